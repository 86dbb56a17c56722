"""Hold the beams of one request: sequences that are computed together, and what they have made.

A beam is a `Sequence` whose tokens can change: between two steps it may take over those of another
beam, its parent. The first beam, the lead, stands for the request: it waits, and it ends. Beams
that do not run now are spare; they own nothing.

    deliver      a beam's step is done: its likeliest tokens are known, and it waits for the others
    advance      all have delivered: choose the next beams, and note which end
    take_moves   how to get there: in place where a parent goes on, else by a fork
"""

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace
from slipstream_contract.beams import Beams
from slipstream_contract.ids import TokenIds

from slipstream.core.batch import Top, TopMode
from slipstream.core.edits import counts_tokens
from slipstream.core.sequence import Request, Sequence, SequenceStatus
from slipstream.core.stop import Ending, RawBytes, StopChecker
from slipstream.engine.beams import Candidate, candidates, choose, num_candidates, score
from slipstream.wire import Beam as Answer
from slipstream.wire import Finished, FinishReason, Tokens

# How a beam ends with a candidate, if it does, and its checker after it.
_Check = tuple[Ending | None, StopChecker]


class Move(NamedTuple):
    """How a beam gets its next token: it takes over the tokens of `parent`, perhaps its own."""

    parent: "Beam"
    beam: "Beam"
    token_id: int
    log_prob: float
    cum_log_prob: float
    stop: StopChecker  # which has taken the token

    @property
    def is_fork(self) -> bool:
        """Whether the parent is another beam."""
        return self.parent is not self.beam


class Ended(NamedTuple):
    """A beam that has ended, or that is returned as it stands."""

    score: float
    answer: Answer


class Beam(Sequence):
    """A sequence of a group. It is never scheduled while its token is not chosen."""

    __slots__ = ("cum_log_prob", "group", "top")

    def __init__(self, group: "BeamGroup", sequence_id: int, index: int, *rest: object) -> None:
        request, prompt, seed, max_model_len, vocab = rest
        super().__init__(sequence_id, request, index, prompt, seed, max_model_len, vocab)  # type: ignore[arg-type]
        self.group = group
        self.cum_log_prob = 0.0
        self.top: Top | None = None  # what it has delivered

    def start(self, now_ns: int) -> None:
        """Note the first time that it is scheduled, and prepare its edits."""
        super().start(now_ns)
        self.needs_every_token = True

    def append(self, token_id: int, log_prob: float, now_ns: int) -> Ending | None:
        """Wait for the other beams: what was sampled is not what is taken."""
        if not self.first_token_ns:
            self.first_token_ns = now_ns
        self.last_token_ns = now_ns
        self.num_pending += 1
        return None

    def check(self, token_id: int) -> "_Check":
        """Return how the beam ends with a next token, if it does, and its checker after it.

        A guided text ends by an end, which is legal where the text may end. Where the request
        forbids one yet, or no token is left for it, a text after which nothing but an end is legal
        ends without.
        """
        number, guide = len(self.outputs) + 1, self.guide
        if self.stop.is_end(token_id, number - 1):
            return Ending(FinishReason.END), self.stop
        if guide is not None and guide.is_end(token_id):
            return Ending(FinishReason.END), self.stop
        stop = self.stop.copy()
        ending = stop.take_token(token_id, number)
        if guide is not None and (ending is None or ending.reason is FinishReason.LENGTH):
            is_last = ending is not None or number < self.sampling.min_tokens
            if is_last and guide.finishes(token_id):
                stop.num_sendable = number
                return Ending(FinishReason.STOP), stop
        return ending, stop

    def take_output(self) -> Tokens | None:
        """Return the group's beams, if this is the lead and there is something new."""
        return self.group.take_output() if self is self.group.lead else None

    def reset(self) -> None:
        """Forget what was delivered: it will be computed again."""
        self.top = None
        self.rewind()

    def follow(self, parent: "Beam") -> None:
        """Take over the tokens of another beam; blocks are not touched."""
        self.outputs, self.log_probs = parent.outputs.copy(), parent.log_probs.copy()
        self.first_token_ns, self.last_token_ns = parent.first_token_ns, parent.last_token_ns
        if self.edits is not None:
            self.edits.fork()

    def extend(self, move: Move) -> None:
        """Append the token of a move: the next step computes it."""
        self.outputs.append(move.token_id)
        self.log_probs.append(move.log_prob)
        self.cum_log_prob, self.stop = move.cum_log_prob, move.stop
        self.num_tokens = self.num_prompt + len(self.outputs)
        self.top = None
        self.num_pending = 0
        self.needs_history = self.group.has_counts


