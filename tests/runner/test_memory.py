"""How large the cache becomes with so much memory left, and what is refused."""

from pathlib import Path

import pytest
import torch
from fixtures.memory import private_bytes
from fixtures.models.checkpoints import make_model, make_runner, save
from fixtures.tiers import quick_of
from hypothesis import given
from hypothesis import strategies as st
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels.cache.kv_spec import KVSpec
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


@given(
    share=st.floats(0.01, 1.0),
    total=st.integers(1, 10**12),
    taken=st.integers(0, 10**12),
    left=st.integers(0, 10**12),
)
def test_no_more_than_the_share_is_taken(share: float, total: int, taken: int, left: int) -> None:
    more = memory.within_share(share, total, taken, left)
    assert 0 <= more <= left
    assert more == 0 or taken + more <= share * total
    assert more == left or taken + more + 1 > share * total


def test_a_share_too_small_is_refused_with_the_figures(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(checkpoint)
    longest = plan.held_blocks * plan.block_bytes
    needed = plan.weight_bytes + longest
    monkeypatch.setattr("slipstream.runner.plan.total_memory", lambda device: 2 * needed)
    plan_of(checkpoint, memory_share=0.5)
    figures = rf"{plan.weight_bytes / 1e9:.2f} GB and the KV cache of a sequence of 256 tokens"
    with pytest.raises(ConfigError, match=rf"memory_share = 0.49 is .* need {figures}"):
        plan_of(checkpoint, memory_share=0.49)
    tokens = 2 * plan.block_size
    plan_of(checkpoint, memory_share=0.49, kv_cache_tokens=tokens)
    with pytest.raises(ConfigError, match=f"leaves .* a sequence of {plan.max_model_len} tokens"):
        memory.num_blocks(plan_of(checkpoint, memory_share=0.5), longest)  # a tenth is kept free


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_a_share_is_above_0_and_at_most_1(checkpoint: Path, share: float) -> None:
    with pytest.raises(ConfigError, match=r"memory_share = .* is not above 0 and at most 1"):
        plan_of(checkpoint, memory_share=share)


def test_a_runner_on_a_cpu_keeps_to_its_share(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(checkpoint)
    total = 4 * (plan.weight_bytes + plan.held_blocks * plan.block_bytes)
    for module in ("plan", "memory"):
        monkeypatch.setattr(f"slipstream.runner.{module}.total_memory", lambda device: total)
    runner = make_runner(checkpoint, kv_cache_tokens=None, block_size=32, memory_share=0.5)
    room = 0.9 * (total / 2 - plan.weight_bytes)
    assert runner.num_blocks == room // plan.block_bytes


DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", quick_of(DTYPES, [torch.int8]), ids=str)
def test_a_cache_on_a_cpu_takes_memory_as_it_is_written(dtype: torch.dtype) -> None:
    spec = KVSpec(dtype, num_kv_heads=2, head_size=64, block_size=32, num_layers=2)
    before, size = private_bytes(), 1 << 28
    cache = spec.allocate(size // spec.block_bytes, torch.device("cpu"))
    assert cache.nbytes > 0.9 * size
    assert private_bytes() - before < size // 16
    cache[0, -1] = 1
    assert not cache.view(torch.uint8)[0, :-1:1000].any()
    assert (cache[0, -1].float() == 1).all()
