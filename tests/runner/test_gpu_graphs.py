"""Graphs on a GPU: a replay has the bits of an eager step, whatever ran before it."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fixtures.engine.ticks import ticks
from fixtures.kernels.checking import same_bits
from fixtures.models.checkpoints import (
    Asker,
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from slipstream.core.batch import Batch, Row
from slipstream.core.edits import EDIT
from slipstream.engine.scheduler import Limits
from slipstream.runner.graphs import MAX_CHUNK_ROWS
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.step_shape import Layout, StepShape
from slipstream.wire import FinishReason
from slipstream_contract.sampling import SamplingParams

pytestmark = pytest.mark.gpu

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
    ("qwen2", "float16"),
    ("llama", "bfloat16"),
    ("qwen3", "bfloat16"),
    ("gemma3", "bfloat16"),
    ("llama4", "bfloat16"),
    ("llama4", "float32"),
]
GROUPS = {
    "num_hidden_layers": 3,
    "sliding_window": 200,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
# Without experts, which fp32 lacks. Chunks of attention: no row of a batch here crosses a border.
CHUNKED = {"intermediate_size_mlp": 192, "interleave_moe_layer_step": 9, "head_dim": 64}
CHUNKED |= {"num_hidden_layers": 3, "no_rope_layer_interval": 3, "attention_chunk_size": 4096}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("llama", "qwen2", "qwen3")},
    "gemma3": ("gemma3", GROUPS),
    "llama4": ("llama4", CHUNKED),
    "llama4, small chunks": ("llama4", CHUNKED | {"attention_chunk_size": 256}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("graphs")
    return {
        name: save(make_model(family, max_position_embeddings=MAX_LEN, **changes), folder / name)
        for name, (family, changes) in MODELS.items()
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
        tables, size = range(runner.window.num_tables), -(-length // BLOCK_SIZE)
        owned = tuple([blocks.pop() for _ in range(size)] for _ in tables)
        token = rng.randrange(runner.vocab_size)
        style = STYLES[i % len(STYLES)]
        rows.append(Row(i, i, [token], length - 1, owned, True, style, i, 1))
    return Batch(tuple(rows), len(rows))


def batches(runner: ModelRunner, rng: random.Random) -> Iterator[Batch]:
    for count in range(1, MAX_ROWS + 1):
        most = rng.choice(BORDERS)
        yield decodes(runner, rng, [most] + [rng.randint(1, most) for _ in range(count - 1)])
    for length in BORDERS:
        count = rng.randint(1, MAX_ROWS)
        yield decodes(runner, rng, [min(length, rng.choice(BORDERS)) for _ in range(count)])


def with_chunks(runner: ModelRunner, rng: random.Random) -> Iterator[Batch]:
    """A few chunks, some behind tokens that are computed, some decodes between them."""
    for num_decodes, counts in [
        (0, [128]),
        (0, [1]),
        (0, [512]),
        (0, [100, 3, 2, 77, 15, 60, 9, 40]),
        (3, [16]),
        (7, [300]),
        (1, [2, 2, 2]),
        (4, [190, 193]),
        (12, [100]),
        (19, [300]),
        (9, [2, 70, 5]),
    ]:
        counts = [1] * num_decodes + counts
        starts = [rng.choice([1, 15, 200, 3000]) for _ in counts]
        starts[-1] = 0
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        rows = []
        for i, row in enumerate(decodes(runner, rng, ends).rows):
            token_ids = [rng.randrange(runner.vocab_size) for _ in range(counts[i])]
            samples = i < num_decodes or (counts[i] > 1 and rng.random() < 0.7)
            rows.append(
                msgspec.structs.replace(row, token_ids=token_ids, start=starts[i], samples=samples)
            )
        yield Batch(tuple(rows), num_decodes)


def eager(runner: ModelRunner, batch: Batch, shape: StepShape) -> None:
    """The step in this shape, its results where `replay` has them."""
    runner._step(shape, runner._stage(runner._builder.build(batch, shape, 0, runner._half)))


def results(runner: ModelRunner, batch: Batch) -> list[Any]:
    """Token ids, log probs and is-finite as the host reads them, and the tokens on the device."""
    torch.cuda.synchronize()
    count = sum(row.samples for row in batch.rows)
    return [*runner._results.read(0, count), runner._results.token_ids[:count].tolist()]


@pytest.mark.parametrize(("family", "dtype"), CASES)
@torch.inference_mode()
def test_a_replay_has_the_bits_of_the_padded_eager_step(
    checkpoints: dict[str, Path], family: str, dtype: str
) -> None:
    runner, rng = make(checkpoints[family], dtype), random.Random(family + dtype)
    graphs = runner._graphs
    assert graphs is not None
    assert graphs._graphs.keys() == set(graphs._buckets.shapes)
    assert None not in graphs._graphs.values()
    for cache in runner._caches:
        cache.normal_()
    failures, met = [], set()
    for batch in [*batches(runner, rng), *with_chunks(runner, rng)]:
        found = graphs.shape_of(Layout().shape_of(batch))
        assert found is not None
        met.add(found)
        eager(runner, batch, found)
        want, want_caches = results(runner, batch), [cache.clone() for cache in runner._caches]
        exact = runner._builder.build(batch, Layout().shape_of(batch), 0, 0)
        slots = torch.from_numpy(exact.slots).cuda()
        for cache in runner._caches:  # what the eager step wrote, the replay must write again
            cache[slots // BLOCK_SIZE, :, :, slots % BLOCK_SIZE] = float("nan")
        for tensor in (*runner._results.mirrors, runner._results.token_ids):
            tensor.fill_(1)
        runner._layers._tables.fill_(runner.num_blocks - 1)
        runner._run(batch, 0, runner._half, None, {})
        if results(runner, batch) != want:
            failures.append(f"results of {Layout().shape_of(batch)}, {found}")
        if not all(map(same_bits, runner._caches, want_caches)):
            failures.append(f"cache of {Layout().shape_of(batch)}, {found}")
    assert len(met) > 10
    assert not failures, "\n".join(failures)


class EditingDriver(Driver):
    """Every third row bans, forces or weighs tokens, by what is its own alone."""

    def _row(self, number: int, g: Generation, chunk: int) -> Row:
        row = super()._row(number, g, chunk)
        if g.seed % 3:
            return row
        rng = random.Random(g.seed + row.num_outputs)
        ids = sorted(rng.sample(range(self.runner.vocab_size), 50))
        addends = [float("-inf"), *(rng.choice([-3.0, 2.0]) for _ in ids[1:])]
        edits = b"".join(map(EDIT.pack, ids, addends))
        return msgspec.structs.replace(row, edits=edits)


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
        driver.free += [b for g in running if g.is_finished for b in g.blocks()]
        num_steps += 1
    assert num_steps > 200
    return generations


@pytest.mark.parametrize("family", ["llama", "gemma3", "llama4, small chunks"])
def test_the_same_tokens_as_without_graphs(family: str, checkpoints: dict[str, Path]) -> None:
    with_graphs = make(checkpoints[family])
    ours = generate(with_graphs)
    expected = generate(make(checkpoints[family], cuda_graphs=False))
    assert with_graphs._graphs is not None
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
        runner._model.embedding.table.weight[sick_token] = float("nan")
    rows = list(batch.rows)
    rows[2] = msgspec.structs.replace(rows[2], token_ids=[sick_token])
    sick = runner.run(Batch(tuple(rows), 5))
    assert sick.outcomes == [True, True, False, True, True]
    for i in (0, 1, 3, 4):
        assert sick.token_ids[i] == healthy[0].token_ids[i] == healthy[1].token_ids[i]
    again = runner.run(batch)  # what the sick row left in the graphs' memory does no harm
    assert again == healthy[1]
    fewer = runner.run(Batch(batch.rows[:3], 3))
    assert fewer.token_ids == healthy[0].token_ids[:3]
    assert fewer.outcomes == [True] * 3


def test_steps_without_a_graph_run_eagerly(checkpoints: dict[str, Path]) -> None:
    runner, rng = make(checkpoints["llama"]), random.Random(6)
    graphs = runner._graphs
    assert graphs is not None
    with torch.inference_mode():
        for cache in runner._caches:
            cache.normal_()
    batch = decodes(runner, rng, [rng.randint(1, 300) for _ in range(MAX_ROWS)])
    replayed = runner.run(batch)
    del graphs._graphs[StepShape(MAX_ROWS, MAX_ROWS, MAX_ROWS, MAX_ROWS, 0)]
    assert runner.run(batch).token_ids == replayed.token_ids
    batch = Batch(batch.rows[:5], 5)
    replayed = runner.run(batch)
    size = runner._staging._size
    runner._staging._size = 100  # too small for what it is asked to hold
    assert runner.run(batch).token_ids == replayed.token_ids
    runner._staging._size = size
    assert graphs.shape_of(StepShape(513, 1, 0, 1, 513)) is None
    assert graphs.shape_of(StepShape(100, MAX_CHUNK_ROWS + 1, 0, 3, 90)) is None


def test_a_shape_for_which_memory_is_short_runs_eagerly(
    checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ModelRunner._step

    def hungry(self: ModelRunner, shape: StepShape, *inputs: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing() and shape.num_rows == 4:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return plain(self, shape, *inputs)

    monkeypatch.setattr(ModelRunner, "_step", hungry)
    runner, rng = make(checkpoints["llama"]), random.Random(7)
    assert runner._graphs is not None
    assert "no memory for the CUDA graph" in caplog.text
    missing = {StepShape(4, 4, 4, 4, 0, has_drafts) for has_drafts in (False, True)}
    graphs = runner._graphs._graphs
    assert {shape for shape, graph in graphs.items() if graph is None} == missing
    with torch.inference_mode():
        for cache in runner._caches:
            cache.normal_()
    batch = decodes(runner, rng, [700] * 3)
    assert runner.run(batch) == runner.run(batch)


ASKED = [
    SamplingParams(max_tokens=60, temperature=0.0, log_probs=True),
    SamplingParams(max_tokens=45, temperature=0.8, top_k=20, seed=11, log_probs=True, n=3),
    SamplingParams(
        max_tokens=50,
        top_p=0.9,
        seed=12,
        repetition_penalty=1.2,
        frequency_penalty=0.1,
        min_tokens=40,
        end_ids=(3,),
        log_probs=True,
    ),
    SamplingParams(max_tokens=60, seed=13, bad_words=((1, 2), (3,)), stop_token_ids=(5, 9, 40)),
    SamplingParams(max_tokens=1, seed=14),
    SamplingParams(max_tokens=33, seed=15, presence_penalty=1.5, bias=((8, 3.0),), n=2),
]


def drive(runner: ModelRunner, budget: int = 700) -> Asker:
    """Requests that arrive one after another, prompts beside decodes, cancels between them."""
    # How prompts are cut depends on the clock, and bits on how they are cut.
    asker = Asker(runner, Limits(MAX_ROWS, budget, 100), ticks())
    lengths = [3, 250, 60, 500, 17, 760, 1, 1020, 33, 1530, 8, 255, 45, 2040, 511, 26, 64, 2]
    for i, prompt in enumerate(random_prompts(lengths)):
        number = asker.submit(prompt, ASKED[i % len(ASKED)])
        for _ in range(i % 4):
            asker.step()
        if i % 7 == 6:
            asker.engine.cancel(b"asker", number)
    asker.drain()
    return asker


def test_a_step_in_flight_changes_no_token(checkpoints: dict[str, Path]) -> None:
    runner = make(checkpoints["llama"])
    assert runner.max_in_flight == 2
    two = drive(runner)
    runner.max_in_flight = 1
    one = drive(runner)
    runner.max_in_flight = 2
    again = drive(runner)
    for key, answer in one.answers.items():
        other = two.answers[key]
        assert other.reason == again.answers[key].reason == answer.reason
        assert again.answers[key] == other, "the same calls, the same bits"
        if answer.reason is FinishReason.CANCELLED:
            continue  # a step earlier or later
        assert other.token_ids == answer.token_ids, key
        assert other.log_probs == pytest.approx(answer.log_probs, abs=1e-3)


def test_a_steady_state_asks_the_device_for_no_memory(checkpoints: dict[str, Path]) -> None:
    runner = make(checkpoints["llama"], "bfloat16")
    drive(runner)
    before = torch.cuda.memory_stats()
    drive(runner)
    after = torch.cuda.memory_stats()
    for name in ("num_device_alloc", "num_device_free", "num_alloc_retries"):
        assert after[name] == before[name], name
