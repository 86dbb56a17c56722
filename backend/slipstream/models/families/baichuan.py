"""Baichuan and Baichuan 2 (Yang et al., 2023): q, k, v in one matrix; ALiBi in models of 13B, rows
of length 1 in the second's head.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from slipstream.layers.dims import RopeConfig
from slipstream.models.alibi import slopes
from slipstream.models.axes import Axes, EachRow, QkvOrder, TensorNames, joined
from slipstream.models.config_class import own_class
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm, GgufKeys
from slipstream.models.reader import Reader
from slipstream.models.ropes import no_rope, read_rope

if TYPE_CHECKING:
    from torch import Tensor

CLASS = own_class(
    "baichuan",
    vocab_size=125696,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    hidden_act="silu",
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    eos_token_id=2,
)
_FIRST, _OTHERS = "BaiChuanForCausalLM", "BaichuanForCausalLM"
_LAYERS_OF_13B = 40
_FIRST_VOCABULARY = 64_000  # by which the first model of 13B differs from the second ones


def unit_rows(x: "Tensor") -> "Tensor":
    """Divide the rows of `[n, size]` by their lengths, in fp32 (NormHead)."""
    lengths = x.float().square().sum(1, keepdim=True).sqrt()
    return (x.float() / lengths.clamp_min(1e-12)).to(x.dtype)


def names(config: Reader) -> TensorNames:
    """Return where tensors are; the head of the second version is changed as it is loaded."""
    is_other = config.get("architectures") == [_OTHERS]
    is_second = is_other and config.get("vocab_size") != _FIRST_VOCABULARY
    changed = {"lm_head.weight": EachRow(unit_rows)} if is_second else {}
    return TensorNames(joined("self_attn.W_pack"), qkv=QkvOrder.BLOCKS, changed=changed)


def derived(config: Reader) -> Mapping[str, object]:
    """Return the context, and theta, which no key changes.

    Models of 13B call the context otherwise, and have `alibi`.
    """
    if config.has("model_max_length") and "max_position_embeddings" not in config.data:
        return {"alibi": True, "max_position_embeddings": config.get("model_max_length")}
    return {"alibi": False, "rope_theta": 10000.0}


def ropes(config: Reader, max_positions: int, size: int) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotation, which models with ALiBi do not have."""
    return (no_rope if config.get("alibi") else read_rope)(config, max_positions, size)


def gguf_config(keys: GgufKeys) -> dict[str, object]:
    """Return the context of models of 13B, known by their layers, as they call it."""
    if keys.whole("block_count") != _LAYERS_OF_13B:
        return {}
    return {"model_max_length": keys.whole("context_length"), "max_position_embeddings": None}


@family(
    _FIRST,
    _OTHERS,
    keys="model_max_length",
    has_windows=False,
    read_ropes=ropes,
    derived=derived,
    tensors=names,
    config_class=CLASS,
    gguf=GgufForm("baichuan", pairs_rows=True, config=gguf_config),
)
def baichuan(config: Reader) -> Axes:
    """Return the axes; a head's slope decides how far it sees where there is no rotation."""
    heads = config.whole("num_attention_heads")
    return Axes(slopes=slopes(heads) if config.get("alibi") else ())
