"""Open streams beside clients that leave at random: `python benchmarks/disconnects.py`.

2,000 streams run through the gateway from a paced source while 1,000 other clients leave at random
moments: within their headers, within their bodies, before an answer, in mid-stream; streamed or
not; with a reset or without. Then clients leave the real engine of the default model likewise.

It fails if a stream that stayed is not the text that was made, token for token; if a request is
left open, or a descriptor; if memory grows from one round to the next; if a block of the real
engine is not free in the end; or if the gateway's log holds a traceback.
"""

import argparse
import asyncio
import json
import os
import random
import re
import socket
import struct
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paced_engine import expected_bytes
from paced_gateway import PATHS, Ask, PacedGateway, Slots, body, receive_all, serving
from report import RESULTS, commit
from sse_clients import request
from stream_clients import Received

MOMENTS = ("headers", "body", "waiting", "stream", "whole")
_STEP_S = 0.25  # of the paced source
_MB_GROWN = 8.0  # from one round to the next
_IDLE_S = 60.0
_RESET = struct.pack("ii", 1, 0)
_REAL_TOKENS = 200  # of a request to the real engine
_NS = 1_000_000_000
_FIGURE = re.compile(r"^slipstream_gateway_(\w+)(?:\{[^}]*\})? (\S+)$", re.M)


async def leave(port: int, dialect: str, ask: Ask, moment: str, rng: random.Random) -> None:
    """Send a part of a request, or all of it and read a part of the answer; then disconnect."""
    given = json.loads(body(dialect, ask))
    given["stream"] = moment != "whole"  # an answer that is not streamed
    data = request("127.0.0.1", PATHS[dialect], json.dumps(given).encode())
    border = data.index(b"\r\n\r\n") + 4
    cuts = {"headers": (0, border - 1), "body": (border, len(data) - 1)}
    size = rng.randint(*cuts[moment]) if moment in cuts else len(data)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data[:size])
        await writer.drain()
        if moment == "stream":
            for _ in range(rng.randint(1, 4)):
                await asyncio.wait_for(reader.read(rng.choice((1, 50, 4000))), 60)
        await asyncio.sleep(rng.random() * (0.05 if moment == "waiting" else 1.0))
        if rng.random() < 0.5:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    finally:
        writer.close()


async def storm(
    port: int, count: int, seconds: float, max_tokens: int, rng: random.Random
) -> Counter[str]:
    """Let `count` clients come and leave at random moments within a time."""
    done: Counter[str] = Counter()

    async def one(number: int) -> None:
        await asyncio.sleep(rng.random() * seconds)
        moment, dialect = rng.choice(MOMENTS), rng.choice(list(PATHS))
        await leave(port, dialect, Ask(1_000_000 + number, max_tokens), moment, rng)
        done[f"{dialect} {moment}"] += 1

    await asyncio.gather(*(one(number) for number in range(count)))
    return done


