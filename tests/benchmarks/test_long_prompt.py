"""The benchmark of streams beside a long prompt, on an engine of a known pace."""

import argparse

import pytest

NAMES = (
    "shapes",
    "traces",
    "limits",
    "rows",
    "report",
    "open_load",
    "long_prompt",
)


class Paced:
    """An engine whose steps take 1 ms, or 2.5 while a prompt of more than 9 tokens is computed."""

    is_busy = True

    def __init__(self) -> None:
        self.now_s = 1.0
        self._left: dict[int, int] = {}  # tokens of prompts
        self._streams: list[int] = []

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None:
        self._left[number] = len(prompt)
        assert all(0 <= token_id < 64 for token_id in prompt)
        if max_tokens > 1:
            self._streams.append(number)

    def advance(self, within_s: float) -> list[tuple[int, int]]:
        self.now_s += 0.0025 if any(left > 9 for left in self._left.values()) else 0.001
        done = [number for number, left in self._left.items() if left <= 0]
        for number in done:
            del self._left[number]
        for number in self._left:
            self._left[number] -= 8
        streams = [number for number in self._streams if number not in self._left]
        return [(number, 1) for number in sorted({*done, *streams})]


@pytest.mark.parametrize("length", [80, 400])
def test_a_long_prompt_costs_what_the_engine_says(bench, length, monkeypatch, capsys) -> None:
    engine = Paced()
    monkeypatch.setattr(bench.long_prompt.time, "perf_counter", lambda: engine.now_s)
    monkeypatch.setattr(bench.long_prompt, "SHAPES", {"toy": {"vocab_size": 64}})
    asked = {"shape": "toy", "streams": 3, "stream_tokens": 8, "output_tokens": 99}
    args = argparse.Namespace(**asked, prompt=length, steps=20, repeat=2)
    found = bench.long_prompt.measure(engine, args)
    assert found["p99_ratio"] == pytest.approx(2.5)
    for row in found["rows"]:
        assert row["usual_ms"]["p99"] == pytest.approx(1.0)
        assert row["beside_ms"]["p50"] == pytest.approx(2.5)
        assert row["prompt_s"] == pytest.approx((length / 8 - 1) * 0.0025, abs=0.004)
    assert capsys.readouterr().out.count("p99_ratio") == 2
