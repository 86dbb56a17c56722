"""Chunks of attention (Llama 4): a token sees its own alone, in any step and beside all else."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.engine.ticks import ticks
from fixtures.models.checkpoints import (
    GREEDY,
    Asker,
    Driver,
    Generation,
    edit_config,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.drafters import SpeculatingDriver, save_eagle3, save_medusa
from fixtures.models.parity import check_against, engine_greedy
from fixtures.models.ranks import ranks_of
from fixtures.tiers import quick_of
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.config import EngineConfig
from slipstream.core.batch import Batch, Row
from slipstream.core.window import AttentionWindow
from slipstream.engine.scheduler import Limits
from slipstream.engine.settings import limits_of
from slipstream.errors import CheckpointError, ConfigError
from slipstream.layers.attention import StepRows
from slipstream.layers.chunked import ChunkView
from slipstream.models.hf import read_config
from slipstream.runner.plan import Plan, settle
from slipstream.wire import Submit
from slipstream_contract.beams import Beams
from slipstream_contract.drafts import Drafts
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams
from slipstream_quantize.opened import Opened, Running
from transformers.masking_utils import chunked_causal_mask_function

CHUNK, VOCAB = 32, 1009
SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "head_dim": 32, "no_rope_layer_interval": 3}
SIZES |= {"attention_chunk_size": CHUNK, "max_position_embeddings": 512, "floor_scale": 50}
SEEDS = [pytest.param(seed, marks=[] if seed < 2 else [pytest.mark.rest]) for seed in range(6)]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_model("llama4", **SIZES)


@pytest.fixture(scope="module")
def checkpoint(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("chunked"))


def planned(directory: Path, device: str = "cpu", **options: object) -> Plan:
    config = EngineConfig(checkpoint=str(directory), device=device, **options)
    return settle(config, torch.device(device))


@pytest.mark.parametrize("chunk", [3, 16])
def test_the_oracle_masks_by_the_definition(chunk: int) -> None:
    """Meta's: a query sees a key if both positions, divided by the size of a chunk, are equal."""
    sees = chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64))
    for query, key in itertools.product(range(5 * chunk), repeat=2):
        wanted = key <= query and key // chunk == query // chunk
        assert bool(sees(0, 0, torch.tensor(query), torch.tensor(key))) == wanted


