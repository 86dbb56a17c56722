"""Adapters and prompt tables by TensorRT-LLM's inputs: what belongs together, what is refused."""

import re

import numpy as np
import pytest
from slipstream_contract.errors import ContractError
from slipstream_contract.lora import LoraTask
from slipstream_contract.prompt_table import PromptTable
from slipstream_contract.request import GenerateRequest
from slipstream_contract.schemas.trtllm import llm_request, text_request

WEIGHTS = np.arange(12, dtype=np.float16).reshape(2, 6)
SIZE = np.array([2], np.int32)
CONFIG = np.array([[1, 0, 1], [4, 0, 1]], np.int32)


TABLE = np.arange(12, dtype=np.float16).reshape(3, 4)


def ask(**arrays: object) -> LoraTask | None:
    return request(**arrays).task


def request(**arrays: object) -> GenerateRequest:
    plain = {
        "input_ids": np.array([1, 2], np.int32),
        "input_lengths": np.array([2], np.int32),
        "request_output_len": np.array([4], np.int32),
    }
    return llm_request({**plain, **arrays}, {})


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
        ({"prompt_vocab_size": SIZE}, "prompt_vocab_size is given without prompt_embedding_table"),
        (
            {"prompt_table_extra_ids": np.array([0, 4], np.uint64)},
            "prompt_table_extra_ids is given without prompt_embedding_table",
        ),
        (
            {"prompt_embedding_table": TABLE, "prompt_vocab_size": SIZE + 2},
            "prompt_vocab_size is 4, not a whole number from 1 to 3",
        ),
        (
            {
                "prompt_embedding_table": TABLE,
                "prompt_table_extra_ids": np.array([4], np.uint64),
            },
            "prompt_table_extra_ids has 1 values for 2 input_ids",
        ),
    ],
)
def test_what_does_not_belong_together(arrays: dict[str, np.ndarray], why: str) -> None:
    with pytest.raises(ContractError, match=re.escape(why)):
        ask(**arrays)


def test_what_a_prompt_table_is() -> None:
    for table in (TABLE, TABLE[None]):  # clients send a 1 too many
        assert request(prompt_embedding_table=table).table == PromptTable(3, 4, TABLE.tobytes())
    some = {"prompt_embedding_table": TABLE, "prompt_vocab_size": SIZE}
    some["prompt_table_extra_ids"] = np.array([0, 2**64 - 1], np.uint64)
    assert request(**some).table == PromptTable(2, 4, TABLE[:2].tobytes(), (2**64 - 1,))
    none = {"prompt_embedding_table": TABLE[:0], "prompt_table_extra_ids": np.zeros(2, np.uint64)}
    assert request(**none, prompt_vocab_size=SIZE * 0).table is None
    text = {
        "text_input": np.array([b"a"], object),
        "max_tokens": np.array([4], np.int32),
        "prompt_embedding_table": TABLE,
        "prompt_table_extra_id": number(7),
    }
    assert text_request(text, {}).table == PromptTable(3, 4, TABLE.tobytes(), (7,))
