"""The numbers that describe a decoder: read from a checkpoint, used by layers. No array library."""

from dataclasses import dataclass, replace

from slipstream.kernels.experts.spec import Gate, Routing


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: frequencies `theta ** (-2i / d)` and how they are stretched.

    `kind` is default, linear (Chen et al., 2023), llama3 (Meta, 2024), yarn (Peng et al., 2023) or
    longrope (Ding et al., 2024); fields that a kind does not use keep their neutral values.
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # context after / before stretching
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: rotations in the original context above which nothing stretches
    beta_slow: float = 1.0  # yarn: rotations below which all stretches
    attention_factor: float = 1.0  # yarn, longrope: multiplies cosines and sines
    short_attention_factor: float | None = None  # longrope: in the original context; None: the same
    truncate: bool = True  # yarn: the ramp's ends are whole dimensions
    factors: tuple[float, ...] = ()  # longrope: of the wave of each pair
    short_factors: tuple[float, ...] = ()  # longrope: in the original context; empty: the same
    rotated: int | None = None  # numbers of a head that rotate; None: all
    has_two: bool = False  # a token has two positions: each half of what rotates has its own

    def of_length(self, num_positions: int) -> "RopeConfig":
        """Return what sequences of at most so many tokens rotate by, the same for all of them.

        A cache holds rotated keys, so a sequence that grows cannot change its factors.
        """
        is_short = num_positions <= self.original_max_positions
        factors, magnitude = self.factors, self.attention_factor
        if is_short:
            factors = self.short_factors or factors
            magnitude = self.short_attention_factor or magnitude
        of_one = replace(self, short_factors=(), short_attention_factor=None)
        return replace(of_one, factors=factors, attention_factor=magnitude)


@dataclass(frozen=True, slots=True)
class Dims:
    """Sizes of a decoder-only transformer with grouped-query attention and a gated MLP."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    eps: float


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of latent attention: the cache has a row of `rank + rotated` numbers for each token.

    query_rank: of latents of queries; 0: queries are made of rows.
    plain, rotated: numbers of a head's query and key that stay, and that rotate.
    value: numbers of a head's value.
    interleaved: whether pairs that rotate lie side by side.
    """

    rank: int
    query_rank: int
    plain: int
    rotated: int
    value: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class SkipConfig:
    """The blocks of tokens that heads of some layers skip (block-sparse attention, Phi-3-small).

    A query in block q sees all of block k, up to itself, if `q - k < local`, or if `k` is
    `first + i * stride` of the head's `first`.

    layers: that skip blocks; heads of others see all tokens.
    tokens: of a block.
    local: the newest blocks, with the query's own, that every head sees.
    stride: between those of older blocks that a head sees.
    firsts: of each query head, the first block of these.
    """

    layers: frozenset[int]
    tokens: int
    local: int
    stride: int
    firsts: tuple[int, ...]

    @property
    def dense_tokens(self) -> int:
        """The longest sequence of which no head skips a token."""
        return self.tokens * self.local


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in the place of an MLP.

    inner_size: of an expert.
    bias: whether router and experts have biases.
    shared_size: inner size of the expert of all rows; 0: there is none.
    shared_gated: whether a logistic gate of the row multiplies what it gives.
    corrected: whether the router has corrections of the scores by which experts are chosen.
    scales_inputs: whether a logistic function of its logit multiplies what an expert reads, the
    one of its row, and not what it gives (Llama 4).
    takes_turns: whether gates and ups take turns in the class of transformers, whose matrices of
    all experts are `[e, inputs, outputs]`.
    is_fused: whether the checkpoint has these matrices so, and not one by one.
    """

    routing: Routing
    inner_size: int
    gate: Gate = Gate.SILU
    bias: bool = False
    shared_size: int = 0
    shared_gated: bool = False
    corrected: bool = False
    scales_inputs: bool = False
    takes_turns: bool = False
    is_fused: bool = False
