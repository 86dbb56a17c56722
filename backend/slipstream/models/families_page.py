"""Write the table of docs/families.md from the registry: each family by its own defaults. No torch.

`make families` writes it.
"""

import re
from pathlib import Path

from slipstream.models.axes import Axes, QkNorms, Residuals
from slipstream.models.hf import read_model
from slipstream.models.model_config import ModelConfig
from slipstream.models.reader import Reader
from slipstream.models.registry import family_of, supported, whole_of, wholes

_EXAMPLE = Path(__file__).parent / "families" / "gpt_neox.py"  # that the page shows as a whole
_NOWHERE = Path("/nonexistent")  # no generation_config.json beside it


def written(page: str) -> str:
    """Return docs/families.md with its table, and the file that it shows, as they are now."""
    page = re.sub(r"(?s)(?<=<!-- families -->\n).*(?=<!-- /families -->)", lambda _: table(), page)
    code = f"```python\n{_EXAMPLE.read_text(encoding='utf-8')}```"
    return re.sub(r"(?s)```python\n.*?```", lambda _: code, page)


def table() -> str:
    """Return the table, a line for each architecture."""
    lines = [
        "| `architectures` | norms | positions | attention | MLP | ends | keys of its own |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(_row, supported()), *map(_whole, wholes()), ""])


def _whole(architecture: str) -> str:
    """Return the line of an architecture that sees images, too."""
    whole = whole_of([architecture])
    assert whole is not None, "it is registered"
    texts = " or ".join(f"`{name}`" for name in whole.texts.values())
    return f"| `{architecture}` | its text model alone, {texts} | | | | | `text_config` |"


def _row(architecture: str) -> str:
    family = family_of(architecture)
    config = Reader({"architectures": [architecture], **family.said}, architecture)
    model = read_model(config, architecture, _NOWHERE)
    aliases = sorted(name for names in family.aliases.values() for name in names)
    keys = sorted(family.keys - {family.activation_key} - set(aliases))
    cells = (
        f"`{architecture}`",
        _norms(model.axes),
        _positions(model),
        _attention(model.axes),
        _mlp(model.axes),
        _ends(model),
        " ".join(f"`{key}`" for key in (*keys, *aliases)),
    )
    return f"| {' | '.join(cells)} |"


def _norms(axes: Axes) -> str:
    places = {
        (True, False): "before",
        (True, True): "before and behind",
        (False, True): "behind",
    }[axes.norms_before, axes.norms_behind]
    residuals = "" if axes.residuals is Residuals.SERIAL else f"; parallel, {axes.residuals.value}"
    scale = "" if axes.residual_scale == 1 else "; results scaled"
    scale += "" if axes.sum_scale == 1 else " times a factor"
    return f"{axes.norm.value}, {places}{residuals}{scale}"


def _positions(model: ModelConfig) -> str:
    if model.axes.learned_positions or model.axes.slopes:
        return "learned" if model.axes.learned_positions else "ALiBi"
    found = []
    for rope in dict.fromkeys(model.ropes):
        count = model.dims.head_size if rope.rotated is None else rope.rotated
        share = "" if count == model.dims.head_size else f", {count} of {model.dims.head_size}"
        two = ", halves of heads by a position each" if rope.has_two else ""
        found.append(f"rotary{share}{two}" if count else "none in some layers")
    pairs = ", interleaved" if model.axes.interleaved else ""
    return "; ".join(dict.fromkeys(found)) + pairs


def _attention(axes: Axes) -> str:
    biases = {(True, True): "biases", (True, False): "biases of q, k, v", (False, True): "a bias"}
    parts = [biases.get((axes.qkv_bias, axes.out_bias), "")]
    if axes.qk_norms is not QkNorms.NONE:
        late = ", behind the rotation" if axes.late_norms else ""
        parts.append(f"q and k normalised: {axes.qk_norms.value}{late}")
    if axes.query_growth is not None:
        parts.append("q grow with the position")
    if axes.chunked:
        parts.append("some layers see chunks")
    if axes.latent is not None:
        parts.append("latent")
    if axes.score_cap:
        parts.append("scores capped")
    if axes.sink_scores:
        parts.append("sinks in the softmax")
    if axes.two_way is not None:
        parts.append("tokens of a prompt see each other")
    if axes.qkv_most is not None:
        parts.append("q, k, v cut")
    return ", ".join(part for part in parts if part)


def _mlp(axes: Axes) -> str:
    if axes.experts is not None:
        return "experts"
    gate = "gate: " if axes.gated else ""
    return f"{gate}{axes.activation.value}{', biases' if axes.mlp_bias else ''}"


def _ends(model: ModelConfig) -> str:
    axes = model.axes
    parts = ["tied" if model.ties_embeddings else ""]
    parts.append("embeddings scaled" if axes.embedding_scale != 1 else "")
    parts.append("embeddings normalised" if axes.embedding_norm else "")
    parts.append("bias of logits" if axes.head_bias else "")
    parts.append("logits scaled" if axes.logit_scale != 1 else "")
    parts.append("logits capped" if axes.logit_cap else "")
    return ", ".join(part for part in parts if part)