def test_chunks_of_the_oracle_are_sequences_by_themselves() -> None:
    """Where all layers see chunks: a chunk has the logits of its tokens alone."""
    layers = {"layer_types": ["chunked_attention"] * 4, "no_rope_layers": [1] * 4}
    model, (tokens,) = make_model("llama4", **SIZES | layers), random_prompts([3 * CHUNK])
    with torch.no_grad():
        whole = model(torch.tensor([tokens])).logits[0].split(CHUNK)
        each = model(torch.tensor(tokens).view(3, CHUNK)).logits
    for part, alone in zip(whole, each, strict=True):
        assert (part - alone).abs().max() <= 1e-4


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_far_behind_the_first_chunk(seed: int, tmp_path: Path) -> None:
    """Drawn chunks, blocks, layers and steps, with a preemption; within 1e-4, tokens equal."""
    rng = random.Random(f"chunked {seed}")
    chunk = rng.choice([16, 32, 64])
    kinds = [rng.choice(["chunked_attention", "full_attention"]) for _ in range(4)]
    keys = {"attention_chunk_size": chunk, "use_qk_norm": rng.random() < 0.5}
    keys |= {"layer_types": rng.choice([None, kinds, ["chunked_attention"] * 4])}
    model = make_model("llama4", **SIZES | keys)
    block_size = rng.choice([8, 16, chunk])
    runner = make_runner(save(model, tmp_path), block_size=block_size)
    lengths = [5 * chunk + rng.randrange(-3, 30), 2 * chunk, rng.randrange(chunk), 3 * chunk - 1]
    prompts = random_prompts(lengths, VOCAB, seed)
    found = [Generation(prompt, 5 + 9 * i) for i, prompt in enumerate(prompts)]
    driver = Driver(runner, keep_logits=True)
    driver.step(found[:2], rng.randrange(1, 2 * chunk))
    driver.step(found, rng.randrange(1, 2 * chunk))
    driver.preempt(found[0])
    driver.finish(found, rng.randrange(chunk // 2, 2 * chunk))
    for each in found:
        check_against(model, each, 1e-4)


# Root of the mean square of the error, over the deviation: those without chunks.
BITS = {"auto": 0.05, "fp8": 0.08, "int8": 0.025, "int4": 0.27}


@pytest.mark.parametrize("name", quick_of(BITS, ("auto", "int4")))
def test_fewer_bits(name: str, tmp_path: Path) -> None:
    """Caches, and all of it in bfloat16, where decodes rotate in their attention if nothing else
    does; without experts, of which a row may get another.
    """
    model = make_model("llama4", **SIZES, interleave_moe_layer_step=9, use_qk_norm=name != "auto")
    options = {"dtype": "bfloat16"} if name == "auto" else {"kv_cache_dtype": name}
    runner = make_runner(save(model, tmp_path), block_size=16, **options)
    found = [Generation(prompt, 4) for prompt in random_prompts([5 * CHUNK + 7, CHUNK - 2])]
    Driver(runner, keep_logits=True).finish(found, 50)
    for each in found:
        with torch.no_grad():
            truth = model(torch.tensor([each.tokens])).logits[0, len(each.prompt) - 1 : -1]
        error = (torch.stack(each.logits) - truth).pow(2).mean().sqrt() / truth.std()
        assert error < BITS[name]


class Watched:
    """A runner whose empty blocks are NaN, and that keeps the rows of drafts."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.asker: Asker | None = None
        self.runs: list[list[Row]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, batch: Batch) -> Any:
        assert self.asker is not None
        empty = self.asker.engine._scheduler.cache._blocks._empty
        with torch.inference_mode():
            for cache in self._runner._caches:
                cache[empty] = torch.nan if cache.is_floating_point() else 0
        if batch.num_drafts:
            self.runs.append(list(batch.rows[: batch.num_decodes]))
        return self._runner.launch(batch)

    def crossed(self) -> int:
        """Count the drafts at the first place of a chunk."""
        pairs = [pair for rows in self.runs for pair in itertools.pairwise(rows)]
        return sum(
            row.start % CHUNK == 0 and before.slot == row.slot and before.start + 1 == row.start
            for before, row in pairs
        )


def asker_of(directory: Path, **options: object) -> tuple[Asker, Watched]:
    base = {"device": "cpu", "dtype": "float32", "block_size": 8, "kv_cache_tokens": 2048}
    base |= {"max_num_seqs": 4, "max_num_batched_tokens": 48}
    given = base | options
    limits = limits_of(
        EngineConfig(checkpoint=str(directory), **given), planned(directory, **given)
    )
    watched = Watched(make_runner(directory, **given))
    watched.asker = asker = Asker(watched, limits, ticks())
    return asker, watched


def asked_of(
    asker: Asker, prompts: list[list[int]], every: int = 0, **sampling: object
) -> list[list[int]]:
    """Greedy tokens of prompts that come some steps apart; each `every` steps one is preempted."""
    numbers, rng = [], random.Random(1)
    scheduler = asker.engine._scheduler
    waiting = list(prompts)
    for step in itertools.count():
        if waiting and step % 3 == 0:
            asked = SamplingParams(max_tokens=40, temperature=0.0, **sampling)
            numbers.append(asker.submit(waiting.pop(0), asked))
        running = [each for each in scheduler.running.values() if each.num_preemptions < 3]
        if every and step % every == every - 1 and running:
            scheduler._running.preempt(rng.choice(running))
        if not waiting and not asker.engine.has_work:
            break
        asker.step()
    asker.drain()
    return [asker.answers[number, 0].token_ids for number in numbers]


def crowd() -> list[list[int]]:
    """Prompts of several chunks, of which some begin as others do."""
    base, other = random_prompts([4 * CHUNK + 5, 3 * CHUNK])
    return [base, base[: 2 * CHUNK] + other[:9], base + other[:40], base[:CHUNK], other, base]


@pytest.fixture(scope="module")
def wanted(model: torch.nn.Module, checkpoint: Path) -> list[list[int]]:
    """The engine's greedy tokens, which are those of dense passes."""
    outputs = asked_of(asker_of(checkpoint)[0], crowd())
    for prompt, said in zip(crowd(), outputs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
        assert said == logits.argmax(-1).tolist()
    return outputs


def test_the_same_tokens_over_preemptions(checkpoint: Path, wanted: list[list[int]]) -> None:
    """Whatever is found again, or computed again in other steps."""
    asker, _ = asker_of(checkpoint)
    assert asked_of(asker, crowd(), every=4) == wanted
    assert asker.engine.status().num_preemptions > 3
    assert asker.engine.figures().counters["prefix_hits"] > 0


def test_drafts_that_cross_a_border(checkpoint: Path, wanted: list[list[int]]) -> None:
    """Right ones, which a request brings: a step verifies tokens of two chunks."""
    asker, watched = asker_of(checkpoint)
    for prompt, said in zip(crowd(), wanted, strict=True):
        drafts = Drafts(token_ids=tuple(said))
        assert asked_of(asker, [prompt], drafts=drafts) == [said]
    assert watched.crossed() > 3


def test_beams_over_a_border(model: torch.nn.Module, checkpoint: Path) -> None:
    """Log probs of each beam are those of a dense pass over its tokens."""
    asker, _ = asker_of(checkpoint)
    (prompt,), beams = random_prompts([2 * CHUNK - 5]), []
    sampling = SamplingParams(max_tokens=12, n=3, beams=Beams(width=3), log_probs=True)
    asker.engine.submit(b"asker", Submit(0, pack(prompt), sampling, 1))
    while asker.engine.has_work:
        for tokens in asker.engine.step().get(b"asker", ()):
            beams = tokens.beams or beams
    assert [len(beam.token_ids) for beam in beams] == [12] * 3
    for beam in beams:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + beam.token_ids])).logits[0, len(prompt) - 1 : -1]
        truth = logits.log_softmax(-1).gather(1, torch.tensor(beam.token_ids)[:, None])[:, 0]
        assert (torch.tensor(beam.log_probs) - truth).abs().max() <= 1e-4


