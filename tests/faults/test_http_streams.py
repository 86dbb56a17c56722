"""Answers over HTTP that Triton cuts short and ends in good order: not by us, and never unseen."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from fixtures.faults.asking import Ask, ClosedError, CutError, asks, pieces
from fixtures.faults.planter import plant, write_python
from fixtures.server.support import CHECKPOINT, Client, RequestError, compose, end, start
from slipstream_client.bench.messages import Record
from slipstream_client.bench.worker import transport
from slipstream_contract.whole import CUT
from slipstream_serve.probe import stream_text
from slipstream_serve.server import server_directory
from slipstream_serve.triton import CONTROL_HEADER, Endpoints, ServeError, TritonServer

TEXT_MODELS = ("ensemble", "tensorrt_llm_bls", "vllm_model")
PACE_S = 0.1  # so slow that all are there at once on any machine
LOAD_S = 5.0  # of a model whose process starts slowly
PATIENCE_S = 180.0


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Run a server with one HTTP thread, which has all streams."""
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    folder, usual = tmp_path_factory.mktemp("streams"), TritonServer._arguments
    one = "--http-thread-count=1"
    write_python(folder / "python", orders_of(folder))
    options = ("--kv-cache-tokens", "8192", "--dtype", "float32")
    repository = compose(CHECKPOINT, folder / "models", *options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonServer, "_arguments", lambda *given: [*usual(*given), one])
        patch.setenv("SLIPSTREAM_PYTHON", str(folder / "python"))
        server = start(repository, folder / "log", is_supervised=True)
    try:
        yield Client(server)
    finally:
        end(server)


def orders_of(folder: Path) -> Path:
    """Make the folder of orders to the engine."""
    orders = folder / "orders"
    orders.mkdir(exist_ok=True)
    return orders


def answers(client: Client, questions: list[Ask]) -> tuple[list[threading.Thread], dict[int, str]]:
    """Threads that ask over HTTP, and by the seed what they got so far."""
    found = {ask.seed: "" for ask in questions}

    def run(ask: Ask) -> None:
        try:
            for piece in pieces(client, ask, PATIENCE_S):
                found[ask.seed] += piece
        except (ClosedError, RequestError, OSError) as error:
            found[ask.seed] += f" {error!r}"

    threads = [threading.Thread(target=run, args=(ask,), daemon=True) for ask in questions]
    for thread in threads:
        thread.start()
    return threads, found


