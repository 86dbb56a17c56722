"""StarCoder and SantaCoder (Li et al., 2023): GPT-2 with one head of keys and values."""

from collections.abc import Mapping
from dataclasses import replace

from slipstream.models.axes import ACTIVATIONS, Axes, QkvOrder, TensorNames
from slipstream.models.families import gpt2
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm, GgufKeys
from slipstream.models.reader import Reader
from slipstream.models.ropes import no_rope


def derived(config: Reader) -> Mapping[str, object]:
    """Return one head of keys and values, or as many as of queries."""
    is_one = config.flag("multi_query", default=True)
    return {**gpt2.derived(config), "num_key_value_heads": 1 if is_one else None}


def tensors(config: Reader) -> TensorNames:
    """Return GPT-2's names; matrices are not transposed, q, k and v lie by heads if all have k."""
    is_one = config.flag("multi_query", default=True)
    order = QkvOrder.BLOCKS if is_one else QkvOrder.HEADS
    return replace(gpt2.TENSORS, qkv=order, transposed=())


def gguf_config(keys: GgufKeys) -> dict[str, object]:
    """Return that there is one head of keys; files of others have no order that is known."""
    if keys.num_kv_heads != 1:
        raise keys.refusal("attention.head_count_kv", "is not implemented; 1 is")
    return {"multi_query": True}


@family(
    "GPTBigCodeForCausalLM",
    keys="multi_query attention_softmax_in_fp32 scale_attention_softmax_in_fp32",
    activation_key="activation_function",
    activations=ACTIVATIONS,
    has_windows=False,
    read_ropes=no_rope,
    aliases=gpt2.KEYS,
    derived=derived,
    tensors=tensors,
    gguf=GgufForm("starcoder", qkv=QkvOrder.BLOCKS, config=gguf_config),
)
def gpt_bigcode(config: Reader) -> Axes:
    """Return GPT-2's axes; softmax is in fp32, whatever keys say."""
    return gpt2.AXES
