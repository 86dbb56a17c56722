"""Holds streams until it is killed. One JSON line in: {"url": ..., "requests": [arguments, ...]}.

Says "asked" once all requests are on their way, and reads what comes.
"""

import asyncio
import json
import sys
from typing import Any

from slipstream_client import AsyncSlipstreamClient
from slipstream_client.aio import AsyncChunkStream


async def hold(url: str, requests: list[dict[str, Any]]) -> None:
    """Asks for everything, then waits for its end."""
    client = AsyncSlipstreamClient(url)
    streams = [client.stream(**arguments) for arguments in requests]
    readers = asyncio.gather(*(read(stream) for stream in streams), return_exceptions=True)
    await asyncio.sleep(0)
    print("asked", flush=True)
    await readers
    await asyncio.sleep(600)


async def read(stream: AsyncChunkStream) -> None:
    """Reads to the end."""
    async for _ in stream:
        pass


if __name__ == "__main__":
    asyncio.run(hold(**json.loads(sys.stdin.readline())))
