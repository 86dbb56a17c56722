"""Hunyuan with experts (Tencent, 2025), A13B: as many for each layer, beside one of all rows."""

from collections.abc import Mapping
from dataclasses import replace

from slipstream.models.axes import Axes, TensorNames
from slipstream.models.experts import KEYS, read_experts, read_routing
from slipstream.models.families import hunyuan_v1_dense as dense
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm, GgufKeys, plain_experts
from slipstream.models.reader import Reader

SIZE = "intermediate_size"  # of experts, and of that of all rows
NAMES = {**dense.NAMES, "mlp.gate": "mlp.gate.wg", "mlp.shared_expert": "mlp.shared_mlp"}


def derived(config: Reader) -> Mapping[str, object]:
    """Return the rotation, and how many experts a row has; layers that differ are refused."""
    key = "moe_topk" if config.has("moe_topk") else "num_experts_per_tok"
    count = config.get(key)
    if isinstance(count, list):
        if len(count) != config.whole("num_hidden_layers") or any(x != count[0] for x in count):
            raise config.refusal(key, "is not the same number for each layer")
        count = count[0]
    if key == "moe_topk" and config.data.get("num_experts_per_tok") not in (None, count):
        raise config.refusal("num_experts_per_tok", f"contradicts moe_topk = {count}")
    return {**dense.derived(config), "num_experts_per_tok": count}


def gguf_experts(keys: GgufKeys) -> dict[str, object]:
    """Return how many experts a GGUF file has; refuse those of all rows of another size."""
    size = keys.whole("expert_feed_forward_length", keys.whole("feed_forward_length"))
    for key, known in (("expert_shared_feed_forward_length", size), ("expert_shared_count", 1)):
        if keys.whole(key, known) != known:
            raise keys.refusal(key, f"is not implemented; {known} is")
    found = plain_experts(keys)
    return {"num_experts": found["num_experts"], "moe_topk": found["num_experts_per_tok"]}


@family(
    "HunYuanMoEV1ForCausalLM",
    keys=f"attention_bias eod_token_id sep_token_id moe_topk {KEYS}",
    has_windows=False,
    derived=derived,
    tensors=TensorNames(NAMES),
    gguf=GgufForm(
        "hunyuan-moe",
        has_experts=True,
        experts=gguf_experts,
        flags={"attention_bias": "attn_q.bias"},
        numbers={SIZE: "expert_feed_forward_length"},
    ),
)
def hunyuan_moe(config: Reader) -> Axes:
    """Read the experts, and whether attention has biases."""
    experts = read_experts(config, read_routing(config), SIZE, SIZE)
    return replace(dense.hunyuan(config), experts=experts)
