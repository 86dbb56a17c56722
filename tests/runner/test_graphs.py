"""What needs no GPU of the graphs: the choice of a bucket, and padding that changes nothing."""

import random

import numpy as np
import pytest
import torch
from fixtures.models.checkpoints import (
    GREEDY,
    Driver,
    Generation,
    make_model,
    make_runner,
    ragged_batch,
    random_prompts,
    save,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.batch import Batch, Row
from slipstream.core.edits import EDIT
from slipstream.kernels.sampling.sample import ROW
from slipstream.runner.graphs import MAX_CHUNK_ROWS, Buckets, row_buckets, token_buckets
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.slots import Slots
from slipstream.runner.staging import joined
from slipstream.runner.step_arrays import StepArrays
from slipstream.runner.step_builder import StepBuilder
from slipstream.runner.step_inputs import StepInputs
from slipstream.runner.step_shape import Layout, StepShape

TOKENS = token_buckets(2048)


def test_row_buckets_of_the_default() -> None:
    assert row_buckets(256) == [
        *(1, 2, 4, 8, 16, 24, 32),
        *(48, 64, 80, 96, 112, 128),
        *range(136, 257, 8),
    ]
    assert row_buckets(1) == [1]
    assert row_buckets(5) == [1, 2, 4, 5]
    assert row_buckets(32) == [1, 2, 4, 8, 16, 24, 32]
    assert row_buckets(4000)[-1] == 1024


def test_token_buckets() -> None:
    assert token_buckets(2048) == [16, 32, 64, 128, 192, 256, 384, 512]
    assert token_buckets(100) == [16, 32, 64, 100]
    assert token_buckets(7) == [7]


@settings(max_examples=200, deadline=None)
@given(
    max_num_seqs=st.integers(1, 1200),
    max_num_tokens=st.integers(1, 3000),
    is_deterministic=st.booleans(),
    data=st.data(),
)
def test_a_bucket_is_the_smallest_that_holds(
    max_num_seqs: int, max_num_tokens: int, is_deterministic: bool, data: st.DataObject
) -> None:
    layout = Layout(128, has_decodes=False) if is_deterministic else Layout()
    buckets = Buckets(max_num_seqs, max_num_tokens, layout)
    assert len(set(buckets.shapes)) == len(buckets.shapes)
    num_rows = data.draw(st.integers(1, max_num_seqs))
    rows = tuple(Row(i, i, [1], 0, ([i],), True, GREEDY, 0, 0) for i in range(num_rows))
    shape = layout.shape_of(Batch(rows, num_rows))
    found = buckets.find(shape)
    if num_rows > 1024:
        assert found is None
        return
    assert found in buckets.shapes
    assert found.num_tokens == found.num_rows == found.num_samples >= num_rows
    assert found.num_decodes == (0 if is_deterministic else found.num_rows)
    same_kind = [s.num_rows for s in buckets.shapes if s.max_queries == found.max_queries]
    assert found.num_rows == min(r for r in same_kind if r >= num_rows)
    if is_deterministic:
        assert found.num_rows % 128 == 0
    else:
        assert found.num_rows <= max(num_rows + 1, 2 * num_rows)
        assert num_rows < 128 or found.num_rows <= 1.06 * num_rows
        assert num_rows <= 256 or found.num_rows <= 1.03 * num_rows


@given(
    counts=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    num_decodes=st.integers(0, 12),
    first_samples=st.booleans(),
    max_drafted_rows=st.sampled_from([0, 256]),
    has_drafts=st.booleans(),
)
def test_a_shape_with_chunks_holds_them(
    counts: list[int],
    num_decodes: int,
    first_samples: bool,
    max_drafted_rows: int,
    has_drafts: bool,
) -> None:
    buckets = Buckets(256, 2048, None, max_drafted_rows)
    has_drafts &= num_decodes > 1
    num_rows = num_decodes + len(counts)
    samples = num_rows - (not first_samples)
    sizes = (num_decodes + sum(counts), num_rows, num_decodes, samples, max(counts))
    shape = StepShape(*sizes, has_drafts)
    found = buckets.find(shape)
    if shape.num_samples == shape.num_tokens:
        return  # such a row would be a decode
    if found is None:
        is_large = len(counts) > MAX_CHUNK_ROWS or sum(counts) > 480
        assert is_large or (has_drafts and not max_drafted_rows)
        return
    assert found.has_drafts >= has_drafts
    assert found in buckets.shapes
    assert found.num_rows - found.num_decodes == MAX_CHUNK_ROWS >= len(counts)
    assert found.num_samples >= samples
    assert found.num_tokens - found.num_decodes == found.max_queries >= sum(counts)
    if num_decodes == 0:
        assert found.num_tokens == min(t for t in TOKENS if t >= shape.num_tokens)
        assert found.num_decodes == 0
    else:
        assert num_decodes <= found.num_decodes <= max(8, 4 * num_decodes)
        assert found.num_tokens in (64, 128, 192, 256, 384, 512)
        assert found.max_queries < sum(counts) + 128


@given(st.integers(1, 300), st.integers(1, 3000), st.booleans())
def test_shapes_of_few_rows_or_tokens(
    max_num_seqs: int, max_num_tokens: int, is_deterministic: bool
) -> None:
    layout = Layout(128, has_decodes=False) if is_deterministic else Layout()
    buckets = Buckets(max_num_seqs, max_num_tokens, layout)
    for shape in buckets.shapes:
        assert shape.num_decodes <= max_num_seqs
        assert shape.max_queries <= layout.up(max_num_tokens)
        assert shape.num_rows <= buckets.max_rows
        assert shape.num_tokens <= buckets.max_tokens
        assert buckets.find(shape) == shape


GROUPS = {
    "num_hidden_layers": 3,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    directory = tmp_path_factory.mktemp("graphs")
    return make_runner(save(make_model("llama", hidden_size=64), directory))


@pytest.fixture(scope="module", params=[1, pytest.param(3, marks=pytest.mark.rest)])
def tables(
    request: pytest.FixtureRequest,
    runner: ModelRunner,
    tmp_path_factory: pytest.TempPathFactory,
) -> ModelRunner:
    """A runner with so many."""
    if request.param == 1:
        return runner
    directory = tmp_path_factory.mktemp("groups")
    return make_runner(save(make_model("gemma3", hidden_size=64, **GROUPS), directory))


def logits_and_cache(
    runner: ModelRunner, batch: Batch, shape: StepShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """A step in that shape; the caches are as before it."""
    with torch.inference_mode():
        before = [cache.clone() for cache in runner._caches]
        arrays = runner._builder.build(batch, shape, 0, 0)
        logits = runner._forward(shape, runner._stage(arrays))[arrays.samples]
        after = torch.stack(runner._caches)
        for cache, old in zip(runner._caches, before, strict=True):
            cache.copy_(old)
    assert len(logits) == sum(row.samples for row in batch.rows)
    return logits, after


def make_batch(
    runner: ModelRunner, rng: random.Random, sizes: list[tuple[int, int]], num_decodes: int
) -> Batch:
    """A ragged one, the cache NaN wherever nobody may look."""
    batch, blocks = ragged_batch(runner, rng, sizes, num_decodes)
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    with torch.inference_mode():
        for cache in runner._caches:
            cache.copy_(torch.randn(cache.shape, generator=generator))
            cache[blocks] = float("nan")
    return batch


def check_padding(runner: ModelRunner, batch: Batch, shape: StepShape) -> None:
    plain, plain_cache = logits_and_cache(runner, batch, Layout().shape_of(batch))
    padded, padded_cache = logits_and_cache(runner, batch, shape)
    torch.testing.assert_close(padded, plain, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(padded_cache, plain_cache, rtol=1e-5, atol=2e-5, equal_nan=True)
    assert padded.argmax(-1).tolist() == plain.argmax(-1).tolist()


@pytest.mark.rest
@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=9),
    more_rows=st.integers(0, 7),
    seed=st.integers(0, 1000),
)
def test_padding_decodes_changes_nothing(
    tables: ModelRunner, lengths: list[int], more_rows: int, seed: int
) -> None:
    sizes = [(1, length - 1) for length in lengths]
    batch = make_batch(tables, random.Random(seed), sizes, len(sizes))
    count = len(sizes) + more_rows
    check_padding(tables, batch, StepShape(count, count, count, count, 0))
    untold = Batch(batch.rows, seed % len(sizes))  # who has one token that samples is a decode
    check_padding(tables, untold, StepShape(count, count, count, count, 0))


@pytest.mark.rest
@settings(max_examples=20, deadline=None)
@given(
    num_decodes=st.integers(0, 4),
    counts=st.lists(st.integers(2, 60), min_size=1, max_size=4),
    starts=st.lists(st.integers(0, 60), min_size=8, max_size=8),
    more_rows=st.integers(0, 5),
    more_tokens=st.integers(0, 50),
    more_decodes=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_padding_chunks_changes_nothing(
    tables: ModelRunner,
    num_decodes: int,
    counts: list[int],
    starts: list[int],
    more_rows: int,
    more_tokens: int,
    more_decodes: int,
    seed: int,
) -> None:
    sizes = list(zip([1] * num_decodes + counts, starts, strict=False))
    batch = make_batch(tables, random.Random(seed), sizes, num_decodes)
    exact = Layout().shape_of(batch)
    num_rows, num_tokens = exact.num_rows + more_rows, exact.num_tokens + more_tokens
    check_padding(tables, batch, StepShape(num_tokens, num_rows, 0, num_rows, num_tokens))
    num_rows, num_tokens = num_rows + more_decodes, num_tokens + more_decodes
    decodes = num_decodes + more_decodes
    check_padding(tables, batch, StepShape(num_tokens, num_rows, decodes, num_rows, num_tokens))


def test_padding_keeps_what_was_there(runner: ModelRunner) -> None:
    rows = tuple(Row(i, i, [7 + i], 9 * i, ([i, 9, 4],), True, GREEDY, 0, 0) for i in range(3))
    batch = Batch(rows, 3)
    plain = runner._builder.build(batch, StepShape(3, 3, 3, 3, 0), 0, 0)
    padded = runner._builder.build(batch, StepShape(5, 5, 5, 5, 0), 20, 0)
    assert [a.dtype for a in padded] == [a.dtype for a in plain]
    assert padded.token_ids.tolist() == [7, 8, 9, 0, 0]
    assert padded.sources.tolist() == [-1] * 5
    assert padded.positions.tolist() == [0, 9, 18, 0, 0]
    assert padded.slots.tolist() == [0, 73, 34, -1, -1]
    assert padded.lengths.tolist() == [1, 10, 19, 0, 0]
    assert padded.sample_rows.tolist() == [0, 1, 2, 0, 0]
    assert padded.query_starts.tolist() == [0]
    assert padded.rows.view(ROW)["result"].ravel().tolist() == [20, 21, 22, -1, -1]
    assert np.array_equal(padded.tables, [[0, 9, 4], [1, 9, 4], [2, 9, 4]])
    assert np.array_equal(padded.tables, plain.tables)


def test_chunks_of_a_padded_step(runner: ModelRunner) -> None:
    rows = (
        Row(0, 0, [5], 9, ([3, 1],), True, GREEDY, 0, 0, source=2),
        Row(1, 1, [6, 7, 8], 0, ([2],), False, GREEDY, 0, 0),
        Row(2, 2, [9, 10], 7, ([4, 5],), True, GREEDY, 0, 0),
    )
    step = runner._builder.build(Batch(rows, 1), StepShape(8, 4, 0, 4, 8), 0, 20)
    assert step.token_ids.tolist() == [5, 6, 7, 8, 9, 10, 0, 0]
    assert step.sources.tolist() == [22, *[-1] * 7]
    assert step.positions.tolist() == [9, 0, 1, 2, 7, 8, 0, 0]
    assert step.slots.tolist() == [9, 16, 17, 18, 39, 40, -1, -1]
    assert step.query_starts.tolist() == [0, 1, 4, 6, 6]
    assert step.lengths.tolist() == [10, 3, 9, 0]
    assert step.sample_rows.tolist() == [0, 5, 0, 0]
    assert step.sample_starts.tolist() == [0, 1, 1, 2, 2]
    mixed = runner._builder.build(Batch(rows, 1), StepShape(6, 3, 1, 2, 3), 0, 20)
    assert mixed.query_starts.tolist() == [0, 3, 5]
    assert mixed.sample_starts.tolist() == [0, 0, 1]
    apart = runner._builder.build(Batch(rows, 1), StepShape(10, 6, 3, 4, 7), 0, 20)
    assert apart.token_ids.tolist() == [5, 0, 0, 6, 7, 8, 9, 10, 0, 0]
    assert apart.sources.tolist() == [22, *[-1] * 9]
    assert apart.slots.tolist() == [9, -1, -1, 16, 17, 18, 39, 40, -1, -1]
    assert apart.query_starts.tolist() == [0, 3, 5, 5]
    assert apart.lengths.tolist() == [10, 0, 0, 3, 9, 0]
    assert apart.sample_rows.tolist() == [0, 0, 0, 7]
    assert apart.sample_starts.tolist() == [0, 0, 1, 1]
    assert apart.samples.tolist() == [0, 3]
    assert apart.tables[[0, 3, 4]].tolist() == step.tables.tolist()
    for arrays in (step, mixed, apart):  # as a staging lays them out, and says where the tables are
        assert np.array_equal(arrays.memory, joined(arrays))
        begin, width, count = arrays.header.tolist()
        words = arrays.memory.view(np.int32)[begin : begin + count * width]
        assert words.reshape(count, width).tolist() == arrays.tables.tolist()


def test_slots_keep_what_has_not_changed() -> None:
    slots = Slots(4, 6)
    first = Row(7, 2, [1], 0, ([5, 6],), True, GREEDY, 0, 0)
    assert slots.update((first,)).tolist() == [2]
    assert slots.tables[2].tolist() == [5, 6, 0, 0, 0, 0]
    grown = Row(7, 2, [1], 1, ([8, 8, 9],), True, GREEDY, 0, 1, is_new=False)
    slots.update((grown,))  # only what came is read
    assert slots.tables[2].tolist() == [5, 6, 9, 0, 0, 0]
    other = Row(8, 2, [1], 0, ([3],), True, GREEDY, 0, 0)
    slots.update((other,))
    assert slots.tables[2, 0] == 3


def test_the_cpu_makes_no_graphs(runner: ModelRunner) -> None:
    assert runner._graphs is None
    generations = [Generation(prompt, 3) for prompt in random_prompts([5, 9])]
    Driver(runner).finish(generations)
    assert all(g.is_finished for g in generations)


@settings(max_examples=60, deadline=None)
@given(
    starts=st.lists(st.integers(0, 60), min_size=1, max_size=9),
    more_rows=st.integers(0, 3),
    num_tables=st.integers(1, 3),
    is_deterministic=st.booleans(),
    edited_step=st.integers(0, 30),
    seed=st.integers(0, 1000),
)
def test_a_step_that_continues_is_built_from_the_one_before(
    starts: list[int],
    more_rows: int,
    num_tables: int,
    is_deterministic: bool,
    edited_step: int,
    seed: int,
) -> None:
    layout = Layout(4, has_decodes=False, has_chunks=False) if is_deterministic else Layout()
    builders = [StepBuilder(Slots(12, 40, num_tables), 4, layout) for _ in range(2)]
    rng, count = random.Random(seed), len(starts)
    slots = rng.sample(range(12), count)
    owned = [
        tuple([rng.randrange(1000) for _ in range(start // 4 + 1)] for _ in range(num_tables))
        for start in starts
    ]
    for step in range(25):
        rows = []
        for i, start in enumerate(starts):
            for table in owned[i]:
                while len(table) * 4 <= start + step:
                    table.append(rng.randrange(1000))
            edits = EDIT.pack(i, 1.5) if step == edited_step and i % 2 else b""
            source = i if step else -1
            outputs = 5 + step
            common = (i, slots[i], [0], start + step, owned[i], True, GREEDY, seed + i, outputs)
            rows.append(Row(*common, edits, source, step == 0))
        exact = layout.shape_of(Batch(tuple(rows), count))
        size = layout.up(count + more_rows)
        shape = exact._replace(num_tokens=size, num_samples=size)
        if not is_deterministic:
            shape = StepShape(size, size, size, size, 0)
        first, before = 20 * (step % 2), 20 * (1 - step % 2)
        fast, plain = (
            builder.build(Batch(tuple(rows), count, continues), shape, first, before)
            for builder, continues in zip(builders, (step > 0, False), strict=True)
        )
        for name, ours, want in zip(fast._fields, fast, plain, strict=True):
            assert ours.dtype == want.dtype
            assert np.array_equal(ours, want), (step, name)
        assert np.array_equal(fast.memory, joined(fast))


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 6),
    more_rows=st.integers(0, 3),
    num_tables=st.integers(1, 3),
    is_deterministic=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_step_of_the_same_slots_is_built_from_the_one_before(
    num_rows: int, more_rows: int, num_tables: int, is_deterministic: bool, seed: int
) -> None:
    """Whatever the rows of these slots are: their tokens, places, tables or sequences."""
    layout = Layout(4, has_decodes=False, has_chunks=False) if is_deterministic else Layout()
    builder, anew = (StepBuilder(Slots(12, 40, num_tables), 4, layout) for _ in range(2))
    rng, owned = random.Random(seed), {}
    slots = rng.sample(range(12), num_rows)
    for step in range(25):
        rows = []
        for i, slot in enumerate(slots):
            start, tables, number = owned.get(slot, (0, (), 0))
            is_new = not tables or rng.random() < 0.2
            if is_new:
                start, number = rng.randrange(60), rng.randrange(50)
                tables = tuple([] for _ in range(num_tables))
            for table in tables:
                table += [rng.randrange(1000) for _ in range(start // 4 + 1 - len(table))]
            source = i if rng.random() < 0.2 else -1
            common = (i, slot, [rng.randrange(99)], start, tables, True, GREEDY, number, 5 + number)
            rows.append(Row(*common, b"", source, is_new))
            owned[slot] = (start + 1, tables, number)
        size = layout.up(num_rows + more_rows)
        exact = layout.shape_of(Batch(tuple(rows), num_rows))
        shape = exact._replace(num_tokens=size, num_samples=size)
        if not is_deterministic:
            shape = StepShape(size, size, size, size, 0)
        anew._last = None
        steps = [b.build(Batch(tuple(rows), num_rows), shape, step, 50) for b in (builder, anew)]
        for name, ours, want in zip(StepArrays._fields, *steps, strict=True):
            if name == "tables":
                for i, row in enumerate(rows):
                    for t, table in enumerate(row.tables, i * num_tables):
                        assert list(ours[t, : len(table)]) == table
                continue
            assert np.array_equal(ours, want), (step, name)


def test_steps_of_padding_alone_are_built_one_after_another() -> None:
    builder = StepBuilder(Slots(4, 8), 16)
    shape = StepShape(4, 4, 4, 4, 0)
    first = builder.build(Batch((), 0), shape, 0, 0).memory.copy()
    assert np.array_equal(builder.build(Batch((), 0), shape, 0, 0).memory, first)


def test_inputs_have_the_names_and_the_values_of_their_arrays() -> None:
    shape = StepShape(num_tokens=7, num_rows=4, num_decodes=2, num_samples=3, max_queries=3)
    arrays = StepArrays.of(shape, num_tables=2, num_edits=1, tables=(8, 5))
    arrays.memory[:] = np.arange(len(arrays.memory)) % 251
    inputs = StepInputs.of(torch.from_numpy(arrays.memory), arrays)
    for name in StepArrays._fields:
        assert np.array_equal(getattr(inputs, name).numpy(), getattr(arrays, name)), name
    assert inputs.words.nbytes == arrays.memory.nbytes
