"""How large the cache becomes with so much memory left, and what is refused."""

from pathlib import Path

import pytest
from fixtures.models.checkpoints import make_model, make_runner, save
from hypothesis import given
from hypothesis import strategies as st
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.runner import memory
from slipstream.runner.plan import Plan, resolve

BLOCK = 32 * 2 * 2 * 2 * 64 * 4  # bytes: tokens, layers, kv heads, K and V, head size, fp32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama", hidden_size=64), tmp_path_factory.mktemp("memory") / "Tiny")


def plan_of(checkpoint: Path, **changes: object) -> Plan:
    return resolve(EngineConfig(checkpoint=str(checkpoint), device="cpu", **changes))


def test_a_share_of_what_is_left(checkpoint: Path) -> None:
    plan = plan_of(checkpoint, max_num_seqs=4000)
    assert plan.block_bytes == BLOCK
    for count in (1, 2, 1000):
        exact = -(-count * BLOCK * 10 // 9)
        assert memory.num_blocks(plan, exact + 1) == count
        assert count == 1 or memory.num_blocks(plan, exact - 2) == count - 1


@given(free=st.integers(-(10**9), 10**13), seqs=st.integers(1, 5000), length=st.integers(1, 256))
def test_never_more_than_is_left_or_of_use(
    checkpoint: Path, free: int, seqs: int, length: int
) -> None:
    plan = plan_of(checkpoint, max_num_seqs=seqs, max_model_len=length)
    if int(0.9 * free) < BLOCK:
        with pytest.raises(ConfigError, match="no memory is left for the KV cache"):
            memory.num_blocks(plan, free)
        return
    count = memory.num_blocks(plan, free)
    assert 1 <= count <= min(seqs * -(-length // 32), 65_536 // 32)
    assert count * BLOCK <= 0.9 * free


def test_a_cpu_has_a_default(checkpoint: Path) -> None:
    runner = make_runner(checkpoint, kv_cache_tokens=None, block_size=32)
    assert runner.num_blocks * runner.block_size == 65_536
    few = make_runner(
        checkpoint, kv_cache_tokens=None, block_size=32, max_num_seqs=3, max_model_len=100
    )
    assert few.num_blocks == 3 * 4


def test_what_the_operator_asks_for_is_had_or_refused(checkpoint: Path) -> None:
    assert make_runner(checkpoint, kv_cache_tokens=1000, block_size=16).num_blocks == 62
    plan = plan_of(checkpoint, kv_cache_tokens=3200)
    assert memory.num_blocks(plan, 112 * BLOCK) == 100
    with pytest.raises(ConfigError, match=r"kv_cache_tokens = 3200 takes 0.01 GB, but 0.01 GB"):
        memory.num_blocks(plan, 110 * BLOCK)


def test_the_impossible_is_refused_before_weights_are_read(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_tokens = 1000000000000 takes .* GB"):
        plan_of(checkpoint, kv_cache_tokens=10**12)


def test_blocks_are_as_large_as_the_model_makes_them(checkpoint: Path, tmp_path: Path) -> None:
    other = save(make_model("llama", hidden_size=64, num_key_value_heads=4), tmp_path / "other")
    assert plan_of(other).block_bytes == 2 * BLOCK
    assert plan_of(checkpoint, dtype="bfloat16", block_size=16).block_bytes == BLOCK // 4
