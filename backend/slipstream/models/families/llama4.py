"""Llama 4 (Meta, 2025), its text model: one expert of a row and a shared one, some layers still.

Layers that rotate see only their chunk of a sequence, so sequences end with the first chunk.
"""

from collections.abc import Mapping
from dataclasses import replace

from slipstream.layers.dims import RopeConfig
from slipstream.models.axes import Axes, Growth, QkNorms, TensorNames
from slipstream.models.experts import KEYS, read_experts, read_routing
from slipstream.models.families.smollm3 import still
from slipstream.models.family import family
from slipstream.models.reader import Reader
from slipstream.models.ropes import read_rope
from slipstream.models.wrapped import Whole, wraps

INNER, OF_EXPERT = "intermediate_size", "moe_intermediate_size"
POSITIONS = "max_position_embeddings"
NAMES = {"mlp": "feed_forward", "mlp.gate": "feed_forward.router"}
TURNED = {
    "experts.gate_up_proj": ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight"),
    "experts.down_proj": ("experts.{}.down_proj.weight",),
}
KINDS = ("chunked_attention", "full_attention")


def derived(config: Reader) -> Mapping[str, object]:
    """Return sizes by the names of other families; sequences end where a layer's chunk does."""
    count, most = config.whole("num_hidden_layers"), config.whole(POSITIONS)
    kinds, end = config.names_of("layer_types", count, KINDS), most
    if kinds is None or KINDS[0] in kinds:
        end = min(most, config.whole("attention_chunk_size"))
    # The first files say [] for the default.
    found: dict[str, object] = {} if config.get("no_rope_layers") else {"no_rope_layers": None}
    found |= {"layer_types": None, POSITIONS: end, "num_positions": most}
    sizes = {INNER: config.whole("intermediate_size_mlp"), OF_EXPERT: config.whole(INNER)}
    return found | sizes


def read_ropes(config: Reader, most: int, head_size: int) -> tuple[RopeConfig, RopeConfig]:
    """Read the rotation, of the context that the file has."""
    return read_rope(config, config.whole("num_positions"), head_size)


def names(config: Reader) -> TensorNames:
    """Return where tensors are: what libraries quantise has a matrix for each expert."""
    return TensorNames(NAMES, turned={} if config.has("quantization_config") else TURNED)


def dense_layers(config: Reader) -> frozenset[int]:
    """Return the layers without experts: all but those of `moe_layers`, else all but each n-th."""
    count, listed = config.whole("num_hidden_layers"), config.wholes("moe_layers")
    step = config.whole("interleave_moe_layer_step", 1)
    return frozenset(range(count)) - {*(range(step - 1, count, step) if listed is None else listed)}


def growth(config: Reader) -> Growth | None:
    """Return how queries grow in layers that do not rotate; the first files have 4 for true."""
    key = "attn_temperature_tuning"
    tuned = config.get(key)
    if not (tuned if type(tuned) is int else config.flag(key, default=True)):
        return None
    return Growth(config.positive("attn_scale"), config.whole("floor_scale"), 1, of_still=True)


@family(
    "Llama4ForCausalLM",
    keys=f"{KEYS} attention_bias attention_chunk_size attn_scale attn_temperature_tuning "
    "floor_scale interleave_moe_layer_step intermediate_size_mlp moe_layers no_rope_layers "
    "no_rope_layer_interval router_jitter_noise use_qk_norm",
    has_windows=False,
    read_ropes=read_ropes,
    still=still,
    derived=derived,
    tensors=names,
)
def llama4(config: Reader) -> Axes:
    """Read the experts, of which a row has the one of the largest logit, norms and growth."""
    routing, bias = read_routing(config), config.flag("attention_bias", default=False)
    if routing.top_k > 1:
        raise config.refusal("num_experts_per_tok", "is not implemented; 1 is")
    has_norms = config.flag("use_qk_norm", default=True)
    return Axes(
        qk_norms=QkNorms.BARE_HEADS if has_norms else QkNorms.NONE,
        query_growth=growth(config),
        interleaved=True,
        qkv_bias=bias,
        out_bias=bias,
        experts=replace(read_experts(config, routing, OF_EXPERT, OF_EXPERT), scales_inputs=True),
        dense_layers=dense_layers(config),
    )


PARTS = ("vision_model.", "multi_modal_projector.")
wraps(
    "Llama4ForConditionalGeneration",
    Whole("llama4", {"llama4_text": "Llama4ForCausalLM"}, others=PARTS),
)
