"""Count what the engine does: exact, in memory, sent once a second to the one bridge that asks.

Clients and probes have a `MetricSet` each, so that operators bill and scale by clients alone. The
time of a step is shared among its sequences by their tokens, and costs `gpu_hour_price`. Time in
which nothing runs belongs to no sequence.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from pathlib import Path

from slipstream.core.batch import Batch
from slipstream.core.sequence import Request, Sequence
from slipstream.engine.first_tokens import FirstTokens
from slipstream.engine.metric_set import MetricSet
from slipstream.wire import Figures, FinishReason


class Telemetry:
    """Metrics since the start. Times are by the clock of `wire.Perf`."""

    def __init__(
        self,
        gpu_hour_price: float = 0.0,
        memory: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        """Start with zeros; `memory` returns bytes of device memory, and of pinned host memory."""
        self.num_probes = 0  # requests that have not ended
        self.first_tokens = FirstTokens()
        parts = (gpu_hour_price, self.first_tokens)
        self._clients, self._probes = MetricSet(*parts), MetricSet(*parts)
        self._price = gpu_hour_price
        self._memory = memory
        self._start_s = time.time()
        self._last = (0, 0, 0, 0)  # last step: sequences, those in chunks, chunk tokens, decodes
        self._last_end_s = time.monotonic()  # of the last step
        # For each cancel: step after which its blocks are free, monotonic ns, metrics.
        self._freeing: deque[tuple[int, int, MetricSet]] = deque()

    @property
    def counters(self) -> dict[str, float]:
        """The counters of clients."""
        return self._clients.counters

    def _metrics_of(self, request: Request) -> MetricSet:
        return self._probes if request.message.is_probe else self._clients

    # --- steps ---------------------------------------------------------------------------------

    def request_queued(self, request: Request) -> None:
        """Count a request that is queued."""
        self.num_probes += request.message.is_probe

    def resume(self) -> None:
        """Start to measure again after the engine was idle."""
        self._last_end_s = time.monotonic()

    def step_finished(
        self, batch: Batch, owners: Many[Sequence], wait_s: float, ended_s: float
    ) -> None:
        """Count a step that the host awaited from `wait_s` to `ended_s` (`time.monotonic()`)."""
        took_s, waited_s = ended_s - self._last_end_s, ended_s - wait_s
        self._last_end_s = ended_s
        host_s = max(0.0, took_s - waited_s)
        num_decodes, num_tokens = batch.num_decodes, batch.num_tokens
        num_rows = len(batch.rows) - batch.num_drafts  # of sequences
        num_of_decodes, num_of_probes = num_decodes - batch.num_drafts, 0
        num_context = num_tokens - num_decodes
        if self.num_probes:
            for place, (row, owner) in enumerate(zip(batch.rows, owners, strict=True)):
                if owner.request.message.is_probe:
                    num_of_probes += len(row.token_ids)
                    num_rows -= 1
                    num_of_decodes -= place < num_decodes
            num_context = num_tokens - num_of_probes - num_of_decodes - batch.num_drafts
        self._last = (num_rows, num_rows - num_of_decodes, num_context, num_of_decodes)
        shares = ((self._clients, num_tokens - num_of_probes), (self._probes, num_of_probes))
        for metrics, size in shares:
            if size:
                part = size / num_tokens
                metrics.step_finished(size, host_s * part, waited_s * part)
        if self._price:
            self._pay(batch, owners, took_s / num_tokens)

    def _pay(self, batch: Batch, owners: Many[Sequence], token_s: float) -> None:
        """Add to each sequence of a step its share of the time, `token_s` seconds a token."""
        for row, owner in zip(batch.rows, owners, strict=True):
            share_s = token_s * len(row.token_ids)
            owner.device_s += share_s
            if owner.is_reported:  # it ended while this step was in flight
                self._metrics_of(owner.request).add_late_cost(owner, share_s)

    def tokens_sampled(self, sequences: Many[Sequence], now_ns: int) -> None:
        """Count a token for each of these sequences, before they append it."""
        if self.num_probes:
            probes = [each for each in sequences if each.request.message.is_probe]
            if probes:
                self._probes.tokens_sampled(probes, now_ns)
                sequences = [each for each in sequences if not each.request.message.is_probe]
        self._clients.tokens_sampled(sequences, now_ns)

    def uncount_token(self, sequence: Sequence) -> None:
        """Take back the last token of a sequence, which was an end id or NaN."""
        self._metrics_of(sequence.request).counters["output_tokens"] -= 1

    def sequence_admitted(self, sequence: Sequence) -> None:
        """Count the prefix query of a new sequence, and its hit of `num_computed` tokens."""
        counters = self._metrics_of(sequence.request).counters
        counters["prefix_queries"] += sequence.num_prompt
        counters["prefix_hits"] += sequence.num_computed

    # --- ends ----------------------------------------------------------------------------------

    def sequence_finished(self, sequence: Sequence, num_outputs: int) -> None:
        """Count a sequence whose end, after `num_outputs` tokens, is being sent."""
        sequence.is_reported, sequence.length = True, num_outputs
        self._metrics_of(sequence.request).sequence_finished(sequence, num_outputs)

    def request_finished(self, request: Request) -> None:
        """Count a request whose sequences have all ended."""
        self.num_probes -= request.message.is_probe
        self._metrics_of(request).request_finished(request)

    def cost(self, sequence: Sequence) -> float:
        """Return the cost of a sequence so far, in the currency of the price."""
        return sequence.device_s * self._clients.price_s

    def request_cancelled(self, request: Request, noticed_ns: int, step: int) -> None:
        """Count a cancelled request.

        Args:
            request: the request.
            noticed_ns: `time.monotonic_ns()` at which the cause was noticed.
            step: number of the step after which its blocks are free.
        """
        metrics = self._metrics_of(request)
        metrics.counters[f"cancels:{request.cause}"] += 1
        self._freeing.append((step, noticed_ns, metrics))

    def blocks_freed(self, step: int) -> None:
        """Note that blocks are free which only steps up to `step` used."""
        while self._freeing and self._freeing[0][0] <= step:
            _, noticed_ns, metrics = self._freeing.popleft()
            metrics.cancel_to_free_s.append(max(0.0, (time.monotonic_ns() - noticed_ns) / 1e9))

    # --- figures -------------------------------------------------------------------------------

    def figures(self, gauges: dict[str, float]) -> Figures:
        """Return all metrics, with the gauges that the engine knows. Samples are returned once."""
        is_idle = not gauges["active_requests"]
        num_rows, num_chunks, num_context, num_decodes = (0, 0, 0, 0) if is_idle else self._last
        device, pinned = self._memory()
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
            self._clients.counters | self._of_probes(),
            {name: (each.counts, each.sum) for name, each in self._clients.histograms.items()},
            self._clients.take_samples(),
        )

    def _of_probes(self) -> dict[str, float]:
        """Return the counters of probes, under names of their own."""
        counters = self._probes.counters
        return {
            **{
                f"probe_finished:{reason}": counters[f"finished:{reason}"]
                for reason in FinishReason
            },
            "probe_tokens:prompt": counters["prompt_tokens"],
            "probe_tokens:output": counters["output_tokens"],
            "probe_step_s:host": counters["step_s:host"],
            "probe_step_s:device": counters["step_s:device"],
            "probe_s": self._probes.histograms["end_to_end_s"].sum,
            "probe_cost": sum(counters[f"cost:{reason}"] for reason in FinishReason),
        }


def _resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 where /proc is not available."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
