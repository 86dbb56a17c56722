"""A request ends in the bridge while the engine publishes that its queue is full."""

import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fixtures.bridge.streams import Ids, Recorder, without_collector
from fixtures.bridge.texts import TEXT, question
from slipstream.bridge.bridge import Bridge, IncomingRequest
from slipstream.bridge.fused import Fused
from slipstream.bridge.streams import Call, Stream
from slipstream.bridge.vllm import Vllm
from slipstream.config import EngineConfig
from slipstream.launch import SupervisorStarter
from slipstream_contract.ids import pack
from slipstream_contract.request import GenerateRequest
from slipstream_contract.sampling import SamplingParams
from slipstream_runtime import admission
from slipstream_runtime.admission import Load, LoadFile, path_of
from slipstream_runtime.directory import Runtime

ROOM = Load(3, 20, 1, 4, 40)
FULL = ROOM._replace(num_requests=4)
DOWN = "the engine is not running"  # the error of a request that gets as far as the engine


@pytest.fixture
def bridge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bridge]:
    """Yield a bridge whose engine is gone, with a load file that it wrote not long ago."""
    monkeypatch.setattr(admission, "MAX_AGE_NS", 10**12)
    monkeypatch.setattr(SupervisorStarter, "ensure", lambda self: None)
    bridge = Bridge("model", Runtime(tmp_path), EngineConfig(checkpoint="none"), os.getpid())
    yield bridge
    bridge.close()


def ask(bridge: Bridge, prompts: list[list[int]]) -> str:
    reply = Recorder()
    asked = IncomingRequest({"x": np.zeros(1)}, {}, "id", reply, frozenset(), time.monotonic_ns())
    call = Call(reply, "id")
    sampling = SamplingParams(max_tokens=4)
    submits = [
        bridge.submit(
            call, GenerateRequest(prompt=pack(ids), sampling=sampling), [Stream(Ids(), True)], asked
        )
        for ids in prompts
    ]
    bridge.answer(reply, lambda: bridge.start(call, submits))
    assert reply.done.is_set()
    assert not bridge.calls.snapshot()
    assert bridge.calls.find("id") is None
    return reply.error.message


def test_it_refuses_what_the_engine_would(bridge: Bridge, tmp_path: Path) -> None:
    file = LoadFile(path_of(tmp_path / "engine.sock"))
    assert DOWN in ask(bridge, [[1]])
    file.publish(ROOM)
    assert DOWN in ask(bridge, [[1] * 20])
    assert "max_waiting_tokens is 40, this prompt has 21" in ask(bridge, [[1], [1] * 21])
    file.publish(FULL)
    assert "4 requests wait with 20 tokens, max_waiting is 4 (1 seq" in ask(bridge, [[1]])
    file.publish(ROOM)
    assert DOWN in ask(bridge, [[1]])
    expected = {"engine_down": 3, "max_waiting_tokens": 1, "max_waiting": 1}
    assert bridge.calls.clients.refused == expected


def test_nothing_of_a_refused_request_waits_to_be_collected(bridge: Bridge, tmp_path: Path) -> None:
    LoadFile(path_of(tmp_path / "engine.sock")).publish(FULL)
    with without_collector():
        reply = Recorder()
        bridge.answer(reply, bridge.raise_if_full)
        kept = [weakref.ref(each) for each in (reply, reply.error)]
        del reply
        assert [each() for each in kept] == [None, None]


@pytest.mark.parametrize("model", [Fused, Vllm])
def test_nothing_is_tokenised_for_an_engine_that_is_full(
    bridge: Bridge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: type
) -> None:
    tokenised: list[str] = []
    encode = TEXT._encoder.encode
    monkeypatch.setattr(
        TEXT._encoder, "encode", lambda text: tokenised.append(text) or encode(text)
    )
    file = LoadFile(path_of(tmp_path / "engine.sock"))
    wiring = Fused(bridge, TEXT, False) if model is Fused else Vllm(bridge, TEXT)

    def error() -> str:
        asked, reply = question("short", model), Recorder()
        bridge.answer(reply, lambda: wiring.start(asked))
        return "" if reply.error is None else reply.error.message

    file.publish(FULL)
    assert "max_waiting is 4" in error()
    assert tokenised == []
    wiring.close()
