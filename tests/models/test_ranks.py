"""Several ranks compute what one does: every family, in fp32, with ranks as threads."""

import random
import re
from pathlib import Path

import msgspec
import pytest
import torch
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    edit_config,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.drawn_later import DRAWN
from fixtures.models.parity import GRID, engine_greedy
from fixtures.models.ranks import Group, compare, driven, ranks_of
from fixtures.models.remote_drawn import REMOTE, Remote
from fixtures.models.written import COMPRESSED, GGUF, PACKED, quantised
from fixtures.tiers import quick_of
from fixtures.waiting import wait_for
from slipstream.config import EngineConfig
from slipstream.engine.scheduler import Limits
from slipstream.errors import ConfigError
from slipstream.kvcache.host import Direction
from slipstream.runner.devices import device_of
from slipstream.runner.plan import resolve, settle
from slipstream_runtime.ranks import RankError

# The first of each family, and what heads and norms make special, on 2 ranks and on 4.
FIRST = {family: name for name, (family, _) in reversed(GRID.items())}
NAMES = [*FIRST.values(), "mqa", "all biases, tied", "olmoe, one key head", "falcon 40b"]
LACKING = {name: drawn for name, drawn in REMOTE.items() if name not in GRID}  # in transformers
NAMES += LACKING
SIZES = dict.fromkeys(LACKING, (2, 3, 4))
CASES = {
    f"{name}, {size} ranks": (name, size) for name in NAMES for size in SIZES.get(name, (2, 4))
}
QUICK = {"gqa, 4 ranks", "olmo2, 2 ranks", "gpt2, 2 ranks"}


@pytest.mark.parametrize("case", quick_of(CASES, QUICK))
def test_a_family(case: str, tmp_path: Path) -> None:
    name, size = CASES[case]
    if name in LACKING:
        drawn = LACKING[name](random.Random(3 if size == 3 else 0))  # 3 heads, or 4
        directory, vocab_size = drawn.save(tmp_path), drawn.config.vocab_size
    else:
        family, overrides = GRID[name]
        model = make_model(family, **overrides)
        directory, vocab_size = save(model, tmp_path), model.config.vocab_size
    compare(directory, size, vocab_size)


FORMATS = [*PACKED, *COMPRESSED, *GGUF]


@pytest.mark.parametrize("name", quick_of(FORMATS, {"gptq-v1-4-32", "gguf Q6_K"}))
def test_a_checkpoint_that_comes_quantised(name: str, tmp_path: Path) -> None:
    # Beside weights in fewer bits rows have 16 bits: one rank is up to 1.4e-4 from fp32 itself.
    compare(quantised(name, tmp_path), 2, 256, rounding=2e-4)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(make_model("llama"), tmp_path)


SETTINGS = {
    "preemption": {"kv_cache_tokens": 200},
    "drafts": {"speculation": "suffix"},
    "host memory": {"kv_cache_tokens": 200, "kv_cache_host_bytes": 1 << 20},
    "deterministic": {"deterministic": True},
    "a window with sinks": {"attention_window": 40, "sink_tokens": 4},
    "bytes in the cache": {"kv_cache_dtype": "int8", "block_size": 16},
    "weights of 8 bits": {"quantization": "int8"},
}


@pytest.mark.parametrize("name", quick_of(SETTINGS, {"host memory"}))
def test_the_scheduler_does_not_know(name: str, llama: Path) -> None:
    """Through the engine: chunks, reuse, copies to host memory and back, drafts."""
    settings, limits = SETTINGS[name], Limits(4, 37)
    prompts = random_prompts([40, 7, 64, 23])
    prompts = [*prompts, *(prompt[:30] + prompt for prompt in prompts)] * 2
    wanted = engine_greedy(make_runner(llama, **settings), limits, prompts)
    with ranks_of(llama, 2, **settings) as leader:
        found = engine_greedy(leader, limits, prompts)
    if name == "weights of 8 bits":  # rows of a part have scales of their own
        assert sum(map(len, found)) == sum(map(len, wanted))
        return
    assert found == wanted


SIZES_OF_GROUPS = {"2 ranks": (2, 1), "4 ranks": (4, 1), "2 stages of 2 ranks": (2, 2)}


