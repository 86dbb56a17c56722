"""Graphs on a GPU: a replay has the bits of an eager step, whatever ran before it."""

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from kernels.checking import same_bits
from models.checkpoints import Driver, Generation, make_model, make_runner, random_prompts, save
from slipstream.engine.arrays import pad_decodes, token_arrays
from slipstream.engine.batch import Batch, LogitEdit, Row
from slipstream.engine.runner import ModelRunner
from slipstream_contract.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]

MAX_ROWS, MAX_LEN, BLOCK_SIZE = 20, 9000, 16
BORDERS = [1, 15, 16, 17, 255, 256, 257, 512, 513, 768, 769, 1024, 1500, 4097, 8192, 8193, 9000]
STYLES = [
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(max_tokens=1, temperature=1.0),
    SamplingParams(max_tokens=1, temperature=0.7, top_p=0.8),
    SamplingParams(max_tokens=1, temperature=1.3, top_k=20, min_p=0.01),
    SamplingParams(max_tokens=1, temperature=1.0, min_p=0.5),
]
CASES = [
    ("llama", "float32"),
    ("llama", "float16"),
    ("llama", "bfloat16"),
    ("qwen2", "bfloat16"),
    ("qwen3", "bfloat16"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("graphs")
    return {
        family: save(make_model(family, max_position_embeddings=MAX_LEN), folder / family)
        for family in ("llama", "qwen2", "qwen3")
    }


def make(directory: Path, dtype: str = "float32", cuda_graphs: bool = True) -> ModelRunner:
    return make_runner(
        directory,
        device="cuda",
        dtype=dtype,
        kv_cache_tokens=MAX_ROWS * (MAX_LEN + BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_ROWS,
        cuda_graphs=cuda_graphs,
    )


def decodes(runner: ModelRunner, rng: random.Random, lengths: list[int]) -> Batch:
    """One token more for sequences that then have these lengths, in blocks in no order."""
    blocks = list(range(runner.num_blocks))
    rng.shuffle(blocks)
    rows = []
    for i, length in enumerate(lengths):
        owned = [blocks.pop() for _ in range(-(-length // BLOCK_SIZE))]
        token = rng.randrange(runner.vocab_size)
        rows.append(Row(i, [token], length - 1, owned, True, STYLES[i % len(STYLES)], i, 1))
    return Batch(tuple(rows), len(rows))


def batches(runner: ModelRunner, rng: random.Random) -> Iterator[Batch]:
    for count in range(1, MAX_ROWS + 1):
        most = rng.choice(BORDERS)
        yield decodes(runner, rng, [most] + [rng.randint(1, most) for _ in range(count - 1)])
    for length in BORDERS:
        count = rng.randint(1, MAX_ROWS)
        yield decodes(runner, rng, [min(length, rng.choice(BORDERS)) for _ in range(count)])


@pytest.mark.parametrize(("family", "dtype"), CASES)
@torch.inference_mode()
def test_a_replay_has_the_bits_of_the_padded_eager_step(
    checkpoints: dict[str, Path], family: str, dtype: str
) -> None:
    runner, rng = make(checkpoints[family], dtype), random.Random(family + dtype)
    graphs = runner._graphs
    assert graphs is not None
    for cache in runner._caches:
        cache.normal_()
    failures, met = [], set()
    for batch in batches(runner, rng):
        tokens = token_arrays(batch, BLOCK_SIZE)
        bucket = graphs._buckets.find(*tokens.block_tables.shape)
        assert bucket is not None
        met.add(bucket)
        padded = pad_decodes(tokens, *bucket)
        logits = runner._forward(runner._tokens.upload(padded), bucket.num_rows, 0)
        want = logits[: len(batch.rows)].float()
        want_caches = [cache.clone() for cache in runner._caches]
        runner.logits(batch)  # captured, if it was not
        slots = torch.from_numpy(tokens.slots).cuda()
        for cache in runner._caches:  # what the replay must write, it must also write here
            cache[slots // BLOCK_SIZE, :, :, slots % BLOCK_SIZE] = float("nan")
        graphs._logits.fill_(float("nan"))
        got = runner.logits(batch)
        lengths = f"{len(batch.rows)} rows, longest {tokens.lengths.max()}, {bucket}"
        if not same_bits(got, want):
            failures.append(f"logits of {lengths}")
        if not all(map(same_bits, runner._caches, want_caches)):
            failures.append(f"cache of {lengths}")
    assert met <= graphs._graphs.keys()
    assert not failures, "\n".join(failures)


class EditingDriver(Driver):
    """Every third row bans, forces or weighs tokens, by what is its own alone."""

    def _row(self, number: int, g: Generation, chunk: int) -> Row:
        row = super()._row(number, g, chunk)
        if g.seed % 3:
            return row
        rng = random.Random(g.seed + row.num_outputs)
        ids = rng.sample(range(self.runner.vocab_size), 50)
        edits = [LogitEdit(i, rng.choice([1.0, 1.5]), rng.choice([-3.0, 2.0])) for i in ids]
        edits[0] = LogitEdit(ids[0], 1.0, float("-inf"))
        return dataclasses.replace(row, edits=tuple(edits))


def generate(runner: ModelRunner) -> list[Generation]:
    """220 steps: sequences arrive in chunks between the decodes of others, over every border."""
    lengths = [3, 250, 60, 500, 17, 760, 1, 1020, 33, 1530, 8, 255, 45, 2040, 511, 26, 64, 2]
    generations = [
        Generation(prompt, 20 + 13 * i % 40, STYLES[i % len(STYLES)], seed=i)
        for i, prompt in enumerate(random_prompts(lengths * 3))
    ]
    driver = EditingDriver(runner)
    waiting, running, num_steps = list(generations), [], 0
    while waiting or not all(g.is_finished for g in running):
        running = [g for g in running if not g.is_finished]
        if waiting and len(running) < MAX_ROWS and num_steps % 4 == 0:
            running.append(waiting.pop(0))
        driver.step(running, chunk=300)
        driver.free += [b for g in running if g.is_finished for b in g.block_ids]
        num_steps += 1
    assert num_steps > 200
    return generations


def test_the_same_tokens_as_without_graphs(checkpoints: dict[str, Path]) -> None:
    with_graphs = make(checkpoints["llama"])
    ours = generate(with_graphs)
    expected = generate(make(checkpoints["llama"], cuda_graphs=False))
    assert with_graphs._graphs is not None
    assert len(with_graphs._graphs._graphs) > 10
    for one, other in zip(ours, expected, strict=True):
        assert one.outputs == other.outputs
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-3)


def test_a_nan_stays_in_its_row(checkpoints: dict[str, Path]) -> None:
    runner, rng = make(checkpoints["llama"]), random.Random(5)
    with torch.inference_mode():
        for cache in runner._caches:
            cache.normal_()
    batch = decodes(runner, rng, [100, 30, 200, 7, 90])
    healthy = [runner.run(batch) for _ in range(2)]
    sick_token = 1008
    assert sick_token not in [row.token_ids[0] for row in batch.rows]
    with torch.inference_mode():
        runner._model.embedding.weight[sick_token] = float("nan")
    rows = list(batch.rows)
    rows[2] = dataclasses.replace(rows[2], token_ids=[sick_token])
    sick = runner.run(Batch(tuple(rows), 5))
    assert sick.is_finite == [True, True, False, True, True]
    for i in (0, 1, 3, 4):
        assert sick.token_ids[i] == healthy[0].token_ids[i] == healthy[1].token_ids[i]
    again = runner.run(batch)  # what the sick row left in the graphs' memory does no harm
    assert again == healthy[1]
    fewer = runner.run(Batch(batch.rows[:3], 3))
    assert fewer.token_ids == healthy[0].token_ids[:3]
    assert fewer.is_finite == [True] * 3


def test_more_rows_than_any_bucket_run_eagerly(checkpoints: dict[str, Path]) -> None:
    runner, rng = make(checkpoints["llama"]), random.Random(6)
    with torch.inference_mode():
        for cache in runner._caches:
            cache.normal_()
    batch = decodes(runner, rng, [rng.randint(1, 300) for _ in range(MAX_ROWS + 5)])
    assert runner._graphs is not None
    num_graphs = len(runner._graphs._graphs)
    whole = runner.run(batch)
    assert len(runner._graphs._graphs) == num_graphs
    part = runner.run(Batch(batch.rows[:MAX_ROWS], MAX_ROWS))
    assert part.token_ids == whole.token_ids[:MAX_ROWS]


def test_a_bucket_for_which_memory_is_short_runs_eagerly(
    checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    runner, rng = make(checkpoints["llama"]), random.Random(7)
    graphs = runner._graphs
    assert graphs is not None
    with torch.inference_mode():
        for cache in runner._caches:
            cache.normal_()
    plain = graphs._forward

    def hungry(staged: Sequence[torch.Tensor], *sizes: int) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return plain(staged, *sizes)

    short, other = decodes(runner, rng, [700] * 3), decodes(runner, rng, [1500] * 3)
    graphs._forward = hungry
    results = [runner.run(short)]
    assert "no memory for the CUDA graph" in caplog.text
    assert list(graphs._graphs.values()).count(None) == 1
    graphs._forward = plain
    results += [runner.run(short), runner.run(short)]
    assert results[0] == results[1] == results[2]
    first, again = runner.run(other), runner.run(other)  # captured and replayed as ever
    assert first == again
    assert list(graphs._graphs.values()).count(None) == 1
