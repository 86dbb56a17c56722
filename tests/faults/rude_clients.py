"""Clients that connect and drop, and clients that hardly read: raw sockets, as strangers do it."""

import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Self

from server.support import PROMPT, Client
from slipstream_client.client import SlipstreamClient

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close by a reset


def http_request(model: str, max_tokens: int) -> bytes:
    """A stream of so many tokens, as bytes."""
    body = {"text_input": PROMPT, "max_tokens": max_tokens, "end_id": -1, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: x\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def _drop_http(client: Client, said: bytes, num_read: int, is_reset: bool) -> None:
    with socket.create_connection(client.server.endpoints.connectable, timeout=30) as link:
        link.sendall(said)
        if num_read:
            link.recv(num_read)
        if is_reset:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def _drop_grpc(client: Client, said: bytes) -> None:
    host, port = client.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=30) as link:
        link.sendall(said)


def _come_and_go(client: Client, model: str, max_tokens: int) -> None:
    """A channel of its own for one question, or for one short answer.

    None is left in the middle: a 24.10 can crash over many cancelled gRPC streams (SIGSEGV).
    """
    with SlipstreamClient(client.address, timeout_s=60) as remote:
        if max_tokens:
            remote.complete(PROMPT, model=model, max_tokens=max_tokens)
        else:
            assert remote.is_ready(model, 60)


def drops(client: Client) -> list[Callable[[], None]]:
    """One of each kind."""
    request = http_request("ensemble", 20)
    return [
        lambda: _drop_http(client, b"", 0, False),
        lambda: _drop_http(client, request[:40], 0, True),
        lambda: _drop_http(client, request, 0, True),
        lambda: _drop_http(client, http_request("tensorrt_llm_bls", 20), 1, False),
        lambda: _drop_grpc(client, b""),
        lambda: _drop_grpc(client, _PREFACE),
        lambda: _come_and_go(client, "ensemble", 0),
        lambda: _come_and_go(client, "tensorrt_llm_bls", 2),
    ]


def drop_many(client: Client, number: int, num_threads: int = 8) -> None:
    """So many clients come and go, each kind as often."""
    kinds = drops(client)
    errors: list[BaseException] = []

    def run(first: int) -> None:
        try:
            for index in range(first, number, num_threads):
                kinds[index % len(kinds)]()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


class SlowReaders:
    """So many HTTP streams of which one byte a second is read, until the block is left."""

    def __init__(self, client: Client, number: int, model: str, max_tokens: int) -> None:
        request = http_request(model, max_tokens)
        self.num_read = 0
        self._links = []
        for _ in range(number):
            link = socket.socket()
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2304)  # before it connects
            link.connect(client.server.endpoints.connectable)
            link.sendall(request)
            self._links.append(link)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._is_over.wait(1.0):
            for link in select.select(self._links, [], [], 0)[0]:
                self.num_read += len(link.recv(1))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        for link in self._links:
            link.close()


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Returns when the condition holds."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < timeout_s
        time.sleep(0.05)
