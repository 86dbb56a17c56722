"""Every two features of attention together: refused at start with the backend's reason, or served.

On a CPU tiny models run, through scheduler, cache and host memory, and give what a dense attention
without cache and blocks gives. On a GPU, which need not be there, the start alone is looked at.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.models.checkpoints import Asker, make_model, random_prompts, save
from fixtures.tiers import quick_of
from slipstream.config import EngineConfig
from slipstream.core.batch import Batch
from slipstream.engine.scheduler import Limits
from slipstream.errors import ConfigError
from slipstream.kernels.attention.backend import PagedCuda, TorchCpu
from slipstream.kernels.attention.spec import AttentionSpec
from slipstream.kernels.attention.table import FEATURES, Feature, pairs, spec_of
from slipstream.kernels.cache import kv_format
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import Plan, settle
from slipstream_contract.sampling import SamplingParams

WINDOW, SINKS, HOST_BYTES, VOCAB = 20, 3, 1 << 16, 97
SIZES = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "head_dim": 128}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
BASE = {"block_size": 32, "kv_cache_tokens": 640}
SLIDING = {"sliding_window": WINDOW}
LAYERS = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.float8_e4m3fn: "fp8"}
FORMATS = kv_format.FORMATS.values()
NAMES |= {torch.int8: "int8", torch.uint8: "int4"}
# Of logits: root of the mean square, over the deviation. What is rounded to 16 bits before it is
# quantised may end in another step of the cache's format.
FLIPS = 1e-3
EXACT, HALF = 1e-5, {"float16": 0.005, "fp8": 0.05, "int8": 0.02, "int4": 0.2}

TINY: dict[str, Any] = {"windows": None, "stream_window": WINDOW, "num_sinks": SINKS}
TINY |= {"host_bytes": HOST_BYTES}


def settings(features: tuple[Feature, ...]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The family of a tiny model with these features, its keys, and the engine's options."""
    family, keys, options = "llama", {}, dict(BASE)
    changes: dict[str, Any] = {}
    for feature in features:
        changes |= feature.changes
    for field, value in changes.items():
        match field:
            case "dtype":
                options["dtype"] = NAMES[value]
            case "cache_dtype":
                options["kv_cache_dtype"] = NAMES[value]
            case "windows" if 0 in value:
                family, keys = "qwen2", keys | SLIDING | LAYERS
            case "windows":
                family, keys = "mistral", keys | SLIDING
            case "head_size":
                keys["head_dim"] = value
            case "stream_window":
                options |= {"attention_window": WINDOW, "sink_tokens": SINKS}
            case "host_bytes":
                options["kv_cache_host_bytes"] = HOST_BYTES
            case "reuses_blocks":
                options["kv_cache_reuse"] = value
            case "block_size" | "deterministic":
                options[field] = value
    return family, keys, options


def expected_spec(device: str, features: tuple[Feature, ...], model: str) -> AttentionSpec:
    """What the plan should ask of attention: the table's spec in the tiny model's sizes."""
    spec = spec_of(device, *features)
    changes = {name: value for name, value in TINY.items() if value and getattr(spec, name)}
    windows = tuple(WINDOW if window else 0 for window in spec.windows)
    return replace(spec, num_heads=2, num_kv_heads=1, windows=windows, model=model, **changes)


ARCHITECTURES = {name: f"{name.capitalize()}ForCausalLM" for name in ("llama", "mistral", "qwen2")}
# Changes of scores are of other families: tests/kernels/test_scores.py pairs them; test_chunked.py
# pairs chunks, test_skipping.py heads that skip blocks.
ELSEWHERE = {"form", "score_cap", "has_slopes", "has_sink_scores", "is_chunked", "skipped_tokens"}
SERVED = [feature for feature in FEATURES if ELSEWHERE.isdisjoint(feature.changes)]
COMBINED = [(), *((feature,) for feature in SERVED)]
COMBINED += [pair for pair in pairs() if {*pair} <= {*SERVED}]


# Heads of most sizes are one to torch: with each other feature a few of them run.
OFTEN = [each for each in SERVED if each.changes.get("head_size") in (None, 80, 256)]
RUN = [each for each in COMBINED if len(each) < 2 or {*each} <= {*OFTEN}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs")


@cache
def checkpoint(folder: Path, family: str, keys: tuple[tuple[str, Any], ...]) -> tuple[Any, Path]:
    """A model, which two pairs may share, and where it lies."""
    unpacked = {name: list(v) if isinstance(v, tuple) else v for name, v in keys}
    model = make_model(family, **(SIZES | unpacked))
    path = folder / f"{family}-{len(list(folder.iterdir()))}"
    return model, save(model, path)


def planned(
    folder: Path, features: tuple[Feature, ...], device: str, dtype: str = "bfloat16"
) -> tuple[Any, Plan | str]:
    """The oracle's model, and the plan or the words with which it is refused."""
    family, keys, options = settings(features)
    options = {"dtype": dtype} | options
    packed = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in sorted(keys.items()))
    model, path = checkpoint(folder, family, packed)
    config = EngineConfig(checkpoint=str(path), **options)
    try:
        return model, settle(config, torch.device(device))
    except ConfigError as error:
        return model, str(error)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_start_says_what_the_backend_says(device: str, folder: Path) -> None:
    kind = {"cpu": TorchCpu, "cuda": PagedCuda}[device]
    refused = 0
    for features in COMBINED:
        _, plan = planned(folder, features, device)
        spec = expected_spec(device, features, ARCHITECTURES[settings(features)[0]])
        reason = kind.supports(spec)
        refused += reason is not None
        if isinstance(plan, str):
            assert plan == reason
            continue
        assert reason is None, f"{[each.name for each in features]} starts in spite of: {reason}"
        assert type(plan.attention) is kind
        assert replace(plan.attention.spec, layers_per_block=1) == spec
    assert refused > 5


