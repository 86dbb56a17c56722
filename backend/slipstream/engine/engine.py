"""Run requests without a process around them: submit and cancel change state, `step` advances it.

There are no sockets and no text here. The engine decides which tokens a bridge gets; postprocessing
turns them into text.
"""

import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from slipstream_runtime.admission import Load

from slipstream.core.batch import Batch, Sampled
from slipstream.core.drafts import Speculation
from slipstream.core.edits import EditContext
from slipstream.core.processors import start_processors
from slipstream.core.sequence import Request
from slipstream.core.stop import Ending, RawBytes
from slipstream.core.window import AttentionWindow
from slipstream.engine.adapters import AdapterStore
from slipstream.engine.answers import add_sequences, add_wanted, make_request, most_running
from slipstream.engine.bisect import Bisection, is_of_device
from slipstream.engine.deadlines import Deadlines, overdue
from slipstream.engine.device_drafts import DeviceDrafts
from slipstream.engine.gauges import Gauges
from slipstream.engine.guides import Guides, MaskTaker
from slipstream.engine.launch_lead import LaunchLead
from slipstream.engine.reports import RequestLog
from slipstream.engine.request_checks import RequestBounds
from slipstream.engine.request_ids import RequestIds
from slipstream.engine.scheduler import Limits, Scheduler
from slipstream.engine.telemetry import Telemetry
from slipstream.guide.interface import MakeCompiler
from slipstream.kvcache.host import Mover
from slipstream.wire import CancelCause, Figures, FinishReason, Rejected, Status, Submit, Tokens

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

    def launch(self, batch: Batch) -> LaunchedStep:
        """Start a step. A row's `source` is the number of a sample of the step launched before."""


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """A step between launch and commit."""

    batch: Batch
    launched: LaunchedStep | None  # None: its launch failed
    error: Exception | None


