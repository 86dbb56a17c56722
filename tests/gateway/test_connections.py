"""Connections as rude clients use them: gone, slow, silent, at once; and the end of a server."""

import contextlib
import json
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from fixtures.gateway.served import (
    DONE,
    MODEL,
    Gateway,
    Response,
    make_long_repository,
    serving,
)
from fixtures.server.support import LONG
from slipstream_gateway.settings import MAX_HEADER_BYTES

LASTING = {"prompt": "a", "max_tokens": LONG, "ignore_eos": True}


def send(
    gateway: Gateway, body: dict[str, Any], path: str = "/v1/completions", version: str = "1.1"
) -> socket.socket:
    data = json.dumps(body).encode()
    client = gateway.socket()
    head = f"POST {path} HTTP/{version}\r\nhost: a\r\ncontent-length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    return client


def wait_open(gateway: Gateway, count: int, timeout_s: float = 120.0) -> None:
    begin = time.monotonic()
    while gateway.get("/load").json["server_load"] != count:
        assert time.monotonic() - begin < timeout_s, gateway.figures()
        time.sleep(0.01)


def wait_engine(gateway: Gateway, state: str, count: int, timeout_s: float = 120.0) -> None:
    """Until the engine says that so many requests are running, or waiting."""
    name = f'slipstream_gateway_engine_{state}{{model="{MODEL}"}}'
    begin = time.monotonic()
    while True:
        gateway.get("/health")  # asks the engine
        if gateway.figures()[name] == count:
            return
        assert time.monotonic() - begin < timeout_s, gateway.figures()
        time.sleep(0.01)


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_client_of_http_1_0_gets_bytes_until_the_connection_ends(gateway, is_streaming):
    """As `curl -0` and `ab` expect: such clients do not know chunks."""
    body = {"prompt": "a", "max_tokens": 5, "temperature": 0, "stream": is_streaming}
    with send(gateway, body, version="1.0") as client:
        head, _, data = b"".join(iter(lambda: client.recv(1 << 16), b"")).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    whole = gateway.complete(**body | {"stream": False}).json["choices"]
    if is_streaming:
        assert data.endswith(b"data: [DONE]\n\n")
        lines = data.decode().split("\n\n")
        assert all(line.startswith("data: ") for line in lines[:-1])
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-2]]
        assert "".join(texts) == whole[0]["text"]
    else:
        assert json.loads(data)["choices"] == whole


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_client_that_leaves_cancels_its_request(long_gateway: Gateway, is_streaming: bool):
    before = long_gateway.figures().get('slipstream_gateway_ended_total{how="abandoned"}', 0)
    clients = [send(long_gateway, {**LASTING, "stream": is_streaming, "n": 2}) for _ in range(3)]
    wait_open(long_gateway, 3)
    for client in clients:
        client.close()
    long_gateway.wait_idle()
    after = long_gateway.figures()['slipstream_gateway_ended_total{how="abandoned"}']
    assert after == before + 3


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_client_that_leaves_with_requests_behind_cancels_the_one_that_runs(
    long_gateway: Gateway, is_streaming: bool
):
    """The server's own flag of the end is that of the last request that came, which never ran."""
    before = long_gateway.figures().get('slipstream_gateway_ended_total{how="abandoned"}', 0)
    client = send(long_gateway, {**LASTING, "stream": is_streaming})
    wait_open(long_gateway, 1)
    data = json.dumps({**LASTING, "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(data)
    client.sendall((head + data) * 2)
    time.sleep(0.2)
    client.close()
    long_gateway.wait_idle(120)
    after = long_gateway.figures()['slipstream_gateway_ended_total{how="abandoned"}']
    assert after == before + 1


def test_a_deadline_is_an_error_with_all_tokens_before_it(long_gateway: Gateway):
    whole = long_gateway.complete(**LASTING, timeout_ms=300)
    assert whole.status == 504
    assert "timeout_ms" in whole.error["message"] or "300" in whole.error["message"]
    for timeout_ms in (400 << doubled for doubled in range(7)):  # enough for a token on any machine
        streamed = long_gateway.complete(**LASTING, timeout_ms=timeout_ms, stream=True)
        assert streamed.status == 200
        *chunks, error, last = streamed.events
        assert last == DONE
        assert error["error"]["code"] == "deadline_exceeded"
        if chunks:
            break
    assert chunks
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)


def test_a_connection_serves_many_requests(gateway: Gateway):
    connection = gateway.connect()
    with contextlib.closing(connection):
        for is_streaming in (True, False, True):
            body = {"prompt": "import os\n", "max_tokens": 3, "stream": is_streaming}
            connection.request("POST", "/v1/completions", json.dumps(body))
            found = connection.getresponse()
            assert found.status == 200
            assert (b"[DONE]" in found.read()) == is_streaming


def test_an_offer_to_upgrade_is_passed_over(gateway: Gateway):
    """As Java's HttpClient sends it."""
    offer = {
        "Connection": "Upgrade, HTTP2-Settings",
        "Upgrade": "h2c",
        "HTTP2-Settings": "AAMAAABk",
    }
    body = {"prompt": "a", "max_tokens": 3, "seed": 1}
    found = gateway.post("/v1/completions", body, offer)
    assert found.status == 200
    assert found.json["choices"] == gateway.complete(**body).json["choices"]


def test_requests_sent_at_once_are_answered_in_order(gateway: Gateway):
    bodies = [{"prompt": "a", "max_tokens": size, "ignore_eos": True} for size in (4, 2)]
    data = b""
    for body in bodies:
        text = json.dumps(body).encode()
        data += b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(
            text
        )
        data += text
    with gateway.socket() as client:
        client.sendall(data)
        shown = b""
        while shown.count(b'"completion_tokens":') < 2:
            shown += client.recv(1 << 16)
    assert shown.index(b'"completion_tokens":4') < shown.index(b'"completion_tokens":2')


def test_headers_without_an_end_are_refused(gateway: Gateway):
    with gateway.socket() as client:
        client.sendall(b"GET /ping HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(2 * MAX_HEADER_BYTES // 1000):
                client.sendall(b"x-a: " + b"b" * 993 + b"\r\n")
        with contextlib.suppress(ConnectionError):
            assert client.recv(1000).startswith(b"HTTP/1.1 431 ")
    assert gateway.get("/ping").status == 200


def test_bytes_that_are_no_http(gateway: Gateway):
    for data in (b"\x16\x03\x01\x02\x00\x01\x00", b"NONSENSE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        with gateway.socket() as client:
            client.sendall(data)
            assert client.recv(100)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 505")
    assert gateway.get("/ping").status == 200


def read_events(client: socket.socket, data: bytes = b"") -> Response:
    while not data.endswith(b"0\r\n\r\n"):
        more = client.recv(1 << 16)
        assert more, data[-200:]
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        parts.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return Response(int(head.split()[1]), {}, b"".join(parts))


@pytest.mark.rest
def test_a_slow_reader_gets_all_in_fewer_events(gateway: Gateway):
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "ignore_eos": True,
        "max_tokens": 90,
        "n": 10,
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 20,
    }
    path = "/v1/chat/completions"
    wanted = gateway.post(path, body).json["choices"]
    client = send(gateway, {**body, "stream": True}, path)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with contextlib.closing(client):
        begin = time.monotonic()
        while gateway.figures()[f'slipstream_gateway_engine_running{{model="{MODEL}"}}']:
            assert time.monotonic() - begin < 120
            time.sleep(0.1)
        chunks = read_events(client).chunks
    texts, entries, num_events = [""] * 10, [0] * 10, 0
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        found = (choice["logprobs"] or {}).get("content", [])
        entries[choice["index"]] += len(found)
        num_events += bool(found)
    assert texts == [choice["message"]["content"] for choice in wanted]
    assert entries == [90] * 10
    assert num_events < 900, "tokens that came while the client was behind are joined"


@pytest.mark.rest
def test_an_end_while_streams_run(long_repository: Path, tmp_path: Path):
    """New requests get 503, running ones their time, and then an error that SDKs raise."""
    options = ("--drain", "1")
    with serving(long_repository, tmp_path / "log", *options) as gateway:
        long = [
            send(gateway, {**LASTING, "stream": is_streaming}) for is_streaming in (True, False)
        ]
        short = send(gateway, {**LASTING, "max_tokens": 2, "stream": True})
        wait_open(gateway, 3)
        gateway.process.send_signal(signal.SIGTERM)
        assert read_events(short).events[-1] == DONE
        *_, error, last = read_events(long[0]).events
        assert (last, error["error"]["type"]) == (DONE, "server_error")
        assert long[1].recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        assert gateway.process.wait(120) == 0


@pytest.mark.rest
def test_a_full_engine_is_429_with_a_time(tmp_path: Path):
    repository = make_long_repository(tmp_path, max_num_seqs=1, max_waiting=2)
    with serving(repository, tmp_path / "log") as gateway:
        busy: list[socket.socket] = []
        for state, count in (("running", 1), ("waiting", 1), ("waiting", 2)):
            busy.append(send(gateway, {**LASTING, "stream": True}))
            wait_engine(gateway, state, count)  # else two wait at once, and a third is refused
        full = gateway.complete(prompt="a", max_tokens=1)
        assert full.status == 429
        assert full.error["code"] == "rate_limit_exceeded"
        assert int(full.headers["retry-after-ms"]) >= 50
        assert int(full.headers["retry-after"]) >= 1
        for client in busy:
            client.close()
        gateway.wait_idle()


@pytest.mark.rest
def test_a_silent_stream_gets_comments(tmp_path: Path):
    """Status 200 comes with the first comment, before any token."""
    repository = make_long_repository(tmp_path, max_num_seqs=1)
    with serving(repository, tmp_path / "log", "--keep-alive", "0.5") as gateway:
        first = send(gateway, {**LASTING, "stream": True})
        wait_open(gateway, 1)
        second = send(gateway, {"prompt": "a", "max_tokens": 2, "stream": True})
        data = b""
        while b": keep-alive" not in data:
            data += second.recv(1 << 12)
        assert data.startswith(b"HTTP/1.1 200 ")
        assert b"data:" not in data
        first.close()
        assert read_events(second, data).events[-1] == DONE
