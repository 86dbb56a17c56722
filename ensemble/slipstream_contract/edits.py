"""Fields that edit logits and that TensorRT-LLM's tensors have in a way of their own."""

from typing import Any

from slipstream_contract import limits
from slipstream_contract.inputs import Inputs


def edit_fields(read: Inputs) -> dict[str, Any]:
    """Return fields of `SamplingParams` of a request in TensorRT-LLM's tensors.

    Raises ContractError.
    """
    name = "no_repeat_ngram_size"
    size = read.whole(name, 0)
    if size != limits.NGRAM_OFF:
        limits.check_whole(read.label(name), size, 0, limits.MAX_NGRAM)
    return {name: 0 if size == limits.NGRAM_OFF else size}
