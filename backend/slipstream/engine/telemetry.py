"""What the engine counts: exact, in memory, told once a second to the one bridge that asks.

Per token it costs less than any clock: all that got a token in a step got it at the same time, so
they are counted by the time of the token before, and most of them share that too.

Cost: a step's time belongs to the sequences in it by their tokens, and is paid at `gpu_hour_price`.
Time in which nothing runs is nobody's.
"""

import os
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from pathlib import Path

from slipstream.engine.batch import Batch
from slipstream.engine.sequence import Request, Sequence
from slipstream.figures import HISTOGRAMS, counter_names
from slipstream.wire import CancelCause, Figures

_MAX_SAMPLES = 4096  # kept of each kind; nobody asks if they are more
_HOUR_S = 3600.0


class Histogram:
    """How many values fell into which bucket, and their sum."""

    def __init__(self, bounds: Many[float]) -> None:
        """`bounds` are the upper ends, inclusive; there is one more bucket, without end."""
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._bounds = bounds

    def add(self, value: float, times: int = 1) -> None:
        """`times` values alike. A sum never falls: what is below 0 counts as 0."""
        value = max(value, 0.0)
        self.counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times


class Telemetry:
    """Counters since the engine began. Stamps are of the clock of `wire.Perf`."""

    def __init__(
        self,
        gpu_hour_price: float = 0.0,
        memory: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        """`memory` tells bytes held on the device, and of pinned memory on the host."""
        self.counters = dict.fromkeys(counter_names(), 0.0)
        self._price = gpu_hour_price
        self._price_s = gpu_hour_price / _HOUR_S
        self._memory = memory
        self._start_s = time.time()
        self._histograms = {name: Histogram(bounds) for name, bounds in HISTOGRAMS.items()}
        self._cancel_to_free_s: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self._request_cost: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self._last = (0, 0, 0, 0)  # step: sequences, of them in chunks, chunks' tokens, decodes
        self._landed_s = time.monotonic()  # the last step
        self._freeing: deque[tuple[int, int]] = deque()  # (step, monotonic ns of the cancel)

    # --- steps ---------------------------------------------------------------------------------

    def resume(self) -> None:
        """There is work again: the time before was nobody's."""
        self._landed_s = time.monotonic()

    def step(self, batch: Batch, owners: Many[Sequence], begin_s: float, landed_s: float) -> None:
        """A step is done: the host waited for it between these two `time.monotonic()`s."""
        took_s, waited_s = landed_s - self._landed_s, landed_s - begin_s
        self._landed_s = landed_s
        num_rows, num_decodes = len(batch.rows), batch.num_decodes
        num_context = sum(len(row.token_ids) for row in batch.rows[num_decodes:])
        num_tokens = num_decodes + num_context
        self._last = (num_rows, num_rows - num_decodes, num_context, num_decodes)
        self.counters["steps"] += 1
        self.counters["step_s:device"] += waited_s
        self.counters["step_s:host"] += max(0.0, took_s - waited_s)
        self._histograms["step_tokens"].add(num_tokens)
        if self._price_s:
            token_s = took_s / num_tokens
            for row, owner in zip(batch.rows, owners, strict=True):
                share_s = token_s * len(row.token_ids)
                owner.device_s += share_s
                if owner.is_told:  # it ended while this step ran
                    assert owner.ending is not None
                    self.counters[f"cost:{owner.ending.reason}"] += share_s * self._price_s

    def sampled(self, sequences: Many[Sequence], now_ns: int) -> None:
        """These are about to get a token each."""
        self.counters["output_tokens"] += len(sequences)
        before = Counter([sequence.last_token_ns for sequence in sequences])
        num_first = before.pop(0, 0)
        between = self._histograms["inter_token_s"]
        for last_ns, times in before.items():
            between.add((now_ns - last_ns) / 1e9, times)
        if num_first:
            for sequence in sequences:
                if not sequence.last_token_ns:
                    self._first_token(sequence, now_ns)

    def not_a_token(self) -> None:
        """What one of them got was an end id, or NaN."""
        self.counters["output_tokens"] -= 1

    def looked_up(self, num_tokens: int, num_found: int) -> None:
        """A sequence is admitted; keys and values of so many of its tokens were in the cache."""
        self.counters["prefix_queries"] += num_tokens
        self.counters["prefix_hits"] += num_found

    def _first_token(self, sequence: Sequence, now_ns: int) -> None:
        arrival_ns, begin_ns = sequence.request.arrival_ns, sequence.first_scheduled_ns
        self.counters["prompt_tokens"] += sequence.num_prompt
        self._histograms["first_token_s"].add((now_ns - arrival_ns) / 1e9)
        self._histograms["queue_s"].add((begin_ns - arrival_ns) / 1e9)
        self._histograms["prefill_s"].add((now_ns - begin_ns) / 1e9)

    # --- ends ----------------------------------------------------------------------------------

    def finished(self, sequence: Sequence, num_outputs: int) -> None:
        """A sequence is told that it has ended, with so many tokens."""
        assert sequence.ending is not None
        sequence.is_told, sequence.length = True, num_outputs
        now_ns, last_ns = time.monotonic_ns(), sequence.last_token_ns
        begin_ns, histograms = sequence.first_scheduled_ns, self._histograms
        self.counters[f"finished:{sequence.ending.reason}"] += 1
        self.counters[f"cost:{sequence.ending.reason}"] += self.cost(sequence)
        histograms["input_tokens"].add(sequence.num_prompt)
        histograms["output_tokens"].add(num_outputs)
        histograms["end_to_end_s"].add((now_ns - sequence.request.arrival_ns) / 1e9)
        if not last_ns:
            if not begin_ns:
                histograms["queue_s"].add((now_ns - sequence.request.arrival_ns) / 1e9)
            return
        decode_s = (last_ns - sequence.first_token_ns) / 1e9
        histograms["decode_s"].add(decode_s)
        histograms["inference_s"].add((last_ns - begin_ns) / 1e9)
        if num_outputs > 1:
            histograms["token_mean_s"].add(decode_s / (num_outputs - 1))

    def ended(self, request: Request) -> None:
        """All sequences of a request have."""
        histograms, sampling = self._histograms, request.sampling
        lengths = [sequence.length for sequence in request.sequences]
        histograms["max_output_tokens"].add(max(lengths))
        histograms["asked_tokens"].add(sampling.max_tokens)
        histograms["asked_sequences"].add(sampling.n)
        histograms["request_input_tokens"].add(request.sequences[0].num_prompt)
        histograms["request_output_tokens"].add(sum(lengths))
        if self._price_s:
            self._request_cost.append(sum(map(self.cost, request.sequences)))

    def cost(self, sequence: Sequence) -> float:
        """Of what was computed for it, in the currency of the price."""
        return sequence.device_s * self._price_s

    def cancelled(self, cause: CancelCause, noticed_ns: int, step: int) -> None:
        """A request was, noticed at a `time.monotonic_ns()`; its blocks are free after `step`."""
        self.counters[f"cancels:{cause}"] += 1
        self._freeing.append((step, noticed_ns))

    def freed(self, step: int) -> None:
        """What that step and those before it held back is free."""
        while self._freeing and self._freeing[0][0] <= step:
            self._cancel_to_free_s.append(
                max(0.0, (time.monotonic_ns() - self._freeing.popleft()[1]) / 1e9)
            )

    # --- figures -------------------------------------------------------------------------------

    def figures(self, gauges: dict[str, float]) -> Figures:
        """All that was counted; `gauges` are those that the engine knows. Samples are told once."""
        is_idle = not gauges["active_requests"]
        num_rows, num_chunks, num_context, num_decodes = (0, 0, 0, 0) if is_idle else self._last
        device, pinned = self._memory()
        samples = {
            "cancel_to_free_s": list(self._cancel_to_free_s),
            "request_cost": list(self._request_cost),
        }
        self._cancel_to_free_s.clear()
        self._request_cost.clear()
        return Figures(
            gauges
            | {
                "scheduled_sequences": num_rows,
                "context_sequences": num_chunks,
                "context_tokens": num_context,
                "generation_sequences": num_decodes,
                "host_bytes": _resident_bytes(),
                "device_bytes": device,
                "pinned_bytes": pinned,
                "start_time_s": self._start_s,
                "gpu_hour_price": self._price,
            },
            dict(self.counters),
            {name: (each.counts, each.sum) for name, each in self._histograms.items()},
            samples,
        )


def _resident_bytes() -> int:
    """Of this process; 0 where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
