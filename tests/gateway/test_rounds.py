"""Rounds of writing: bounded by their cost, never for first and last tokens; no text is lost."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream import wire
from slipstream_contract.vocab import TokenBytes
from slipstream_gateway import engine_client
from slipstream_gateway.engine_client import EngineClient, Route
from slipstream_gateway.sequences import Answering, PromptPart
from slipstream_gateway.token_texts import TokenTexts
from slipstream_runtime.directory import Runtime

CHECKPOINT = Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
VOCAB = TokenBytes.load(CHECKPOINT)
TEXTS = TokenTexts(VOCAB)
COST_S = 0.002  # of the processor, for each write


class Costly:
    """An exchange whose writes cost time of the processor."""

    def __init__(self, is_urgent: bool) -> None:
        self.is_urgent = is_urgent
        self.num_waiting = self.num_taken = self.num_writes = 0

    def put(self, index: int, tokens: wire.Tokens) -> None:
        self.num_waiting += 1

    def flush(self) -> None:
        end_s = time.thread_time() + COST_S
        while time.thread_time() < end_s:
            pass
        self.num_writes += 1
        self.num_taken += self.num_waiting
        self.num_waiting = 0


@pytest.mark.parametrize(
    "pace",
    [
        engine_client.FEW_CORES,
        pytest.param(engine_client.MANY_CORES, marks=pytest.mark.rest),
    ],
)
@pytest.mark.parametrize("is_urgent", [False, True])
def test_a_round_waits_for_what_it_costs(tmp_path, monkeypatch, is_urgent, pace):
    monkeypatch.setattr(engine_client, "PACE", pace)
    exchange, num_steps = Costly(is_urgent), 60

    async def run() -> float:
        runtime = Runtime(tmp_path, "m")
        runtime.home.mkdir()
        engine = EngineClient(runtime, asyncio.get_running_loop(), lambda: None)
        engine.routes[1] = Route(exchange, 0)  # type: ignore[arg-type]
        begin_s = time.monotonic()
        for step in range(num_steps):
            engine.take(wire.StepOutputs(step, 0, [wire.Tokens(1, 0, [300], [])]))
            await asyncio.sleep(0.001)
        seconds = time.monotonic() - begin_s
        while exchange.num_taken < num_steps:  # the last of them, without another step
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.close)
        return seconds

    seconds = asyncio.run(asyncio.wait_for(run(), 30))
    assert exchange.num_taken == num_steps
    if is_urgent:
        assert exchange.num_writes == num_steps
    else:
        assert exchange.num_writes <= 1.3 * pace.share * seconds / COST_S + 2


IDS = st.integers(0, VOCAB.size - 1)


@given(parts=st.lists(st.lists(IDS, max_size=4), min_size=1, max_size=8), data=st.data())
def test_tokens_that_wait_together_give_the_same_text(parts, data):
    """Taken one by one, or joined at any places: the same text, ids and end."""
    messages = [wire.Tokens(1, 0, ids, []) for ids in parts]
    perf = wire.Perf(0, 0, 0, 0, 0, 0, 0)
    finished = wire.Finished(wire.FinishReason.LENGTH, 1, 1, perf)
    last = messages.pop()
    cut = data.draw(st.integers(0, len(VOCAB.raw(last.token_ids[-1])) if last.token_ids else 0))
    messages.append(wire.Tokens(1, 0, last.token_ids, [], drop_bytes=cut, finished=finished))
    found = []
    for joins in ([False] * len(messages), [data.draw(st.booleans()) for _ in messages]):
        answer = Answering(TEXTS.decoder(True), PromptPart([1], None, None, VOCAB), None)
        pieces = []
        for message, waits in zip(messages, joins, strict=True):
            answer.put(message)
            if not waits or message.finished:
                pieces.append(answer.take())
        text = "".join(delta.text for piece in pieces for delta in piece.deltas)
        ids = [each for piece in pieces for each in piece.token_ids]
        found.append((text, ids, pieces[-1].finished))
    assert found[0] == found[1]


def test_more_streams_than_the_usual_limit_of_files():
    """The gateway's process raises its soft limit, which is 1,024 by default, to the hard one."""
    code = (
        "import resource as r\n"
        "from slipstream_gateway.server import allow_connections\n"
        "hard = r.getrlimit(r.RLIMIT_NOFILE)[1]\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (1024, hard))\n"
        "allow_connections()\n"
        "print(r.getrlimit(r.RLIMIT_NOFILE)[0] == min(hard, 65536))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "True\n"
