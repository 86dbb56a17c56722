"""Guide sequences: compile what requests ask for, make masks, validate samples.

A request waits, deferred, while its guide is compiled; requests behind it go first. The mask of a
token is made when the token before is known, while the step that samples it runs, and given to that
step. If it comes too late the row is void and runs again; no other row waits for it. The threads
that compile and make masks are those of `Workers`: everything here runs in the engine's.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Protocol

from slipstream_contract.errors import Code

from slipstream.core.batch import Batch, Outcome
from slipstream.core.guided import Guided
from slipstream.core.guided_later import GuidedLater
from slipstream.core.rules import RuleError
from slipstream.core.sequence import Request, Sequence, SequenceStatus
from slipstream.core.stop import Ending
from slipstream.core.thinking import Thinking
from slipstream.engine.beam_group import Beam, BeamGroup
from slipstream.guide.interface import GuideError, MakeCompiler, Template, reason_of
from slipstream.guide.workers import Fill, Workers
from slipstream.wire import FinishReason, Rejected

_WAIT_S = 0.005  # between two looks at messages while nothing else is to do

Result = tuple[Sequence | None, int, float, int]  # and a token, its log prob, its outcome
Append = Callable[[Sequence, int, float, int], Ending | None]
Finish = Callable[[Sequence, Ending], None]


class MaskTaker(Protocol):
    """A launched step, of which rows wait for their masks."""

    def give_mask(self, sample: int, mask: bytes) -> None:
        """Take the mask of a sample, from any thread; the step may have ended."""


class Guides:
    """The guided sequences of an engine.

    `defer` and `wake` put off a request's first sequence, by a number that no sequence has, and put
    it back. `finish` ends a sequence.
    """

    def __init__(
        self,
        make: MakeCompiler,
        defer: Callable[[Sequence, int], None],
        wake: Callable[[int], bool],
        finish: Finish,
        thinking: Thinking | None = None,
        in_thinking: bool = False,
    ) -> None:
        """`in_thinking`: guides of requests that do not say hold from the first token on."""
        self.workers = Workers(make)
        self._thinking = thinking
        self._in_thinking = in_thinking
        self._defer = defer
        self._wake = wake
        self._finish = finish
        self.num_active = 0  # guided requests that have not ended
        self.looks_ahead = False  # for forced tokens, which may be drafts
        self._rejected: list[tuple[bytes, Rejected]] = []
        self._waiting: dict[int, Sequence] = {}  # for their masks to be made
        # By sequence, what takes the mask of its row in the step launched last.
        self._takers: dict[int, Callable[[bytes], None]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a guide is being compiled, or a mask made."""
        return self.workers.num_jobs > 0

    def take_rejected(self) -> list[tuple[bytes, Rejected]]:
        """Return the requests refused since the last call, by bridge."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def start(self, request: Request) -> None:
        """Compile the guide of a request that was just queued; it waits until that is done."""
        guide = request.sampling.guide
        assert guide is not None
        first = request.sequences[0]
        self.num_active += 1
        self._defer(first, _leader_of(first))
        self.workers.compile(guide, lambda made: self._compiled(request, made))

    def poll(self) -> None:
        """Take what the threads have made."""
        self.workers.poll()

    def wait(self) -> None:
        """Wait for the threads, a moment."""
        self.workers.wait(_WAIT_S)

    def _compiled(self, request: Request, made: Template | GuideError) -> None:
        first = request.sequences[0]
        if isinstance(made, GuideError):
            self._reject(request, f"the guide is refused: {made}")
        elif first.status is not SequenceStatus.FINISHED:
            parts = (made, request.sampling, self.workers.end_ids)
            thinking = self._thinking_of(request)
            try:
                for sequence in request.sequences:
                    sequence.guide = (
                        Guided(*parts) if thinking is None else GuidedLater(*parts, thinking)
                    )
            except Exception as error:
                is_ours = not isinstance(error, GuideError)
                code = Code.INTERNAL if is_ours else Code.INVALID_ARGUMENT
                self._reject(request, f"the guide cannot be followed: {reason_of(error)}", code)
            else:
                if isinstance(first, Beam):
                    first.group.count_ends()
        self._wake(_leader_of(first))

    def _thinking_of(self, request: Request) -> Thinking | None:
        """Return the thinking after which a request's guide holds; None: it holds at once."""
        guide, thinking = request.sampling.guide, self._thinking
        assert guide is not None
        wanted = guide.options.in_thinking
        if thinking is None or (self._in_thinking if wanted is None else wanted):
            return None
        is_open = thinking.is_open(request.message.token_ids)
        # A prompt that says nothing of thinking: only the request knows that the model thinks.
        return thinking if (wanted is False if is_open is None else is_open) else None

    def _reject(self, request: Request, message: str, code: Code = Code.INVALID_ARGUMENT) -> None:
        if request.sequences[0].status is SequenceStatus.FINISHED:
            return  # it was cancelled meanwhile
        self._rejected.append((request.bridge, Rejected(request.number, code, message)))
        for sequence in request.sequences:
            self._finish(sequence, Ending(FinishReason.ERROR, error=message))

    def launched(self, batch: Batch, step: MaskTaker) -> None:
        """Note the rows of a launched step whose masks are still to be made."""
        rows = [row for row in batch.rows if row.samples]
        self._takers = {
            row.sequence_id: partial(step.give_mask, sample)
            for sample, row in enumerate(rows)
            if row.mask is not None and not row.mask
        }

    # --- samples -------------------------------------------------------------------------------

    def judged(self, results: Iterable[Result]) -> Iterator[Result]:
        """Yield samples with their outcomes by `judge`, each before the next one is looked at.

        A beam does not take what was sampled: its guide follows what is chosen, by `follow`.
        """
        for sequence, token_id, log_prob, outcome in results:
            judged = outcome
            if sequence is not None and _is_sampled(sequence):
                judged = self.judge(sequence, token_id, outcome)
                if judged == Outcome.LATE:
                    self.advance(sequence)
            yield sequence, token_id, log_prob, judged

    def judge(self, sequence: Sequence, token_id: int, outcome: int) -> int:
        """Return the outcome of a guided sample: `LATE` if the guide refuses it.

        A legal one is taken. If the guide cannot go on, the sequence ends with an error.
        """
        guided = sequence.guide
        assert guided is not None
        is_sampled = outcome in (Outcome.SAMPLED, Outcome.UNMASKED)
        if not is_sampled or sequence.status is SequenceStatus.FINISHED:
            return outcome
        if guided.is_filling:
            return Outcome.LATE  # another thread has the matcher: sampled again, with the mask
        had_mask = guided.needs_mask and outcome == Outcome.SAMPLED
        try:
            if outcome == Outcome.UNMASKED:
                guided.look_ahead()  # a mask has one spelling of what is forced
            is_legal = guided.take(token_id)
        except Exception as error:
            guided.error, guided.is_our_fault = reason_of(error), not isinstance(error, GuideError)
            return Outcome.NOT_FINITE
        if not is_legal and had_mask:
            guided.error = f"token {token_id} is refused, which its mask allows"
            guided.is_our_fault = True
            return Outcome.NOT_FINITE
        return Outcome.SAMPLED if is_legal else Outcome.LATE

    def append(
        self, sequence: Sequence, token_id: int, log_prob: float, now_ns: int
    ) -> Ending | None:
        """Append a sample, legal where the sequence is guided; return how that ends, or None.

        An end of the grammar ends the sequence, even one that the request does not name. Where
        nothing but an end is legal it has ended, without a further step, whatever the least number
        of tokens is.
        """
        guided = sequence.guide
        if guided is None or not _is_sampled(sequence):
            return sequence.append(token_id, log_prob, now_ns)
        if guided.is_end(token_id) and token_id not in sequence.stop.watched:
            return Ending(FinishReason.END)
        ending = sequence.append(token_id, log_prob, now_ns)
        if ending is not None and ending.reason is not FinishReason.LENGTH:
            return ending
        try:
            if guided.is_finished:
                sequence.stop.num_sendable = sequence.num_outputs
                return Ending(FinishReason.STOP)
            if ending is None and self.looks_ahead:
                guided.look_ahead()
        except Exception as error:
            return _lost(reason_of(error), is_refusal=isinstance(error, GuideError))
        if ending is None:
            self.advance(sequence)
        return ending

    def follow(self, group: BeamGroup) -> None:
        """Let the guides of beams take the tokens that were chosen for them."""
        try:
            for move in group.moves:
                if move.is_fork and move.parent.guide is not None:
                    move.beam.guide = move.parent.guide.copy()
            for move in group.moves:  # only now: parents are as they were until here
                guided = move.beam.guide
                if guided is None:
                    return
                if not guided.take(move.token_id):
                    raise GuideError(f"token {move.token_id} is refused")
                self.advance(move.beam)
        except Exception as error:
            lead = group.lead
            assert lead.guide is not None, "a group of which some beams are guided"
            self._fail(lead, lead.guide, error)

    def runnable(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Return those that can sample now: plain ones, and those that have their mask.

        The beams of a group run together, once all have theirs.
        """
        return [s for s in sequences if s.guide is None or _has_mask(s)]

    def advance(self, sequence: Sequence) -> None:
        """Ask for the mask of the next token, where it needs one; `flush` makes it."""
        if sequence.guide is not None:
            self._waiting[sequence.id] = sequence

    def flush(self) -> None:
        """Start to make the masks that are needed."""
        waiting, self._waiting = self._waiting, {}
        takers, self._takers = self._takers, {}  # of rows that are void, or need none now, too
        for sequence in waiting.values():
            guided = sequence.guide
            if guided is None:
                continue
            give = takers.get(sequence.id)
            if not guided.wants_fill:
                if give is not None and guided.known_mask is not None:
                    give(guided.known_mask)
                continue
            if guided.forced:
                self._fill_forced(sequence, guided, give)
                continue
            guided.is_filling = True
            take = guided.filled if give is None else partial(guided.filled, give=give)
            fail = partial(self._fail, sequence, guided)
            self.workers.fill(Fill(guided.matcher, guided.pace, take, fail))
        self.workers.flush()

    def _fill_forced(
        self, sequence: Sequence, guided: Guided, give: Callable[[bytes], None] | None
    ) -> None:
        """Make the mask of a forced token here, as that takes less than to ask a thread."""
        try:
            guided.filled(guided.fill(), give)
        except Exception as error:
            self._fail(sequence, guided, error)

    def _fail(self, sequence: Sequence, guided: Guided, error: Exception) -> None:
        guided.is_filling = False
        if sequence.status is not SequenceStatus.FINISHED:
            is_refusal = isinstance(error, GuideError)
            self._finish(sequence, _lost(reason_of(error), is_refusal))


def _is_sampled(sequence: Sequence) -> bool:
    """Return whether a sequence is guided, and takes its samples."""
    return sequence.guide is not None and not isinstance(sequence, Beam)


def _has_mask(sequence: Sequence) -> bool:
    """Return whether a guided sequence can sample now, and all beams of its group if it is one."""
    together = sequence.group.live if isinstance(sequence, Beam) else (sequence,)
    return all(s.guide is None or s.guide.can_run(s.num_pending) for s in together)


def _leader_of(first: Sequence) -> int:
    """Return the number of what a sequence waits for while its guide is compiled."""
    return -1 - first.id


def _lost(error: str, is_refusal: bool) -> Ending:
    message = f"the guide cannot be followed further: {error}"
    return Ending(FinishReason.ERROR, error=message, is_refusal=is_refusal)


def error_of(sequence: Sequence) -> Ending:
    """Return the end of a sequence whose row has no token to sample, and why."""
    guided, edits = sequence.guide, sequence.edits
    if guided is not None and guided.error:
        return _lost(guided.error, is_refusal=not guided.is_our_fault)
    if sequence.fault or edits is None:
        return Ending(FinishReason.ERROR, error=sequence.fault or "numerical error")
    try:
        fields, illegal = edits.fields(sequence.outputs), edits.banned(sequence.outputs)
    except RuleError as error:
        return Ending(FinishReason.ERROR, error=str(error))
    vocab_size = sequence.request.edit_context.vocab_size
    if guided is not None and (guided.needs_mask or guided.row_masks):
        fields.append("the guide")
        illegal |= guided.illegal()
    if not fields or len(illegal.intersection(range(vocab_size))) < vocab_size:
        return Ending(FinishReason.ERROR, error="numerical error")
    names = " and ".join(filter(None, (", ".join(fields[:-1]), fields[-1])))
    bans = "bans" if len(fields) == 1 else "together ban"
    message = f"no token is left: {names} {bans} all {vocab_size} of them"
    return Ending(FinishReason.ERROR, error=message, is_refusal=True)
