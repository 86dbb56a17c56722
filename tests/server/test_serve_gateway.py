"""The gateway beside a server: watched by it and ended with it."""

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fixtures.gateway.served import Gateway
from fixtures.ports import held_port
from fixtures.server.listening import listening
from fixtures.server.serve_process import Serve, short_directory
from fixtures.server.support import LONG

pytestmark = [pytest.mark.triton, pytest.mark.beside]


@contextlib.contextmanager
def served(repository: Path, *options: str) -> Iterator[tuple[Serve, Gateway, str]]:
    with held_port() as port, short_directory() as folder:
        serve = Serve(repository, folder / "scratch", *options, openai_port=port)
        try:
            shown = serve.wait_ready()
            log = folder / "scratch" / f"gateway-{port}.log"
            yield serve, Gateway(serve.process, f"127.0.0.1:{port}", log), shown
        finally:
            serve.end(signal.SIGTERM)


def pid_of(port: str) -> int:
    """The gateway's process, by its command line."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"gateway" in words and port.encode() in words:
                return int(entry.name)
    raise AssertionError("no gateway")


@pytest.mark.rest
def test_a_gateway_is_started_watched_and_ended(repository: Path):
    with served(repository) as (serve, gateway, shown):
        assert f"OpenAI   {gateway.url}/v1" in shown
        answer = gateway.complete(prompt="import os\n", max_tokens=4, temperature=0)
        assert answer.status == 200, answer.data
        assert answer.json["usage"]["completion_tokens"] == 4
        port = gateway.address.rpartition(":")[2]
        first = pid_of(port)
        streams = [Stream(gateway) for _ in range(4)]
        for stream in streams:
            stream.wait_token()
        os.kill(first, signal.SIGKILL)
        line = serve.wait_line("started again")
        assert "SIGKILL" in line
        for stream in streams:
            assert stream.is_cut()
        gateway.wait_idle()
        assert pid_of(port) != first
        again = gateway.complete(prompt="import os\n", max_tokens=4, temperature=0)
        assert again.json["choices"] == answer.json["choices"]
        last = pid_of(port)
    assert not Path(f"/proc/{last}").exists()


@pytest.mark.rest
def test_nothing_but_the_named_ports_listens(repository: Path):
    """On loopback; of all processes of `serve`, before a request and after some of each kind."""
    with served(repository) as (serve, gateway, shown):
        wanted = {int(port) for port in re.findall(r"(?:localhost|127\.0\.0\.1):(\d+)", shown)}
        port = int(gateway.address.rpartition(":")[2])
        assert port in wanted
        assert len(wanted) == 4  # HTTP, gRPC, metrics, OpenAI
        for _ in range(2):
            root = psutil.Process(serve.process.pid)
            pids = [root.pid, *(child.pid for child in root.children(recursive=True))]
            found = [each for each in listening(pids) if each.kind != "unix"]
            assert {each.port for each in found} == wanted
            assert {each.address for each in found} == {"127.0.0.1"}
            assert [each.pid for each in found if each.port == port] == [pid_of(str(port))]
            assert gateway.complete(prompt="a", max_tokens=2, stream=True).status == 200
            assert gateway.get("/").status == 200


class Stream:
    """A stream over a raw socket, which takes a long time."""

    def __init__(self, gateway: Gateway) -> None:
        self._socket = gateway.socket()
        self.data = b""
        body = b'{"prompt":"a","max_tokens":%d,"ignore_eos":true,"stream":true}' % LONG
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)
        self._ended = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._socket.recv(1 << 16):
                self.data += data
        self._ended.set()

    def wait_token(self, timeout_s: float = 120.0) -> None:
        begin = time.monotonic()
        while b'"text":' not in self.data:
            assert time.monotonic() - begin < timeout_s, self.data
            time.sleep(0.01)

    def is_cut(self) -> bool:
        return self._ended.wait(120) and b"[DONE]" not in self.data


def test_what_is_wrong_with_the_gateway_is_named_before_anything_starts(
    repository: Path, tmp_path: Path
):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for options, words in (
            ({"openai_port": port}, f"port {port}"),
            ({"openai_port": 1, "options": ["--api-key-file", str(tmp_path / "none")]}, "none"),
        ):
            more = options.pop("options", [])
            with short_directory() as folder:
                serve = Serve(repository, folder / "scratch", *more, **options)
                out, err = serve.process.communicate(timeout=120)
                assert serve.process.returncode == 1
                assert words in err, (out, err)
                assert "starting tritonserver" not in out
