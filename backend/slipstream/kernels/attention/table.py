"""The tables of docs/attention.md, from what the backends say: `make attention`.

A feature is a change of a plain spec: bfloat16, heads of 128, 32 query heads over 8 of K and V.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from slipstream.kernels.attention.backend import (
    BACKENDS,
    AttentionBackend,
    backend_for,
)
from slipstream.kernels.attention.spec import (
    BY_HEAD,
    CAUSAL,
    LATENT,
    MISSING_FORMS,
    PREFIX,
    AttentionSpec,
)
from slipstream.kernels.cache.kv_format import FORMATS


@dataclass(frozen=True, eq=False)
class Feature:
    """A feature that a model or a configuration can have."""

    name: str
    origin: str  # the option or the key that asks for it
    changes: Mapping[str, Any]  # of fields of the plain spec

    def excludes(self, other: "Feature") -> bool:
        """Whether both are values of one field."""
        return not self.changes.keys().isdisjoint(other.changes)


LATENTS = Feature(
    f"{LATENT} attention",
    "the model: DeepSeek",
    {"form": LATENT, "latent_rank": 512, "num_kv_heads": 1, "head_size": 288},
)
FEATURES = (
    Feature("float32", "`dtype = float32`", {"dtype": torch.float32}),
    Feature("float16", "`dtype = float16`", {"dtype": torch.float16}),
    *(
        Feature(f"{name} cache", f"`kv_cache_dtype = {name}`", {"cache_dtype": dtype})
        for name, dtype in FORMATS.items()
    ),
    Feature("blocks of 8", "`block_size = 8`", {"block_size": 8}),
    Feature("windows", "the model: `sliding_window`", {"windows": (1024,)}),
    Feature("windows in some layers", "the model: `layer_types`", {"windows": (0, 1024)}),
    Feature(
        "attention chunks",
        "the model: `attention_chunk_size`",
        {"windows": (1024,), "is_chunked": True},
    ),
    Feature(
        "endless sequences",
        "`attention_window`, `sink_tokens`",
        {"stream_window": 1024, "num_sinks": 4},
    ),
    Feature("deterministic", "`deterministic`", {"deterministic": True}),
    Feature("no reuse", "`kv_cache_reuse = false`", {"reuses_blocks": False}),
    Feature("host memory", "`kv_cache_host_bytes`", {"host_bytes": 1 << 30}),
    *(
        Feature(f"heads of {size}", f"the model: `head_dim = {size}`", {"head_size": size})
        for size in (64, 80, 96, 256)
    ),
    Feature("capped scores", "the model: `attn_logit_softcapping`", {"score_cap": 50.0}),
    Feature("ALiBi", "the model: `alibi`", {"has_slopes": True}),
    Feature("sinks in the softmax", "the model: GptOss", {"has_sink_scores": True}),
    Feature("skipped blocks", "the model: Phi-3-small", {"skipped_tokens": 64}),
    Feature(f"{PREFIX} attention", "the model: ChatGLM 1", {"form": PREFIX}),
    LATENTS,
    *(
        Feature(f"{form} attention", "no family that is served", {"form": form})
        for form in MISSING_FORMS
    ),
)


def spec_of(device: str, *features: Feature) -> AttentionSpec:
    """Return the plain spec with these features; a cache is of the activations' dtype if not told
    otherwise.
    """
    changes: dict[str, Any] = {"dtype": torch.bfloat16}
    for feature in features:
        changes |= feature.changes
    changes.setdefault("cache_dtype", changes["dtype"])
    sizes = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "block_size": 32}
    return AttentionSpec(device=device, **(sizes | changes))


def pairs() -> Iterator[tuple[Feature, Feature]]:
    """Every two features that do not exclude each other, once."""
    for number, first in enumerate(FEATURES):
        for second in FEATURES[:number]:
            if not second.excludes(first):
                yield second, first


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def combinations(backend: type[AttentionBackend]) -> str:
    """Return the table of what combines on a backend, and its notes, as Markdown.

    Where latents are all that a backend has, every other feature stands beside them.
    """
    reasons: list[str] = []
    plain = () if backend.has_form(CAUSAL) else (LATENTS,)
    features = [each for each in FEATURES if not any(each.excludes(one) for one in plain)]

    def answer(*asked: Feature) -> str:
        reason = backend.supports(spec_of(backend.device, *plain, *asked))
        if reason is None:
            return "+"
        if reason not in reasons:
            reasons.append(reason)
        return f"{reasons.index(reason) + 1}"

    alone = {feature: answer(feature) for feature in features}
    supported = [feature for feature in features if alone[feature] == "+"]
    letters = [chr(ord("a") + i) for i in range(len(supported))]
    width = len(supported) - 1  # columns: nothing stands beside the last feature
    lines = [_line(["", "feature", "asked for by", "alone", *letters[:width]])]
    lines.append("|---" * (width + 4) + "|")
    for row, feature in enumerate(supported):
        others = supported[:row]
        cells = ["" if feature.excludes(other) else answer(other, feature) for other in others]
        cells += [""] * (width - row)
        lines.append(_line([letters[row], feature.name, feature.origin, "+", *cells]))
    for feature in features:
        if feature not in supported:
            cells = ["", feature.name, feature.origin, alone[feature], *[""] * width]
            lines.append(_line(cells))
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *notes])


def _cell(reason: str | None) -> str:
    return "yes" if reason is None else f"no: {reason}"


def choices() -> str:
    """Return which CUDA kernels attend, for the plain spec and every feature, as Markdown."""
    titles = ["", "decodes", "prompts on Hopper", "on other GPUs", "shared tokens read once"]
    titles += ["decodes rotate and cache", "a chunk on several multiprocessors"]
    titles += ["long prompts' blocks unpacked first"]
    lines = [_line(titles), "|---" * len(titles) + "|"]
    for feature in (None, *FEATURES):
        spec = spec_of("cuda", *([feature] if feature else []))
        backend = backend_for(spec)
        if isinstance(backend, str) or len(spec.windows) > 1:
            continue  # layers of several windows are each as in a row of their own
        if spec.skipped_tokens:  # layers that skip none are as in the first row
            spec = replace(spec, form=BY_HEAD)
        window = max(spec.windows)
        hopper, other = (backend.choose(spec, window, is_hopper) for is_hopper in (True, False))
        reasons = (hopper.own_prefix, hopper.own_rotation, hopper.whole_chunks)
        name = "bfloat16, heads of 128" if feature is None else feature.name
        kernels = [hopper.decode, hopper.prefill, other.prefill]
        unpacked = _cell(hopper.packed)
        if hopper.packed is None:
            unpacked += f", for {hopper.unpacked}, on other GPUs {other.unpacked}"
        lines.append(_line([name, *kernels, *map(_cell, reasons), unpacked]))
    return "\n".join(lines)


def tables() -> str:
    """Return all tables of the page."""
    parts = []
    for backend in BACKENDS:
        where = "On a GPU" if backend.device == "cuda" else "On a CPU"
        graphs = "with all that runs" if backend.has_graphs else "none"
        parts += [f"## {where} ({backend.name})", f"CUDA graphs: {graphs}.", combinations(backend)]
    parts += ["## Which kernels", choices()]
    return "\n\n".join(parts)
