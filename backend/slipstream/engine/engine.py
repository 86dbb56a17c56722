"""Run requests without a process around them: submit and cancel change state, `step` advances it.

There are no sockets and no text here. The engine decides which tokens a bridge gets; postprocessing
turns them into text.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterable

from slipstream_runtime.admission import Load

from slipstream.core.drafts import Speculation
from slipstream.core.edits import EditContext
from slipstream.core.processors import start_processors
from slipstream.core.sequence import Request, Sequence
from slipstream.core.stop import Ending, RawBytes
from slipstream.engine.adapters import AdapterStore
from slipstream.engine.answers import add_sequences, add_wanted, make_request, most_running
from slipstream.engine.deadlines import Deadlines, overdue
from slipstream.engine.device_drafts import DeviceDrafts
from slipstream.engine.gauges import Gauges
from slipstream.engine.guides import Guides
from slipstream.engine.reports import RequestLog
from slipstream.engine.request_checks import RequestBounds
from slipstream.engine.request_ids import RequestIds
from slipstream.engine.scheduler import Limits, Scheduler
from slipstream.engine.steps import Runner, Steps
from slipstream.engine.telemetry import Telemetry
from slipstream.guide.interface import MakeCompiler
from slipstream.wire import (
    CancelCause,
    Figures,
    Finished,
    FinishReason,
    Rejected,
    Status,
    Submit,
    Tokens,
)

_log = logging.getLogger(__name__)


class Engine:
    """All requests of one model that have not ended.

    Steps are those of `steps.py`; what they sample comes back here, and out.
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
        self.adapters = adapters or AdapterStore()
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
            window=runner.window,
            mover=runner.transfers,
            attention_doubles_at=runner.attention_doubles_at,
            step_sizes=runner.step_sizes,
            speculation=speculation,
            device_drafts=device_drafts,
            room=self.adapters.room,
        )
        self.prefixes = self._scheduler.cache.index
        fixed = {"max_num_seqs": limits.max_num_seqs, "block_size": runner.block_size}
        self._gauges = Gauges(self._scheduler, self._telemetry, fixed)
        self._edit_context = edit_context or EditContext(runner.vocab_size, vocab)
        self._guides = None if guide_compiler is None else self._make_guides(guide_compiler)
        if self._guides is not None and speculation is not None:
            self._guides.looks_ahead = speculation.accepted is None
        self._scheduler.guides = self._guides
        self._steps = Steps(
            self._scheduler,
            runner,
            self._telemetry,
            clock,
            fewer_tokens_help=limits.two_way is None,
        )
        self._bounds = self._make_bounds(device_drafts is not None)
        self._deadlines = Deadlines()
        self._requests: dict[tuple[bytes, int], Request] = {}
        self._request_ids: RequestIds[Request] = RequestIds()
        self._next_sequence_id = 0
        self._num_received = self._num_received_tokens = 0  # refused ones included; their prompts

    def _make_guides(self, compiler: MakeCompiler) -> Guides:
        queue, finish = self._scheduler.waiting, self._scheduler.finish
        thinking = self._edit_context.thinking, self._limits.guide_in_thinking
        return Guides(compiler, queue.defer, queue.wake, finish, *thinking)

    def _make_bounds(self, drafts_on_device: bool) -> RequestBounds:
        runner = self._runner
        return RequestBounds(
            vocab_size=runner.vocab_size,
            max_model_len=runner.max_model_len,
            num_blocks=runner.num_blocks,
            num_tokens=runner.num_blocks // runner.window.num_tables * runner.block_size,
            blocks_for=self._scheduler.cache.blocks_for,
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
    def fatal(self) -> Exception | None:
        """The error after which the device is beyond repair: the process must end then."""
        return self._steps.fatal

    @property
    def num_steps(self) -> int:
        """Number of steps so far, failed ones included."""
        return self._steps.num_committed

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute or send anything."""
        return bool(self._requests or self._steps)

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
            self._steps.resume()
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
        last_step = self.num_steps + len(self._steps)  # which may still use its blocks
        self._telemetry.request_cancelled(request, noticed_ns or time.monotonic_ns(), last_step)
        self._telemetry.blocks_freed(self.num_steps)

    def cancel_bridge(self, bridge: bytes) -> int:
        """Cancel all requests of a bridge that is gone; return how many there were."""
        gone = self.requests_of(bridge)
        for number in gone:
            self.cancel(bridge, number, CancelCause.BRIDGE)
        return len(gone)

    def slack_ns(self) -> float:
        """Return how long the next `step` can wait for requests, in ns."""
        return self._steps.slack_ns()

    def step(self) -> dict[bytes, list[Tokens]]:
        """Launch ahead, commit the oldest step; return the new tokens for each bridge."""
        self._end_overdue()
        if (guides := self._guides) is not None and guides.num_active:
            guides.poll()
        self._steps.launch_ahead()
        if self.fatal is not None:
            return {}
        if had_steps := bool(self._steps):
            self._steps.commit_oldest()
        outputs = self._outputs()
        if had_steps or outputs or self.adapters.room.wait():
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
        age_s = self._steps.age_s() if self._requests else 0.0
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
            assert self._steps or cache.num_unused == cache.num_blocks, "a leak"
        assert cache.num_fenced == 0 or self._steps, "a fence without a step in flight"
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
                self._sequence_ended(sequence, tokens.finished)
        return outputs

    def _sequence_ended(self, sequence: Sequence, finished: Finished) -> None:
        """Count a sequence whose end is being sent; remove its request with the last of them."""
        request = sequence.request
        if finished.reason is FinishReason.ERROR:
            _log.error("request %d ended: %s", request.number, finished.error)
        self._telemetry.sequence_finished(sequence, finished.num_output_tokens)
        request.num_unfinished -= 1
        if request.num_unfinished:
            return
        del self._requests[request.bridge, request.number]
        self._request_ids.remove(request)
        self.adapters.release(request.adapter)
        self._telemetry.request_finished(request)
        if request.sampling.guide is not None and self._guides is not None:
            self._guides.num_active -= 1
        if self._request_log is not None and not request.message.is_probe:
            self._request_log.write(request)