# ---- the oracle ----


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


Cached = Callable[[torch.Tensor], torch.Tensor]


def attention(
    layer: Any, rotary: Any, h: torch.Tensor, window: int, sinks: int, cached: Cached
) -> torch.Tensor:
    """Compute one layer's attention over all tokens, `[n, hidden]`; `window` 0: no window."""
    size, n = layer.head_dim, len(h)
    q, k, v = (f(h).view(n, -1, size) for f in (layer.q_proj, layer.k_proj, layer.v_proj))
    every = torch.arange(n)
    cos, sin = (x[0, :, None] for x in rotary(h[None], every[None]))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in map(cached, (turn(k, cos, sin), v)))
    scores = torch.einsum("qhd,khd->hqk", turn(q, cos, sin), k)
    mask = every[None] <= every[:, None]
    if window:
        near = every[None] > every[:, None] - (window - sinks)
        places = every.clamp(max=window - 1)  # the positions that queries have for sinks
        far = torch.einsum("qhd,khd->hqk", turn(q, cos[places], sin[places]), k[:sinks])
        scores[..., :sinks] = far
        mask &= near | (every[None] < sinks)
    weights = (scores * size**-0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    return layer.o_proj(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))


@torch.no_grad()
def dense(
    model: Any, tokens: list[int], windows: list[int], sinks: int, cached: Cached
) -> torch.Tensor:
    """Logits of all tokens, in fp32, by the modules of transformers and the attention above."""
    x = model.model.embed_tokens(torch.tensor(tokens))
    for layer, window in zip(model.model.layers, windows, strict=True):
        h = layer.input_layernorm(x)
        x = x + attention(layer.self_attn, model.model.rotary_emb, h, window, sinks, cached)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(model.model.norm(x))


class Listener:
    """A runner that keeps the logits of every sample, by sequence and the token's number."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.logits: dict[tuple[int, int], torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, batch: Batch) -> Any:
        if batch.copies:
            self._runner._copy_blocks(batch)  # twice is as good as once
        logits = self._runner.logits(batch)
        samplers = [row for row in batch.rows if row.samples]
        for row, values in zip(samplers, logits, strict=True):
            self.logits[row.sequence_id, row.num_outputs] = values
        return self._runner.launch(batch)


def served(plan: Plan) -> Iterator[tuple[list[int], int, torch.Tensor]]:
    """Tokens of a sequence, the number of the one that was sampled last, and its logits."""
    listener = Listener(ModelRunner(plan))
    asker = Asker(listener, Limits(2, 24, kv_cache_reuse=plan.config.kv_cache_reuse))
    (long, short) = random_prompts([45, 9], VOCAB)
    prompts = [long, short, [*long[:40], 5]]  # the third begins as the first, and comes later
    for prompt in prompts[:2]:
        asker.submit(prompt, SamplingParams(max_tokens=3, temperature=0.0))
    asker.drain()
    asker.submit(prompts[2], SamplingParams(max_tokens=2, temperature=0.0))
    asker.drain()
    for number, prompt in enumerate(prompts):
        outputs = asker.answers[number, 0].token_ids
        for i in range(len(outputs)):
            yield prompt + outputs[:i], i, listener.logits[number, i]


def through(cached: torch.dtype) -> Cached:
    """What is left of K or V in a cache of this dtype."""
    if cached in FORMATS:
        return lambda x: kv_format.dequantize(*kv_format.quantize(x, cached), cached)
    return lambda x: x.to(cached).float()


def bound(plan: Plan) -> float:
    """Return the bound of the error; a number just between two codes may go either way."""
    if plan.dtype != torch.float32:
        return HALF[plan.kv.format_name]
    return EXACT if plan.cache_dtype == torch.float32 else FLIPS


@pytest.mark.parametrize("first", quick_of(range(len(SERVED)), range(1, len(SERVED), 2)))
def test_pairs_that_start_give_what_dense_attention_gives(first: int, folder: Path) -> None:
    """In float32, unless a feature says otherwise."""
    for features in [each for each in RUN if each[-1:] == (SERVED[first],)]:
        model, plan = planned(folder, features, "cpu", "float32")
        if isinstance(plan, str):
            continue
        spec, limit, checked = plan.attention.spec, bound(plan), 0
        windows = [spec.stream_window or window for window in plan.model.windows]
        for tokens, number, logits in served(plan):
            cached = through(plan.cache_dtype)
            wanted = dense(model, tokens, windows, spec.num_sinks, cached)[-1]
            error = float((logits - wanted).pow(2).mean().sqrt() / wanted.std())
            assert error < limit, ([each.name for each in features], len(tokens), number)
            checked += 1
        assert checked == 8
