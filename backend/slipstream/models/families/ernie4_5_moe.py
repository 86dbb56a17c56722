"""ERNIE 4.5 (Baidu, 2025) with experts, which are chosen by a softmax with a correction."""

from collections.abc import Mapping
from dataclasses import replace

from slipstream.models.axes import Axes, TensorNames
from slipstream.models.experts import CORRECTION, KEYS, read_experts, read_routing
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm, GgufKeys
from slipstream.models.reader import Reader

LAYERS = "moe_layer_start_index moe_layer_end_index moe_layer_interval"


def derived(config: Reader) -> Mapping[str, object]:
    """Return nothing; refuse biases, which no published model has."""
    config.refuse_unless("use_bias", value=False)
    return {}


def dense_layers(config: Reader) -> frozenset[int]:
    """Return the layers without experts: before the first, behind the last, and between."""
    count, step = config.whole("num_hidden_layers"), config.whole("moe_layer_interval", 1)
    first, last = (config.get(key) for key in LAYERS.split()[:2])
    if type(first) is not int or first < 0:
        raise config.refusal("moe_layer_start_index", "is not a whole number >= 0")
    if type(last) is not int or last < -1:
        raise config.refusal("moe_layer_end_index", "is not a whole number >= -1")
    last = count - 1 if last == -1 else last
    return frozenset(i for i in range(count) if (i + 1) % step or not first <= i <= last)


def gguf_config(keys: GgufKeys) -> dict[str, object]:
    """Return sizes of experts, and layers without; a shared one's size is that of its tensors."""
    keys.get("expert_shared_feed_forward_length")
    counts = ("expert_shared_count", "leading_dense_block_count")
    shared, dense = (keys.whole(key) if keys.get(key) else 0 for key in counts)
    return {
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "moe_num_shared_experts": shared,
        "moe_layer_start_index": dense,
        "moe_layer_end_index": -1,
        "moe_layer_interval": keys.whole("interleave_moe_layer_step", 1),
    }


@family(
    "Ernie4_5_MoeForCausalLM",
    keys=f"use_bias {KEYS} {LAYERS} moe_intermediate_size moe_num_shared_experts moe_norm_min",
    has_windows=False,
    aliases="num_experts=moe_num_experts num_experts_per_tok=moe_k",
    derived=derived,
    tensors=TensorNames(
        {
            "mlp.shared_expert": "mlp.shared_experts",
            f"mlp.gate.{CORRECTION}": f"mlp.moe_statics.{CORRECTION}",
        },
        changed={f"mlp.gate.{CORRECTION}": lambda x: x.flatten()},
    ),
    gguf=GgufForm("ernie4_5-moe", has_experts=True, config=gguf_config),
)
def ernie4_5_moe(config: Reader) -> Axes:
    """Read the experts, shared ones, and which layers have none."""
    experts = read_experts(config, read_routing(config), "moe_intermediate_size")
    count = config.get("moe_num_shared_experts")
    shared = config.whole("moe_num_shared_experts") if count else 0
    experts = replace(experts, shared_size=shared * experts.inner_size, corrected=True)
    return Axes(interleaved=True, experts=experts, dense_layers=dense_layers(config))
