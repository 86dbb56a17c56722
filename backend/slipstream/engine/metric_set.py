"""Count the requests of clients, or those of probes.

Counting costs less per token than reading a clock: all tokens of a step come at the same time, so
they are grouped by the time of the token before, which most sequences of a step share too.
"""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence as Many

from slipstream.core.sequence import Request, Sequence
from slipstream.engine.first_tokens import FirstTokens
from slipstream.figures import HISTOGRAMS, counter_names

_MAX_SAMPLES = 4096  # kept of each kind; a reader that never comes must not fill memory
_HOUR_S = 3600.0


class Histogram:
    """Counts of values in buckets, and the sum of the values."""

    def __init__(self, bounds: Many[float]) -> None:
        """Start empty; `bounds` are the inclusive upper ends, and one more bucket has none."""
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._bounds = bounds

    def add(self, value: float, times: int = 1) -> None:
        """Add a value `times` times. A value below 0 counts as 0, as a sum must never fall."""
        value = max(value, 0.0)
        self.counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times


class MetricSet:
    """Counters, histograms and samples since the start. Times are by the clock of `wire.Perf`."""

    def __init__(self, gpu_hour_price: float, first_tokens: FirstTokens) -> None:
        self._first_tokens = first_tokens
        self.counters = dict.fromkeys(counter_names(), 0.0)
        self.histograms = {name: Histogram(bounds) for name, bounds in HISTOGRAMS.items()}
        self.cancel_to_free_s: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self.request_cost: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self.price_s = gpu_hour_price / _HOUR_S

    def step_finished(self, num_tokens: int, host_s: float, device_s: float) -> None:
        """Count a step of `num_tokens` tokens, and its share of the step's time."""
        self.counters["steps"] += 1
        self.counters["step_s:host"] += host_s
        self.counters["step_s:device"] += device_s
        self.histograms["step_tokens"].add(num_tokens)

    def add_late_cost(self, sequence: Sequence, seconds: float) -> None:
        """Add the cost of a step that was in flight when the sequence ended."""
        assert sequence.ending is not None
        self.counters[f"cost:{sequence.ending.reason}"] += seconds * self.price_s

    def tokens_sampled(self, sequences: Many[Sequence], now_ns: int) -> None:
        """Count a token for each of these sequences, before they append it."""
        self.counters["output_tokens"] += len(sequences)
        before = Counter([sequence.last_token_ns for sequence in sequences])
        num_first = before.pop(0, 0)
        between = self.histograms["inter_token_s"]
        for last_ns, times in before.items():
            between.add((now_ns - last_ns) / 1e9, times)
        if num_first:
            for sequence in sequences:
                if not sequence.last_token_ns:
                    self._first_token(sequence, now_ns)

    def _first_token(self, sequence: Sequence, now_ns: int) -> None:
        arrival_ns, begin_ns = sequence.request.message.arrival_ns, sequence.first_scheduled_ns
        self.counters["prompt_tokens"] += sequence.num_prompt
        self.histograms["first_token_s"].add((now_ns - arrival_ns) / 1e9)
        self.histograms["queue_s"].add((begin_ns - arrival_ns) / 1e9)
        self.histograms["prefill_s"].add((now_ns - begin_ns) / 1e9)
        for part, seconds in self._first_tokens.parts_s(sequence).items():
            self.counters[f"first_token_wait_s:{part}"] += seconds

    def sequence_finished(self, sequence: Sequence, num_outputs: int) -> None:
        """Count a sequence that has ended with `num_outputs` tokens."""
        assert sequence.ending is not None
        now_ns, last_ns = time.monotonic_ns(), sequence.last_token_ns
        begin_ns, histograms = sequence.first_scheduled_ns, self.histograms
        self.counters[f"finished:{sequence.ending.reason}"] += 1
        self.counters[f"cost:{sequence.ending.reason}"] += sequence.device_s * self.price_s
        histograms["input_tokens"].add(sequence.num_prompt)
        histograms["output_tokens"].add(num_outputs)
        histograms["end_to_end_s"].add((now_ns - sequence.request.message.arrival_ns) / 1e9)
        if not last_ns:
            if not begin_ns:
                histograms["queue_s"].add((now_ns - sequence.request.message.arrival_ns) / 1e9)
            return
        decode_s = (last_ns - sequence.first_token_ns) / 1e9
        histograms["decode_s"].add(decode_s)
        histograms["inference_s"].add((last_ns - begin_ns) / 1e9)
        if num_outputs > 1:
            histograms["token_mean_s"].add(decode_s / (num_outputs - 1))

    def request_finished(self, request: Request) -> None:
        """Count a request whose sequences have all ended."""
        histograms, sampling = self.histograms, request.sampling
        lengths = [sequence.length for sequence in request.sequences]
        histograms["max_output_tokens"].add(max(lengths))
        histograms["asked_tokens"].add(sampling.max_tokens)
        histograms["asked_sequences"].add(sampling.n)
        histograms["request_input_tokens"].add(request.sequences[0].num_prompt)
        histograms["request_output_tokens"].add(sum(lengths))
        if self.price_s:
            device_s = sum(sequence.device_s for sequence in request.sequences)
            self.request_cost.append(device_s * self.price_s)

    def take_samples(self) -> dict[str, list[float]]:
        """Return the samples since the last call, by the names of `figures.SAMPLES`."""
        samples = {
            "cancel_to_free_s": list(self.cancel_to_free_s),
            "request_cost": list(self.request_cost),
        }
        self.cancel_to_free_s.clear()
        self.request_cost.clear()
        return samples
