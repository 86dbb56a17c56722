"""Follow a request that generates: from its first token to the last byte of its response."""

import logging
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

from slipstream import wire

from slipstream_gateway.answer import Answer, Usage
from slipstream_gateway.dialects.dialect import Dialect, Writer
from slipstream_gateway.errors import ApiError
from slipstream_gateway.reply import Reply
from slipstream_gateway.sequences import Answering, News, PromptPart, finish_of

_log = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"
_NO_BEAM = wire.Beam([], [], 0.0)
_JOIN = 256  # tokens of an answer that is not streamed are read in parts of this size


@runtime_checkable
class Detailed(Protocol):
    """A writer of a dialect that also shows token ids and prompts."""

    def attach(self, usage: Usage, prompts: Sequence[PromptPart], per_prompt: int) -> None:
        """Take what changes while the answer comes; answer `i` is to prompt `i // per_prompt`."""

    def note(self, index: int, token_ids: Sequence[int]) -> None:
        """Take the token ids of what is written next of answer `index`."""


class Canceller(Protocol):
    """The engine as an exchange leaves it."""

    def close_exchange(self, exchange: "Exchange", cause: wire.CancelCause | None) -> None:
        """Remove the requests of an exchange; with a cause, those that run are cancelled."""

    def flush(self, exchange: "Exchange") -> None:
        """Have an exchange write what it has."""


@dataclass
class Times:
    """Times of an exchange, by `time.monotonic()`; 0: not yet."""

    start_s: float = field(default_factory=time.monotonic)
    first_token_s: float = 0.0
    last_event_s: float = field(default_factory=time.monotonic)  # the last byte, or the start
    paused_s: float = 0.0  # since when the client reads too slowly


@dataclass(frozen=True)
class Shape:
    """Constants of an exchange; answer `i` is to prompt `i // per_prompt`."""

    is_streaming: bool
    per_prompt: int
    block_size: int  # tokens, of the engine's cache
    is_search: bool = False  # all beams of a prompt end together, with one message


