"""Hold the state of one generation: its tokens, its blocks, its progress, and what was sent."""

import logging
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from slipstream_contract.ids import TokenIds, pack
from slipstream_contract.sampling import SamplingParams

from slipstream.core.adapter import Adapter, without_virtual
from slipstream.core.batch import PromptAsk, PromptValues, TopMode
from slipstream.core.cache_state import CacheState
from slipstream.core.draft_state import DraftState
from slipstream.core.edits import (
    NO_CONTEXT,
    EditContext,
    EditPlan,
    Edits,
    counts_tokens,
    needs_edits,
)
from slipstream.core.first_wait import FirstWait
from slipstream.core.guided import Guided
from slipstream.core.moving import Moved, moves, moving_of
from slipstream.core.prefix import DigestChain
from slipstream.core.processors import States
from slipstream.core.records import all_banned
from slipstream.core.rules import RuleError
from slipstream.core.stop import Ending, RawBytes, StopChecker
from slipstream.core.two_way import ONE_WAY, Sight
from slipstream.core.values import Wanted
from slipstream.wire import CancelCause, Finished, FinishReason, Perf, Submit, Tokens

_log = logging.getLogger(__name__)

_MASK64 = (1 << 64) - 1


def mix_seed(seed: int, index: int) -> int:
    """Return 64 bits: `seed` itself for index 0, else splitmix64 of both (Steele et al., 2014)."""
    seed &= _MASK64
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK64
    return z ^ (z >> 31)


class SequenceStatus(Enum):
    """The state of a sequence. A preempted sequence is waiting again."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Chooser(Protocol):
    """Something that says which sequences of a request are sent."""

    def take(self, tokens: Tokens) -> list[Tokens]:
        """Take a sequence that has ended; return what to send now."""


@dataclass(slots=True, eq=False)
class Request:
    """A submitted request; its sequences share the prompt."""

    bridge: bytes
    message: Submit  # what the bridge said of it
    cause: CancelCause | None = None  # why it was ended before its end
    sequences: list["Sequence"] = field(default_factory=list)
    num_unfinished: int = 0
    chain: DigestChain | None = None  # of the prompt
    choice: "Chooser | None" = None  # of the best sequences, if not all are sent
    edit_context: EditContext = NO_CONTEXT
    edit_plan: EditPlan | None = None  # once a sequence needs it
    processors: States = ()  # those that it asks for
    adapter: Adapter | None = None
    sight: Sight = ONE_WAY

    @property
    def number(self) -> int:
        """The bridge's number of it."""
        return self.message.request

    @property
    def sampling(self) -> SamplingParams:
        """How each of its sequences is sampled."""
        return self.message.sampling


