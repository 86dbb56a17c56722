"""OLMo (Groeneveld et al., 2024): layer norms without weights; q, k and v may be cut."""

from collections.abc import Mapping

from slipstream.models.axes import Axes, NormKind
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader


def derived(config: Reader) -> Mapping[str, object]:
    """Return the epsilon of its norms, which no key changes."""
    return {"rms_norm_eps": 1e-5}


@family(
    "OlmoForCausalLM",
    keys="attention_bias clip_qkv",
    has_windows=False,
    derived=derived,
    gguf=GgufForm("olmo", pairs_rows=True, numbers={"clip_qkv": "attention.clamp_kqv"}),
)
def olmo(config: Reader) -> Axes:
    """Read whether all attention matrices have biases, and where q, k and v are cut."""
    bias = config.flag("attention_bias", default=False)
    most = config.positive("clip_qkv") if config.has("clip_qkv") else None
    return Axes(norm=NormKind.LAYER_ALONE, qkv_bias=bias, out_bias=bias, qkv_most=most)
