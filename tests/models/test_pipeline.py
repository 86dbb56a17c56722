"""Stages of a pipeline compute what one process does: every family, in fp32, ranks as threads."""

import random
import re
from pathlib import Path

import msgspec
import pytest
import torch
from fixtures.models.checkpoints import (
    edit_config,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.drawn_later import DRAWN
from fixtures.models.parity import GRID, engine_greedy
from fixtures.models.ranks import Group, compare, driven, ranks_of
from fixtures.models.remote_drawn import REMOTE
from fixtures.tiers import quick_of
from fixtures.waiting import wait_for
from slipstream.config import EngineConfig
from slipstream.engine.scheduler import Limits
from slipstream.errors import ConfigError
from slipstream.models.stages import split
from slipstream.runner.plan import resolve, settle

# The first of each family, and what makes layers differ; 2 ranks in each stage by turns with 1.
FIRST = {family: name for name, (family, _) in reversed(GRID.items())}
NAMES = [*FIRST.values(), *(name for name in REMOTE if name not in GRID)]
SIZES = {name: 1 + (name in GRID and i % 2) for i, name in enumerate(NAMES)}
CASES = {f"{name}, 2 stages of {size}": (name, size) for name, size in SIZES.items()}
QUICK = {case for case in CASES if case.startswith(("gqa", "gpt2", "gemma3"))}


@pytest.mark.parametrize("case", quick_of(CASES, QUICK))
def test_a_family(case: str, tmp_path: Path) -> None:
    name, size = CASES[case]
    if name in GRID:
        family, overrides = GRID[name]
        model = make_model(family, **overrides)
        directory, vocab_size = save(model, tmp_path), model.config.vocab_size
    else:
        drawn = REMOTE[name](random.Random(3))
        directory, vocab_size = drawn.save(tmp_path), drawn.config.vocab_size
    compare(directory, size, vocab_size, 2)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(make_model("llama", num_hidden_layers=4), tmp_path)


SETTINGS = {
    "three stages": {"num_stages": 3},
    "two stages of two": {"size": 2},
    "preemption": {"kv_cache_tokens": 200},
    "drafts": {"speculation": "suffix"},
    "host memory": {"kv_cache_tokens": 200, "kv_cache_host_bytes": 1 << 20},
    "deterministic": {"deterministic": True},
    "a window with sinks": {"attention_window": 40, "sink_tokens": 4},
    "bytes in the cache": {"kv_cache_dtype": "int8", "block_size": 16},
    "weights of 8 bits": {"quantization": "int8"},
}


@pytest.mark.parametrize("name", quick_of(SETTINGS, {"two stages of two"}))
def test_the_scheduler_sees_results_late(name: str, llama: Path) -> None:
    """Through the engine: several steps in flight, chunks, reuse, host memory, drafts."""
    settings = dict(SETTINGS[name])
    size, num_stages = settings.pop("size", 1), settings.pop("num_stages", 2)
    prompts = random_prompts([40, 7, 64, 23])
    prompts = [*prompts, *(prompt[:30] + prompt for prompt in prompts)] * 2
    wanted = engine_greedy(make_runner(llama, **settings), Limits(4, 37), prompts)
    with ranks_of(llama, size, num_stages, **settings) as leader:
        limits = Limits(4, 37, num_stages=num_stages)
        assert engine_greedy(leader, limits, prompts) == wanted


def test_as_many_steps_are_in_flight_as_stages(llama: Path, monkeypatch) -> None:
    """The first stage has computed a step before the last one's states of the step before come."""
    with ranks_of(llama, 1, 3) as leader:
        notes: list[str] = []
        links = leader._links
        send, receive = links.send, links.receive
        monkeypatch.setattr(links, "send", lambda x: [notes.append("out"), send(x)])
        monkeypatch.setattr(links, "receive", lambda *to: [notes.append("back"), receive(*to)][1])
        engine_greedy(leader, Limits(8, 64, num_stages=3), random_prompts([5, 6, 7, 8, 9, 10]))
    ahead = [notes[:i].count("out") - notes[:i].count("back") for i in range(len(notes) + 1)]
    assert max(ahead) == 3
    # Once prompts are computed, each step that comes back leaves two on their way.
    middle = [ahead[i] for i, note in enumerate(notes) if note == "back"][3:-3]
    assert middle == [3] * len(middle)


@pytest.mark.parametrize("num_stages", [2, pytest.param(3, marks=pytest.mark.rest)])
def test_bits_do_not_depend_on_the_run(num_stages: int, llama: Path) -> None:
    def logits() -> list[list[torch.Tensor]]:
        with ranks_of(llama, 1, num_stages, deterministic=True) as leader:
            return [generation.logits for generation in driven(leader, 1009)]

    for one, other in zip(logits(), logits(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


KINDS = {  # windowed and full layers share tables on all stages; some dense ones are before experts
    "gpt_oss": DRAWN["gpt_oss"](random.Random(0)),
    "gemma3": GRID["gemma3, a pattern"][1],
    "mistral": GRID["mistral, a window of one"][1],
    "deepseek_v3": DRAWN["deepseek_v3"](random.Random(1))
    | {"num_hidden_layers": 4, "first_k_dense_replace": 2},
}


@pytest.mark.parametrize("family", quick_of(KINDS, {"gemma3"}))
def test_layers_of_several_kinds(family: str, tmp_path: Path) -> None:
    model = make_model(family, **KINDS[family])
    compare(save(model, tmp_path), 1, model.config.vocab_size, 3)


def test_each_stage_has_its_share(llama: Path) -> None:
    config = EngineConfig(checkpoint=str(llama), device="cpu", dtype="float32")
    alone = resolve(config)
    parts = [resolve(msgspec.structs.replace(config, pipeline_parallel=2), r) for r in (0, 1)]
    # Each stage has a table of rotations.
    assert 0 <= sum(part.weight_bytes for part in parts) - alone.weight_bytes < 1000
    assert sum(part.block_bytes for part in parts) == alone.block_bytes
    assert [part.max_in_flight for part in parts] == [2, 2]


@pytest.mark.parametrize(
    ("layers", "first", "count", "wanted"),
    [
        ([1] * 8, 0, 2, [4, 4]),
        ([1] * 8, 2, 2, [3, 5]),
        ([1] * 8, 9, 4, [1, 2, 2, 3]),
        ([5, 1, 1, 1, 5], 0, 3, [1, 3, 1]),
    ],
)
def test_no_stage_reads_more_than_it_must(
    layers: list[int], first: int, count: int, wanted: list[int]
) -> None:
    bounds = split(layers, first, count)
    assert [end - begin for begin, end in bounds] == wanted
    assert [begin for begin, _ in bounds[1:]] == [end for _, end in bounds[:-1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_parallel": 9}, "pipeline_parallel = 9 is above 8"),
        ({"pipeline_parallel": 5}, "pipeline_parallel = 5: num_hidden_layers = 4 is below it"),
        (
            {"pipeline_parallel": 3, "tensor_parallel": 4},
            "pipeline_parallel = 3 with tensor_parallel = 4: 12 ranks are above 8",
        ),
        (
            {"pipeline_parallel": 2, "speculation": "draft"},
            "pipeline_parallel = 2 does not go with speculation = 'draft'",
        ),
    ],
)
def test_what_stages_cannot_share_is_refused(
    changes: dict[str, object], message: str, llama: Path
) -> None:
    config = EngineConfig(checkpoint=str(llama), load_format="random", device="cpu", **changes)
    with pytest.raises(ConfigError, match=re.escape(message)):
        settle(config, torch.device("cpu"))


def test_a_tensor_without_a_place_is_refused_by_its_stage(llama: Path) -> None:
    edit_config(llama, num_hidden_layers=3)
    with pytest.raises(ConfigError.__mro__[1], match="has no place in this architecture"):
        Group(llama, 1, 2)


def test_a_stage_that_fails_ends_all(llama: Path, monkeypatch) -> None:
    group = Group(llama, 1, 3)

    def broken(*_: object) -> None:
        raise ValueError("planted")

    wait_for(lambda: len(group.followers) == 2)
    last = next(runner for runner in group.followers if runner._is_last)
    monkeypatch.setattr(last, "_hidden", broken)
    with pytest.raises(Exception, match="rank 2 has failed") as caught:
        driven(group.leader, 1009)
    assert type(caught.value).__name__ == "RankError"
    assert {type(error).__name__ for error in group.wait()} == {"ValueError", "RankError"}