class Sequence:
    """The sequence with number `index` of a request.

        prompt, then outputs:  [ computed | in flight | not yet ]  + `num_pending` unknown
                           num_computed ^           ^ num_scheduled             num_tokens ^

    A token is pending while the step that samples it is in flight: it counts in `num_tokens` and
    `num_scheduled`, but its id is not in `outputs` yet.
    """

    __slots__ = (
        "cache",
        "device_s",
        "draft",
        "drafts",
        "edits",
        "ending",
        "fault",
        "first_scheduled_ns",
        "first_token_ns",
        "first_wait",
        "guide",
        "id",
        "index",
        "is_due",
        "is_new",
        "is_reported",
        "is_spared",
        "is_speculating",
        "last_token_ns",
        "length",
        "log_probs",
        "moving",
        "needs_every_token",
        "needs_history",
        "num_computed",
        "num_deferrals",
        "num_final",
        "num_in_flight",
        "num_pending",
        "num_preemptions",
        "num_prompt",
        "num_scheduled",
        "num_sent",
        "num_tokens",
        "num_top",
        "num_void",
        "outputs",
        "prompt",
        "queued_ns",
        "request",
        "sample",
        "sampling",
        "seed",
        "slot",
        "status",
        "stop",
        "top_mode",
        "wanted",
    )

    def __init__(
        self,
        sequence_id: int,
        request: Request,
        index: int,
        prompt: TokenIds,
        seed: int,
        max_model_len: int,
        vocab: RawBytes | None,
    ) -> None:
        sampling = request.sampling
        self.id = sequence_id  # rises with every sequence: the largest is the youngest
        self.request = request
        self.index = index
        self.sampling = sampling
        self.seed = mix_seed(seed, index)
        self.prompt = prompt  # shared with the siblings
        self.outputs: list[int] = []
        self.num_prompt = len(prompt)
        max_outputs = min(sampling.max_tokens, max_model_len - len(prompt))
        self.num_tokens = len(prompt)
        self.num_final = len(prompt) + max_outputs  # `num_tokens` at the end
        self.num_computed = self.num_scheduled = 0
        self.num_pending = 0
        self.num_in_flight = 0  # its rows in steps that are scheduled and not committed
        self.num_void = 0  # the next of these rows that mean nothing
        self.sample = 0  # number of its sample in the last step
        self.cache = CacheState()  # of the KV cache, which alone changes it
        self.is_spared = False  # never preempted again
        self.num_deferrals = 0  # times that it waited for another's prefix
        self.is_due = False  # it missed its turn as the oldest while deferred
        # Likeliest tokens wanted at each output; -1: no `Top`. Mirostat wants that of its sample.
        self.num_top = 0 if sampling.mirostat else -1
        self.top_mode = int(TopMode.PROCESSED) if sampling.mirostat else 0
        self.wanted: Wanted | None = None  # values beside the tokens
        self.slot = -1
        self.is_new = True  # nothing scheduled since it was admitted
        self.needs_history = False  # its tokens must be counted anew for penalties
        self.needs_every_token = moves(sampling)  # before the next step
        self.is_speculating = False  # not scheduled while a token is pending: drafts follow it
        self.drafts: list[int] = []  # for its next rows
        self.draft: DraftState | None = None  # None: it never had drafts
        self.status = SequenceStatus.WAITING
        self.edits: Edits | None = None
        self.fault = ""  # of its own rules: no token can follow
        self.moving = moving_of(sampling)
        self.guide: Guided | None = None  # once its guide is compiled
        self.stop = StopChecker(sampling, vocab, max_outputs)
        self.log_probs: list[float] = []  # of the output, if requested
        self.num_sent = 0
        self.num_preemptions = 0
        self.ending: Ending | None = None
        self.queued_ns = 0  # by the scheduler's clock
        self.first_wait: FirstWait | None = None  # once a chunk of it was computed
        self.first_scheduled_ns = 0
        self.first_token_ns = 0
        self.last_token_ns = 0
        self.device_s = 0.0  # its share of the steps' time, if time has a price
        self.is_reported = False  # its end was sent
        self.length = 0  # of the output, once `is_reported`

    def adapter_at(self, start: int) -> int:
        """Return the runner's number of the adapter of tokens from `start` on; 0: none."""
        adapter = self.request.adapter
        if adapter is None or (not adapter.rank and start >= self.num_prompt):
            return 0
        return adapter.number

    @property
    def has_virtual(self) -> bool:
        """Whether tokens of the prompt may be virtual."""
        adapter = self.request.adapter
        return adapter is not None and adapter.num_virtual > 0

    def texts(self, token_ids: TokenIds) -> TokenIds:
        """Return those of the sequence's tokens that have a text."""
        if not self.has_virtual:
            return token_ids
        return without_virtual(token_ids, self.request.edit_context.vocab_size)

    @property
    def num_outputs(self) -> int:
        """Number of tokens sampled so far; an end id does not count."""
        return len(self.outputs)

    @property
    def num_known(self) -> int:
        """Number of tokens whose ids are known: all but the pending ones."""
        return self.num_prompt + len(self.outputs)

    def ids(self, start: int, end: int) -> TokenIds:
        """Return the known tokens at positions `start .. end - 1`."""
        num_prompt = self.num_prompt
        if end <= num_prompt:
            return self.prompt[start:end]
        if start + 1 == end:
            return TokenIds("i", [self.outputs[start - num_prompt]])
        outputs = pack(self.outputs[max(0, start - num_prompt) : end - num_prompt])
        return outputs if start >= num_prompt else self.prompt[start:] + outputs

    def next_rules(self) -> tuple[bytes, Moved]:
        """Return edits and moved parameters of the next output; all tokens before it are known.

        A rule that raises ends its sequence alone: each token is banned, and `fault` says why.
        """
        vocab_size = self.request.edit_context.vocab_size
        try:
            moved = () if self.moving is None else self.moving.next(self.outputs)
            packed = b"" if self.edits is None else self.edits.pack(self.outputs)
            if self.guide is not None:
                packed = self.guide.with_bans(packed, vocab_size)
        except Exception as error:
            self.fail(error)
        return (all_banned(vocab_size), ()) if self.fault else (packed, moved)

    def drafted_edits(self, drafts: list[int]) -> bytes | None:
        """Return the edits of the output behind drafts; None: a rule raises, if they are right."""
        try:
            return b"" if self.edits is None else self.edits.pack(self.outputs, drafts)
        except Exception:
            return None

    def read_prompt(self, end: int) -> None:
        """Let rules read the prompt's first `end` tokens ahead, as steps compute them."""
        try:
            if self.edits is not None:
                self.edits.read_prompt(end)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Note what was raised by what is the sequence's own: it ends with `fault`."""
        _log.error("a rule of request %d failed", self.request.number, exc_info=error)
        is_named = isinstance(error, RuleError)
        self.fault = str(error) if is_named else f"its rules failed: {type(error).__name__}"

    def start(self, now_ns: int) -> None:
        """Note the first time that the sequence is scheduled, and prepare its edits."""
        self.first_scheduled_ns = now_ns
        if needs_edits(self.sampling):
            try:
                self.edits = Edits(self._edit_plan())
                self.needs_every_token |= self.edits.needs_every_token
            except Exception as error:
                self.fail(error)

    def _edit_plan(self) -> EditPlan:
        """Return the edits that the request's sequences share."""
        request = self.request
        if request.edit_plan is None:
            ends = frozenset[int]() if self.guide is None else self.guide.end_ids
            prompt = self.texts(self.prompt)
            parts = (prompt, request.edit_context, request.processors, ends)
            request.edit_plan = EditPlan(self.sampling, *parts)
        return request.edit_plan

    def want(self, wanted: Wanted) -> None:
        """Ask for values beside the tokens, before anything is scheduled."""
        self.wanted = wanted
        self.num_top, self.top_mode = wanted.num_top, wanted.top_mode

    @property
    def has_masks(self) -> bool:
        """Whether rows of the sequence may have masks."""
        return self.sampling.guide is not None or bool(self.sampling.allowed_token_ids)

    @property
    def wants_values(self) -> bool:
        """Whether rows of the sequence may want values beside their samples."""
        return self.num_top >= 0 or self.wanted is not None

    @property
    def is_read_anew(self) -> bool:
        """Whether the prompt must be computed, as values of its tokens are still wanted."""
        wanted = self.wanted
        return wanted is not None and wanted.has_prompt and wanted.num_given < self.num_prompt

    def prompt_ask(self, start: int, end: int) -> PromptAsk | None:
        """Return what is wanted of the tokens at positions `start .. end - 1`."""
        wanted = self.wanted
        if wanted is None or not self.is_read_anew:
            return None
        first, end = max(start, wanted.num_given), min(end, self.num_prompt)
        if first >= end:
            return None
        next_ids = self.prompt[first + 1 : end + 1]
        likely = (wanted.num_prompt_top, wanted.top_mode & TopMode.LOGITS)
        return PromptAsk(first - start, next_ids, *likely, wanted.has_context)

    def take_prompt(self, values: PromptValues) -> None:
        """Keep values of tokens of the prompt, unless the row that made them is void."""
        if self.wanted is not None and not self.num_void:
            self.wanted.add_prompt(values)

    def admit(self) -> None:
        """Mark the sequence as running, after the cache has given it blocks."""
        self.status = SequenceStatus.RUNNING
        self.is_new = True
        self.needs_history = counts_tokens(self.sampling)

    def roll_back(self) -> None:
        """Discard the rows in flight: what they computed will be computed again."""
        self.num_scheduled = self.num_computed
        self.num_tokens = self.num_known
        self.num_pending = self.num_in_flight = self.num_void = 0
        self.is_new = True  # the runner may have taken in half of it
        self.needs_history = counts_tokens(self.sampling)

    def rewind(self) -> None:
        """Void the rows in flight: they build on a token that the sequence does not have.

        What they compute is not read; the same positions are computed again, with other tokens.
        """
        self.num_void = self.num_in_flight
        self.num_pending = 0
        self.num_tokens = self.num_known
        if self.status is SequenceStatus.RUNNING:
            self.num_computed = min(self.num_computed, self.num_known - 1)
            self.num_scheduled = self.num_computed
            self.needs_history = counts_tokens(self.sampling)

    def append(self, token_id: int, log_prob: float, now_ns: int) -> Ending | None:
        """Append a sampled token; return how the sequence ends with it, or None if it goes on."""
        if not self.first_token_ns:
            self.first_token_ns = now_ns
        self.last_token_ns = now_ns
        outputs, stop = self.outputs, self.stop
        number = len(outputs) + 1  # of this token
        num_tokens = self.num_prompt + number
        # The common case: no condition of `take_token` can hold.
        if stop.is_trivial and token_id not in stop.watched and num_tokens < self.num_final:
            outputs.append(token_id)
            stop.num_sendable = number
            if self.sampling.log_probs:
                self.log_probs.append(log_prob)
            if self.wanted is not None:
                self.wanted.append()
            return None
        if stop.is_end(token_id, number - 1):
            return Ending(FinishReason.END)
        outputs.append(token_id)
        if self.sampling.log_probs:
            self.log_probs.append(log_prob)
        if self.wanted is not None:
            self.wanted.append()
        return stop.take_token(token_id, number)

    def finish(self, ending: Ending) -> None:
        """Mark the sequence as finished; release withheld tokens unless a stop word cut them."""
        self.status = SequenceStatus.FINISHED
        self.ending = ending
        if ending.reason is not FinishReason.STOP:
            self.stop.num_sendable = self.num_outputs

    def take_output(self) -> Tokens | None:
        """Return what can be sent since the last call; None if there is nothing."""
        start, end = self.num_sent, self.stop.num_sendable
        if start == end and self.ending is None:
            return None
        self.num_sent = end
        token_ids = self.outputs[start:end]
        log_probs = self.log_probs[start:end] if self.sampling.log_probs else []
        values = None if self.wanted is None else self.wanted.take(start, end)
        finished = None if self.ending is None else self._finished(self.ending)
        if finished is not None:  # free memory: a sibling may run for long
            self.prompt, self.outputs, self.log_probs = TokenIds("i"), [], []
            self.edits = self.wanted = self.guide = None
        number, drop_bytes = self.request.number, self.stop.drop_bytes
        return Tokens(
            number, self.index, token_ids, log_probs, drop_bytes, finished, start, values=values
        )

    def _finished(self, ending: Ending) -> Finished:
        new, shared = self.cache.num_allocated_blocks, self.cache.num_shared_blocks
        drafted, accepted = (0, 0) if self.draft is None else self.draft.totals(self.outputs)
        perf = Perf(
            arrival_ns=self.request.message.arrival_ns,
            first_scheduled_ns=self.first_scheduled_ns,
            first_token_ns=self.first_token_ns,
            last_token_ns=self.last_token_ns,
            kv_alloc_new_blocks=new,
            kv_reused_blocks=shared,
            kv_alloc_total_blocks=new + shared,
            num_drafted=drafted,
            num_accepted=accepted,
        )
        return Finished(
            reason=ending.reason,
            num_input_tokens=self.num_prompt,
            num_output_tokens=self.num_outputs,
            perf=perf,
            stop_reason=ending.stop_reason,
            error=ending.error,
            is_refusal=ending.is_refusal,
        )