@pytest.mark.parametrize("name", quick_of(["eagle3", "medusa", "draft"], ["eagle3"]))
def test_drafters_on_the_device(name: str, checkpoint: Path, tmp_path: Path) -> None:
    """A drafter has full attention; tokens are those without it."""
    if name == "eagle3":
        save_eagle3(tmp_path, max_position_embeddings=512)
    elif name == "medusa":
        save_medusa(tmp_path)
    else:
        small = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2}
        save(make_model("qwen3", **small, num_key_value_heads=1), tmp_path)
    prompts = random_prompts([3 * CHUNK - 4, 2 * CHUNK + 1])
    plain, found = ([Generation(prompt, 20) for prompt in prompts] for _ in range(2))
    Driver(make_runner(checkpoint)).finish(plain, 50)
    options = {"speculation": name, "draft_checkpoint": str(tmp_path), "num_draft_tokens": 3}
    driver = SpeculatingDriver(make_runner(checkpoint, **options), 3)
    driver.finish(found, 50)
    assert [each.outputs for each in found] == [each.outputs for each in plain]
    assert driver.drafted.proposed


@pytest.mark.rest
def test_ranks_and_stages(checkpoint: Path) -> None:
    """Through the engine, with several steps in flight."""
    prompts = crowd()[:4]
    wanted = engine_greedy(make_runner(checkpoint), Limits(4, 37), prompts)
    with ranks_of(checkpoint, 2, 2) as leader:
        assert engine_greedy(leader, Limits(4, 37, num_stages=2), prompts) == wanted


