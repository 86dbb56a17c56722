"""One generation in flight: its tokens, its blocks, how far it is computed, what already left."""

from dataclasses import dataclass, field
from enum import Enum, auto
from sys import maxsize

from slipstream_contract.ids import TokenIds, pack
from slipstream_contract.retention import Retention
from slipstream_contract.sampling import SamplingParams
from slipstream_contract.urgency import DEFAULT_PRIORITY

from slipstream.core.batch import Copy
from slipstream.core.edits import Edits, counts_tokens, needs_edits
from slipstream.core.prefix import Chain
from slipstream.core.stop import Ending, RawBytes, StopChecker
from slipstream.wire import CancelCause, Finished, FinishReason, Perf, Tokens

_MASK64 = (1 << 64) - 1


def mix_seed(seed: int, index: int) -> int:
    """64 bits from (seed, index): the seed for index 0, else splitmix64 (Steele et al., 2014)."""
    seed &= _MASK64
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK64
    return z ^ (z >> 31)


class Status(Enum):
    """Where a sequence stands. A preempted one waits again."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """What one `Submit` asked for; its sequences share the prompt."""

    bridge: bytes
    number: int
    sampling: SamplingParams
    arrival_ns: int
    priority: int = DEFAULT_PRIORITY
    deadline_ns: int = 0
    timeout_ns: int = 0
    request_id: str = ""
    model: str = ""
    cache_salt: str = ""
    retention: Retention | None = None
    is_probe: bool = False
    cause: CancelCause | None = None  # why it was ended before its end
    sequences: list["Sequence"] = field(default_factory=list)
    num_unfinished: int = 0
    chain: Chain | None = None  # of the prompt


class Sequence:
    """Sequence `index` of a request.

    prompt, then outputs:  [ computed | in flight | not yet ]  + `num_pending` unknown
                       num_computed ^           ^ num_scheduled             num_tokens ^
    tables     blocks of each group of layers, with room for `capacity` positions in each; none
               unless running. Of local tables the first `num_forgotten` are no longer its own, and
               `gap` tokens behind the sinks are missing

    A token is pending while the step that samples it is in flight: its place counts in
    `num_tokens` and `num_scheduled`, its id is not in `outputs` yet.
    """

    __slots__ = (
        "capacity",
        "chain",
        "copies",
        "device_s",
        "edits",
        "ending",
        "first_scheduled_ns",
        "first_token_ns",
        "gap",
        "id",
        "index",
        "is_due",
        "is_new",
        "is_proven",
        "is_spared",
        "is_told",
        "last_token_ns",
        "leads",
        "length",
        "log_probs",
        "needs_every_token",
        "needs_history",
        "next_note",
        "num_allocated_blocks",
        "num_computed",
        "num_final",
        "num_forgotten",
        "num_held",
        "num_in_flight",
        "num_pending",
        "num_preemptions",
        "num_prompt",
        "num_registered",
        "num_scheduled",
        "num_sent",
        "num_shared_blocks",
        "num_tokens",
        "outputs",
        "prompt",
        "request",
        "sample",
        "sampling",
        "seed",
        "slot",
        "status",
        "stop",
        "tables",
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
        self.id = sequence_id  # grows with every sequence: the largest is the youngest
        self.request = request
        self.index = index
        self.sampling = sampling
        self.seed = mix_seed(seed, index)
        self.prompt = prompt  # shared with the siblings
        self.outputs: list[int] = []
        self.num_prompt = len(prompt)
        max_outputs = min(sampling.max_tokens, max_model_len - len(prompt))
        self.num_tokens = len(prompt)
        self.num_final = len(prompt) + max_outputs  # `num_tokens` at which it ends
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_pending = 0
        self.num_in_flight = 0  # its rows in steps that are scheduled and not committed
        self.sample = 0  # which sample of the last step it was in
        self.tables: tuple[list[int], ...] = ()
        self.capacity = 0
        self.num_forgotten = self.gap = 0
        self.is_spared = False  # it will not be preempted any more
        # The cache's own, while it runs:
        self.chain: Chain | None = None  # kept for when it runs again
        self.copies: list[Copy] = []  # into its blocks
        self.is_proven = False  # sampled since it was admitted, and all samples were finite
        self.next_note = maxsize  # `num_computed` of which the cache must know
        self.num_registered = 0  # blocks that the cache has taken in
        self.leads = b""  # digest of the first block that it computes
        self.num_held = 0  # how often it waited for what another one computed
        self.is_due = False  # the turn of the oldest was its, and it could not take it
        self.slot = -1
        self.is_new = True  # nothing scheduled since it was admitted
        self.needs_history = False  # nothing sampled since then, and what it sampled counts
        self.needs_every_token = False  # the next edits depend on a pending token
        self.status = Status.WAITING
        self.edits: Edits | None = None
        self.stop = StopChecker(sampling, vocab, max_outputs)
        self.log_probs: list[float] = []  # of the output, if asked for
        self.num_sent = 0
        self.num_preemptions = 0
        self.ending: Ending | None = None
        self.first_scheduled_ns = 0
        self.first_token_ns = 0
        self.last_token_ns = 0
        self.num_allocated_blocks = 0
        self.num_shared_blocks = 0
        self.device_s = 0.0  # its share of steps, where they have a price
        self.is_told = False  # that it has ended
        self.length = 0  # of the output, from then on

    @property
    def num_outputs(self) -> int:
        """Tokens sampled so far; an end id does not count."""
        return len(self.outputs)

    @property
    def num_known(self) -> int:
        """Tokens whose ids are known: all but those that are pending."""
        return self.num_prompt + len(self.outputs)

    def ids(self, begin: int, end: int) -> TokenIds:
        """The known tokens from one place of the sequence to another."""
        num_prompt = self.num_prompt
        if end <= num_prompt:
            return self.prompt[begin:end]
        outputs = pack(self.outputs[max(0, begin - num_prompt) : end - num_prompt])
        return outputs if begin >= num_prompt else self.prompt[begin:] + outputs

    def pack_edits(self) -> bytes:
        """The edits of the next output, where all tokens before it are known."""
        if self.edits is None:
            return b""
        end = self.num_known
        return self.edits.pack(len(self.outputs), self.ids(max(0, end - self.edits.num_seen), end))

    def start(self, now_ns: int) -> None:
        """First time scheduled."""
        self.first_scheduled_ns = now_ns
        if needs_edits(self.sampling):
            self.edits = Edits(self.sampling)
            self.needs_every_token = self.edits.needs_every_token

    def admit(self) -> None:
        """It runs from now on; the cache has given it its blocks."""
        self.status = Status.RUNNING
        self.is_new = True
        self.needs_history = counts_tokens(self.sampling)

    def roll_back(self) -> None:
        """Forget the rows in flight: what they computed will be computed again."""
        self.num_scheduled = self.num_computed
        self.num_tokens = self.num_known
        self.num_pending = self.num_in_flight = 0
        self.is_new = True  # the runner may have taken in half of it
        self.needs_history = counts_tokens(self.sampling)

    def append(self, token_id: int, log_prob: float, now_ns: int) -> Ending | None:
        """Take one sampled token; how the sequence ends with it, if it does."""
        if not self.first_token_ns:
            self.first_token_ns = now_ns
        self.last_token_ns = now_ns
        outputs, stop = self.outputs, self.stop
        number = len(outputs) + 1  # of this one
        num_tokens = self.num_prompt + number
        # Nearly always: nothing that `check` looks for can be there.
        if stop.is_trivial and token_id not in stop.watched and num_tokens < self.num_final:
            outputs.append(token_id)
            stop.num_kept = number
            if self.sampling.log_probs:
                self.log_probs.append(log_prob)
            return None
        if stop.is_end(token_id, number - 1):
            return Ending(FinishReason.END)
        outputs.append(token_id)
        if self.sampling.log_probs:
            self.log_probs.append(log_prob)
        return stop.check(token_id, number)

    def finish(self, ending: Ending) -> None:
        """Close the books. Unless a stop word cut them, all tokens held back may leave."""
        self.status = Status.FINISHED
        self.ending = ending
        if ending.reason is not FinishReason.STOP:
            self.stop.num_kept = self.num_outputs

    def take(self) -> Tokens | None:
        """What can be told since the last time; None if there is nothing."""
        begin, end = self.num_sent, self.stop.num_kept
        if begin == end and self.ending is None:
            return None
        self.num_sent = end
        token_ids = self.outputs[begin:end]
        log_probs = self.log_probs[begin:end] if self.sampling.log_probs else []
        finished = None if self.ending is None else self._finished(self.ending)
        if finished is not None:  # all is told: a sibling may keep the request alive for long
            self.prompt, self.outputs, self.log_probs = TokenIds("i"), [], []
            self.edits = None
        number, drop_bytes = self.request.number, self.stop.drop_bytes
        return Tokens(number, self.index, token_ids, log_probs, drop_bytes, finished, begin)

    def _finished(self, ending: Ending) -> Finished:
        new, shared = self.num_allocated_blocks, self.num_shared_blocks
        perf = Perf(
            arrival_ns=self.request.arrival_ns,
            first_scheduled_ns=self.first_scheduled_ns,
            first_token_ns=self.first_token_ns,
            last_token_ns=self.last_token_ns,
            kv_alloc_new_blocks=new,
            kv_reused_blocks=shared,
            kv_alloc_total_blocks=new + shared,
        )
        return Finished(
            reason=ending.reason,
            num_input_tokens=self.num_prompt,
            num_output_tokens=self.num_outputs,
            perf=perf,
            stop_reason=ending.stop_reason,
            error=ending.error,
        )
