"""Steps from launch to commit: launched ahead of results, committed in order, undone if one fails.

A step that fails is rolled back with those launched behind it, which build on it; then its rows run
in ever smaller groups until the sequence at fault is known (`bisect.py`). Only that one ends.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from slipstream.core.batch import Batch, Sampled
from slipstream.core.step_sizes import StepSizes
from slipstream.core.stop import Ending
from slipstream.core.window import AttentionWindow
from slipstream.engine.bisect import Bisection, is_of_device
from slipstream.engine.guides import MaskTaker
from slipstream.engine.launch_lead import LaunchLead
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.telemetry import Telemetry
from slipstream.kvcache.host import Mover
from slipstream.wire import FinishReason

_log = logging.getLogger(__name__)

_MAX_FAILED = 8  # requests that fail with no step between that succeeds: the device is broken


class LaunchedStep(MaskTaker, Protocol):
    """A step that the runner has started."""

    def wait(self) -> Sampled:
        """Wait for the step and return what it sampled. Steps are awaited in launch order."""


class Runner(Protocol):
    """The part that executes batches, one after another."""

    num_blocks: int
    block_size: int
    vocab_size: int
    max_model_len: int
    window: AttentionWindow
    transfers: Mover | None  # copies of blocks to host memory and back, if there is any
    max_in_flight: int  # steps: 2, if one may be launched while the one before it runs; else 1
    attention_doubles_at: int  # context at which a token costs twice as much; 0: none
    step_sizes: StepSizes  # of steps that leave no rows idle

    def launch(self, batch: Batch) -> LaunchedStep:
        """Start a step. A row's `source` is the number of a sample of the step launched before."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step between launch and commit."""

    batch: Batch
    launched: LaunchedStep | None  # None: its launch failed
    error: Exception | None


