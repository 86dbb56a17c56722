"""The start of requests in the wirings that encode text themselves."""

import dataclasses
import threading

import numpy as np
import pytest
from fixtures.bridge.texts import CHECKPOINT, TEXT, question
from slipstream.bridge.composed import Composed, Vocabulary
from slipstream.bridge.fused import Fused
from slipstream.bridge.text import Text
from slipstream.bridge.vllm import Vllm
from slipstream_contract.errors import ContractError
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing


class Begun:
    """A bridge that records the prompts that are submitted to it."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def answer(self, reply, begin):
        begin()

    def raise_if_full(self):
        pass

    def submit(self, call, request, streams, question):
        return request.token_ids.tolist()

    def start(self, call, submits, has_flow=False):
        self.texts += submits


@pytest.mark.parametrize("model", [Fused, Vllm])
def test_a_short_prompt_does_not_wait_for_long_ones(model):
    begun, free = Begun(), threading.Event()
    wiring = Fused(begun, TEXT, False) if model is Fused else Vllm(begun, TEXT)
    for _ in range(2):
        wiring._encoders.submit(free.wait)  # each thread has a prompt that takes a while
    wiring.start(question("long " * 300, model))
    wiring.start(question("short", model))
    assert begun.texts == [TEXT.encode("short")]
    free.set()
    wiring.close()
    assert begun.texts[1:] == [TEXT.encode("long " * 300)]


@pytest.mark.parametrize("model", [Fused, Vllm])
def test_what_is_wrong_with_a_short_prompt_is_raised(model):
    begun = Begun()
    wiring = Fused(begun, TEXT, False) if model is Fused else Vllm(begun, TEXT)
    with pytest.raises(ContractError, match="text_input"):
        wiring.start(question("", model))
    wiring.close()
    assert begun.texts == []


@pytest.mark.parametrize("model", [Fused, Vllm])
def test_a_prompt_that_is_far_too_long_is_not_even_decoded(model):
    begun = Begun()
    wiring = Fused(begun, TEXT, False) if model is Fused else Vllm(begun, TEXT)
    with pytest.raises(ContractError, match=r"text_input has 1000000 bytes, at least"):
        wiring.start(question(b"\xff" * 1_000_000, model))
    wiring.close()
    assert begun.texts == []


@pytest.mark.parametrize("model", [Fused, Vllm])
@pytest.mark.parametrize("configured", [True, False])
def test_special_tokens_are_added_as_the_request_says_or_else_the_model(
    tmp_path, model, configured
):
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text, begun = Text(tmp_path, configured, True, 2048), Begun()
    wiring = Fused(begun, text, False) if model is Fused else Vllm(begun, text)
    for given in (None, True, False):
        asked = question("def f(", model)
        if given is not None:
            value = np.array([given])
            asked.inputs["add_special_tokens"] = value[None] if model is Fused else value
        wiring.start(asked)
    wiring.close()
    plain = TEXT.encode("def f(")
    expected = {True: [0, *plain], False: plain}
    assert begun.texts == [expected[configured], expected[True], expected[False]]


def test_a_step_of_the_ensemble_may_carry_what_preprocessing_has_honoured():
    begun = Begun()
    outputs = frozenset({"STREAM_STATE", "output_ids"})
    wiring = Composed(begun, Vocabulary(TEXT.vocab, TEXT.end_ids, True), outputs, False)
    scalars = {"input_lengths": 3, "request_output_len": 5}
    inputs = {name: np.array([[value]], np.int32) for name, value in scalars.items()}
    inputs["input_ids"] = np.array([[5, 6, 7]], np.int32)
    for requested in ({"STREAM_STATE"}, {"output_ids"}):
        asked = question("", Fused)
        asked = dataclasses.replace(
            asked,
            inputs=inputs,
            parameters={"add_special_tokens": False},
            requested=frozenset(requested),
        )
        if requested == {"STREAM_STATE"}:
            wiring.start(asked)
            continue
        with pytest.raises(ContractError, match="unknown request parameter 'add_special_tokens'"):
            wiring.start(asked)
    assert begun.texts == [[5, 6, 7]]
