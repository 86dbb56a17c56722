"""Ways a stream can end other than by itself; afterwards nothing is held and all serve on.

How clients leave is `test_cancels`.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from fixtures.server.support import (
    LONG,
    PROMPT,
    TEXT_MODELS,
    Client,
    RequestError,
    lasting,
    serving,
    text,
)
from fixtures.tiers import quick_of
from slipstream_serve.triton import SHARED_MEMORY

pytestmark = pytest.mark.triton


def is_alive(pid: int) -> bool:
    """Whether it runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except OSError:
        return False


class Streams:
    """Long streams, a thread for each; how they ended."""

    def __init__(self, client: Client, models: Sequence[str]) -> None:
        self.ends: list[str] = []
        self._begun = threading.Semaphore(0)
        threads = [threading.Thread(target=self._read, args=(client, model)) for model in models]
        self.threads = threads
        for thread in threads:
            thread.start()

    def _read(self, client: Client, model: str) -> None:
        try:
            for i, _ in enumerate(client.iterate(model, **lasting(model))):
                if i == 0:
                    self._begun.release()
            self.ends.append("the end")
        except Exception as error:  # whatever the client calls it
            self.ends.append(str(error))

    def wait_begun(self) -> None:
        """Until each has a token."""
        for _ in self.threads:
            assert self._begun.acquire(timeout=120)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_a_client_that_cancels_frees_its_blocks(idle, model):
    with idle.cancelling():
        stream = idle.iterate(model, **lasting(model))
        next(stream)
        stream.close()


def wait_second_block(client: Client) -> None:
    """Wait until what runs has more tokens than a block holds."""
    begin = time.monotonic()
    while (state := client.health())["kv_blocks_total"] - state["kv_blocks_free"] < 2:
        assert time.monotonic() - begin < 120, state
        time.sleep(0.02)


def test_stop_ends_the_request_of_the_same_id_with_what_it_has(idle):
    inputs = lasting("tensorrt_llm") | {"streaming": False}
    answers: list[dict[str, object]] = []
    thread = threading.Thread(
        target=lambda: answers.append(idle.generate("tensorrt_llm", **inputs, id="77"))
    )
    thread.start()
    idle.wait_running(1)
    wait_second_block(idle)
    stop = {"input_ids": [0], "input_lengths": 1, "request_output_len": 1}
    stop |= {"Streaming": False}  # as NVIDIA's client sends it
    idle.generate("tensorrt_llm", **stop, stop=True, id="78")  # nobody's
    assert idle.health()["running"] == 1
    answer = idle.generate("tensorrt_llm", **stop, stop=True, id="77")
    assert "output_ids" not in answer
    thread.join(120)
    assert 3 < answers[0]["sequence_length"] < 3 + LONG
    idle.wait_idle(120)


@pytest.mark.parametrize("model", [*TEXT_MODELS, "tensorrt_llm"])
def test_an_id_that_is_running_is_refused_and_the_first_goes_on(idle, model):
    short = lasting(model, 4)
    with idle.cancelling():
        first = idle.iterate(model, "twice", **lasting(model))
        next(first)
        for _ in range(6):  # of which some are given to another process of the model
            with pytest.raises(RequestError, match=r"ALREADY_EXISTS: .*twice"):
                idle.events(model, **short, id="twice")
        assert len([next(first) for _ in range(5)]) == 5
        first.close()
    assert idle.events(model, **short, id="twice")


def engine_pid(client) -> int | None:
    """None while there is no engine, which health then says by its code."""
    status, answer = client.post("slipstream_health/infer", {"inputs": []}, 60)
    if status != 200:
        assert "UNAVAILABLE" in answer
        return None
    return client.health()["engine_pid"]


def retry(ask, timeout_s: float):
    """What `ask` answers once it is not UNAVAILABLE any more."""
    begin = time.monotonic()
    while True:
        try:
            return ask()
        except RequestError as error:
            if "UNAVAILABLE" not in str(error) or time.monotonic() - begin > timeout_s:
                raise
            time.sleep(0.05)


@pytest.mark.parametrize("model", quick_of(TEXT_MODELS, ["ensemble"]))
def test_a_killed_engine_ends_its_streams_with_an_error_and_is_replaced(idle, model):
    pid = idle.health()["engine_pid"]
    streams = Streams(idle, [model] * 4)
    streams.wait_begun()
    os.kill(pid, signal.SIGKILL)
    begin = time.monotonic()
    for thread in streams.threads:
        thread.join(120)
    assert len(streams.ends) == 4
    assert all("UNAVAILABLE" in end for end in streams.ends), streams.ends
    while (now := engine_pid(idle)) is None:
        assert time.monotonic() - begin < 120
        time.sleep(0.1)
    assert now != pid
    # Every bridge finds the new engine by itself, the one that was asked for health perhaps first.
    for each in TEXT_MODELS:
        answer = retry(lambda m=each: idle.generate(m, text_input=PROMPT, max_tokens=4), 60)
        assert answer["text_output"].startswith(PROMPT)


def test_health_fails_in_time_while_the_engine_stands_still(idle):
    pid = idle.health()["engine_pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(RequestError, match="UNAVAILABLE: the engine did not answer within 1 s"):
            idle.ask_health()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert idle.health()["engine_pid"] == pid


@pytest.mark.rest
def test_a_postprocessing_that_stands_still_is_no_cancel(idle):
    inputs = lasting("ensemble", 2000)
    want = text(idle.stream("ensemble", **inputs))
    stream = idle.iterate("ensemble", **inputs)
    responses = [next(stream)]
    pids = idle.stubs("postprocessing")
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(0.3)  # a second, and the server itself would give it up
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert text([*responses, *stream]) == want


@pytest.mark.rest
def test_a_server_that_is_stopped_ends_its_streams_and_leaves_nothing(repository, tmp_path):
    with serving(repository, tmp_path / "log") as client:
        streams = Streams(client, TEXT_MODELS * 2)
        streams.wait_begun()
        processes = list(client.server.processes())
        assert len(processes) > 5
        begin = time.monotonic()
        client.server.stop()
        assert time.monotonic() - begin < 120
        for thread in streams.threads:
            thread.join(120)
            assert not thread.is_alive()
        assert len(streams.ends) == 4
        assert list(client.server.processes()) == []
        begin = time.monotonic()
        while any(is_alive(pid) for pid in processes):  # the kernel takes its time to tear down
            assert time.monotonic() - begin < 120
            time.sleep(0.05)
        assert list(SHARED_MEMORY.glob(f"{client.server._prefix}*")) == []
        assert client.server.exit_code == 0