class Exchange:
    """A request in flight. All its methods run in the event loop's thread."""

    def __init__(
        self,
        reply: Reply,
        dialect: Dialect,
        writer: Writer,
        answers: Sequence[Answering],
        shape: Shape,
        close: Callable[["Exchange", wire.CancelCause | None], None],
    ) -> None:
        """Make an exchange that has not started.

        `close` is called once, at its end; with a cause, the engine's requests still run.
        """
        self.times = Times()
        self.usage = Usage()
        self.is_over = False
        self.is_abandoned = False  # the client left before its end
        self.engine: Canceller | None = None
        self.requests: list[int] = []  # the engine's numbers
        self.fields: Container[str] = ()  # of the request, for errors
        self.is_named_tool = False  # a named tool's call ends with `stop`, as OpenAI has it
        self.error: ApiError | None = None
        self.reply = reply
        self._dialect = dialect
        self._writer = writer
        self._answers = answers
        self._is_streaming = shape.is_streaming
        self._shape = shape
        self._close = close
        self._wholes = [Answer() for _ in answers] if not shape.is_streaming else []
        self._fresh: dict[int, None] = {}  # answers with tokens that were not taken
        self._num_running = len(answers)  # that the engine has not finished
        self._num_open = len(answers)  # without their last event
        self._num_pending = 0  # tokens
        self._failure: ApiError | None = None  # to be sent after the last tokens
        self._beams: list[tuple[int, News]] = []  # of a search that has ended
        prompts = [answer.prompt for answer in answers[:: shape.per_prompt]]
        self.usage.prompt = sum(len(prompt.token_ids) for prompt in prompts)
        self._detailed = writer if isinstance(writer, Detailed) else None
        if self._detailed is not None:
            self._detailed.attach(self.usage, prompts, shape.per_prompt)

    # --- from the engine ---------------------------------------------------------------------

    def put(self, index: int, tokens: wire.Tokens) -> None:
        """Add tokens of an answer; of a beam search, of all answers from `index` on."""
        finished = tokens.finished
        if finished is not None:
            self._num_running -= self._shape.per_prompt if self._shape.is_search else 1
            if finished.reason is wire.FinishReason.ERROR:
                status = 400 if finished.is_refusal else 500
                self.fail(ApiError(status, finished.error or "the engine failed"))
                return
            if finished.reason is wire.FinishReason.DEADLINE:
                message = finished.error or "the request took too long"
                self._failure = ApiError(504, message, code="deadline_exceeded")
        if self._shape.is_search:
            self._put_beams(index, tokens)
            return
        self._num_pending += len(tokens.token_ids)
        self._answers[index].put(tokens)
        self._fresh[index] = None

    def _put_beams(self, first: int, tokens: wire.Tokens) -> None:
        """Take a search that has ended: one that never ran, or was cut, has fewer beams."""
        if tokens.finished is None:
            return
        beams = tokens.beams or []
        for place in range(self._shape.per_prompt):
            beam = beams[place] if place < len(beams) else _NO_BEAM
            piece = self._answers[first + place].take_beam(beam, tokens.finished)
            self._beams.append((first + place, piece))

    @property
    def is_urgent(self) -> bool:
        """Whether what has come is the first or the last of the response."""
        return not self.reply.is_started or self._num_running == 0

    def flush(self) -> None:
        """Write what has come, unless the client is behind."""
        if self.is_over:
            return
        if not self._is_streaming:
            if self._num_running == 0 or self._num_pending > _JOIN:
                self._absorb()
            return
        if self.reply.is_paused:
            self.times.paused_s = self.times.paused_s or time.monotonic()
            assert self.engine is not None
            self.reply.when_room(partial(self.engine.flush, self))
            return
        self.times.paused_s = 0.0
        data = b"" if self.reply.is_started else self._start()
        for index, piece in self._take():
            data += self._event(index, piece)
        is_last = self._num_open == 0
        if is_last:
            data += self._last_events()
        if data or is_last:
            self._write(data, is_last)
        if is_last:
            self._end()

    # --- ends --------------------------------------------------------------------------------

    def fail(self, error: ApiError) -> None:
        """End with an error: as an HTTP status if nothing was sent, else as an event."""
        if self.is_over:
            return
        self.error = error
        if not self.reply.is_started:
            self.reply.refuse(error, self._dialect.error(error))
        elif self._is_streaming:
            self._write_at_last(self._writer.fail(error))
        self._end(wire.CancelCause.FAILED)

    def abandon(self) -> None:
        """End without a word: the client has gone, or reads nothing."""
        if not self.is_over:
            self.is_abandoned = True
            self.reply.abort()
            self._end(wire.CancelCause.CLIENT)

    def keep_alive(self, now_s: float, quiet_s: float) -> None:
        """Send a comment if nothing was sent for `quiet_s`; the first one sends status 200."""
        if self.is_over or not self._is_streaming or now_s - self.times.last_event_s < quiet_s:
            return
        if not self.reply.is_paused:
            start = b"" if self.reply.is_started else self._start()
            self._write(start + KEEP_ALIVE)

    # --- the parts of a response ---------------------------------------------------------------

    def _start(self) -> bytes:
        self.reply.start()
        return self._writer.start(self.usage.prompt)

    def _take(self) -> Iterable[tuple[int, News]]:
        """Take what is new of every answer that has news, in order, and count it."""
        self._num_pending = 0
        fresh, self._fresh = self._fresh, {}
        taken, self._beams = self._beams, []
        for index in fresh if len(fresh) == 1 else sorted(fresh):
            answer = self._answers[index]
            if answer.has_news:
                taken.append((index, answer.take()))
            else:
                self._fresh[index] = None
        for index, piece in taken:
            self._count(index, piece)
        return taken

    def _count(self, index: int, piece: News) -> None:
        usage = self.usage
        usage.completion += len(piece.token_ids)
        if piece.token_ids and not self.times.first_token_s:
            self.times.first_token_s = time.monotonic()
        if piece.finished is not None:
            self._num_open -= 1
            perf = piece.finished.perf
            usage.reasoning += self._answers[index].num_reasoning
            usage.drafted += perf.num_drafted
            usage.accepted += perf.num_accepted
            if index % self._shape.per_prompt == 0:
                reused = perf.kv_reused_blocks * self._shape.block_size
                usage.cached += min(reused, piece.finished.num_input_tokens)

    def _event(self, index: int, piece: News) -> bytes:
        if self._detailed is not None:
            self._detailed.note(index, piece.token_ids)
        data = self._writer.write(index, piece.deltas, piece.log_probs)
        if piece.finished is not None and self._failure is None:
            finish = finish_of(piece.finished, self._has_calls(index))
            data += self._writer.finish(index, finish, self.usage)
        return data

    def _has_calls(self, index: int) -> bool:
        return self._answers[index].ends_in_calls and not self.is_named_tool

    def _last_events(self) -> bytes:
        if self._failure is not None:
            self.error = self._failure
            return self._writer.fail(self._failure)
        return self._writer.end(self.usage)

    def _absorb(self) -> None:
        """Add what has come to the whole answers; send them after the last."""
        for index, piece in self._take():
            if self._detailed is not None:
                self._detailed.note(index, piece.token_ids)
            whole = self._wholes[index]
            whole.add(piece.deltas)
            whole.log_probs += piece.log_probs
            if piece.finished is not None and self._failure is None:
                whole.finish = finish_of(piece.finished, self._has_calls(index))
        if self._num_open:
            return
        if self._failure is not None:
            self.fail(self._failure)
            return
        self.reply.respond(200, self._writer.whole(self._wholes, self.usage))
        self._end()

    def _write(self, data: bytes, is_last: bool = False) -> None:
        self.times.last_event_s = time.monotonic()
        self.reply.write(data, is_last)

    def _write_at_last(self, data: bytes) -> None:
        if self.reply.is_paused:  # there is no room for an error, and the client does not read
            self.is_abandoned = True
            self.reply.abort()
            return
        self._write(data, is_last=True)

    def _end(self, cause: wire.CancelCause | None = None) -> None:
        self.is_over = True
        self._fresh.clear()
        self._close(self, cause)
