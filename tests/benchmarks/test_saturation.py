"""A full engine is steady when tokens are counted: the real scheduler over simulated steps."""

from dataclasses import replace
from typing import Any

import pytest
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits

NAMES = ("saturation", "simulated", "step_times", "traces")
ROWS = ["5000-500", "2048-128", "2048-2048", "20000-2000"]
CACHE, TOKENS, SEQUENCES = 1_880_000, 8192, 1024
WINDOW_S = 5.0


def simulated(bench) -> tuple[Any, Engine]:
    """An 8B in fp8 on an H200, about: half the bytes, 0.6 of the time of a prompt's token."""
    times = bench.step_times.recorded("H200", "slipstream")
    rest = tuple((tokens, 0.55 * ms) for tokens, ms in times.rest)
    prompts, reads = 0.6 * times.token_ms, 0.52 * times.read_ms
    times = replace(times, rest=rest, token_ms=prompts, read_ms=reads)
    runner = bench.simulated.SimulatedRunner(times, CACHE // 32)
    runner.vocab_size, runner.max_model_len = 128_256, 32_768
    runner.buckets = bench.simulated.Buckets(SEQUENCES, TOKENS)
    return runner, Engine(Limits(SEQUENCES, TOKENS), runner, None, clock=runner.clock)


@pytest.mark.rest
@pytest.mark.parametrize("name", ROWS)
def test_prompts_come_evenly_once_all_have_started(bench, name: str) -> None:
    """Also where an engine spares running streams, so that the start takes five times the steps."""
    (runner, engine), row = simulated(bench), bench.saturation.ROWS[name]
    count = bench.saturation.sequences_that_fit(row, CACHE, SEQUENCES, TOKENS)
    full = bench.saturation.Full(engine, row, bench.saturation.ages_of(row, count, TOKENS), 1)
    while not full.has_started:
        full.step()
    rates = []
    for _ in range(4):
        tokens, begun, began_s = 0, full.num_begun, runner.now_s
        while runner.now_s < began_s + WINDOW_S:
            tokens += full.step()
        rates.append(tokens / (runner.now_s - began_s))
        assert 0.8 < (full.num_begun - begun) * row.num_output / tokens < 1.3
    assert max(rates) < 1.2 * min(rates)
    full.drain()
    engine.check_integrity()
