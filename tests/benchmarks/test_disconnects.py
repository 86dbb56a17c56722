"""Clients that leave a gateway at random moments, and what the benchmark would find."""

from types import SimpleNamespace

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
    "gateway_streams",
)


@pytest.mark.rest
def test_300_streams_and_200_disconnects(bench):
    """No frame is lost or doubled, and nothing is left open: each of these raises SystemExit."""
    found = bench.disconnects.paced(300, 200, seconds=6, rounds=2, seed=0)
    assert found["streams"] == 600
    assert sum(found["disconnects"].values()) == 200


@pytest.mark.rest
def test_100_disconnects_free_every_block_of_the_real_engine(bench):
    found = bench.disconnects.real(100, seconds=4, seed=1)
    assert sum(found["disconnects"].values()) == 100
    assert found["figures"]["requests_total"] > 20


def answer(text: bytes, end: bytes = b"data: [DONE]\n\n") -> bytes:
    events = b"".join(b'data: {"choices":[{"index":0,"text":"%c"}]}\n\n' % each for each in text)
    return (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + events + end + b"\r\n0\r\n\r\n"
    )


@pytest.mark.parametrize("change", ["", "lost", "doubled", "swapped", "cut"])
def test_a_wrong_stream_is_seen(bench, change):
    right = bench.paced_engine.expected_bytes(7, 40)
    text = {
        "lost": right[:20] + right[21:],
        "doubled": right[:20] + right[19:],
        "swapped": right[:20] + right[21:22] + right[20:21] + right[22:],
    }.get(change, right)
    data = answer(text, b"" if change == "cut" else b"data: [DONE]\n\n")
    pieces = [(n, data[n : n + 100]) for n in range(0, len(data), 100)]
    stream = bench.paced_gateway.parse(7, 0, pieces)
    if not change:
        bench.disconnects.check([stream], 40)
        assert int(stream.counts.sum()) == 40
        assert np.all(np.diff(stream.times_ns) >= 0)
        return
    with pytest.raises(SystemExit, match="stream 7"):
        bench.disconnects.check([stream], 40)


@pytest.mark.rest
def test_a_small_run_of_the_delays(bench):
    args = SimpleNamespace(seconds=4.0, clients=1)
    row = bench.gateway_streams.measure("chat", "16x50", args)
    assert row["us_token"] > 0
    assert row["p50_ms"] < 1000
    assert not row["is_memory_growing"]
    assert bench.gateway_streams.judge([row], 2)[0]["figure"] == "p99_ms"
