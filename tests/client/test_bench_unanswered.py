"""What `slipstream bench` says where no server of ours answers, against real ports."""

import asyncio
import socket
from types import SimpleNamespace

import aiohttp
import pytest
from fixtures.client.answering import answering
from slipstream_client import failures
from slipstream_client.bench import transports, worker
from slipstream_client.bench.load import RequestMaker
from slipstream_client.bench.messages import Record

NAMES = {"grpc": "gRPC", "http": "HTTP"}
START = "is it running (`slipstream serve` starts one), and is this its"


def asked(protocol: str, address: str, prompt: str = "say a") -> Record:
    """Send a request; its record."""
    maker = RequestMaker(protocol, "ensemble", {}, False)
    record = Record(0, 0, 0)

    async def ask() -> None:
        async with worker.transport(protocol, address, "ensemble", 60.0) as sender:
            await sender.send(maker.payload(prompt, 1, ""), record)

    asyncio.run(ask())
    assert not record.is_refused  # a refusal would be no failure
    return record


def answered(protocol: str, words: bytes) -> tuple[Record, str]:
    """Send a request to a port that answers with `words` and hangs up; its record, the address."""

    async def ask() -> tuple[Record, str]:
        async with answering(words) as address:
            return await asyncio.to_thread(asked, protocol, address), address

    return asyncio.run(ask())


@pytest.mark.parametrize("protocol", NAMES)
def test_where_nothing_listens(protocol, free_port):
    record = asked(protocol, f"127.0.0.1:{free_port}")
    address = f"no server answers at 127.0.0.1:{free_port} (Connection refused)"
    assert record.message == f"{address}: {START} {NAMES[protocol]} port?"
    assert record.code == "UNAVAILABLE"


@pytest.mark.parametrize("protocol", NAMES)
def test_a_port_that_hangs_up_may_speak_tls(protocol):
    record, address = answered(protocol, b"")
    assert record.message.startswith(f"no server answers at {address} (")
    assert ", as at a port with TLS, which clients here do not speak): is it" in record.message
    assert record.code == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("protocol", "words", "found"),
    [
        ("grpc", b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", ""),
        ("http", b"\x00\x00\x18\x04\x00\x00\x00\x00\x00", ""),  # gRPC's first frame
        ("http", b"HTTP/1.1 502 Bad\r\nContent-Length: 6\r\n\r\n<html>", " (HTTP_502)"),
        ("http", b'HTTP/1.1 404 No\r\nContent-Length: 12\r\n\r\n{"error":{}}', " (HTTP_404)"),
    ],
)
def test_another_server_is_not_taken_for_tritons(protocol, words, found):
    record, address = answered(protocol, words)
    start = f"what answers at {address} is not Triton's {NAMES[protocol]}{found}: which is its"
    assert record.message.startswith(start)
    assert record.code == "UNAVAILABLE"


def test_a_name_that_does_not_resolve():
    """The errors of both libraries as they are: a resolver may take its time."""
    cause = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    key = SimpleNamespace(host="nosuch", port=1, ssl=True)
    error = aiohttp.ClientConnectorDNSError(key, cause)
    message, code = transports._broken(error, "nosuch:1", "ERROR", "HTTP")
    said = "no server answers at nosuch:1 (Name or service not known): "
    assert (message, code) == (f"{said}{START} HTTP port?", "UNAVAILABLE")
    details = (
        "errors resolving nosuch:1: [field:hostname lookup error:failed: Domain name not found]"
    )
    call = SimpleNamespace(
        details=lambda: details, code=lambda: failures.grpc.StatusCode.UNAVAILABLE
    )
    found = failures.error_from_rpc(call, "nosuch:1")
    assert found.message.startswith("no server answers at nosuch:1 (Domain name not found): is it")


def test_a_model_that_the_server_does_not_have(served):
    text = "Request for unknown model: 'big' is not found"
    record = asked("grpc", served[1], f"fail {text}")
    said = "the server has no model 'big': `slipstream models` lists deployments"
    assert (record.message, record.code) == (said, "NOT_FOUND")
    body = b'{"error":"%b"}' % text.encode()
    head = b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n" % len(body)
    record, _ = answered("http", head + body)
    assert (record.message, record.code) == (said, "NOT_FOUND")