def load_over_http(client: Client, model: str) -> None:
    """Load over HTTP, unlike `serve`: the thread that serves all clients does it."""
    server = client.server
    request = urllib.request.Request(
        f"{client.http}/v2/repository/models/{model}/load",
        b"{}",
        {CONTROL_HEADER: server._control_key},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        assert reply.status == 200


def load_slowly(client: Client, model: str, *, is_http: bool = False) -> float:
    """Load it anew, with processes that stand still meanwhile; the seconds that it took."""
    server = client.server
    server.control("unload", model, PATIENCE_S)
    old = set(server.stubs())

    def hold() -> None:
        """All that the load starts, from the first process on: one of them may end by itself."""
        held: set[int] = set()
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            for pid in set(server.stubs()) - old - held:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                    until = until if held else time.monotonic() + LOAD_S
                    held.add(pid)
            time.sleep(0.01)
        for pid in held:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    begin = time.monotonic()
    threading.Thread(target=hold, daemon=True).start()
    if is_http:
        load_over_http(client, model)
    else:
        server.control("load", model, PATIENCE_S)
    return time.monotonic() - begin


@pytest.mark.triton
@pytest.mark.parametrize("is_http", [False, True])
@pytest.mark.rest
def test_a_model_that_is_loaded_slowly_cuts_no_answer_short(
    client: Client, *, is_http: bool
) -> None:
    """Over HTTP the load keeps the one thread from all streams: what comes in that time must wait,
    and of itself Triton remembers 278 responses of all streams. Over gRPC it keeps nobody."""
    models = ("tensorrt_llm_bls", "tensorrt_llm", "ensemble")
    questions = [ask for ask in asks(24, 150, models=models) if ask.is_http]
    assert len(questions) == 12
    want = None
    for is_loading in (False, True):
        orders = orders_of(client.server.repository.parent)
        plant(orders, "pace", seconds=PACE_S)
        threads, found = answers(client, questions)
        client.wait_running(len(questions))
        plant(orders, "heal")
        if is_loading:
            assert load_slowly(client, "vllm_model", is_http=is_http) > 0.8 * LOAD_S
        for thread in threads:
            thread.join(2 * PATIENCE_S)
            assert not thread.is_alive()
        want = want or found
        assert found == want
    assert client.generate("vllm_model", text_input="a", sampling_parameters='{"max_tokens": 2}')


# --- and where it happens nonetheless -------------------------------------------------------------


@contextmanager
def playing(*events: str) -> Iterator[int]:
    """An HTTP server that answers everything with these events, in good order; its port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for chunk in (*(f"data: {event}\n\n".encode() for event in events), b""):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


MARKS = dict.fromkeys(TEXT_MODELS[:2], '"last_token_time_ns": 0')
MARKS["vllm_model"] = '"finish_reason": "length"'


async def measured(address: str, model: str) -> Record:
    """What `slipstream bench` notes of one answer."""
    record = Record(0, 0, 0)
    async with transport("http", address.removeprefix("http://"), model, 9) as way:
        await way.send(b"{}", record)
    return record


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_an_answer_without_its_last_event_is_no_answer(model: str) -> None:
    first, last = '{"text_output": "a", "finish_reason": "None"}', '{"text_output": "b", %s}'
    for events in ((first, last % MARKS[model]), (first,), ()):
        with playing(*events) as port:
            address = f"http://127.0.0.1:{port}"
            record = asyncio.run(measured(address, model))
            got = []
            told = stream_text(address, model, "x", 2)
            asked = pieces(SimpleNamespace(http=address), Ask(model, "x", 1, is_http=True), 9)
            if len(events) == 2:
                assert (list(told), list(asked)) == (["a", "b"], ["a", "b"])
                assert record.code == ""
                continue
            with pytest.raises(ServeError, match="without its last event"):
                got.extend(told)
            with pytest.raises(CutError, match="without its last event"):
                got.extend(asked)
            assert len(got) == 2 * len(events)
            assert (record.code, record.message) == ("UNAVAILABLE", CUT)


# --- loading a model ------------------------------------------------------------------------------


def test_a_model_that_cannot_be_loaded_is_told_in_one_line(tmp_path: Path) -> None:
    server = TritonServer(tmp_path, Endpoints.free(), tmp_path / "log", is_supervised=True)
    try:
        with pytest.raises(ServeError, match=r"^load of model ensemble: \S[^\n]*$"):
            server.control("load", "ensemble", 5)
    finally:
        server.stop()


# --- room for notes -------------------------------------------------------------------------------


_OWN = """
import os, socket
from slipstream_serve.workarounds.triton_24_10 import http_notes
ends = [*socket.socketpair(), socket.socket(), *socket.socketpair(type=socket.SOCK_DGRAM)]
before = [end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for end in ends]
room, count = http_notes.widen(os.getpid()), len(os.listdir("/proc/self/fd"))
after = [end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for end in ends]
http_notes.widen(os.getpid())
assert len(os.listdir("/proc/self/fd")) == count
print(room, *(now // old for now, old in zip(after, before)))
"""
_DROP_FROM_BOUNDS, _NET_ADMIN = 24, 12  # of prctl


@pytest.mark.parametrize("may_force", [True, False])
def test_sockets_get_as_much_room_as_the_kernel_allows(*, may_force: bool) -> None:
    prctl = ctypes.CDLL(None).prctl
    drop = None if may_force else lambda: prctl(_DROP_FROM_BOUNDS, _NET_ADMIN)
    done = subprocess.run(
        [sys.executable, "-c", _OWN], capture_output=True, text=True, check=True, preexec_fn=drop
    )
    room, *grown = map(int, done.stdout.split())
    allowed = int(Path("/proc/sys/net/core/wmem_max").read_text())
    forced, usual = (2 * each // 768 for each in (32 << 20, min(allowed, 32 << 20)))
    assert room in ((forced, usual) if may_force else (usual,))  # not everybody may
    assert min(grown[:2]) > 1
    assert grown[2:] == [1, 1, 1]
