"""Baichuan and Baichuan 2 (Yang et al., 2023) of 7B: q, k, v in one matrix; the second's head has
rows of length 1.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from slipstream.models.axes import Axes, QkvOrder, TensorNames, joined
from slipstream.models.config_class import own_class
from slipstream.models.family import family
from slipstream.models.reader import Reader

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
_FIRST, _SECOND = "BaiChuanForCausalLM", "BaichuanForCausalLM"


def unit_rows(x: "Tensor") -> "Tensor":
    """Divide the rows of `[n, size]` by their lengths, in fp32 (NormHead)."""
    lengths = x.float().square().sum(1, keepdim=True).sqrt()
    return (x.float() / lengths.clamp_min(1e-12)).to(x.dtype)


def names(config: Reader) -> TensorNames:
    """Return where tensors are; the head of the second version is changed as it is loaded."""
    is_second = config.get("architectures") == [_SECOND]
    changed = {"lm_head.weight": unit_rows} if is_second else {}
    return TensorNames(joined("self_attn.W_pack"), qkv=QkvOrder.BLOCKS, changed=changed)


def derived(config: Reader) -> Mapping[str, object]:
    """Return theta, which no key changes; refuse the models of 13B, whose positions are ALiBi."""
    if config.has("model_max_length") and "max_position_embeddings" not in config.data:
        raise config.refusal("model_max_length", "alone is of 13B, with ALiBi: not implemented")
    return {"rope_theta": 10000.0}


@family(
    _FIRST,
    _SECOND,
    keys="model_max_length",
    has_windows=False,
    derived=derived,
    tensors=names,
    config_class=CLASS,
)
def baichuan(config: Reader) -> Axes:
    """Return the axes, which no key of config.json changes."""
    return Axes()
