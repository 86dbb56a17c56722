"""Heads that skip blocks of tokens (Phi-3-small): what each sees, and models against fp64."""

import logging
import random
from pathlib import Path

import pytest
import torch
from fixtures.models import phi3small, remote_drawn
from fixtures.models.checkpoints import Driver, Generation, make_runner, random_prompts
from fixtures.models.parity import check_against, engine_greedy
from fixtures.models.remote import Remote
from fixtures.tiers import quick_of
from slipstream.config import EngineConfig
from slipstream.engine.scheduler import Limits
from slipstream.errors import CheckpointError, ConfigError
from slipstream.kernels.attention.backend import TorchCpu
from slipstream.kernels.attention.spec import AttentionSpec
from slipstream.layers.attention import AttentionInputs, StepRows
from slipstream.layers.dims import SkipConfig
from slipstream.layers.skipping import Skipping, SkippingInputs
from slipstream.models.hf import read_config
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import settle

SEEDS = [pytest.param(seed, marks=[] if seed < 2 else [pytest.mark.rest]) for seed in range(8)]
_log = logging.getLogger(__name__)


def made(rng: random.Random, layers: int = 0, **changes: object) -> Remote:
    """Draw a model of so many layers, or of a few, whose blocks are small beside sequences."""
    sizes = remote_drawn.Sizes(rng)
    sizes.layers, sizes.vocab = layers or rng.choice([2, 3]), rng.randrange(100, 300)
    model = phi3small.drawn(rng, sizes, remote_drawn._filled)
    own = {
        "blocksparse_block_size": rng.choice([8, 16]),
        "blocksparse_num_local_blocks": rng.choice([1, 2, 3]),
        "blocksparse_vert_stride": rng.choice([2, 3, 5, 8]),
    }
    model.keys |= own | changes
    return model


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_configuration(seed: int, tmp_path: Path) -> None:
    """Logits within 1e-4 and the same tokens, over chunks, borders of blocks and preemption."""
    rng = random.Random(f"skipping {seed}")
    model = made(rng)
    model.save(tmp_path)
    _log.warning("seed %d: %s", seed, model.keys)
    runner = make_runner(tmp_path, block_size=8)
    driver = Driver(runner, keep_logits=True)
    lengths = [rng.randrange(1, 30), rng.randrange(90, 160), rng.randrange(40, 90)]
    prompts = random_prompts(lengths, model.config.vocab_size, seed)
    generations = [Generation(prompt, 20 + i) for i, prompt in enumerate(prompts)]
    driver.step(generations[:1], rng.randrange(1, 20))
    for _ in range(9):
        driver.step(generations, rng.randrange(1, 50))
    driver.preempt(generations[1])
    driver.finish(generations, rng.randrange(3, 70))
    for generation in generations:
        check_against(model, generation, 1e-4)