class Steps:
    """The steps in flight, oldest first, and the search for what made one fail.

    `fatal` is set when the device is beyond repair: nothing may be launched or sent then.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        telemetry: Telemetry,
        clock: Callable[[], int],
        fewer_tokens_help: bool,
    ) -> None:
        self.fatal: Exception | None = None
        self.num_committed = 0  # failed steps included
        self._scheduler = scheduler
        self._runner = runner
        self._telemetry = telemetry
        self._clock = clock
        self._fewer_tokens_help = fewer_tokens_help  # where memory was too short for a step
        self._in_flight: deque[_Step] = deque()
        self._failed: set[tuple[bytes, int]] = set()  # requests that failed since a step succeeded
        self._bisection = Bisection()
        self._launch_lead = LaunchLead(clock)
        self._progressed_s = 0.0  # time.monotonic()

    def __len__(self) -> int:
        return len(self._in_flight)

    def resume(self) -> None:
        """Note that there is work again: the idle time before it does not count."""
        self._progressed_s = time.monotonic()

    def age_s(self) -> float:
        """Return the time since the last commit, or since `resume`."""
        return time.monotonic() - self._progressed_s

    def slack_ns(self) -> float:
        """Return how long the next launch can wait for requests, in ns; see `LaunchLead`."""
        if len(self._in_flight) != 1 or self._scheduler.needs_results or self._bisection:
            return 0.0
        return self._launch_lead.slack_ns(self._scheduler.earliest_end_ns())

    def launch_ahead(self) -> None:
        """Launch as many steps as the runner takes at a time.

        After a failed launch no further step is launched, and a bisected group runs alone.
        """
        in_flight, guides = self._in_flight, self._scheduler.guides
        while len(in_flight) < self._runner.max_in_flight:
            if in_flight and in_flight[-1].error is not None:
                return
            only = self._bisection.current()
            if only is not None and in_flight:
                return
            decided_ns = self._clock()
            batch = self._schedule(only)
            if self.fatal is not None or (batch is None and only is None):
                return
            if batch is None:
                if guides is not None and guides.is_busy:
                    return  # the group may wait for a mask, whose error comes by `poll`
                continue  # preempted for others: the group's turn is over
            try:
                launched = self._runner.launch(batch)
                in_flight.append(_Step(batch, launched, None))
                took_ns = self._clock() - decided_ns
                self._launch_lead.launch_took(took_ns)
                self._scheduler.launch_took(took_ns)
                if batch.has_masks and guides is not None and guides.num_active:
                    guides.launched(batch, launched)
            except Exception as error:
                in_flight.append(_Step(batch, None, error))

    def commit_oldest(self) -> None:
        """Wait for the oldest step in flight and commit it; launch at once what had to wait for it.

        There must be one.
        """
        self._commit(self._in_flight.popleft())
        # The next step must not build on one that was never launched.
        if self._in_flight and self._in_flight[0].error is not None:
            self._commit(self._in_flight.popleft())
        self._progressed_s = time.monotonic()
        self._telemetry.blocks_freed(self.num_committed)
        # At once, as the device has waited for what was committed. But a group on trial is
        # committed with its launch: no cancel comes between, which would blame another.
        if not self._in_flight and self._scheduler.needs_results and not self._bisection:
            self.launch_ahead()

    def _schedule(self, only: tuple[frozenset[int], int] | None) -> Batch | None:
        """Return the next batch; if all sequences wait for blocks from host memory, wait for some.

        Sets `fatal` if that fails: by a copy, or by what has half changed the sequences of a step.
        """
        scheduler = self._scheduler
        try:
            while (batch := scheduler.schedule(only)) is None:
                if self._in_flight or not (scheduler.has_work and scheduler.cache.tier.is_moving):
                    break
                scheduler.cache.tier.wait()
        except AssertionError:
            raise
        except Exception as error:
            _log.error("no step could be scheduled", exc_info=error)
            self.fatal = error
            return None
        return batch

    def _commit(self, step: _Step) -> None:
        """Wait for a step and commit it; if it failed, undo it and find the sequence at fault."""
        batch, error = step.batch, step.error
        self.num_committed += 1
        try:
            if error is not None:
                raise error
            assert step.launched is not None
            wait_s = time.monotonic()
            sampled = step.launched.wait()
            ended_s = time.monotonic()
            num_samples = sum([row.samples for row in batch.rows])
            if len(sampled.token_ids) != num_samples:
                raise RuntimeError(f"{len(sampled.token_ids)} tokens for {num_samples} rows")
        except Exception as caught:
            self._recover(batch, caught)
            return
        self._failed.clear()
        self._bisection.succeed()
        owners = self._scheduler.commit(batch, sampled)
        self._telemetry.step_finished(batch, owners, wait_s, ended_s)

    def _recover(self, batch: Batch, error: Exception) -> None:
        """Undo all steps in flight after a failed one, and find the sequence at fault.

        If the device itself has failed, `fatal` is set and nothing is sent: all tokens sent so far
        are right, and a client that sends its request again can be served by the next engine.
        """
        _log.error("a step of %d rows failed", len(batch.rows), exc_info=error)
        if is_of_device(error):
            self.fatal = error
            return
        for step in self._in_flight:
            with contextlib.suppress(Exception):  # it builds on what was never computed
                if step.launched is not None:
                    step.launched.wait()
        self._in_flight.clear()
        owners = self._scheduler.roll_back()
        if not owners:
            return
        names = {kind.__name__ for kind in type(error).__mro__}
        is_short_of_memory = "OutOfMemoryError" in names and self._fewer_tokens_help
        culprit = self._bisection.fail(owners, batch.num_tokens, is_short_of_memory)
        if culprit is None:
            return
        reason = f"the step failed: {type(error).__name__}"
        self._scheduler.finish(culprit, Ending(FinishReason.ERROR, error=reason))
        self._failed.add((culprit.request.bridge, culprit.request.number))
        if len(self._failed) >= _MAX_FAILED:
            self.fatal = error
