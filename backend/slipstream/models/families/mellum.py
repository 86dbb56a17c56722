"""Mellum 2 (JetBrains, 2026): Qwen3-MoE whose windows rotate in a way of their own."""

from collections.abc import Mapping
from dataclasses import replace

from slipstream.models.axes import Axes, TensorNames
from slipstream.models.experts import KEYS, listed_dense_layers
from slipstream.models.families.qwen3_moe import qwen3_moe
from slipstream.models.family import family
from slipstream.models.reader import Reader
from slipstream.models.ropes import read_ropes

# Layers that predict further tokens, which are not read.
FURTHER = "num_mtp_layers num_nextn_predict_layers mtp_layer_types mtp_mlp_layer_types"
_THETAS = {"full_attention": 5e5, "sliding_attention": 1e4}


def derived(config: Reader) -> Mapping[str, object]:
    """Return what a config.json that is silent has: no windows, and two plain rotations."""
    found: dict[str, object] = {"decoder_sparse_step": 1}
    if not config.has("layer_types"):
        found["layer_types"] = ["full_attention"] * config.whole("num_hidden_layers")
    if not config.has("rope_parameters"):
        found["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in _THETAS.items()
        }
    ropes = found.get("rope_parameters") or config.get("rope_parameters")
    local = ropes.get("sliding_attention") if isinstance(ropes, dict) else None
    theta = local.get("rope_theta") if isinstance(local, dict) else None
    if theta is not None and config.has("rope_parameters"):
        config.child("rope_parameters").child("sliding_attention").positive("rope_theta")
    return {**found, "rope_local_base_freq": theta or _THETAS["sliding_attention"]}


@family(
    "MellumForCausalLM",
    keys=f"attention_bias {KEYS} moe_intermediate_size norm_topk_prob mlp_layer_types {FURTHER}",
    read_ropes=read_ropes,
    derived=derived,
    tensors=TensorNames(unused=("mtp.",)),
)
def mellum(config: Reader) -> Axes:
    """Read the experts, which layers have none, and whether attention has biases."""
    return replace(qwen3_moe(config), dense_layers=listed_dense_layers(config, frozenset()))
