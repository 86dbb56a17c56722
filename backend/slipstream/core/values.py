"""Values that a request wants beside its tokens, and what has come of them for one sequence."""

from array import array
from collections import deque
from collections.abc import Iterable
from itertools import chain

from slipstream_contract.log_probs import MODES, WHOLE, LogProbs

from slipstream.core.batch import PromptValues, Top, TopMode
from slipstream.wire import Likely, Values


def top_mode(name: str) -> int:
    """Return the flags of `TopMode` for one of vLLM's names."""
    is_processed, has_logits = MODES[name]
    return TopMode.PROCESSED * is_processed | TopMode.LOGITS * has_logits


def _likely(tops: list[Top]) -> Likely:
    """Return log probs of tokens one after another, in columns."""

    def column(code: str, values: Iterable[float]) -> bytes:
        return array(code, values).tobytes()

    return Likely(
        len(tops),
        len(tops[0].token_ids),
        column("i", chain.from_iterable([top.token_ids for top in tops])),
        column("f", chain.from_iterable([top.log_probs for top in tops])),
        column("i", [top.rank for top in tops]),
        column("f", [top.log_prob for top in tops]),
    )


class Wanted:
    """Hold one sequence's part of `LogProbs`, and what is there of it.

    Of several sequences the first has the prompt's. Its values are made while the prompt is
    computed, from position `num_given` on; what is before it has been made.
    """

    __slots__ = (
        "_arrived",
        "_context",
        "_logits",
        "_prompt",
        "_tops",
        "has_context",
        "logits_mode",
        "num_given",
        "num_prompt_top",
        "num_top",
        "top_mode",
    )

    def __init__(self, wanted: LogProbs, mode: int, is_first: bool) -> None:
        """Start with nothing; `mode` has flags of `TopMode`."""
        is_whole = wanted.top == WHOLE
        self.num_top = -1 if wanted.top is None else max(0, wanted.top)
        self.top_mode = mode
        self.logits_mode = -1
        if is_whole or wanted.generation_logits:
            self.logits_mode = mode & TopMode.PROCESSED if is_whole else 0
        self.num_prompt_top = -1
        if is_first and wanted.prompt is not None:
            self.num_prompt_top = max(0, wanted.prompt)
        self.has_context = is_first and (wanted.context_logits or wanted.prompt == WHOLE)
        self.num_given = 0
        self._arrived: deque[tuple[Top | None, bytes | None]] = deque()
        self._tops: list[Top] = []
        self._logits: list[bytes] = []
        self._prompt: list[Likely] = []
        self._context: list[bytes] = []

    @property
    def has_prompt(self) -> bool:
        """Whether there are values of the prompt's tokens."""
        return self.num_prompt_top >= 0 or self.has_context

    def arrive(self, made: list[tuple[Top | None, bytes | None]]) -> None:
        """Take what a step made beside its samples, in order; the first of them may be appended."""
        self._arrived = deque(made)

    def append(self) -> None:
        """Keep the next of what has arrived: its token was appended."""
        top, logits = self._arrived.popleft()
        if top is not None:
            self._tops.append(top)
        if logits is not None:
            self._logits.append(logits)

    def add_prompt(self, values: PromptValues) -> None:
        """Keep the values of a part of the prompt, which follows the last one."""
        assert values.start == self.num_given, "a part of the prompt is missing, or there twice"
        self.num_given += values.num_positions
        if values.likely is not None:
            self._prompt.append(values.likely)
        if values.logits:
            self._context.append(values.logits)

    def take(self, start: int, end: int) -> Values:
        """Return the values of outputs `start .. end - 1`, and once those of the prompt."""
        tops = self._tops[start:end]
        prompt, self._prompt = self._prompt, []
        context, self._context = self._context, []
        likely = _likely(tops) if tops else None
        logits, num_context = self._logits[start:end], self.num_given if context else 0
        return Values(likely, logits, prompt, context, self.top_mode, num_context)
