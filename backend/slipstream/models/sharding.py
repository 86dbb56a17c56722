"""Split a model over ranks (Shoeybi et al., 2019): a rank's model is one with fewer heads.

`sharded` makes a configuration smaller, `share` gives the layers of what is built of it the sums
that make them whole. Everything between computes a model like any other.
"""

from dataclasses import replace

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels.comm.ranks import Ranks
from slipstream.layers.attention import Attention
from slipstream.layers.decoder import AnyBlock, Decoder, StepDecoder
from slipstream.layers.dims import SkipConfig
from slipstream.layers.experts import Experts
from slipstream.layers.latent import LatentAttention
from slipstream.layers.mlp import TwoStepMLP
from slipstream.layers.ranks import GatheredHead, SpreadLayerNorm, SpreadNorm, TokensOfRank, summed
from slipstream.layers.stages import Inlet
from slipstream.models.axes import QkNorms
from slipstream.models.cuts import Cuts
from slipstream.models.model_config import ModelConfig

_WIDTHS = 64


def check_is_ours(asked: str, config: EngineConfig, model: ModelConfig) -> None:
    """Raise `ConfigError`, which begins with `asked`, for a class of transformers."""
    if model.build is not None:
        raise ConfigError(
            f"{asked} does not go with backend_model = {config.backend_model!r} for "
            f"{model.architecture}: classes of transformers are not split"
        )


def check_ranks(config: EngineConfig, model: ModelConfig) -> None:
    """Raise `ConfigError` if ranks cannot share the model: field, value and limit."""
    size = config.tensor_parallel
    if size == 1:
        return
    asked = f"tensor_parallel = {size}"
    check_is_ours(asked, config, model)
    heads = model.dims.num_heads
    if heads % size:
        raise ConfigError(f"{asked}: num_attention_heads = {heads} is no multiple of it")
    heads = model.dims.num_kv_heads
    if heads % size and size % heads:
        raise ConfigError(
            f"{asked}: num_key_value_heads = {heads} is neither a multiple nor a divisor of it"
        )


def part_of_width(width: int, size: int) -> int:
    """Return a rank's part of a width: an even one, or a multiple of 64 that GEMMs take well."""
    return width // size if width % size == 0 else -(-width // (size * _WIDTHS)) * _WIDTHS


def sharded(model: ModelConfig, rank: int, size: int) -> ModelConfig:
    """Return the model of one rank, which `check_ranks` allows: with its heads and widths.

    The vocabulary stays whole; `ModelConfig.vocab_rows` is the rank's part.
    """
    if size == 1:
        return model
    d, experts, axes = model.dims, model.axes.experts, model.axes
    widths = {"tokens": d.vocab_size, "inner": d.intermediate_size}
    if experts is not None:
        inner, shared = experts.inner_size, experts.shared_size
        widths |= {"expert": inner, "both of expert": 2 * inner, "shared": shared}
        of_rank = part_of_width(inner, size), part_of_width(shared, size)
        experts = replace(experts, inner_size=of_rank[0], shared_size=of_rank[1])
    has_norms = axes.qk_norms in (QkNorms.WHOLE, QkNorms.LAYER_WHOLE, QkNorms.LAYER_HEADS)
    count = 0 if axes.experts is None else axes.experts.routing.num_experts
    cuts = Cuts(rank, size, d.num_heads, d.num_kv_heads, widths, has_norms, count)
    dims = replace(
        d,
        num_heads=d.num_heads // size,
        num_kv_heads=max(1, d.num_kv_heads // size),
        intermediate_size=part_of_width(d.intermediate_size, size),
    )
    tensors = replace(model.tensors, cuts=cuts)
    slopes = axes.slopes[rank * dims.num_heads : (rank + 1) * dims.num_heads]
    skips = _skips_of_rank(axes.skips, rank, size)
    axes = replace(axes, experts=experts, slopes=slopes, skips=skips)
    return replace(model, dims=dims, axes=axes, tensors=tensors, num_ranks=size)


def _skips_of_rank(skips: SkipConfig | None, rank: int, size: int) -> SkipConfig | None:
    """Return the blocks that the heads of a rank skip."""
    if skips is None:
        return None
    each = len(skips.firsts) // size
    return replace(skips, firsts=skips.firsts[rank * each : (rank + 1) * each])


def share(decoder: StepDecoder, ranks: Ranks, vocab_size: int) -> None:
    """Have the layers of a rank's decoder give what the whole model's would, in place.

    `vocab_size` is the whole model's.
    """
    assert isinstance(decoder, Decoder), "classes of transformers are refused"
    for block in decoder.blocks:
        _share_block(block, ranks)
    if isinstance(decoder.embedding, Inlet):
        return
    decoder.embedding.lookup = TokensOfRank(decoder.embedding, ranks)
    decoder.head = GatheredHead(decoder.head, ranks, vocab_size)


def _share_block(block: AnyBlock, ranks: Ranks) -> None:
    attention, mlp = block.attention, block.mlp
    assert isinstance(attention, Attention | LatentAttention)
    attention.out.linear.ranks = ranks
    norms = attention.early_norms if isinstance(attention, Attention) else ()
    for norm in norms:
        if isinstance(norm.norm, SpreadNorm | SpreadLayerNorm):
            norm.norm.ranks = ranks
    if isinstance(mlp, Experts):
        mlp.out_norm = summed(ranks, mlp.out_norm)
    else:
        assert isinstance(mlp, TwoStepMLP)
        mlp.down.linear.ranks = ranks