def test_within_a_chunk_attention_is_full(checkpoint: Path) -> None:
    """Plans of such lengths are those of models without chunks."""
    short, long = (
        planned(checkpoint, dtype="bfloat16", max_model_len=n) for n in (CHUNK, CHUNK + 1)
    )
    assert short.window == AttentionWindow(0, 0, 2048)
    assert not short.attention.spec.is_chunked
    assert short.attention.spec.windows == (0,)
    assert long.window == AttentionWindow(CHUNK, 0, 2048, False, 4, 1, is_chunked=True)
    assert [each.attention.rotates_decodes for each in (short, long)] == [True, False]


OF_GPU = {"intermediate_size": 64, "intermediate_size_mlp": 64}
REFUSED = [
    ({"block_size": 64}, "block_size = 64 does not divide attention chunks of 32 tokens"),
    ({"attention_window": 16}, "attention_window = 16: Llama4ForCausalLM has windows of its own"),
]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_is_refused(
    options: dict[str, object], words: str, device: str, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    edit_config(tmp_path, **OF_GPU)
    with pytest.raises(ConfigError, match=words):
        planned(tmp_path, device, dtype="bfloat16", **options)


def test_drafters_with_chunks_are_refused(checkpoint: Path) -> None:
    options = {"speculation": "draft", "draft_checkpoint": str(checkpoint)}
    with pytest.raises(ConfigError, match="max_model_len = 512 is above") as error:
        planned(checkpoint, **options)
    assert "draft_checkpoint: Llama4ForCausalLM sees chunks of 32 tokens" in str(error.value)
    assert planned(checkpoint, **options, max_model_len=CHUNK).drafts is not None


def test_a_window_beside_chunks_is_refused(model: torch.nn.Module, tmp_path: Path) -> None:
    save(model, tmp_path)
    edit_config(tmp_path, sliding_window=16)
    with pytest.raises(CheckpointError, match="sliding_window = 16 is not implemented"):
        read_config(tmp_path)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 4]), st.integers(1, 5), st.integers(1, 40))
def test_what_a_view_shows(data: st.DataObject, size: int, blocks: int, width: int) -> None:
    """The blocks from the chunk's first one on, and as many tokens as lie behind its begin."""
    chunk = size * blocks
    lengths = data.draw(st.lists(st.integers(0, size * width), min_size=1, max_size=5))
    counts = [data.draw(st.integers(1, (n - 1) % chunk + 1)) for n in lengths if n]
    tables = torch.randperm(len(lengths) * width).view(len(lengths), width).int()
    held = torch.tensor(lengths, dtype=torch.int32)
    contexts = tuple(zip(counts, [n for n in lengths if n], strict=True))
    rows = StepRows(held, held, tables, held, held, 0, 1, contexts=contexts)
    seen = ChunkView.of(rows, chunk, size)(rows)
    assert seen.lengths.dtype == seen.block_tables.dtype == torch.int32
    for row, length in enumerate(lengths):
        first = max(0, length - 1) // chunk * chunk
        assert int(seen.lengths[row]) == length - first
        wanted = tables[row, first // size : -(-length // size)]
        assert seen.block_tables[row, : len(wanted)].tolist() == wanted.tolist()
    assert seen.contexts == tuple((count, (n - 1) % chunk + 1) for count, n in contexts)
    assert all(0 < count <= shown for count, shown in seen.contexts)


def test_a_row_over_a_border_is_a_fault(checkpoint: Path) -> None:
    """Steps are checked where they are made into arrays."""
    row = Row(0, 0, [1] * 5, CHUNK - 4, ([0] * 8,) * 4, False, GREEDY, 0, 0)
    layout = make_runner(checkpoint)._builder.layout
    with pytest.raises(AssertionError, match="the scheduler cuts there"):
        layout.shape_of(Batch((row,), 0))


def test_texts_that_calibrate_end_with_the_first_chunk(checkpoint: Path) -> None:
    opened = Opened(checkpoint, "cpu", "float32")
    Running(opened, torch.zeros(1, CHUNK, dtype=torch.int64))
    with pytest.raises(ConfigError, match="pieces of 33 tokens are longer than attention chunks"):
        Running(opened, torch.zeros(1, CHUNK + 1, dtype=torch.int64))
