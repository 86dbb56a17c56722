"""A request whose client may have left: when the engine hears of it."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bridge.test_streams import Ids, Recorder
from slipstream import wire
from slipstream.bridge.bridge import Bridge, Question
from slipstream.bridge.streams import Call, Stream
from slipstream.config import EngineConfig
from slipstream.launch import Supervision
from slipstream_contract.runtime import Runtime
from slipstream_contract.sampling import SamplingParams
from slipstream_contract.urgency import Urgency


class House:
    """A bridge, and what happens in it, in order: a letter for each message or question."""

    def __init__(self, path: Path) -> None:
        self.bridge = Bridge("model", Runtime(path), EngineConfig(checkpoint="none"), os.getpid())
        self.events: list[str] = []
        self.bridge.connection.send = self._send

    def begin(self, is_gone: bool) -> Recorder:
        """A step of an ensemble, whose client has left or not."""
        reply = Asked(self.events, is_gone)
        inputs = {"x": np.zeros(1)}
        asked = Question(inputs, {}, "", reply, frozenset(), time.time_ns(), Urgency(), 0)
        call = Call(reply, "", is_step=True)
        stream = Stream(Ids(), True)
        submit = self.bridge.submit(call, [1], SamplingParams(max_tokens=4), [stream], asked)
        self.bridge.answer(reply, lambda: self.bridge.begin(call, [submit], has_flow=True))
        return reply

    def _send(self, *messages: wire.ToEngine) -> None:
        self.events += [type(message).__name__ for message in messages]


class Asked(Recorder):
    """Tells the house that it was asked."""

    def __init__(self, events: list[str], is_gone: bool) -> None:
        super().__init__()
        self._events, self.is_gone = events, is_gone

    def is_cancelled(self) -> bool:
        self._events.append("asked")
        return self.is_gone


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr(Supervision, "ensure", lambda self: None)
    house = House(tmp_path)
    yield house
    house.bridge.close()


def test_an_engine_with_nothing_to_do_is_given_a_request_at_once(house: House) -> None:
    house.begin(is_gone=False)
    assert house.events == ["Submit", "asked"]
    assert len(house.bridge.calls.snapshot()) == 1


def test_it_is_taken_back_if_its_client_has_left(house: House) -> None:
    reply = house.begin(is_gone=True)
    assert house.events == ["Submit", "asked", "Cancel"]
    assert not house.bridge.calls.snapshot()
    assert reply.done.wait(5)
    assert reply.error is None


def test_beside_others_who_has_left_never_reaches_the_engine(house: House) -> None:
    house.begin(is_gone=False)
    house.events.clear()
    reply = house.begin(is_gone=True)
    assert house.events == ["asked"]
    assert reply.done.is_set()
    assert len(house.bridge.calls.snapshot()) == 1
    house.begin(is_gone=False)
    assert house.events == ["asked", "asked", "Submit"]
