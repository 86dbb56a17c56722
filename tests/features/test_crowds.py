"""Requests of features drawn at random, in a crowd on a small cache: each gets what it gets alone.

Tables of virtual tokens, edits, values, several answers, beams and the best of samples meet shapes
of attention, chunks, preemptions, drafts and steps that fail.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from fixtures.engine.checks import samplings
from fixtures.engine.client import Client, Stream
from fixtures.engine.hashed import VOCAB_SIZE, Words
from fixtures.engine.ticks import ticks
from fixtures.models.checkpoints import make_model, make_runner, save
from fixtures.tiers import quick_of
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from slipstream.core.batch import Batch
from slipstream.drafting.forced import WithForced
from slipstream.drafting.lookup import PromptLookup
from slipstream.drafting.speculator import Speculator
from slipstream.engine.adapters import AdapterStore
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.runner.model_runner import ModelRunner
from slipstream.wire import FinishReason
from slipstream_contract.beams import Beams
from slipstream_contract.drafts import Drafts
from slipstream_contract.errors import ContractError
from slipstream_contract.prompt_table import PromptTable
from slipstream_contract.sampling import SamplingParams

LENGTH, WIDTH, ROWS = 40, 64, 3
SHAPES: dict[str, dict[str, object]] = {
    "llama": {},
    "gemma3": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "bloom": {"n_head": 4},
    "youtu": {},
}
MORE: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"bias": ((3, 4.0), (9, -4.0)), "order": "trtllm"},
    {"dry_multiplier": 1.5, "dry_allowed_length": 1, "dry_penalty_last_n": -1},
    {"drafts": Drafts(token_ids=(1, 2, 3), most=3)},
    {"best_of": 3},
    {"beams": Beams(width=3), "n": 2, "values": None},
)
PROMPTS = st.one_of(
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30),
    st.integers(1, 30).map(lambda size: [1, 2, 3, 4] * (size // 4) + [5]),
    st.lists(st.integers(VOCAB_SIZE, VOCAB_SIZE + ROWS - 1), min_size=1, max_size=9),
)
REQUESTS = st.tuples(PROMPTS, samplings(), st.sampled_from(MORE), st.integers(0, 2))
Asked = tuple[list[int], SamplingParams, int]


@pytest.fixture(scope="module")
def runner_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], ModelRunner]:
    """Return a runner of a shape with so many tokens of cache."""

    @cache
    def made(shape: str, num_tokens: int) -> ModelRunner:
        sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": WIDTH, "max_position_embeddings": LENGTH}
        model = make_model(shape, **(sizes | SHAPES[shape]))
        folder = save(model, tmp_path_factory.mktemp("crowds"))
        return make_runner(folder, kv_cache_tokens=num_tokens, max_model_len=LENGTH)

    return made


def settled(request: tuple[list[int], SamplingParams, dict[str, Any], int]) -> Asked:
    """Return a request without what its parts refuse of each other."""
    prompt, sampling, more, table = request
    is_virtual = max(prompt) >= VOCAB_SIZE
    table = max(table, 1) if is_virtual else table
    if sampling.values is not None and sampling.values.prompt is not None and table:
        more = more | {"values": None}
    return prompt, replace(sampling, **{"best_of": None, "max_tokens": 6, **more}), table


def submit(client: Client, asked: Asked) -> int | str:
    """Return the number of a request, or why it is refused; `table`: 0: none."""
    prompt, sampling, table = asked
    values = np.random.default_rng(table).standard_normal((ROWS, WIDTH)).astype(np.float16)
    given = PromptTable(ROWS, WIDTH, values.tobytes()) if table else None
    if sampling.best_of is not None:
        sampling = replace(sampling, best_of=max(sampling.best_of, sampling.n))
    try:
        return client.submit(prompt, sampling, table=given)
    except ContractError as error:
        return error.message


def answers(client: Client, number: int) -> list[tuple[Any, ...]]:
    """Return what a request got: tokens, beams, how each ended."""
    found: list[Stream] = [s for (n, _), s in sorted(client.streams.items()) if n == number]
    return [
        (s.token_ids, [beam.token_ids for beam in s.beams], s.reason, len(s.log_probs))
        for s in found
    ]


def engine_of(runner: ModelRunner, limits: Limits, has_drafts: bool = False) -> Client:
    """Return a client of a new engine."""
    speculation = Speculator(WithForced(PromptLookup()), 3) if has_drafts else None
    store = AdapterStore(runner.adapters)
    parts = {"clock": ticks(), "speculation": speculation, "adapters": store}
    return Client(Engine(limits, runner, Words(), **parts))


@pytest.mark.parametrize("shape", quick_of(SHAPES, ("llama", "gemma3")))
@settings(max_examples=6)
@given(
    requests=st.lists(REQUESTS, min_size=5, max_size=9),
    budget=st.sampled_from([7, 16, 64]),
    failing=st.sampled_from([0, 0, 9]),
    has_drafts=st.booleans(),
)
def test_a_crowd_changes_nothing(
    runner_of: Callable[[str, int], ModelRunner],
    shape: str,
    requests: list[tuple[list[int], SamplingParams, dict[str, Any], int]],
    budget: int,
    failing: int,
    has_drafts: bool,
) -> None:
    runner, plain = runner_of(shape, 15 * 8), runner_of(shape, 60 * 8)
    crowd = engine_of(runner, Limits(4, budget, 100), has_drafts)
    launch, count = ModelRunner.launch.__get__(runner), iter(range(10**6))

    def launch_or_fail(batch: Batch) -> Any:
        if failing and not crowd.engine._steps._bisection and next(count) % failing == 1:
            raise ValueError("planted")
        return launch(batch)

    runner.launch = launch_or_fail  # type: ignore[method-assign]
    asked = [settled(request) for request in requests]
    numbers = []
    for each in asked:
        numbers.append(submit(crowd, each))
        crowd.step()
    while crowd.engine.has_work and crowd.engine.fatal is None:
        crowd.step()
    crowd.drain(0)
    for each, number in zip(asked, numbers, strict=True):
        alone = engine_of(plain, Limits(4, 64, 100, kv_cache_reuse=False))
        other = submit(alone, each)
        if isinstance(number, str):
            assert number == other or "blocks" in number
            continue
        assert isinstance(other, int)
        alone.drain()
        assert answers(crowd, number) == answers(alone, other), each
        assert all(s[2] is not FinishReason.CANCELLED for s in answers(alone, other))
