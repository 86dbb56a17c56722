"""The protocols by which `slipstream bench` reaches a server."""

import contextlib
from collections.abc import AsyncIterator

from slipstream_client.bench.openai import OpenAITransport
from slipstream_client.bench.transports import GrpcTransport, HttpTransport, Transport

GRPC, HTTP, OPENAI = PROTOCOLS = ("grpc", "http", "openai")


@contextlib.asynccontextmanager
async def transport(
    protocol: str, address: str, model: str, timeout_s: float
) -> AsyncIterator[Transport]:
    """Open the transport of a protocol, one of `PROTOCOLS`; close it at the end."""
    found: Transport
    if protocol == OPENAI:
        found = OpenAITransport(address, timeout_s)
    elif protocol == HTTP:
        found = HttpTransport(address, f"/v2/models/{model}/generate_stream", timeout_s)
    else:
        found = GrpcTransport(address, timeout_s)
    try:
        yield found
    finally:
        await found.close()
