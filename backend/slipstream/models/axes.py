"""The axes in which decoders differ, and the names of tensors in checkpoints. No torch."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

from slipstream.core.two_way import TwoWay
from slipstream.layers.dims import ExpertsConfig, LatentConfig, SkipConfig
from slipstream.models.cuts import Cuts


class NormKind(Enum):
    """The factor of a normalised row."""

    WEIGHT = "rms"
    ONE_PLUS_WEIGHT = "rms of 1 + weight"
    LAYER = "layer norm"
    LAYER_WITHOUT_BIAS = "layer norm without bias"
    LAYER_ALONE = "layer norm without weights"
    LAYER_ONE_PLUS = "layer norm of 1 + weight"


class Activation(Enum):
    """The activation function of an MLP, or of its gate; `layers/mlp.py` has the functions."""

    SILU = "silu"
    GELU_TANH = "gelu, by tanh"
    GELU = "gelu"
    RELU = "relu"
    RELU_SQUARED = "relu, squared"
    QUICK_GELU = "gelu, by a logistic function"
    XIELU = "xielu, of learned numbers"
    GEGELU = "gelu, by a logistic function, clamped"


# Names of activations that config.json of plain MLPs has.
ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
    "quick_gelu": Activation.QUICK_GELU,
}


class Residuals(Enum):
    """What attention and MLP read, whose results are added to one sum."""

    SERIAL = "the sum with what attention added"
    ONE_NORM = "one norm of the sum"
    TWO_NORMS = "a norm of the same sum each"
    OF_NORMS = "a norm of the sum, which takes its place"
    INTO_NORMS = "the sum, whose place its norm takes when they are added"


class QkNorms(Enum):
    """What is normalised of queries and keys."""

    NONE = "nothing"
    HEADS = "each head, by rms"
    BARE_HEADS = "each head, by rms without weights, where it rotates"
    WHOLE = "all heads together, by rms"
    LAYER_HEADS = "each head, by a layer norm with weights of its own"
    LAYER = "each head, by a layer norm with bias"
    LAYER_WHOLE = "all heads together, by a layer norm"


# Norms of each head by itself.
OF_HEADS = (QkNorms.HEADS, QkNorms.BARE_HEADS, QkNorms.LAYER_HEADS, QkNorms.LAYER)


class Growth(NamedTuple):
    """How queries grow: at position p by `1 + share * log(1 + (p + first) // every)`.

    of_still: whether those of layers that do not rotate grow alone; else all do.
    """

    share: float
    every: int
    first: int = 0
    of_still: bool = False


@dataclass(frozen=True, slots=True)
class Axes:
    """The ways in which decoders differ; the defaults are Llama's. A new axis is a field here.

    norm: of rows, and what norms multiply by.
    norms_before, norms_behind: whether norms stand before attention and MLP, and behind them,
    before each is added.
    residuals: what attention and MLP read.
    residual_scale: of what each of them adds.
    sum_scale: of norms that take the sum's place, there; attention and MLP read them without.
    qk_norms: what is normalised of queries and keys.
    late_norms: whether these norms, of each head, come behind the rotation.
    query_growth: by which queries are multiplied, of their position; None: not.
    normed_size: numbers of a head that its norm counts, the others being zeros; 0: all.
    interleaved: whether a head's numbers 2i and 2i + 1 rotate together; else the halves do.
    qkv_bias, out_bias, mlp_bias: whether these matrices have biases.
    qkv_most: queries, keys and values are cut to so much and its negative; None: not cut.
    attention_scale: factor of the dot product of query and key; None: `head_size ** -0.5`.
    score_cap: scores of attention stay below it, by tanh; 0: no cap.
    slopes: of each query head, times the key's position less the query's: what is added to a score
    (ALiBi); none: nothing is.
    latent: sizes of latent attention; None: the cache has keys and values.
    sink_scores: whether heads have a score in the softmax beside those of tokens.
    skips: the blocks of tokens that heads of some layers do not see; None: they see all.
    gated: whether the MLP has a gate.
    activation: the MLP's, or its gate's.
    gate_limit: of a clamped gate: it is at most so large, what it multiplies within as much.
    embedding_scale: what rows of the embedding are multiplied by.
    embedding_norm: whether a norm stands behind the embedding.
    learned_positions: whether a learned row of its position is added to each token's.
    position_offset: row of the first position.
    embedding_size: numbers of a row of the embedding and of the head, of which a matrix each makes
    the hidden size and back; 0: the hidden size.
    last_norm: whether a norm stands before the head.
    head_bias, logit_scale, logit_cap: of logits; 0: no cap.
    silent: tokens of the vocabulary that are never said.
    experts: a mixture of experts in the place of MLPs, but for those of `dense_layers`.
    chunked: whether layers with a window see chunks of so many tokens, each its own, in its place.
    two_way: tokens by which prompts say which of theirs see each other; None: none do.
    """

    norm: NormKind = NormKind.WEIGHT
    norms_before: bool = True
    norms_behind: bool = False
    residuals: Residuals = Residuals.SERIAL
    residual_scale: float = 1.0
    sum_scale: float = 1.0
    qk_norms: QkNorms = QkNorms.NONE
    late_norms: bool = False
    query_growth: Growth | None = None
    normed_size: int = 0
    interleaved: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qkv_most: float | None = None
    attention_scale: float | None = None
    score_cap: float = 0.0
    slopes: tuple[float, ...] = ()
    sink_scores: bool = False
    skips: SkipConfig | None = None
    latent: LatentConfig | None = None
    gated: bool = True
    activation: Activation = Activation.SILU
    gate_limit: float = inf
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    learned_positions: bool = False
    position_offset: int = 0
    embedding_size: int = 0
    last_norm: bool = True
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    silent: tuple[int, ...] = ()
    experts: ExpertsConfig | None = None
    dense_layers: frozenset[int] = frozenset()
    chunked: bool = False
    two_way: TwoWay | None = None


_LAYER = re.compile(r"^(model\.layers\.)(\d+)(?=\.|$)")
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


class QkvOrder(Enum):
    """How q, k and v lie in a checkpoint."""

    SPLIT = "three matrices"
    BLOCKS = "one: q, k, v"
    HEADS = "one: of every head q, k, v"
    GROUPS = "one: of every kv head its heads of q, then k, v"


Change = Callable[["Tensor"], "Tensor"]  # of a stored tensor to one of the decoder


@dataclass(frozen=True, slots=True)
class Moves:
    """How rows and columns of a stored matrix become those of the decoder's; None: as they are.

    rows, columns: changes along dimensions 0 and 1.
    shape: `[outputs, inputs]` of the decoder's to those of the stored matrix, which libraries that
    quantise keep in this order, whatever the model's own files have.
    is_transposed: whether these have `[inputs, outputs]`.
    """

    rows: Change | None
    columns: Change | None
    shape: Callable[[int, int], tuple[int, int]]
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class EachRow:
    """A change that makes each row of the stored one alone, so that a rank need not read others."""

    change: Change

    def __call__(self, x: "Tensor") -> "Tensor":
        """Return the rows as they are changed."""
        return self.change(x)


def joined(name: str, kind: str = "self_attn") -> dict[str, str]:
    """Return names for a matrix that is stored with others, below `self_attn` or `mlp`."""
    parts = ("q_proj", "k_proj", "v_proj") if kind == "self_attn" else ("gate_proj", "up_proj")
    return {f"{kind}.{part}": name for part in parts}


def _unchanged(name: str) -> Change | None:
    return None


def _unmoved(name: str) -> Moves | None:
    return None


@dataclass(frozen=True, slots=True)
class LayerRange:
    """The layers `begin` to `end` of a model of `total`, which its stage numbers from 0.

    `has_ends`: whether it has embedding, last norm and head, too.
    """

    begin: int
    end: int
    total: int
    has_ends: bool

    def number(self, name: str) -> str:
        """Return a name, by Llama's names, with the layer's number in the whole model."""
        return _LAYER.sub(lambda found: f"{found[1]}{int(found[2]) + self.begin}", name, count=1)

    def own(self, name: str) -> str:
        """Return a name that has the layer's number in the whole model as the stage has it."""
        return _LAYER.sub(lambda found: f"{found[1]}{int(found[2]) - self.begin}", name, count=1)

    def skips(self, name: str) -> bool:
        """Return whether a tensor, by the checkpoint's name, is for other stages to read."""
        found = _NUMBER.search(name)
        if found is None:
            return not self.has_ends
        layer = int(found[1])
        return layer < self.total and not self.begin <= layer < self.end


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The checkpoint's names of the decoder's tensors, and how it stores them.

    `own` maps parts of the decoder's names, which are Llama's, to the checkpoint's: parts between
    dots, as `self_attn.o_proj` to `attention.dense`, all replaced at once, the longest first.
    Tensors that end in one of `unread` may be left over: buffers that config.json makes again; so
    may those that begin with one of `unused`.

    qkv: how q, k and v lie; joins_gate_up: whether gate and up are one matrix, in this order; both
    need names in `own`, see `joined`.
    transposed: layers, by the decoder's names, whose matrices are `[inputs, outputs]`.
    norms_each_head: whether norms of q and k have weights for each head, `[heads, size]`.
    changed: other changes, by the ends of the decoder's names.
    stacked: ends of names of tensors that are several under one another, and the ends of these
    ones' names, with `{}` for an expert's number: `[experts, rows, inputs]`, or `[rows, inputs]`.
    turned: the same of `[experts, inputs, rows]`, where these ones' rows lie side by side.
    change: what makes a tensor of the decoder from the stored one, all of these together; None: it
    is that. Set when dims are known (transforms.py).
    moves: the same of a matrix, whose name ends in no `.weight`, or of a bias, if it moves numbers.
    cuts: the parts that a rank of several has; None: all of every tensor.
    layers: those that a stage of a pipeline has; None: all.
    """

    own: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = (".rotary_emb.inv_freq",)
    unused: tuple[str, ...] = ()
    qkv: QkvOrder = QkvOrder.SPLIT
    joins_gate_up: bool = False
    transposed: tuple[str, ...] = ()
    norms_each_head: bool = False
    changed: Mapping[str, Change] = field(default_factory=dict)
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    turned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    change: Callable[[str], Change | None] = field(default=_unchanged, compare=False)
    moves: Callable[[str], Moves | None] = field(default=_unmoved, compare=False)
    cuts: Cuts | None = None
    layers: LayerRange | None = None

    @property
    def prefix(self) -> str:
        """What names of the decoder begin with, and lack in files of the decoder alone."""
        return f"{self.stored('model.layers').partition('.')[0]}."

    def may_be_unread(self, name: str) -> bool:
        """Return whether a tensor, by the checkpoint's name, is a buffer, or another rank's."""
        is_unused = name.endswith(self.unread) or name.startswith(self.unused)
        if self.layers is not None and self.layers.skips(name):
            return True
        return is_unused or (self.cuts is not None and self.cuts.skips(name))

    def stored(self, name: str) -> str:
        """Return the checkpoint's name of a tensor of the decoder."""
        if self.cuts is not None:
            name = self.cuts.number(name)
        if self.layers is not None:
            name = self.layers.number(name)
        if not self.own:
            return name
        parts = "|".join(map(re.escape, sorted(self.own, key=len, reverse=True)))
        return re.sub(rf"(?<![^.])({parts})(?![^.])", lambda part: self.own[part[0]], name)
