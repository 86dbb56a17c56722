"""Copies of adapters to the device, by a thread, on a GPU on a stream of its own, beside steps.

A GPU's memory of an adapter belongs to that stream. What is evicted may still be read by steps that
were launched before, and the host does not wait for them: so the thread that copies gives it up,
once its stream waits for these steps. No copy can be given the memory earlier, and one that follows
no eviction waits for no step.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch

from slipstream.models.adapters.read import AdapterWeights
from slipstream.runner.adapter_forms import Loaded

Event = torch.cuda.Event


class Loads:
    """The adapters that are on their way to the device, by number.

    Args:
        device: where they go.
        copy: makes of an adapter what steps use, on the current stream.
    """

    def __init__(self, device: torch.device, copy: Callable[[AdapterWeights], Loaded]) -> None:
        self._is_gpu, self._copy = device.type == "cuda", copy
        self._running: dict[int, Future[Loaded]] = {}
        self._evicted: deque[tuple[Event, Loaded]] = deque()  # with what was launched before
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, number: int) -> bool:
        return number in self._running

    def start(self, number: int, weights: AdapterWeights) -> None:
        """Start to copy an adapter."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "adapter-loads")
            if self._is_gpu:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._running[number] = self._thread.submit(self.run, weights)

    def take(self, seconds: float = 0.0) -> Iterator[tuple[int, Future[Loaded]]]:
        """Take the copies that have ended; wait for one at most so long."""
        if seconds and self._running:
            wait(self._running.values(), seconds, FIRST_COMPLETED)
        for number, load in list(self._running.items()):
            if load.done():
                del self._running[number]
                yield number, load

    def wait_for(self, number: int) -> None:
        """Wait until a copy has ended."""
        wait([self._running[number]])

    def evict(self, loaded: Loaded) -> None:
        """Give up an adapter's memory on the device; steps launched with it keep it to their end.

        On a GPU it is given up when the next copy needs some.
        """
        if self._is_gpu:
            self._evicted.append((torch.cuda.current_stream().record_event(), loaded))

    def run(self, weights: AdapterWeights) -> Loaded:
        """Copy an adapter, in the thread of copies."""
        with torch.inference_mode():
            if self._stream is None:
                return self._copy(weights)
            with torch.cuda.stream(self._stream):
                while self._evicted:
                    event, evicted = self._evicted.popleft()
                    self._stream.wait_event(event)
                    del evicted  # no earlier
                loaded = self._copy(weights)
                self._stream.synchronize()
            return loaded
