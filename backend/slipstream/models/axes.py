"""The axes in which decoders differ, and the names of tensors in checkpoints. No torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class NormKind(Enum):
    """The factor of a normalised row."""

    WEIGHT = "rms"
    ONE_PLUS_WEIGHT = "rms of 1 + weight"


class Activation(Enum):
    """The activation function of an MLP's gate."""

    SILU = "silu"
    GELU_TANH = "gelu, by tanh"


@dataclass(frozen=True, slots=True)
class Axes:
    """The ways in which decoders differ; the defaults are Llama's. A new axis is a field here.

    norm: what norms multiply by.
    norms_behind: whether norms stand behind attention and MLP too, before each is added.
    qk_norms: whether every head's query and key are normalised before rotation.
    qkv_bias, out_bias, mlp_bias: whether these matrices have biases.
    attention_scale: factor of the dot product of query and key; None: `head_size ** -0.5`.
    activation: the MLP's gate.
    embedding_scale: what rows of the embedding are multiplied by.
    """

    norm: NormKind = NormKind.WEIGHT
    norms_behind: bool = False
    qk_norms: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    attention_scale: float | None = None
    activation: Activation = Activation.SILU
    embedding_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The checkpoint's names of the decoder's tensors.

    `own` maps parts of the decoder's names, which are Llama's, to the checkpoint's: parts between
    dots, as `self_attn.o_proj` to `attention.dense`, all replaced at once, the longest first.
    Tensors that end in one of `unread` may be left over: buffers that config.json makes again.
    """

    own: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = (".rotary_emb.inv_freq",)

    def stored(self, name: str) -> str:
        """Return the checkpoint's name of a tensor of the decoder."""
        if not self.own:
            return name
        parts = "|".join(map(re.escape, sorted(self.own, key=len, reverse=True)))
        return re.sub(rf"(?<![^.])({parts})(?![^.])", lambda part: self.own[part[0]], name)