class BeamGroup:
    """The beams of one request."""

    def __init__(
        self,
        beams: Beams,
        request: Request,
        first_id: int,
        prompt: TokenIds,
        seed: int,
        max_model_len: int,
        vocab: RawBytes | None,
    ) -> None:
        self.request = request
        self._beams = beams
        rest = (request, prompt, seed, max_model_len, vocab)
        self.all = [Beam(self, first_id + i, i, *rest) for i in range(beams.width)]
        for beam in self.all:
            beam.top_mode = int(TopMode.PROCESSED)
        self.lead = self.all[0]
        self.count_ends()
        self.live: list[Beam] = [self.lead]  # by rank, the best first
        self.is_running = False
        self.has_counts = counts_tokens(
            request.sampling
        )  # sampling depends on how often tokens occur
        self._num_delivered = 0  # live beams whose step is done
        self._ended: list[Ended] = []  # the best first
        self._moves: list[Move] = []
        self._final: list[Answer] | None = None
        self._has_news = False
        self._most = self.lead.num_final - self.lead.num_prompt

    @property
    def width(self) -> int:
        """Most beams that run at a time."""
        return self._beams.width

    @property
    def spare(self) -> list[Beam]:
        """The beams that do not run."""
        live = set(self.live)
        return [beam for beam in self.all if beam not in live]

    @property
    def is_in_flight(self) -> bool:
        """Whether a step in flight has a row of any beam."""
        return any(beam.num_in_flight for beam in self.all)

    # --- a step --------------------------------------------------------------------------------

    def count_ends(self) -> None:
        """Ask for so many tokens of each beam that some go on, whatever ends of those that end."""
        sampling, guide = self.request.sampling, self.lead.guide
        ends = {*sampling.end_ids, *sampling.stop_token_ids, *(guide.end_ids if guide else ())}
        for beam in self.all:
            beam.num_top = num_candidates(self._beams, len(ends))

    def deliver(self, beam: Beam, top: Top) -> bool:
        """Take what a beam's step found; return whether all beams have delivered."""
        beam.top = top
        self._num_delivered += 1
        return self._num_delivered == len(self.live)

    def advance(self, now_ns: int) -> Ending | None:
        """Choose the next beams; return how the search ends, if it is over."""
        live, number = self.live, self.live[0].num_outputs + 1
        self.lead.last_token_ns = now_ns
        self._num_delivered = 0
        tops = [(top.token_ids, top.log_probs) for each in live if (top := each.top) is not None]
        ordered = candidates(self._beams, [each.cum_log_prob for each in live], tops)
        checks: dict[Candidate, _Check] = {}  # of those that may end

        def is_end(candidate: Candidate) -> bool:
            beam = live[candidate.beam]
            is_plain = beam.stop.is_trivial and candidate.token_id not in beam.stop.watched
            if is_plain and number < self._most and beam.guide is None:
                return False
            checks[candidate] = beam.check(candidate.token_id)
            return checks[candidate][0] is not None

        scores = [each.score for each in self._ended]
        step = choose(self._beams, ordered, is_end, scores, number, self._most)
        if step.ended:
            for candidate in step.ended:
                self._end(candidate, number, *checks[candidate])
            self._ended.sort(key=lambda each: -each.score)
            del self._ended[self._beams.width :]
        self._has_news = True
        if step.is_over:
            self._final = [each.answer for each in self._ended]
            if not self._final:
                error = "no token is left for any beam"
                return Ending(FinishReason.ERROR, error=error, is_refusal=True)
            best = self._final[0]
            assert best.reason is not None
            return Ending(best.reason, best.stop_reason)
        self._moves = self._assign(step.running, checks)
        return None

    def _end(
        self, candidate: Candidate, number: int, ending: Ending | None, stop: StopChecker
    ) -> None:
        """Add an ended beam, without what its ending cuts."""
        assert ending is not None
        beam = self.live[candidate.beam]
        token_ids, log_probs, drop_bytes = beam.outputs, beam.log_probs, 0
        if ending.reason is not FinishReason.END:
            token_ids = [*token_ids, candidate.token_id]
            log_probs = [*log_probs, candidate.log_prob]
            if ending.reason is FinishReason.STOP:
                size, drop_bytes = stop.num_sendable, stop.drop_bytes
                token_ids, log_probs = token_ids[:size], log_probs[:size]
        answer = self._answer(token_ids, log_probs, candidate.cum_log_prob, ending, drop_bytes)
        self._ended.append(Ended(score(self._beams, candidate.cum_log_prob, number), answer))

    def _answer(
        self,
        token_ids: list[int],
        log_probs: list[float],
        cum_log_prob: float,
        ending: Ending | None,
        drop_bytes: int = 0,
    ) -> Answer:
        return Answer(
            token_ids.copy(),
            log_probs.copy() if self.request.sampling.log_probs else [],
            cum_log_prob,
            drop_bytes,
            None if ending is None else ending.reason,
            None if ending is None else ending.stop_reason,
        )

    def _assign(self, running: list[Candidate], checks: dict[Candidate, _Check]) -> list[Move]:
        """Return the moves to the next beams, by rank: a parent's first child stays in place."""
        live = self.live
        going_on = {candidate.beam for candidate in running}
        free: Iterator[Beam] = iter(())
        if not len(going_on) == len(running) == len(live):
            stays = [beam for rank, beam in enumerate(live) if rank not in going_on]
            free = iter([*stays, *self.spare])
        moves = []
        for candidate in running:
            rank, token_id, log_prob, cum_log_prob = candidate
            beam = parent = live[rank]
            if rank in going_on:
                going_on.remove(rank)
            else:
                beam = next(free)
            stop = checks[candidate][1] if candidate in checks else parent.stop
            moves.append(Move(parent, beam, token_id, log_prob, cum_log_prob, stop))
        return moves

    @property
    def moves(self) -> list[Move]:
        """The moves that are chosen and not made."""
        return self._moves

    def make_moves(self) -> list[Beam]:
        """Give all beams their next tokens, and return those that have become spare."""
        moves, self._moves = self._moves, []
        for move in moves:
            if move.is_fork:
                move.beam.follow(move.parent)
        for move in moves:  # only now: parents are as they were until here
            move.beam.extend(move)
        before, self.live = self.live, [move.beam for move in moves]
        if len(moves) >= len(before):
            return []
        live = set(self.live)
        return [beam for beam in before if beam not in live]

    def discard_results(self) -> None:
        """Forget what beams have delivered, as their blocks are gone."""
        self._num_delivered = 0
        for beam in self.live:
            beam.reset()

    # --- ends ----------------------------------------------------------------------------------

    def finish(self, ending: Ending) -> None:
        """End all beams; what is not over is returned as it stands."""
        if ending.reason is not FinishReason.ERROR and self._final is None:
            self._final = [
                answer if answer.reason is not None else replace(answer, reason=ending.reason)
                for answer in self._standing()
            ]
        self._moves = []
        self._has_news = True
        for beam in self.all:
            beam.finish(ending)

    def _standing(self) -> list[Answer]:
        """Return ended and running beams as they stand, the best first."""
        states = [(each.outputs, each.log_probs, each.cum_log_prob) for each in self.live]
        if self._moves:
            states = [
                ([*m.parent.outputs, m.token_id], [*m.parent.log_probs, m.log_prob], m.cum_log_prob)
                for m in self._moves
            ]
        running = [
            Ended(score(self._beams, cum, max(1, len(ids))), self._answer(ids, values, cum, None))
            for ids, values, cum in states
        ]
        every = sorted([*self._ended, *running], key=lambda each: -each.score)
        return [each.answer for each in every[: self.request.sampling.n]]

    def take_output(self) -> Tokens | None:
        """Return the best beams as they stand, if they changed; at the end, always."""
        ending = self.lead.ending
        is_wanted = self._has_news and self.request.message.is_streaming
        if ending is None and not is_wanted:
            return None
        self._has_news = False
        answers = self._standing() if self._final is None else self._final
        answers = answers[: self.request.sampling.n] if ending is None or self._final else []
        finished = None
        if ending is not None:
            finished = self._finished(ending, sum(len(each.token_ids) for each in answers))
            self._ended, self._final = [], []
            for beam in self.all:
                beam.prompt, beam.outputs, beam.log_probs = TokenIds("i"), [], []
                beam.edits = beam.guide = None
        return Tokens(self.request.number, 0, [], [], 0, finished, 0, answers)

    def _finished(self, ending: Ending, num_tokens: int) -> Finished:
        message = self.lead._finished(ending)
        new = sum(beam.cache.num_allocated_blocks for beam in self.all)
        shared = sum(beam.cache.num_shared_blocks for beam in self.all)
        perf = replace(
            message.perf,
            kv_alloc_new_blocks=new,
            kv_reused_blocks=shared,
            kv_alloc_total_blocks=new + shared,
        )
        return replace(message, num_output_tokens=num_tokens, perf=perf)

    def check_integrity(self) -> None:
        """Assert that the beams are in the states that the group has them in."""
        lengths = {beam.num_outputs for beam in self.live}
        assert len(lengths) <= 1, "beams of different lengths"
        assert len({*self.live}) == len(self.live) <= self.width
        for beam in self.spare:
            assert not beam.cache.tables, "a spare beam has blocks"
            assert beam.status is not SequenceStatus.RUNNING
        for beam in self.live:
            assert (beam.status is SequenceStatus.RUNNING) == self.is_running
            assert len(beam.log_probs) == len(beam.outputs)
