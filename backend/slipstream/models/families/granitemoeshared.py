"""Granite MoE with an expert of all rows beside those that are chosen (IBM, 2025)."""

from dataclasses import replace

from slipstream.models.axes import Axes
from slipstream.models.experts import read_experts, read_routing
from slipstream.models.families.granite import GGUF_NUMBERS, granite
from slipstream.models.families.granitemoe import EXPERT_KEYS, TENSORS
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm, GgufKeys, plain_experts
from slipstream.models.reader import Reader

SIZE = "shared_intermediate_size"


def gguf_experts(keys: GgufKeys) -> dict[str, object]:
    """Return how many experts there are, and how many a row has, as config.json calls them."""
    found = plain_experts(keys)
    return {"num_local_experts": found.pop("num_experts"), **found}


def gguf_config(keys: GgufKeys) -> dict[str, object]:
    """Return the size of the shared expert; files without one have no such key."""
    key = "expert_shared_feed_forward_length"
    return {SIZE: keys.whole(key) if keys.get(key) else 0}


@family(
    "GraniteMoeSharedForCausalLM",
    keys=f"{EXPERT_KEYS} {SIZE}",
    has_windows=False,
    tensors=TENSORS,
    gguf=GgufForm(
        "granitemoe",
        pairs_rows=True,
        has_experts=True,
        experts=gguf_experts,
        flags={"attention_bias": "attn_q.bias"},
        numbers=GGUF_NUMBERS,
        config=gguf_config,
    ),
)
def granitemoeshared(config: Reader) -> Axes:
    """Read what Granite MoE has, and the size of the shared expert; 0: there is none."""
    shared = SIZE if config.get(SIZE) not in (None, 0) else ""
    experts = read_experts(config, read_routing(config), "intermediate_size", shared)
    return replace(granite(config), experts=experts)
