"""What needs no GPU of the graphs: the choice of a bucket, and padding that changes nothing."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models.checkpoints import (
    GREEDY,
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from slipstream.engine.arrays import pad_decodes, token_arrays
from slipstream.engine.batch import Batch, Row
from slipstream.engine.graphs import Buckets, row_buckets, width_buckets
from slipstream.engine.runner import ModelRunner

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)


def test_row_buckets_of_the_default() -> None:
    assert row_buckets(256) == [
        *(1, 2, 4, 8, 16, 24, 32),
        *(48, 64, 80, 96, 112, 128),
        *(160, 192, 224, 256),
    ]
    assert row_buckets(1) == [1]
    assert row_buckets(5) == [1, 2, 4, 5]
    assert row_buckets(32) == [1, 2, 4, 8, 16, 24, 32]
    assert row_buckets(4000)[-1] == 512


def test_width_buckets_in_tokens() -> None:
    widths = [width * 32 for width in width_buckets(131_072, 32)]
    assert widths == [
        *(256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
        *(16_384, 32_768, 65_536, 131_072),
    ]
    assert width_buckets(100, 32) == [4]
    assert width_buckets(700, 32) == [8, 16, 22]


@settings(max_examples=200, deadline=None)
@given(
    max_num_seqs=st.integers(1, 600),
    max_model_len=st.integers(1, 200_000),
    block_size=st.sampled_from(BLOCK_SIZES),
    data=st.data(),
)
def test_a_bucket_is_the_smallest_that_holds(
    max_num_seqs: int, max_model_len: int, block_size: int, data: st.DataObject
) -> None:
    buckets = Buckets(max_num_seqs, max_model_len, block_size)
    most_blocks = -(-max_model_len // block_size)
    assert buckets.rows == sorted(set(buckets.rows))
    assert buckets.widths == sorted(set(buckets.widths))
    assert (buckets.rows[-1], buckets.widths[-1]) == (min(max_num_seqs, 512), most_blocks)
    num_rows = data.draw(st.integers(1, max_num_seqs))
    num_blocks = data.draw(st.integers(1, most_blocks))
    bucket = buckets.find(num_rows, num_blocks)
    if num_rows > 512:
        assert bucket is None
        return
    assert bucket is not None
    assert bucket.num_rows == min(b for b in buckets.rows if b >= num_rows)
    assert bucket.num_blocks == min(b for b in buckets.widths if b >= num_blocks)
    # Padding never doubles the work: at most one row more than twice, or half the tables in vain.
    assert bucket.num_rows <= max(num_rows + 1, 2 * num_rows)
    assert bucket.num_blocks * block_size <= max(256, 2 * num_blocks * block_size) + block_size
    assert buckets.find(num_rows, most_blocks + 1) is None


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    directory = tmp_path_factory.mktemp("graphs")
    return make_runner(save(make_model("llama", hidden_size=64), directory))


def logits_and_cache(
    runner: ModelRunner, batch: Batch, shape: tuple[int, int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A step of decodes, padded to so many rows and blocks; the caches are as before it."""
    tokens = token_arrays(batch, runner.block_size)
    if shape is not None:
        tokens = pad_decodes(tokens, *shape)
    with torch.inference_mode():
        before = [cache.clone() for cache in runner._caches]
        logits = runner._forward([torch.from_numpy(a) for a in tokens], len(tokens.lengths), 0)
        after = torch.stack(runner._caches)
        for cache, old in zip(runner._caches, before, strict=True):
            cache.copy_(old)
    return logits[: len(batch.rows)], after


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=9),
    more_rows=st.integers(0, 7),
    more_blocks=st.integers(0, 20),
    seed=st.integers(0, 1000),
)
def test_padding_changes_nothing(
    runner: ModelRunner, lengths: list[int], more_rows: int, more_blocks: int, seed: int
) -> None:
    rng = random.Random(seed)
    blocks = list(range(runner.num_blocks))
    rng.shuffle(blocks)
    rows = []
    for i, length in enumerate(lengths):
        count = -(-length // runner.block_size)
        owned = [blocks.pop() for _ in range(count)]
        rows.append(Row(i, [rng.randrange(1009)], length - 1, owned, True, GREEDY, 0, 1))
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        for cache in runner._caches:  # what earlier tokens left, NaN wherever nobody may look
            cache.copy_(torch.randn(cache.shape, generator=generator))
            cache[blocks] = float("nan")
    batch = Batch(tuple(rows), len(rows))
    width = max(len(row.block_ids) for row in rows)
    plain, plain_cache = logits_and_cache(runner, batch, None)
    shape = (len(rows) + more_rows, width + more_blocks)
    padded, padded_cache = logits_and_cache(runner, batch, shape)
    torch.testing.assert_close(padded, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(padded_cache, plain_cache, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert padded.argmax(-1).tolist() == plain.argmax(-1).tolist()


def test_padding_keeps_what_was_there(runner: ModelRunner) -> None:
    rows = tuple(Row(i, [7 + i], 9 * i, [i, 9, 4], True, GREEDY, 0, 0) for i in range(3))
    tokens = token_arrays(Batch(rows, 3), 8)
    padded = pad_decodes(tokens, 5, 6)
    assert [a.dtype for a in padded] == [a.dtype for a in tokens]
    assert padded.token_ids.tolist() == [7, 8, 9, 0, 0]
    assert padded.positions.tolist() == [0, 9, 18, 0, 0]
    assert padded.slots.tolist() == [0, 73, 34, -1, -1]
    assert padded.lengths.tolist() == [1, 10, 19, 0, 0]
    assert padded.sample_rows.tolist() == [0, 1, 2, 3, 4]
    assert padded.query_starts.tolist() == [0]
    assert padded.block_tables.shape == (5, 6)
    assert np.array_equal(padded.block_tables[:3, :3], tokens.block_tables)
    assert not padded.block_tables[3:].any()
    assert not padded.block_tables[:, 3:].any()


def test_the_cpu_makes_no_graphs(runner: ModelRunner) -> None:
    assert runner._graphs is None
    generations = [Generation(prompt, 3) for prompt in random_prompts([5, 9])]
    Driver(runner).finish(generations)
    assert all(g.is_finished for g in generations)