def gateway_figures(port: int) -> dict[str, float]:
    """Return the figures of `/metrics` by their names without labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        return {name: float(value) for name, value in _FIGURE.findall(page.read().decode())}


def wait_idle(port: int) -> dict[str, float]:
    """Return the figures once no request is left. Raises SystemExit if one is."""
    deadline = time.monotonic() + _IDLE_S
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30):
            found = gateway_figures(port)
        running = found["open_requests"] + found["engine_running"] + found["engine_waiting"]
        if not running and found["engine_kv_blocks_free"] == found["engine_kv_blocks"]:
            return found
        if time.monotonic() > deadline:
            raise SystemExit(f"not idle after {_IDLE_S:g} s: {found}")
        time.sleep(0.1)


def check(streams: Sequence[Received], max_tokens: int) -> None:
    """Raise SystemExit if a stream is not the text that was made, token for token."""
    for stream in streams:
        wanted = expected_bytes(stream.seed, max_tokens)
        if stream.error or stream.text != wanted:
            said = stream.error or f"{len(stream.text)} of {max_tokens} tokens, or other ones"
            raise SystemExit(f"stream {stream.seed}: {said}")


async def _round(
    gateway: PacedGateway, num_streams: int, count: int, seconds: float, rng: random.Random
) -> tuple[list[Received], Counter[str]]:
    max_tokens = round(seconds / _STEP_S)
    work = [
        Slots(gateway.port, dialect, [[Ask(n, max_tokens)] for n in numbers], 0, 20 * seconds + 60)
        for dialect, numbers in zip(
            PATHS, (range(0, num_streams, 2), range(1, num_streams, 2)), strict=True
        )
    ]
    *found, gone = await asyncio.gather(
        *(receive_all(each) for each in work),
        storm(gateway.port, count, seconds, 10 * max_tokens, rng),
    )
    streams = [stream for part in found for stream in part]
    check(streams, max_tokens)
    return streams, gone


def paced(num_streams: int, count: int, seconds: float, rounds: int, seed: int) -> dict[str, Any]:
    """Return what came of rounds of streams and disconnects. Raises SystemExit for any fault."""
    rng, states, gone, num_tokens = random.Random(seed), [], Counter[str](), 0
    with tempfile.TemporaryDirectory(prefix="slipstream-disconnects-") as directory:
        log = Path(directory, "log")
        with serving(_STEP_S, Path(directory), log) as gateway:
            for _ in range(rounds):
                share = count // rounds
                streams, left = asyncio.run(_round(gateway, num_streams, share, seconds, rng))
                gone += left
                num_tokens += sum(len(stream.text) for stream in streams)
                wait_idle(gateway.port)
                time.sleep(0.5)
                states.append((gateway.resident_mb(), gateway.num_descriptors()))
        check_log(log)
    if len(states) > 1:
        if states[-1][1] > states[0][1]:
            raise SystemExit(f"descriptors are left open: {states}")
        if states[-1][0] - states[0][0] > _MB_GROWN * (rounds - 1):
            raise SystemExit(f"memory grows: {states}")
    return {
        "streams": num_streams * rounds,
        "tokens": num_tokens,
        "disconnects": dict(sorted(gone.items())),
        "mb_and_descriptors_after_each_round": states,
    }


def real(count: int, seconds: float, seed: int) -> dict[str, Any]:
    """Let clients leave the real engine; return its figures. Raises SystemExit for any fault."""
    with tempfile.TemporaryDirectory(prefix="slipstream-disconnects-") as directory:
        log = Path(directory, "log")
        with serving(None, Path(directory), log) as gateway:
            rng = random.Random(seed)
            gone = asyncio.run(storm(gateway.port, count, seconds, _REAL_TOKENS, rng))
            found = wait_idle(gateway.port)
        check_log(log)
    return {"disconnects": dict(sorted(gone.items())), "figures": found}


def check_log(log: Path) -> None:
    """Raise SystemExit for a traceback in a log."""
    text = log.read_text(errors="replace")
    if "Traceback" in text:
        raise SystemExit(text[-4000:])


def main() -> int:
    """Command line; not 0 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--streams", type=int, default=2000, help="at once (%(default)s)")
    parser.add_argument("--disconnects", type=int, default=1000, help="in all (%(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--real", type=int, default=300, help="disconnects of the real engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help="keep the result in benchmarks/results/ under this name")
    args = parser.parse_args()
    result: dict[str, Any] = {"commit": commit(), "date": time.strftime("%Y-%m-%d")}
    result |= {"cores": os.cpu_count(), "seed": args.seed}
    result["paced"] = paced(args.streams, args.disconnects, args.seconds, args.rounds, args.seed)
    print(json.dumps(result["paced"]), file=sys.stderr)
    result["real engine"] = real(args.real, args.seconds, args.seed)
    if args.name:
        (RESULTS / f"{args.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