class Engine:
    """All requests of one model that have not ended.

    `fatal` is set when the device is beyond repair: the process must end then.
    """

    def __init__(
        self,
        limits: Limits,
        runner: Runner,
        vocab: RawBytes | None,
        model: str = "",
        clock: Callable[[], int] = time.monotonic_ns,
        telemetry: Telemetry | None = None,
        request_log: RequestLog | None = None,
        speculation: Speculation | None = None,
        device_drafts: DeviceDrafts | None = None,
        guide_compiler: MakeCompiler | None = None,
        edit_context: EditContext | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        self.fatal: Exception | None = None
        self.adapters = adapters or AdapterStore()
        self.num_steps = 0
        self._runner = runner
        self._vocab = vocab
        self._model = model
        self._clock = clock
        self._limits = limits
        self._telemetry = telemetry or Telemetry()
        self._request_log = request_log
        self._scheduler = Scheduler(
            limits,
            runner.num_blocks,
            runner.block_size,
            clock,
            self._telemetry,
            *(runner.window, runner.transfers, runner.attention_doubles_at),
            speculation,
            device_drafts,
            self.adapters.room,
        )
        self.prefixes = self._scheduler.cache.index
        fixed = {"max_num_seqs": limits.max_num_seqs, "block_size": runner.block_size}
        self._gauges = Gauges(self._scheduler, self._telemetry, fixed)
        self._edit_context = edit_context or EditContext(runner.vocab_size, vocab)
        self._guides: Guides | None = None
        if guide_compiler is not None:
            queue, finish = self._scheduler.waiting, self._scheduler.finish
            thinking = self._edit_context.thinking, limits.guide_in_thinking
            self._guides = Guides(guide_compiler, queue.defer, queue.wake, finish, *thinking)
            self._scheduler.guides = self._guides
            if speculation is not None and speculation.accepted is None:
                self._guides.looks_ahead = True
        self._bounds = self._make_bounds(device_drafts is not None)
        self._deadlines = Deadlines()
        self._requests: dict[tuple[bytes, int], Request] = {}
        self._request_ids: RequestIds[Request] = RequestIds()
        self._flights: deque[_StepInFlight] = deque()
        self._next_sequence_id = 0
        self._failed: set[tuple[bytes, int]] = set()  # requests that failed since a step succeeded
        self._bisection = Bisection()
        self._launch_lead = LaunchLead(clock)
        self._last_step = 0.0  # time.monotonic()
        self._num_received = self._num_received_tokens = 0  # refused ones included; their prompts

    def _make_bounds(self, drafts_on_device: bool) -> RequestBounds:
        runner = self._runner
        return RequestBounds(
            *(runner.vocab_size, runner.max_model_len, runner.num_blocks),
            runner.num_blocks // runner.window.num_tables * runner.block_size,
            self._scheduler.cache.blocks_for,
            has_tokenizer=self._vocab is not None,
            max_running=self._scheduler.max_running,
            max_logits_bytes=self._limits.max_logits_bytes,
            has_guides=self._guides is not None,
            has_thinking=self._edit_context.thinking is not None,
            drafts_on_device=drafts_on_device,
            two_way=self._limits.two_way,
            max_num_batched_tokens=self._limits.max_num_batched_tokens,
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute or send anything."""
        return bool(self._requests or self._flights)

    def has_request(self, bridge: bytes, request: int) -> bool:
        """Return whether that request of a bridge has not ended."""
        return (bridge, request) in self._requests

    def submit(self, bridge: bytes, message: Submit) -> None:
        """Queue a request. Raises `ContractError` if it is refused; it is counted even then."""
        key = (bridge, message.request)
        assert key not in self._requests, "its number is in use"
        self._num_received += 1
        self._num_received_tokens += len(message.token_ids)
        self._request_ids.refuse_duplicate(bridge, message.model, message.request_id)
        message, num_virtual = self.adapters.with_virtual(message, self._runner.vocab_size)
        sight = self._bounds.validate(message, num_virtual)
        sampling, known = message.sampling, self._edit_context.processors
        processors = start_processors(known, sampling.logits_processors)
        self.load().raise_if_full(len(message.token_ids))
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        request = make_request(bridge, message, sight)
        request.adapter = self.adapters.choose(message)
        request.edit_context, request.processors = self._edit_context, processors
        parts = (message.token_ids, seed, self._runner.max_model_len, self._vocab)
        self._next_sequence_id += add_sequences(request, self._next_sequence_id, *parts)
        add_wanted(request, self._limits.logprobs_mode)
        if not self._requests:
            self._last_step = time.monotonic()  # the idle time before does not count
            self._telemetry.resume()
        request.num_unfinished = len(request.sequences)
        self._requests[key] = request
        self._request_ids.add(request)
        self.adapters.acquire(request.adapter)
        self._telemetry.request_queued(request)
        if message.deadline_ns:
            self._deadlines.add(message.deadline_ns, key, self._requests.keys())
        self._scheduler.add(request)
        if sampling.guide is not None:
            assert self._guides is not None, "refused by the bounds"
            self._guides.start(request)

    def cancel(
        self,
        bridge: bytes,
        request: int,
        cause: CancelCause = CancelCause.CLIENT,
        noticed_ns: int = 0,
    ) -> bool:
        """End all sequences of a request; return False if there is no such request (any more).

        Args:
            bridge: identity of the request's connection.
            request: the bridge's number for it.
            cause: reason, for metrics.
            noticed_ns: `time.monotonic_ns()` at which the cause was noticed; 0: now.
        """
        found = self._requests.get((bridge, request))
        if found is None:
            return False
        self._end_early(found, Ending(FinishReason.CANCELLED), cause, noticed_ns)
        return True

    def _end_early(
        self, request: Request, ending: Ending, cause: CancelCause, noticed_ns: int
    ) -> None:
        request.cause = cause
        for sequence in request.sequences:
            self._scheduler.finish(sequence, ending)
        last_step = self.num_steps + len(self._flights)  # which may still use its blocks
        self._telemetry.request_cancelled(request, noticed_ns or time.monotonic_ns(), last_step)
        self._telemetry.blocks_freed(self.num_steps)

    def cancel_bridge(self, bridge: bytes) -> int:
        """Cancel all requests of a bridge that is gone; return how many there were."""
        gone = self.requests_of(bridge)
        for number in gone:
            self.cancel(bridge, number, CancelCause.BRIDGE)
        return len(gone)

    def slack_ns(self) -> float:
        """Return how long the next `step` can wait for requests, in ns; see `LaunchLead`."""
        if len(self._flights) != 1 or self._scheduler.needs_results or self._bisection:
            return 0.0
        return self._launch_lead.slack_ns(self._scheduler.earliest_end_ns())

    def step(self) -> dict[bytes, list[Tokens]]:
        """Launch ahead, commit the oldest step; return the new tokens for each bridge."""
        self._end_overdue()
        if (guides := self._guides) is not None and guides.num_active:
            guides.poll()
        self._launch_ahead()
        if self.fatal is not None:
            return {}
        had_flights = bool(self._flights)
        if had_flights:
            self._commit(self._flights.popleft())
            # The next step must not build on one that was never launched.
            if self._flights and self._flights[0].error is not None:
                self._commit(self._flights.popleft())
            self._last_step = time.monotonic()
            self._telemetry.blocks_freed(self.num_steps)
            # At once, as the device has waited for what was committed. But a group on trial is
            # committed with its launch: no cancel comes between, which would blame another.
            if not self._flights and self._scheduler.needs_results and not self._bisection:
                self._launch_ahead()
        outputs = self._outputs()
        if had_flights or outputs or self.adapters.room.wait():
            return outputs
        if guides is not None and guides.is_busy:
            guides.wait()
            return outputs
        assert not self._requests, "a sequence that waits while none runs is always admitted"
        return outputs

    def take_rejected(self) -> list[tuple[bytes, Rejected]]:
        """Return requests, by bridge, that turned out since the last call not to be servable."""
        return [] if self._guides is None else self._guides.take_rejected()

    def load(self) -> Load:
        """Return how much is waiting, and how much may wait."""
        scheduler = self._scheduler
        return scheduler.waiting.load(scheduler.num_running)._replace(
            num_received=self._num_received, num_received_tokens=self._num_received_tokens
        )

    def status(self, number: int = 0, bridges: Iterable[str] = ()) -> Status:
        """Return the answer to a `Ping`."""
        age_s = time.monotonic() - self._last_step if self._requests else 0.0
        where = (number, self._model, self.num_steps, age_s, list(bridges))
        return self._gauges.status(*where, self._requests.values())

    def figures(self, num_dropped: int = 0) -> Figures:
        """Return all metrics; `num_dropped` is the number of frames that were not messages."""
        return self._gauges.figures(self._requests.values(), num_dropped)

    def requests_of(self, bridge: bytes) -> list[int]:
        """Return the numbers of a bridge's requests that have not ended."""
        return [number for owner, number in self._requests if owner == bridge]

    def check_integrity(self) -> None:
        """Assert what must hold between steps; for tests and idle times. O(blocks)."""
        self._scheduler.check_integrity()
        self.adapters.check_integrity()
        num_sequences = self._scheduler.num_running + self._scheduler.num_waiting
        cache = self._scheduler.cache
        if not self._requests:
            assert num_sequences == 0, "sequences without a request"
            assert not self._request_ids, "an id of a request that has ended"
            # A launched step also holds the blocks that it copies.
            assert self._flights or cache.num_unused == cache.num_blocks, "a leak"
        assert cache.num_fenced == 0 or self._flights, "a fence without a step in flight"
        assert num_sequences <= sum(map(most_running, self._requests.values()))

    # --- one step ------------------------------------------------------------------------------

    def _end_overdue(self) -> None:
        """End requests whose deadline has passed, whatever their state."""
        now_ns = self._clock()
        for deadline_ns, key in self._deadlines.take_due(now_ns):
            request = self._requests.get(key)
            if request is None or request.message.deadline_ns != deadline_ns:
                continue  # it ended; its number may be in use again
            ending = overdue(request, now_ns - deadline_ns)
            self._end_early(request, ending, CancelCause.DEADLINE, 0)

    def _launch_ahead(self) -> None:
        """Launch as many steps as the runner takes at a time.

        After a failed launch no further step is launched, and a bisected group runs alone.
        """
        flights = self._flights
        while len(flights) < self._runner.max_in_flight and not (flights and flights[-1].error):
            only = self._bisection.current()
            if only is not None and flights:
                return
            decided_ns = self._clock()
            batch = self._schedule(only)
            if self.fatal is not None or (batch is None and only is None):
                return
            if batch is None:
                if self._guides is not None and self._guides.is_busy:
                    return  # the group may wait for a mask, whose error comes by `poll`
                continue  # preempted for others: the group's turn is over
            try:
                launched = self._runner.launch(batch)
                flights.append(_StepInFlight(batch, launched, None))
                self._launch_lead.launched(decided_ns)
                if batch.has_masks and self._guides is not None and self._guides.num_active:
                    self._guides.launched(batch, launched)
            except Exception as error:
                flights.append(_StepInFlight(batch, None, error))

    def _schedule(self, only: tuple[frozenset[int], int] | None) -> Batch | None:
        """Return the next batch; if all sequences wait for blocks from host memory, wait for some.

        Sets `fatal` if a copy cannot be started or has failed.
        """
        scheduler = self._scheduler
        try:
            while (batch := scheduler.schedule(only)) is None:
                if self._flights or not (scheduler.has_work and scheduler.cache.tier.is_moving):
                    break
                scheduler.cache.tier.wait()
        except AssertionError:
            raise
        except Exception as error:
            _log.error("blocks could not be copied", exc_info=error)
            self.fatal = error
            return None
        return batch

    def _commit(self, flight: _StepInFlight) -> None:
        """Wait for a step and commit it; if it failed, undo it and find the sequence at fault."""
        batch, error = flight.batch, flight.error
        self.num_steps += 1
        try:
            if error is not None:
                raise error
            assert flight.launched is not None
            wait_s = time.monotonic()
            sampled = flight.launched.wait()
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
        for flight in self._flights:
            with contextlib.suppress(Exception):  # it builds on what was never computed
                if flight.launched is not None:
                    flight.launched.wait()
        self._flights.clear()
        owners = self._scheduler.roll_back()
        if not owners:
            return
        names = {kind.__name__ for kind in type(error).__mro__}
        is_short_of_memory = "OutOfMemoryError" in names and self._limits.two_way is None
        culprit = self._bisection.fail(owners, batch.num_tokens, is_short_of_memory)
        if culprit is None:
            return
        reason = f"the step failed: {type(error).__name__}"
        self._scheduler.finish(culprit, Ending(FinishReason.ERROR, error=reason))
        self._failed.add((culprit.request.bridge, culprit.request.number))
        if len(self._failed) >= _MAX_FAILED:
            self.fatal = error

    def _outputs(self) -> dict[bytes, list[Tokens]]:
        outputs: dict[bytes, list[Tokens]] = {}
        for sequence in self._scheduler.take_changed():
            tokens = sequence.take_output()
            if tokens is None:
                continue
            request = sequence.request
            sent = outputs.setdefault(request.bridge, [])
            sent.append(tokens)
            if tokens.finished is not None:
                if request.choice is not None:
                    sent[-1:] = request.choice.take(tokens)
                if tokens.finished.reason is FinishReason.ERROR:
                    _log.error("request %d ended: %s", request.number, tokens.finished.error)
                self._telemetry.sequence_finished(sequence, tokens.finished.num_output_tokens)
                request.num_unfinished -= 1
                if request.num_unfinished == 0:
                    del self._requests[request.bridge, request.number]
                    self._request_ids.remove(request)
                    self.adapters.release(request.adapter)
                    self._telemetry.request_finished(request)
                    if request.sampling.guide is not None and self._guides is not None:
                        self._guides.num_active -= 1
                    if self._request_log is not None and not request.message.is_probe:
                        self._request_log.write(request)
        return outputs
