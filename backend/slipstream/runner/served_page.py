"""Write the second table of docs/families.md: with what each architecture is served on a GPU.

Sizes are a family's defaults, and every answer is that of the start's checks: `make families`.
"""

import re
from collections.abc import Callable
from pathlib import Path

import torch

from slipstream import quant
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels.attention.backend import backend_for
from slipstream.kernels.cache.kv_format import FORMATS
from slipstream.models.adapters.targets import Targets
from slipstream.models.hf import read_model
from slipstream.models.model_config import ModelConfig
from slipstream.models.reader import Reader
from slipstream.models.registry import family_of, supported
from slipstream.runner.adapter_places import places_of
from slipstream.runner.cache_dtype import attention_spec, check_positions, model_on
from slipstream.runner.scheme_check import check_scheme

_GPU, _DTYPE = torch.device("cuda", 0), torch.bfloat16
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NOWHERE = Path("/nonexistent")  # no generation_config.json beside it
_WINDOW = 1024


def written(page: str) -> str:
    """Return docs/families.md with its second table as it is now."""
    marks = r"(?s)(?<=<!-- served -->\n).*(?=<!-- /served -->)"
    return re.sub(marks, lambda _: table(), page)


def table() -> str:
    """Return the table: a line for all architectures that have the same answers."""
    lines = [
        "| weights | rounded at load | caches | endless sequences | LoRA | prefix tuning "
        "| architectures |",
        "|---|---|---|---|---|---|---|",
    ]
    found: dict[tuple[str, ...], list[str]] = {}
    for architecture in supported():
        found.setdefault(answers(architecture), []).append(f"`{architecture}`")
    most_first = sorted(found.items(), key=lambda item: (-len(item[1]), item[1]))
    lines += [f"| {' | '.join(cells)} | {' '.join(names)} |" for cells, names in most_first]
    return "\n".join([*lines, ""])


def answers(architecture: str) -> tuple[str, ...]:
    """Return what the start says of dtypes, schemes, caches, endless sequences and adapters."""
    said = {"architectures": [architecture], **family_of(architecture).said}
    model = model_on("cuda", read_model(Reader(said, architecture), architecture, _NOWHERE))
    config = EngineConfig(checkpoint="", load_format="random")

    def scheme(name: str, dtype: torch.dtype) -> str | None:
        asked = EngineConfig(checkpoint="", load_format="random", quantization=name)
        return _reason(lambda: check_scheme(asked, model, _GPU, dtype))

    def cache(dtype: torch.dtype) -> str | None:
        backend = backend_for(attention_spec(config, model, _GPU, _DTYPE, dtype))
        return backend if isinstance(backend, str) else None

    dtypes = {name: scheme("none", dtype) for name, dtype in _DTYPES.items()}
    schemes = {name: scheme(name, _DTYPE) for name in quant.names() if name not in ("auto", "none")}
    caches = {"auto": cache(_DTYPE)} | {name: cache(dtype) for name, dtype in FORMATS.items()}
    cells = (*map(_those, (dtypes, schemes, caches)), _endless(model), *_adapters(model))
    return tuple(cell.replace(architecture, "it") for cell in cells)


def _those(reasons: dict[str, str | None]) -> str:
    return ", ".join(name for name, reason in reasons.items() if reason is None) or "none"


def _reason(check: Callable[[], object]) -> str | None:
    try:
        check()
    except ConfigError as error:
        return str(error)
    return None


def _endless(model: ModelConfig) -> str:
    asked = EngineConfig(checkpoint="", load_format="random", attention_window=_WINDOW)
    reason = _reason(lambda: check_positions(asked, model))
    if reason is None:
        backend = backend_for(attention_spec(asked, model, _GPU, _DTYPE, _DTYPE))
        reason = backend if isinstance(backend, str) else None
    text = (reason or "").removeprefix(f"attention_window = {_WINDOW}").lstrip(": ")
    return f"no: {text.partition(' (')[0]}" if reason else "yes"


def _adapters(model: ModelConfig) -> tuple[str, str]:
    """Return which matrices LoRA changes, and whether there is prefix tuning."""
    places = list(places_of(model, _DTYPE))
    targets = Targets(places, model.tensors, _DTYPE, torch.device("meta"))
    names = {name.rpartition(".")[2] for place in places for name in place.parts}
    kinds = ["linear layers"]
    kinds += ["routed experts"] if any(place.num_experts for place in places) else []
    kinds += [
        text for name, text in (("lm_head", "head"), ("embed_tokens", "embedding")) if name in names
    ]
    return ", ".join(kinds), f"no: {targets.key_refusal}" if targets.key_refusal else "yes"
