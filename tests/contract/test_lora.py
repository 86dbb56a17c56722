"""Adapters by TensorRT-LLM's inputs: what belongs together, and what is refused by its name."""

import re

import numpy as np
import pytest
from slipstream_contract.errors import ContractError
from slipstream_contract.lora import LoraTask
from slipstream_contract.schemas.trtllm import llm_request

WEIGHTS = np.arange(12, dtype=np.float16).reshape(2, 6)
CONFIG = np.array([[1, 0, 1], [4, 0, 1]], np.int32)


def ask(**arrays: object) -> LoraTask | None:
    plain = {
        "input_ids": np.array([1, 2], np.int32),
        "input_lengths": np.array([2], np.int32),
        "request_output_len": np.array([4], np.int32),
    }
    return llm_request({**plain, **arrays}, {}).task


def number(value: int) -> np.ndarray:
    return np.array([value], np.uint64)


def test_what_an_adapter_is() -> None:
    full = LoraTask(9, 2, 6, WEIGHTS.tobytes(), CONFIG.tobytes())
    given = {"lora_task_id": number(9), "lora_weights": WEIGHTS, "lora_config": CONFIG}
    assert ask(**given) == full
    batched = {"lora_weights": WEIGHTS[None], "lora_config": CONFIG[None]}
    assert ask(**given | batched) == full  # clients send a 1 too many
    assert ask(lora_task_id=number(2**64 - 1)) == LoraTask(2**64 - 1)
    assert ask() is None
    assert ask(lora_task_id=number(0)) is None


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"lora_weights": WEIGHTS}, "lora_weights is given without lora_config"),
        ({"lora_config": CONFIG}, "lora_config is given without lora_weights"),
        (
            {"lora_weights": WEIGHTS, "lora_config": CONFIG},
            "lora_task_id is 0, which is no adapter",
        ),
        (
            {"lora_weights": WEIGHTS, "lora_config": CONFIG[:1], "lora_task_id": number(1)},
            "lora_weights has 2 rows, lora_config has 1",
        ),
        ({"lora_weights": WEIGHTS.astype(np.float32)}, "lora_weights has type 'float32', not FP16"),
        ({"lora_config": CONFIG[:, :2]}, "lora_config has shape [2, 2], not [-1, 3]"),
    ],
)
def test_what_does_not_belong_together(arrays: dict[str, np.ndarray], why: str) -> None:
    with pytest.raises(ContractError, match=re.escape(why)):
        ask(**arrays)
