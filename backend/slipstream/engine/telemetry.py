"""What the engine counts: exact, in memory, told once a second to the one bridge that asks.

Clients and probes are counted in a `Book` each, so that what operators bill and scale by is of
clients alone. A step's time belongs to both by their tokens.

Cost: a step's time belongs to the sequences in it by their tokens, and is paid at `gpu_hour_price`.
Time in which nothing runs is nobody's.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from pathlib import Path

from slipstream.core.batch import Batch
from slipstream.core.sequence import Request, Sequence
from slipstream.engine.book import Book
from slipstream.wire import Figures, FinishReason


class Telemetry:
    """Counters since the engine began. Stamps are of the clock of `wire.Perf`."""

    def __init__(
        self,
        gpu_hour_price: float = 0.0,
        memory: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        """`memory` tells bytes held on the device, and of pinned memory on the host."""
        self.num_probes = 0  # requests that have not ended
        self._clients, self._probes = Book(gpu_hour_price), Book(gpu_hour_price)
        self._price = gpu_hour_price
        self._memory = memory
        self._start_s = time.time()
        self._last = (0, 0, 0, 0)  # step: sequences, of them in chunks, chunks' tokens, decodes
        self._landed_s = time.monotonic()  # the last step
        self._freeing: deque[tuple[int, int, Book]] = deque()  # step, monotonic ns of the cancel

    @property
    def counters(self) -> dict[str, float]:
        """The counters of clients."""
        return self._clients.counters

    def _book(self, request: Request) -> Book:
        return self._probes if request.is_probe else self._clients

    # --- steps ---------------------------------------------------------------------------------

    def began(self, request: Request) -> None:
        """Note a request that is queued."""
        self.num_probes += request.is_probe

    def resume(self) -> None:
        """There is work again: the time before was nobody's."""
        self._landed_s = time.monotonic()

    def step(self, batch: Batch, owners: Many[Sequence], begin_s: float, landed_s: float) -> None:
        """A step is done: the host waited for it between these two `time.monotonic()`s."""
        took_s, waited_s = landed_s - self._landed_s, landed_s - begin_s
        self._landed_s = landed_s
        host_s = max(0.0, took_s - waited_s)
        num_decodes, num_tokens = batch.num_decodes, batch.num_tokens
        num_rows, num_of_decodes, num_of_probes = len(batch.rows), num_decodes, 0
        num_context = num_tokens - num_decodes
        if self.num_probes:
            for place, (row, owner) in enumerate(zip(batch.rows, owners, strict=True)):
                if owner.request.is_probe:
                    num_of_probes += len(row.token_ids)
                    num_rows -= 1
                    num_of_decodes -= place < num_decodes
            num_context = num_tokens - num_of_probes - num_of_decodes
        self._last = (num_rows, num_rows - num_of_decodes, num_context, num_of_decodes)
        shares = ((self._clients, num_tokens - num_of_probes), (self._probes, num_of_probes))
        for book, size in shares:
            if size:
                part = size / num_tokens
                book.step(size, host_s * part, waited_s * part)
        if self._price:
            self._pay(batch, owners, took_s / num_tokens)

    def _pay(self, batch: Batch, owners: Many[Sequence], token_s: float) -> None:
        """Share a step's time, which is so long a token, among its sequences."""
        for row, owner in zip(batch.rows, owners, strict=True):
            share_s = token_s * len(row.token_ids)
            owner.device_s += share_s
            if owner.is_reported:  # it ended while this step ran
                self._book(owner.request).spent_late(owner, share_s)

    def sampled(self, sequences: Many[Sequence], now_ns: int) -> None:
        """These are about to get a token each."""
        if self.num_probes:
            probes = [each for each in sequences if each.request.is_probe]
            if probes:
                self._probes.sampled(probes, now_ns)
                sequences = [each for each in sequences if not each.request.is_probe]
        self._clients.sampled(sequences, now_ns)

    def not_a_token(self, sequence: Sequence) -> None:
        """What it got was an end id, or NaN."""
        self._book(sequence.request).counters["output_tokens"] -= 1

    def looked_up(self, sequence: Sequence) -> None:
        """It is admitted; keys and values of `num_computed` of its tokens were in the cache."""
        counters = self._book(sequence.request).counters
        counters["prefix_queries"] += sequence.num_prompt
        counters["prefix_hits"] += sequence.num_computed

    # --- ends ----------------------------------------------------------------------------------

    def finished(self, sequence: Sequence, num_outputs: int) -> None:
        """A sequence is told that it has ended, with so many tokens."""
        sequence.is_reported, sequence.length = True, num_outputs
        self._book(sequence.request).finished(sequence, num_outputs)

    def ended(self, request: Request) -> None:
        """All sequences of a request have."""
        self.num_probes -= request.is_probe
        self._book(request).ended(request)

    def cost(self, sequence: Sequence) -> float:
        """Of what was computed for it, in the currency of the price."""
        return sequence.device_s * self._clients.price_s

    def cancelled(self, request: Request, noticed_ns: int, step: int) -> None:
        """A request was, noticed at a `time.monotonic_ns()`; its blocks are free after `step`."""
        book = self._book(request)
        book.counters[f"cancels:{request.cause}"] += 1
        self._freeing.append((step, noticed_ns, book))

    def freed(self, step: int) -> None:
        """What that step and those before it held back is free."""
        while self._freeing and self._freeing[0][0] <= step:
            _, noticed_ns, book = self._freeing.popleft()
            book.cancel_to_free_s.append(max(0.0, (time.monotonic_ns() - noticed_ns) / 1e9))

    # --- figures -------------------------------------------------------------------------------

    def figures(self, gauges: dict[str, float]) -> Figures:
        """All that was counted; `gauges` are those that the engine knows. Samples are told once."""
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
        """The counters of probes, each under a name of its own."""
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
    """Of this process; 0 where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
