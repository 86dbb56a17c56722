"""How requests begin in the wirings that encode text themselves."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from bridge.test_writers import TEXT, text_inputs
from slipstream.bridge.bridge import Question
from slipstream.bridge.fused import Fused
from slipstream.bridge.vllm import Vllm
from slipstream_contract.errors import ContractError
from slipstream_contract.urgency import Urgency


class Begun:
    """A bridge that keeps what it is given."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def answer(self, reply, begin):
        begin()

    def check_room(self):
        pass

    def submit(self, call, token_ids, sampling, streams, question):
        return token_ids.tolist()

    def begin(self, call, submits, has_flow=False):
        self.texts += submits


def question(text: str | bytes, model: type) -> Question:
    data = text if isinstance(text, bytes) else text.encode()
    inputs = {"text_input": np.array([data], dtype=object)}
    if model is Fused:
        inputs = {name: value[None] for name, value in (text_inputs() | inputs).items()}
    reply = SimpleNamespace()
    return Question(inputs, {}, "", reply, frozenset(), time.monotonic_ns(), Urgency(), 0)


@pytest.mark.parametrize("model", [Fused, Vllm])
def test_a_short_prompt_does_not_wait_for_long_ones(model):
    begun, free = Begun(), threading.Event()
    wiring = Fused(begun, TEXT, False) if model is Fused else Vllm(begun, TEXT)
    for _ in range(2):
        wiring._encoders.submit(free.wait)  # each thread has a prompt that takes a while
    wiring.begin(question("long " * 300, model))
    wiring.begin(question("short", model))
    assert begun.texts == [TEXT.encode("short")]
    free.set()
    wiring.close()
    assert begun.texts[1:] == [TEXT.encode("long " * 300)]


@pytest.mark.parametrize("model", [Fused, Vllm])
def test_what_is_wrong_with_a_short_prompt_is_raised(model):
    begun = Begun()
    wiring = Fused(begun, TEXT, False) if model is Fused else Vllm(begun, TEXT)
    with pytest.raises(ContractError, match="text_input"):
        wiring.begin(question("", model))
    wiring.close()
    assert begun.texts == []


@pytest.mark.parametrize("model", [Fused, Vllm])
def test_a_prompt_that_is_far_too_long_is_not_even_decoded(model):
    begun = Begun()
    wiring = Fused(begun, TEXT, False) if model is Fused else Vllm(begun, TEXT)
    with pytest.raises(ContractError, match=r"text_input has 1000000 bytes, at least"):
        wiring.begin(question(b"\xff" * 1_000_000, model))
    wiring.close()
    assert begun.texts == []
