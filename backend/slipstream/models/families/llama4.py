"""Llama 4 (Meta, 2025), its text model: one expert of a row and a shared one, some layers still.

Layers that rotate see only their chunk of a sequence.
"""

from collections.abc import Mapping
from dataclasses import replace

from slipstream.models.axes import Axes, Growth, QkNorms, TensorNames
from slipstream.models.experts import KEYS, read_experts, read_routing
from slipstream.models.families.smollm3 import still
from slipstream.models.family import family
from slipstream.models.reader import Reader
from slipstream.models.wrapped import Whole, wraps

INNER, OF_EXPERT = "intermediate_size", "moe_intermediate_size"
WINDOW = "sliding_window"
NAMES = {"mlp": "feed_forward", "mlp.gate": "feed_forward.router"}
TURNED = {
    "experts.gate_up_proj": ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight"),
    "experts.down_proj": ("experts.{}.down_proj.weight",),
}
KINDS = ("chunked_attention", "full_attention")
PARTS = ("vision_model.", "multi_modal_projector.")


def unturned(config: Reader, num_layers: int) -> frozenset[int]:
    """Return the layers that do not rotate; of `no_rope_layers`, [] is the default, too."""
    if config.get("no_rope_layers") != []:
        return still(config, num_layers)
    every = config.whole("no_rope_layer_interval")
    return frozenset(range(every - 1, num_layers, every))


def derived(config: Reader) -> Mapping[str, object]:
    """Return sizes by the names of other families, and chunks of attention as windows."""
    sizes = {INNER: config.whole("intermediate_size_mlp"), OF_EXPERT: config.whole(INNER)}
    if config.has(WINDOW):
        raise config.refusal(WINDOW, "is not implemented; attention_chunk_size is")
    count = config.whole("num_hidden_layers")
    kinds, full = config.names_of("layer_types", count, KINDS), unturned(config, count)
    kinds = kinds or [KINDS[i in full] for i in range(count)]
    chunk = {WINDOW: config.whole("attention_chunk_size")} if KINDS[0] in kinds else {}
    return sizes | chunk | {"layer_types": [kind.replace("chunked", "sliding") for kind in kinds]}


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
    still=unturned,
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
        chunked=config.has(WINDOW),
    )


wraps(
    "Llama4ForConditionalGeneration",
    Whole("llama4", {"llama4_text": "Llama4ForCausalLM"}, others=PARTS),
)
