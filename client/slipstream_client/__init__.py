"""SDK and the `slipstream` command; depends on the contract only.

    from slipstream_client import SlipstreamClient

    with SlipstreamClient("127.0.0.1:8001") as client:
        for chunk in client.stream("def add(a, b):", max_tokens=32):
            print(chunk.text, end="", flush=True)

The classes are imported on first use: the command needs no gRPC to start a server.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream_contract.errors import Code, ContractError

    from slipstream_client.aio import AsyncChunkStream, AsyncSlipstreamClient
    from slipstream_client.client import ChunkStream, SlipstreamClient
    from slipstream_client.failures import RequestTimeoutError
    from slipstream_client.results import Chunk, Completion

__all__ = [
    "AsyncChunkStream",
    "AsyncSlipstreamClient",
    "Chunk",
    "ChunkStream",
    "Code",
    "Completion",
    "ContractError",
    "RequestTimeoutError",
    "SlipstreamClient",
]

_MODULES = {
    "AsyncChunkStream": "slipstream_client.aio",
    "AsyncSlipstreamClient": "slipstream_client.aio",
    "Chunk": "slipstream_client.results",
    "ChunkStream": "slipstream_client.client",
    "Code": "slipstream_contract.errors",
    "Completion": "slipstream_client.results",
    "ContractError": "slipstream_contract.errors",
    "RequestTimeoutError": "slipstream_client.failures",
    "SlipstreamClient": "slipstream_client.client",
}


def __getattr__(name: str) -> Any:
    """Import one of `__all__` on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