@pytest.mark.parametrize("name", quick_of(SIZES_OF_GROUPS, {"2 ranks"}))
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.rest)])
def test_bits_do_not_depend_on_the_run_or_what_runs_beside(
    name: str, dtype: str, tmp_path: Path
) -> None:
    """In deterministic mode: of a row alone, in a crowd, in other chunks, by other ranks."""
    directory = save(make_model("llama", num_hidden_layers=2), tmp_path)
    prompts = random_prompts([29, 1, 12, 40, 7, 33], 1009)

    def logits(chunk: int, beside: int) -> list[list[torch.Tensor]]:
        made = [Generation(prompt, 5) for prompt in prompts]
        with ranks_of(directory, *SIZES_OF_GROUPS[name], **options) as leader:
            driver = Driver(leader, seed=chunk, keep_logits=True)
            for first in range(0, len(made), beside):
                driver.finish(made[first : first + beside], chunk)
        return [generation.logits for generation in made]

    options = {"deterministic": True, "dtype": dtype}
    wanted = logits(64, beside=1)
    for chunk, beside in ((64, 6), (5, 3)):
        for one, other in zip(wanted, logits(chunk, beside), strict=True):
            assert len(one) == len(other) == 5
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@torch.inference_mode()
def test_every_rank_copies_to_host_memory_and_back(llama: Path) -> None:
    group = Group(llama, 2, kv_cache_host_bytes=1 << 20)
    wait_for(lambda: len(group.followers) == 1)
    runners = [group.leader, *group.followers]
    for value, runner in enumerate(runners, start=7):
        runner._cache[:, 0] = value
    assert group.leader.transfers is not None
    group.leader.transfers.start(Direction.OUT, [(0, 3)])
    group.leader.transfers.start(Direction.IN, [(3, 5)])
    group.end()
    assert group.errors == []
    for value, runner in enumerate(runners, start=7):
        assert (runner._cache[:, 5] == value).all()


class LateCopies:
    """A mover whose copies end when they are waited for."""

    def __init__(self, notes: list[str]) -> None:
        self._notes, self._started = notes, dict.fromkeys(Direction, 0)
        self._ended = dict.fromkeys(Direction, 0)

    def start(self, direction: Direction, pairs: object) -> None:
        self._started[direction] += 1
        self._notes.append(f"start {direction.value}")

    def num_ended(self, direction: Direction) -> int:
        return self._ended[direction]

    def wait(self) -> None:
        for direction in Direction:
            self._ended[direction] = min(self._started[direction], self._ended[direction] + 1)
        self._notes.append("wait")


def test_a_rank_whose_copies_are_late_waits_for_those_that_have_ended_on_rank_0(
    llama: Path,
) -> None:
    group = Group(llama, 2, kv_cache_host_bytes=1 << 20)
    wait_for(lambda: len(group.followers) == 1)
    notes: list[str] = []
    group.followers[0].transfers = LateCopies(notes)
    mover = group.leader.transfers
    assert mover is not None
    mover.start(Direction.OUT, [(0, 3)])
    mover.start(Direction.OUT, [(1, 4)])
    assert mover.num_ended(Direction.OUT) == 2
    mover.start(Direction.IN, [(3, 5)])  # of what the first has written
    driven(group.leader, 1009)
    group.end()
    out, back = f"start {Direction.OUT.value}", f"start {Direction.IN.value}"
    assert notes == [out, out, "wait", "wait", back]
    assert group.errors == []


