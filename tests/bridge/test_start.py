"""The start of a request: what the engine gets of it, if anything."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fixtures.bridge.streams import Ids, Recorder
from slipstream import wire
from slipstream.bridge.bridge import Bridge, IncomingRequest
from slipstream.bridge.streams import Call, Stream
from slipstream.config import EngineConfig
from slipstream.launch import SupervisorStarter
from slipstream_contract.ids import pack
from slipstream_contract.request import GenerateRequest
from slipstream_contract.sampling import SamplingParams
from slipstream_runtime.directory import Runtime


class House:
    """A bridge, and what happens in it, in order: a letter for each message or question."""

    def __init__(self, path: Path) -> None:
        self.bridge = Bridge("model", Runtime(path), EngineConfig(checkpoint="none"), os.getpid())
        self.events: list[str] = []
        self.sent: list[wire.ToEngine] = []
        self.bridge.connection.send = self._send

    def start(self, is_gone: bool) -> Recorder:
        """Start a call of an ensemble, whose client has left or not."""
        reply = Asked(self.events, is_gone)
        inputs = {"x": np.zeros(1)}
        asked = IncomingRequest(inputs, {}, "", reply, frozenset(), time.monotonic_ns())
        call = Call(reply, "", is_step=True)
        stream = Stream(Ids(), True)
        request = GenerateRequest(prompt=pack([1]), sampling=SamplingParams(max_tokens=4))
        submit = self.bridge.submit(call, request, [stream], asked)
        self.bridge.answer(reply, lambda: self.bridge.start(call, [submit], has_flow=True))
        return reply

    def _send(self, *messages: wire.ToEngine) -> None:
        self.events += [type(message).__name__ for message in messages]
        self.sent += messages


class Asked(Recorder):
    """A reply that records in the house that it was checked for a cancel."""

    def __init__(self, events: list[str], is_gone: bool) -> None:
        super().__init__()
        self._events, self.is_gone = events, is_gone

    def is_cancelled(self) -> bool:
        self._events.append("asked")
        return self.is_gone


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr(SupervisorStarter, "ensure", lambda self: None)
    house = House(tmp_path)
    yield house
    house.bridge.close()


def test_an_engine_with_nothing_to_do_is_given_a_request_at_once(house: House) -> None:
    house.start(is_gone=False)
    assert house.events == ["Submit", "asked"]
    assert len(house.bridge.calls.snapshot()) == 1


def test_of_a_crowd_that_left_one_reaches_an_idle_engine_and_is_taken_back(house: House) -> None:
    first, *rest = [house.start(is_gone=True) for _ in range(5)]
    assert house.events == ["Submit", "asked", "Cancel", *["asked"] * 4]
    assert not house.bridge.calls.snapshot()
    assert first.done.wait(120)
    assert all(reply.done.is_set() for reply in rest)
    assert not any(reply.error for reply in (first, *rest))
    house.events.clear()
    house.start(is_gone=False)
    assert house.events == ["asked", "Submit"]


def test_beside_others_a_client_that_left_never_reaches_the_engine(house: House) -> None:
    house.start(is_gone=False)
    house.events.clear()
    reply = house.start(is_gone=True)
    assert house.events == ["asked"]
    assert reply.done.is_set()
    assert len(house.bridge.calls.snapshot()) == 1
    house.start(is_gone=False)
    assert house.events == ["asked", "asked", "Submit"]


def test_a_request_without_a_seed_gets_one_that_another_engine_would_use_again(
    house: House,
) -> None:
    for _ in range(2):
        house.start(is_gone=False)
    first, second = (submit.sampling.seed for submit in house.sent)
    assert None not in (first, second)
    assert first != second
