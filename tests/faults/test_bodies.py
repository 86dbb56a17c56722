"""Bodies that keep tritonserver busy, beside streams of others: none of these ends early.

And a server whose threads rest is restarted: busy is distinguished from dead.
"""

import gzip
import http.client
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from fixtures.faults.asking import Ask, asks, pieces
from fixtures.faults.bounds import assert_promised
from fixtures.faults.supervised import Supervision, supervised, wait_line
from fixtures.server.sixty_ask import call
from fixtures.server.support import LONG, PROMPT, Client
from fixtures.waiting import wait_for
from slipstream_serve.server import server_directory
from slipstream_serve.triton import TritonServer

pytestmark = pytest.mark.triton

NUM_LOADS = 8  # processes that compute beside the server, on two cores
INFLATED = 400 << 20  # bytes
PATIENCE_S = 120.0
NUM_IDS = 30_000_000


@pytest.fixture(scope="module")
def supervision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervision]:
    """A server with one HTTP thread: what keeps it busy keeps the probe and all streams waiting."""
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    usual = TritonServer._arguments
    one = "--http-thread-count=1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonServer, "_arguments", lambda *given: [*usual(*given), one])
        with supervised(tmp_path_factory.mktemp("bodies")) as supervision:
            yield supervision


@pytest.fixture(scope="module")
def client(supervision: Supervision) -> Client:
    return Client(supervision._server)


@pytest.fixture
def loaded() -> Iterator[None]:
    """The machine has something else to do on every core."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(NUM_LOADS)]
    yield
    for process in processes:
        process.kill()
        process.wait()


class Stream(threading.Thread):
    """Reads an answer until the end of the block."""

    def __init__(self, client: Client, ask: Ask) -> None:
        super().__init__(daemon=True)
        self.num_pieces = 0
        self.error = ""
        self._is_over = threading.Event()
        self._pieces = pieces(client, replace(ask, end_id=-1), PATIENCE_S)

    def run(self) -> None:
        try:
            for _ in self._pieces:
                self.num_pieces += 1
                if self._is_over.is_set():
                    break
            else:
                self.error = "it has ended"
            self._pieces.close()
        except Exception as error:
            self.error = repr(error)

    def leave(self) -> None:
        self._is_over.set()
        self.join(PATIENCE_S)
        assert not self.is_alive()


def post(client: Client, path: str, body: bytes, **headers: str) -> tuple[int, str]:
    address = client.http.removeprefix("http://")
    with closing(http.client.HTTPConnection(address, timeout=PATIENCE_S)) as connection:
        connection.request("POST", f"/v2/models/{path}", body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()


def inflating(client: Client) -> None:
    body = gzip.compress(b" " * INFLATED, 1)
    for path in ("preprocessing/infer", "postprocessing/versions/1/infer"):
        for _ in range(3):
            status, said = post(client, path, body, **{"Content-Encoding": "gzip"})
            assert (status, "Content-Encoding must be identity" in said) == (500, True), said


def inflating_over_grpc(client: Client) -> None:
    asked = (("grpc-internal-encoding-request", "gzip"),)
    code, said, _ = call(client, "ModelInfer", bytes(INFLATED), asked)
    assert (code, "Compressed messages are refused" in said) == ("INTERNAL", True), said


def brackets(client: Client) -> None:
    for path in ("preprocessing/infer", "ensemble/generate", "vllm_model/generate_stream"):
        for body in (b"[" * 10_000_000, b'{"a":' * 4_000_000, b"[" * 60_000_000):
            status, said = post(client, path, body)
            assert (status, "nested too deeply" in said) == (500, True), said


def long_ids(client: Client) -> None:
    """Not refused before it is parsed: 1 s of processor time, several on a loaded machine."""
    number = b'{"input_lengths": %d, "request_output_len": 1, ' % (NUM_IDS + 1)
    body = number + b'"input_ids": [9' + b",9" * NUM_IDS + b"]}"
    status, said = post(client, "tensorrt_llm/generate", body)
    assert (status, "INVALID_ARGUMENT" in said) == (400, True), said


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    "send",
    [inflating, inflating_over_grpc, brackets, long_ids],
    ids=lambda f: f.__name__,
)
def test_no_stream_of_others_ends(
    supervision: Supervision, client: Client, send: Callable[[Client], None]
) -> None:
    """A stream of each model and protocol runs before the bodies and goes on after them."""
    streams = [Stream(client, ask) for ask in asks(8, LONG)]
    pid = client.server.pid
    with supervision.on() as lines:
        for stream in streams:
            stream.start()
        wait_for(lambda: all(stream.num_pieces for stream in streams))
        send(client)
        seen = [stream.num_pieces for stream in streams]
        wait_for(lambda: all(s.num_pieces > n for s, n in zip(streams, seen, strict=True)))
        assert [stream.error for stream in streams] == [""] * len(streams)
        for stream in streams:
            stream.leave()
        assert not lines
    assert client.server.pid == pid
    client.wait_idle(PATIENCE_S)


# --- and a server that is dead --------------------------------------------------------------------

# It waits for the threads, as a debugger must: who is killed is not gone before that.
_HOLD = """
import ctypes, os, sys
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
seize, interrupt, of_all = 0x4206, 0x4207, 0x40000000
for thread in os.listdir(f"/proc/{sys.argv[1]}/task"):
    for request in (seize, interrupt):
        if ptrace(request, int(thread), None, None):
            sys.exit(os.strerror(ctypes.get_errno()))
print("held", flush=True)
while True:
    try:
        os.waitpid(-1, of_all)
    except ChildProcessError:
        break
"""


@pytest.mark.slow
def test_a_server_whose_threads_all_wait_is_started_again(
    supervision: Supervision, client: Client, record_property
) -> None:
    """Simulate a deadlock: the process is alive, not stopped (no SIGSTOP), and never answers."""
    holders = []

    def measure() -> dict[str, float]:
        lines.clear()
        command = [sys.executable, "-c", _HOLD, str(client.server.pid)]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE)
        holders.append(holder)
        assert holder.stdout is not None
        if holder.stdout.readline() != b"held\n":
            pytest.skip("no process may hold the threads of another here")
        begin = time.monotonic()
        wait_line(lines, "tritonserver did not answer for 3.5 s; started tritonserver again")
        return {"repaired": time.monotonic() - begin}

    try:
        with supervision.on() as lines:
            assert_promised({"repaired": 15.0}, measure, record_property)
            assert client.generate("ensemble", text_input=PROMPT, max_tokens=2)
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
    assert os.path.exists(f"/proc/{client.server.pid}")
