"""A request's tokens do not depend on its neighbours, its chunks, its blocks or its preemptions."""

from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.batch import Batch, Row
from slipstream.core.edits import EDIT
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.sampler import Results, SamplingInputs, make_counts, sample_tokens
from slipstream.runner.sampling_rows import pack_row, sampling_arrays
from slipstream_contract.sampling import SamplingParams

LENGTHS = [3, 60, 17, 1, 33, 8, 45, 26, 64, 2, 31, 12]
STYLES = [
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(max_tokens=1, temperature=1.0),
    SamplingParams(max_tokens=1, temperature=0.7, top_p=0.8),
    SamplingParams(max_tokens=1, temperature=1.3, top_k=20, min_p=0.01),
    SamplingParams(max_tokens=1, temperature=1.0, min_p=0.5),
]


def make_generations() -> list[Generation]:
    return [
        Generation(
            prompt, 5 + i % 4, STYLES[i % len(STYLES)], seed=(i * 0x9E3779B97F4A7C15) % 2**64
        )
        for i, prompt in enumerate(random_prompts(LENGTHS))
    ]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    directory = tmp_path_factory.mktemp("invariance")
    return make_runner(save(make_model("llama", hidden_size=64), directory))


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> list[Generation]:
    """Every request by itself, its prompt in one piece."""
    generations = make_generations()
    for generation in generations:
        Driver(runner).finish([generation])
    return generations


STEPS = st.tuples(
    st.integers(0, 4),  # requests that arrive
    st.none() | st.integers(0, len(LENGTHS) - 1),  # one to preempt
    st.integers(1, 70),  # tokens of a chunk
)


@settings(max_examples=25, deadline=None)
@given(
    arrivals=st.permutations(range(len(LENGTHS))),
    steps=st.lists(STEPS, max_size=30),
    blocks=st.integers(0, 1000),
)
def test_any_schedule_gives_the_same_tokens(
    runner: ModelRunner,
    alone: list[Generation],
    arrivals: list[int],
    steps: list[tuple[int, int | None, int]],
    blocks: int,
) -> None:
    everyone = make_generations()
    driver = Driver(runner, seed=blocks)
    waiting = [everyone[i] for i in arrivals]
    running: list[Generation] = []
    for num_arrivals, victim, chunk in steps:
        running += waiting[:num_arrivals]
        del waiting[:num_arrivals]
        if victim is not None and not everyone[victim].is_finished:
            driver.preempt(everyone[victim])
        if not all(g.is_finished for g in running):
            driver.step(running, chunk)
    driver.finish(everyone)
    for ours, expected in zip(everyone, alone, strict=True):
        assert ours.outputs == expected.outputs
        assert ours.log_probs == pytest.approx(expected.log_probs, abs=1e-4)


def test_a_batch_of_fifty(runner: ModelRunner, alone: list[Generation]) -> None:
    crowd = [g for _ in range(5) for g in make_generations()][:50]
    Driver(runner).finish(crowd, chunk=40)
    for i, generation in enumerate(crowd):
        assert generation.outputs == alone[i % len(alone)].outputs


def test_three_preemptions(runner: ModelRunner, alone: list[Generation]) -> None:
    generations = make_generations()
    driver = Driver(runner)
    for _ in range(3):
        driver.step(generations, chunk=64)
        for generation in generations:
            driver.preempt(generation)
    driver.finish(generations)
    assert [g.outputs for g in generations] == [g.outputs for g in alone]


def make_row(token_ids: list[int], blocks: list[int], edits: bytes = b"") -> Row:
    slot = blocks[0]  # another for every row of a batch
    return Row(slot, slot, token_ids, 0, (blocks,), True, STYLES[0], 0, 0, edits)


def test_edits_reach_their_own_row(runner: ModelRunner) -> None:
    prompts = random_prompts([9, 9])
    plain = Batch(tuple(make_row(p, [2 * i, 2 * i + 1]) for i, p in enumerate(prompts)), 0)
    first, second = runner.run(plain).token_ids
    edits = sorted([(first, float("-inf")), (7, 1e4)])
    ban = b"".join(EDIT.pack(*edit) for edit in edits)
    edited = Batch((make_row(prompts[0], [0, 1], ban), make_row(prompts[1], [2, 3])), 0)
    assert runner.run(edited).token_ids == [7, second]


def test_every_row_is_drawn_by_its_own_parameters(runner: ModelRunner) -> None:
    (prompt,) = random_prompts([9])
    draws = [(style, seed, n) for style in STYLES for seed in (3, 2**64 - 1) for n in (0, 5)]
    rows = tuple(
        Row(i, i, prompt, 0, ([2 * i, 2 * i + 1],), True, style, seed, n)
        for i, (style, seed, n) in enumerate(draws)
    )
    sampled = runner.run(Batch(rows, 0))
    numbers = [number for _, _, number in draws]
    drawn = sampling_arrays([pack_row(s, seed, 0) for s, seed, _ in draws], numbers, [b""] * 20)
    results = Results(20, torch.device("cpu"))
    inputs = SamplingInputs(torch.from_numpy(drawn.rows), torch.zeros(0, 2, dtype=torch.int32))
    counts = make_counts(1, runner.vocab_size, torch.device("cpu"))
    sample_tokens(runner.logits(Batch(rows, 0)), inputs, counts, results)
    token_ids, log_probs, _ = results.read(0, 20)
    assert sampled.token_ids == token_ids
    assert sampled.log_probs == pytest.approx(log_probs)
    assert len(set(sampled.token_ids)) > len(STYLES)


def test_rows_that_do_not_sample_return_nothing(runner: ModelRunner) -> None:
    (prompt,) = random_prompts([12])
    row = Row(0, 0, prompt, 0, ([5, 3],), False, STYLES[0], 0, 0)
    assert runner.run(Batch((row,), 0)).token_ids == []
    sampled = runner.run(Batch((row, make_row(prompt, [9, 1])), 0))
    assert len(sampled.token_ids) == len(sampled.log_probs) == len(sampled.outcomes) == 1


def test_nan_is_told_and_stays_in_its_row(tmp_path: Path) -> None:
    model = make_model("llama", hidden_size=64)
    runner = make_runner(save(model, tmp_path))
    healthy, sick = random_prompts([12, 12])
    expected = runner.run(Batch((make_row(healthy, [0, 1]),), 0)).token_ids
    with torch.inference_mode():
        runner._model.embedding.table.weight[sick[3]] = float("nan")
    assert sick[3] not in healthy
    both = runner.run(Batch((make_row(sick, [4, 5]), make_row(healthy, [2, 3])), 0))
    assert both.outcomes == [False, True]
    assert both.token_ids[1:] == expected
    # Blocks that hold another's NaN beyond the new owner's length do no harm.
    again = runner.run(Batch((make_row(healthy, [5, 4]),), 0))
    assert again.outcomes == [True]
    assert again.token_ids == expected
