"""Read from a `config.json` what a mixture of experts is, and which layers have one. No torch."""

from slipstream.kernels.experts.spec import MAX_EXPERTS, MAX_TOP_K, Routing, Score
from slipstream.layers.dims import ExpertsConfig
from slipstream.models.reader import Reader

# What `read_routing` reads.
KEYS = "num_experts num_local_experts num_experts_per_tok"
CORRECTION = "e_score_correction_bias"  # of the scores by which experts are chosen
COUNTS = ("num_experts", "num_local_experts")
KINDS = ("dense", "sparse")  # of layers
_MOST_WIDE = 1 << 24  # inner size of an expert


def read_routing(
    config: Reader,
    score: Score = Score.SOFTMAX,
    normalises: bool = True,
    jitter: float = 0.0,
) -> Routing:
    """Read how many experts there are, by either of the names of that key, and how many a row has.

    transformers 5 writes `num_local_experts` for some families whose files had `num_experts`.
    """
    own = [name for name in COUNTS if name in config.data]
    count = own[0] if own else next(name for name in COUNTS if config.has(name))
    if len(own) > 1 and config.get(own[0]) != config.get(own[1]):
        raise config.refusal(own[1], f"contradicts {own[0]} = {config.get(own[0])}")
    experts = config.whole(count, most=MAX_EXPERTS)
    top_k = config.whole("num_experts_per_tok", most=MAX_TOP_K)
    if top_k > experts:
        raise config.refusal("num_experts_per_tok", f"is above {count} = {experts}")
    return Routing(experts, top_k, score, normalises, jitter=jitter)


def read_experts(
    config: Reader, routing: Routing, inner: str, shared: str = "", shared_gated: bool = False
) -> ExpertsConfig:
    """Read the inner size of experts, and that of the shared one if `shared` names its key."""
    return ExpertsConfig(
        routing,
        config.whole(inner, most=_MOST_WIDE),
        shared_size=config.whole(shared, most=_MOST_WIDE) if shared else 0,
        shared_gated=shared_gated,
    )


def listed_dense_layers(config: Reader, silent: frozenset[int]) -> frozenset[int]:
    """Return the layers without experts: those of `mlp_layer_types`, else `silent`."""
    kinds = config.names_of("mlp_layer_types", config.whole("num_hidden_layers"), KINDS)
    if kinds is None:
        return silent
    return frozenset(i for i, kind in enumerate(kinds) if kind == KINDS[0])


def read_dense_layers(config: Reader) -> frozenset[int]:
    """Return the layers that have an MLP in the place of experts (Qwen).

    They are those of `mlp_only_layers`, and all but every `decoder_sparse_step`-th.
    """
    layers = config.wholes("mlp_only_layers") or []
    step = config.whole("decoder_sparse_step", 1)
    count = config.whole("num_hidden_layers")
    return frozenset(layers) | {i for i in range(count) if (i + 1) % step}