def seen_by(row: torch.Tensor, length: int, kv_heads: int, block: int) -> tuple[set[int], set[int]]:
    """Positions that a row of a head sees, and its kv heads, where tables count 0, 1, ..."""
    blocks = row[: -(-length // block)].tolist()
    at = [b // kv_heads * block + i for b in blocks for i in range(block)]
    assert at[:length] == sorted(at[:length])
    return set(at[:length]), {b % kv_heads for b in blocks}


@pytest.mark.parametrize("seed", quick_of(range(12), range(3)))
def test_rows_of_heads_see_what_the_mask_says(seed: int) -> None:
    """The rows are decodes, or chunks that begin anywhere, with empty ones among them."""
    rng = random.Random(seed)
    block = rng.choice([8, 16])
    kv_heads, each, local = rng.choice([1, 2, 3]), rng.choice([1, 3]), rng.choice([1, 2, 4])
    stride, pages = rng.choice([2, 3, 8]), rng.choice([1, 2])
    heads = kv_heads * each
    keys = {
        "num_attention_heads": heads,
        "blocksparse_block_size": block * pages,
        "blocksparse_num_local_blocks": local,
        "blocksparse_vert_stride": stride,
        "blocksparse_homo_head_pattern": rng.random() < 0.3,
    }
    step = 0 if keys["blocksparse_homo_head_pattern"] else max(1, stride // heads)
    firsts = tuple((-1 - i * step) % stride for i in range(heads))
    skips = SkipConfig(frozenset({0}), block * pages, local, stride, firsts)
    sizes = (torch.float32, torch.float32, heads, kv_heads, 4, block)
    backend = TorchCpu(AttentionSpec("cpu", *sizes, skipped_tokens=block * pages))
    decodes = [rng.randrange(150) for _ in range(3)]
    chunks = [(rng.randrange(90), rng.randrange(60)) for _ in range(4)] + [(0, 0)]
    capacity = -(-150 // block)
    tables = torch.arange(capacity, dtype=torch.int32).repeat(len(decodes) + len(chunks), 1)
    starts = torch.tensor([0, *torch.tensor([n for _, n in chunks]).cumsum(0)], dtype=torch.int32)
    lengths = torch.tensor([*decodes, *map(sum, chunks)], dtype=torch.int32)
    lengths[len(decodes) :][starts.diff() == 0] = 0
    count = int(starts[-1]) + 3 + len(decodes)  # and padding
    nothing = torch.zeros(count, dtype=torch.long)
    most = max(n for _, n in chunks)
    rows = StepRows(nothing, nothing, tables, starts, lengths, len(decodes), most)
    cache = torch.zeros(capacity, kv_heads, 2, block, 4)
    found = Skipping(skips, backend, capacity, torch.device("cpu")).inputs(cache, rows, count)
    seen = phi3small.mask(SimpleKeys(keys), 150, False)
    own, order = found.by_head.rows, found.order
    assert order is not None
    queries = [(s, length - 1) for s, length in enumerate(decodes)]
    queries += [
        (len(decodes) + s, before + i) for s, (before, n) in enumerate(chunks) for i in range(n)
    ]
    met = set()
    for number in range(len(own.lengths)):
        begin, end = number, number + 1
        if number >= own.num_decodes:
            at = number - own.num_decodes
            begin, end = (own.num_decodes + int(own.query_starts[at + i]) for i in range(2))
        length = int(own.lengths[number])
        for i in range(begin, end if length else begin):
            token, head = divmod(int(order[i]), heads)
            _, position = queries[token]
            shown = length - (end - 1 - i)
            places, of = seen_by(own.block_tables[number], shown, kv_heads, block)
            assert places == set(seen[head, position].nonzero()[:, 0].tolist())
            assert of == {head // each}
            met.add((token, head))
    wanted = {(t, h) for t, (_, at) in enumerate(queries) if at >= 0 for h in range(heads)}
    assert met == wanted


class SimpleKeys:
    """Keys as attributes."""

    def __init__(self, keys: dict[str, object]) -> None:
        self.__dict__.update(keys)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Remote]:
    """A model of two layers, the first of which skips blocks of 16 tokens from token 32 on."""
    path, rng = tmp_path_factory.mktemp("phi3small"), random.Random(11)
    keys = {"dense_attention_every_n_layers": 2, "blocksparse_homo_head_pattern": False}
    keys |= {"blocksparse_block_size": 16, "blocksparse_num_local_blocks": 2}
    model = made(rng, 2, **keys, blocksparse_vert_stride=3)
    return model.save(path), model


def likeliest(model: Remote, prompt: list[int], said: list[int]) -> bool:
    """Whether each token is the likeliest of a dense pass over the whole sequence."""
    truth = model(torch.tensor([prompt + said])).logits[0][len(prompt) - 1 : -1]
    return said == truth.argmax(-1).tolist()


SETTINGS = {
    "chunks and reuse": {},
    "preemption": {"kv_cache_tokens": 320},
    "host memory": {"kv_cache_tokens": 320, "kv_cache_host_bytes": 1 << 20},
    "drafts": {"speculation": "suffix"},
    "deterministic": {"deterministic": True},
    "blocks of 16": {"block_size": 16},
}


@pytest.mark.parametrize("name", quick_of(SETTINGS, ("chunks and reuse", "host memory", "drafts")))
def test_the_scheduler_does_not_know(name: str, small: tuple[Path, Remote]) -> None:
    """Through the engine: prefix hits, copies to host memory and back, drafts, preemption."""
    path, model = small
    runner = make_runner(path, **SETTINGS[name])
    prompts = random_prompts([70, 7, 110, 43], model.config.vocab_size)
    prompts += [prompt[:60] + prompt[:9] for prompt in prompts]
    outputs = engine_greedy(runner, Limits(4, 37), prompts)
    for prompt, said in zip(prompts, outputs, strict=True):
        assert likeliest(model, prompt, said)


BOUNDS = {"fp8": 0.1, "int8": 0.05, "int4": 0.5}


@pytest.mark.parametrize("name", quick_of(BOUNDS, ("int8",)))
def test_caches_in_fewer_bits(name: str, small: tuple[Path, Remote]) -> None:
    """Logits are as near to fp64's as the format is fine: what is skipped is the same."""
    path, model = small
    prompts = random_prompts([150, 40], model.config.vocab_size)
    runner = make_runner(path, kv_cache_dtype=name, block_size=16)
    generations = [Generation(prompt, 5) for prompt in prompts]
    Driver(runner, keep_logits=True).finish(generations, 33)
    each = [
        (logits, model(torch.tensor([g.tokens[: len(g.prompt) + i]])).logits[0, -1])
        for g in generations
        for i, logits in enumerate(g.logits)
    ]
    ours, truth = (torch.stack([pair[i].double() for pair in each]) for i in range(2))
    said = truth[0] > torch.finfo(torch.float32).min
    error = (ours - truth)[:, said].pow(2).mean().sqrt() / truth[:, said].std()
    assert error <= BOUNDS[name]


def inputs_of(runner: ModelRunner, length: int) -> list[type]:
    """The kinds of the layers' inputs in a step of one chunk."""
    found: list[type] = []
    whole = runner._layers.of

    def of(*given: object) -> list[AttentionInputs]:
        made = whole(*given)
        found.extend(map(type, made))
        return made

    runner._layers.of = of
    Driver(runner).finish([Generation(list(range(length)), 1)])
    return found


def test_short_sequences_are_those_of_a_model_that_skips_nothing(
    small: tuple[Path, Remote],
) -> None:
    """As long as no sequence of a step could skip a token; deterministic mode does not look."""
    path, _ = small
    skipping, plain = SkippingInputs, AttentionInputs
    assert inputs_of(make_runner(path), 32) == [plain, plain]
    assert inputs_of(make_runner(path), 33) == [skipping, plain]
    assert inputs_of(make_runner(path, deterministic=True), 5) == [skipping, plain]
    packed = make_runner(path, kv_cache_dtype="int8", block_size=16)
    assert inputs_of(packed, 5) == [skipping, plain], "its blocks are written by head"
    runner = make_runner(path, max_model_len=32)
    assert runner._layers._skipping is None
    assert inputs_of(runner, 31) == [plain, plain]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 32}, "block_size = 32: Phi3SmallForCausalLM has heads that skip blocks"),
        ({"attention_window": 20}, "attention_window = 20: Phi3SmallForCausalLM has heads that"),
        (
            {"attention_window": 20, "max_model_len": 32},
            "attention_window = 20: Phi3SmallForCausalLM has heads that skip blocks of 16 tokens",
        ),
        (
            {"device": "cuda", "max_num_seqs": 20000},
            "max_num_seqs = 20000 and max_num_batched_tokens = ",
        ),
    ],
    ids=str,
)
def test_options_that_are_refused(
    options: dict[str, object], words: str, small: tuple[Path, Remote]
) -> None:
    settings = {"device": "cpu", "dtype": "float32", "block_size": 8} | options
    config = EngineConfig(checkpoint=str(small[0]), **settings)
    with pytest.raises(ConfigError, match=words):
        settle(config, torch.device(str(settings["device"])))


def test_a_drafter_that_skips_is_refused(small: tuple[Path, Remote]) -> None:
    path = str(small[0])
    with pytest.raises(ConfigError, match="draft_checkpoint of Phi3SmallForCausalLM: its heads"):
        make_runner(small[0], speculation="draft", draft_checkpoint=path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ff_dim_multiplier": 4}, "ff_dim_multiplier = 4 contradicts ff_intermediate_size = "),
        ({"dummy_token_indices": [3, 9999]}, "has tokens outside of a vocabulary of "),
        ({"rope_position_scale": 2.0, "rope_scaling": {"type": "su"}}, "does not go with rope_sca"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "short_mscale": 1.5}},
            "short_mscale = 1.5 is not implemented for linear rotary embedding",
        ),
        ({"hidden_act": "silu"}, "hidden_act = 'silu' is not implemented; gegelu is"),
        ({"blocksparse_vert_stride": 0}, "blocksparse_vert_stride = 0 is not a whole number >= 1"),
    ],
)
def test_keys_that_are_refused(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    model = made(random.Random(1), **{"rope_position_scale": 1.0} | changes)
    model.save(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        read_config(tmp_path)


def test_what_files_leave_out(tmp_path: Path) -> None:
    """A width by its multiplier; scores without muP; no layer that sees all; none that skips."""
    model = made(random.Random(2), ff_dim_multiplier=4, ff_intermediate_size=None)
    model.keys |= {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 3}
    model.keys |= {"dense_attention_every_n_layers": None, "mup_use_scaling": False}
    model.keys |= {"mup_embedding_multiplier": None, "gegelu_limit": None, "rope_scaling": None}
    model.save(tmp_path)
    config = read_config(tmp_path)
    axes, layers = config.axes, config.dims.num_layers
    assert config.dims.intermediate_size == 256  # 160, filled up
    assert axes.skips is not None
    assert axes.skips.layers == frozenset(range(layers))
    plain = (axes.attention_scale, axes.embedding_scale, axes.gate_limit)
    assert plain == (None, 1.0, float("inf"))
    model.keys |= {"dense_attention_every_n_layers": 1}
    model.save(tmp_path)
    assert read_config(tmp_path).axes.skips is None
