"""Clients that read nothing: their cost is bounded, they are ended, and no other stream waits."""

import asyncio
import json
import socket
import threading
import time

import numpy as np
import pytest

NAMES = (
    "report",
    "limits",
    "rows",
    "paced_engine",
    "stream_clients",
    "sse_clients",
    "stream_figures",
    "paced_gateway",
    "disconnects",
)
RATE, SECONDS, STALL_S = 50, 12, 3.0
NUM_STREAMS, NUM_SLOW, NUM_ANSWERS = 32, 8, 32


def open_slow(bench, port: int, seed: int) -> socket.socket:
    """A client that asks for an answer of many megabytes, and reads none of it."""
    body = {"prompt": "a", "max_tokens": 100_000, "n": NUM_ANSWERS, "seed": seed, "stream": True}
    body["return_token_ids"] = True
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", port))
    data = json.dumps(body).encode()
    slow.sendall(bench.sse_clients.request("127.0.0.1", "/v1/completions", data))
    return slow


@pytest.mark.rest
def test_slow_readers_are_bounded_and_ended(bench, tmp_path):
    paced = bench.paced_gateway
    with paced.serving(1 / RATE, tmp_path, tmp_path / "log", "--stall", str(STALL_S)) as gateway:
        asks = [[paced.Ask(seed, RATE * SECONDS)] for seed in range(NUM_STREAMS)]
        work = paced.Slots(gateway.port, "completions", asks, 0, 120.0)
        found: list[object] = []
        reading = threading.Thread(
            target=lambda: found.extend(asyncio.run(paced.receive_all(work)))
        )
        reading.start()
        begin_s = time.monotonic()

        def wait_open(count: int) -> None:
            while bench.disconnects.gateway_figures(gateway.port)["open_requests"] < count:
                assert time.monotonic() - begin_s < 120

        wait_open(NUM_STREAMS)
        before_mb, most_mb = gateway.resident_mb(), 0.0
        slow = [open_slow(bench, gateway.port, 1000 + number) for number in range(NUM_SLOW)]
        wait_open(NUM_STREAMS + 1)
        while reading.is_alive():
            most_mb = max(most_mb, gateway.resident_mb())
            time.sleep(0.1)
        bench.disconnects.wait_idle(gateway.port)  # the slow ones were cancelled, none has read
        assert time.monotonic() - begin_s < SECONDS + 120
        reading.join()
        journal = bench.stream_figures.read_journal(gateway.journal)
        for client in slow:
            client.close()
        bench.disconnects.check_log(gateway.log)
    bench.disconnects.check(found, RATE * SECONDS)
    delays = [
        (np.repeat(stream.times_ns, stream.counts) - made_ns) / 1e6
        for stream in found
        for made_ns in [journal.made_ns[journal.first[stream.seed] :][: RATE * SECONDS]]
    ]
    # 256 KiB in the kernel, 64 KiB here, and what the engine made within the time to stall
    assert most_mb - before_mb < NUM_SLOW * (0.5 + NUM_ANSWERS * RATE * STALL_S * 1e-3)
    # Had they waited for the slow ones, a quarter would be late, by all of the time to stall.
    assert np.percentile(np.concatenate(delays), 99) < 2 / 3 * STALL_S * 1e3