def test_fewer_gpus_than_ranks_are_refused_by_name(llama: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    config = EngineConfig(checkpoint=str(llama), tensor_parallel=4)
    message = r"tensor_parallel = 4 needs as many GPUs, but torch sees 2 .* '3,5'"
    with pytest.raises(ConfigError, match=message):
        device_of(config, 0)
    config = msgspec.structs.replace(config, tensor_parallel=2)
    assert device_of(config, 1) == torch.device("cuda", 1)
    plan = settle(config, torch.device("cuda", 1), 1)
    assert (plan.model.num_ranks, plan.max_in_flight) == (2, 2)


def test_a_wait_on_the_device_that_failed_names_the_rank(llama: Path, monkeypatch) -> None:
    group = Group(llama, 2)
    late = "rank 0 on here: rank 1 did not come"
    monkeypatch.setattr(group.leader._joined._ranks, "late", lambda: late)
    monkeypatch.setattr(group.leader._results, "read", lambda *_: 1 / 0)
    with pytest.raises(RankError, match=f"{late}: ZeroDivisionError"):
        driven(group.leader, 1009)
    group.end()


def test_a_rank_has_its_share_of_weights_and_cache(llama: Path) -> None:
    config = EngineConfig(checkpoint=str(llama), device="cpu", dtype="float32")
    alone = resolve(config)
    parts = [resolve(msgspec.structs.replace(config, tensor_parallel=2), rank) for rank in (0, 1)]
    assert [part.block_bytes * 2 for part in parts] == [alone.block_bytes] * 2
    assert all(0.5 < part.weight_bytes / alone.weight_bytes < 0.56 for part in parts)


@pytest.mark.parametrize(
    ("changes", "keys", "message"),
    [
        ({"tensor_parallel": 3}, {}, "tensor_parallel = 3: num_attention_heads = 4 is no multiple"),
        ({"tensor_parallel": 9}, {}, "tensor_parallel = 9 is above 8"),
        (
            {"tensor_parallel": 4},
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            "num_key_value_heads = 6 is neither a multiple nor a divisor",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(
    changes: dict[str, object], keys: dict[str, object], message: str, llama: Path
) -> None:
    edit_config(llama, **keys)
    config = EngineConfig(checkpoint=str(llama), load_format="random", device="cpu", **changes)
    with pytest.raises(ConfigError, match=re.escape(message)):
        settle(config, torch.device("cpu"))


LATENTS = [f"deepseek_{version}, {seed}" for version in ("v2", "v3") for seed in (1, 2)]


@pytest.mark.parametrize("case", quick_of(LATENTS, {"deepseek_v3, 1"}))
def test_heads_that_read_one_latent(case: str, tmp_path: Path) -> None:
    """Each rank has the whole cache, and makes queries, keys and values of its heads."""
    family, _, seed = case.partition(", ")
    model = make_model(family, **DRAWN[family](random.Random(seed)))
    size = model.config.num_attention_heads
    directory, vocab_size = save(model, tmp_path), model.config.vocab_size
    compare(directory, size, vocab_size)


@pytest.mark.parametrize("has_bias", [pytest.param(False, marks=pytest.mark.rest), True])
def test_norms_of_all_heads_by_mean_and_variance(has_bias: bool, tmp_path: Path) -> None:
    seed = next(i for i in range(99) if _with_norms(REMOTE["mpt"](random.Random(i)), has_bias))
    drawn = REMOTE["mpt"](random.Random(seed))
    compare(drawn.save(tmp_path), drawn.keys["n_heads"], drawn.config.vocab_size)


def _with_norms(drawn: Remote, has_bias: bool) -> bool:
    attention = drawn.keys["attn_config"]
    has_norms = attention["qk_ln"] and drawn.keys["no_bias"] != has_bias
    return has_norms and 2 <= drawn.keys["n_heads"] <= 4


def test_ranks_of_different_checkpoints_do_not_start(llama: Path, monkeypatch) -> None:
    from slipstream.runner import facts

    real = facts.facts_of
    found = lambda plan: real(plan) | ({"version": "0.0.1"} if plan.rank else {})  # noqa: E731
    monkeypatch.setattr(facts, "facts_of", found)
    with pytest.raises(ConfigError, match=r"rank 1 has another version than rank 0: 0\.0\.1, not"):
        Group(llama, 2)


def test_a_step_that_fails_behind_its_announcement_is_fatal(llama: Path, monkeypatch) -> None:
    group = Group(llama, 2)

    def broken(*_: object) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(group.leader, "_sample", broken)
    with pytest.raises(Exception, match="rank 0: ValueError: planted") as caught:
        driven(group.leader, 1009)
    assert type(caught.value).__name__ == "RankError"
    assert [type(error).__name__ for error in group.wait()] == ["RankError"]
