"""Edit logits by rules that the host can evaluate: bias, bad words, minimum length, repeats.

A step is scheduled while the step before is still sampling, so an edit must not depend on the last
token. Bias and bad words of one token never change; a minimum length depends on the number of the
next output only. All else is a `Rule`, which looks at the tokens before; a sequence that has one
`needs_every_token` before its next step. Penalties are not edits: the device counts tokens itself
(`kernels/sampling/sample.py`).

    EditPlan   of a request: what its sequences share
    Edits      of a sequence: its rules, which follow its outputs
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from struct import Struct
from typing import Protocol

from slipstream_contract.ids import TokenIds
from slipstream_contract.sampling import SamplingParams

from slipstream.core.ngrams import NoRepeat, PromptNgrams

EDIT = Struct("<if")  # token id, addend of its logit


@dataclass(frozen=True, slots=True)
class EditContext:
    """What edits have to know of the model."""

    vocab_size: int = 0


NO_CONTEXT = EditContext()


class Rule(Protocol):
    """Edits of the next token that depend on the tokens before it, and on nothing else.

    A rule may keep what it has read of the outputs; drafts leave no trace in it.
    """

    @property
    def field(self) -> str:
        """The field that asks for it, as errors name it."""

    def addends(self, outputs: Sequence[int], drafts: Sequence[int]) -> Mapping[int, float]:
        """Return what is added to logits of the token after prompt, outputs and drafts.

        The outputs are those of the last call, and more, unless `fork` was called.
        """

    def fork(self) -> None:
        """Note that the next outputs may be others."""


def needs_edits(sampling: SamplingParams) -> bool:
    """Return whether these parameters can edit a logit at all."""
    return bool(
        sampling.bias
        or sampling.bad_words
        or (sampling.min_tokens and _ends(sampling))
        or sampling.no_repeat_ngram_size
    )


def counts_tokens(sampling: SamplingParams) -> bool:
    """Return whether the penalties depend on how often each token occurred."""
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


def _ends(sampling: SamplingParams) -> tuple[int, ...]:
    return (*sampling.end_ids, *sampling.stop_token_ids)


def _pack(addends: dict[int, float]) -> bytes:
    return b"".join(EDIT.pack(*edit) for edit in sorted(addends.items()))


class EditPlan:
    """The edits of a request, as far as its sequences share them. A ban is an addend of -inf."""

    def __init__(self, sampling: SamplingParams, prompt: TokenIds, context: EditContext) -> None:
        self.sampling = sampling
        self.prompt = prompt
        self.context = context
        self.addends: dict[int, float] = {}  # at every output
        for token_id, weight in sampling.bias:
            self.addends[token_id] = self.addends.get(token_id, 0.0) + weight
        self.addends |= {word[0]: -inf for word in sampling.bad_words if len(word) == 1}
        self.early = self.addends | dict.fromkeys(_ends(sampling), -inf)
        self.packed = _pack(self.addends)
        self.packed_early = _pack(self.early) if sampling.min_tokens else b""
        self._phrases = tuple(word for word in sampling.bad_words if len(word) > 1)
        size = sampling.no_repeat_ngram_size
        self.ngrams = PromptNgrams(size, prompt) if size else None

    def rules(self) -> list[Rule]:
        """Return the rules of one sequence."""
        rules: list[Rule] = []
        if self._phrases:
            rules.append(Phrases(self._phrases, self.prompt))
        if self.ngrams is not None:
            rules.append(NoRepeat(self.ngrams))
        return rules


class Edits:
    """The edits of one sequence."""

    def __init__(self, plan: EditPlan) -> None:
        self._plan = plan
        self._rules = plan.rules()
        self._min_tokens = plan.sampling.min_tokens

    @property
    def needs_every_token(self) -> bool:
        """Whether the next edits depend on the last token, and not only on the number of tokens."""
        return bool(self._rules)

    def pack_early(self, num_outputs: int) -> bytes:
        """Return the `EDIT` records of output number `num_outputs`, whatever is before it."""
        assert not self._rules, "edits before the last token is known"
        return self._plan.packed_early if num_outputs < self._min_tokens else self._plan.packed

    def pack(self, outputs: Sequence[int], drafts: Sequence[int] = ()) -> bytes:
        """Return the `EDIT` records of the next output, by rising token id, each id at most once.

        Args:
            outputs: all outputs that are known.
            drafts: tokens that may follow them, and come before the one to sample.
        """
        plan, is_early = self._plan, len(outputs) + len(drafts) < self._min_tokens
        found = [rule.addends(outputs, drafts) for rule in self._rules]
        if not any(found):
            return plan.packed_early if is_early else plan.packed
        addends = (plan.early if is_early else plan.addends).copy()
        for each in found:
            for token_id, addend in each.items():
                addends[token_id] = addends.get(token_id, 0.0) + addend
        return _pack(addends)

    def read_prompt(self, end: int) -> None:
        """Read the prompt's first `end` tokens ahead, as the steps compute them."""
        if self._plan.ngrams is not None:
            self._plan.ngrams.read(end)

    def fork(self) -> None:
        """Note that the outputs are another sequence's from here on."""
        for rule in self._rules:
            rule.fork()


class Phrases:
    """Bad words of several tokens: bans the last one wherever the others are there."""

    field = "bad_words"

    def __init__(self, words: tuple[tuple[int, ...], ...], prompt: TokenIds) -> None:
        most = max(map(len, words)) - 1
        self._before = prompt[-most:].tolist()
        self._most = most
        self._heads: dict[int, list[tuple[int, ...]]] = {}  # by their last token but one
        for word in words:
            self._heads.setdefault(word[-2], []).append(word)

    def addends(self, outputs: Sequence[int], drafts: Sequence[int]) -> Mapping[int, float]:
        """Return the bans of the token after outputs and drafts."""
        seen = [*outputs[max(0, len(outputs) - self._most) :], *drafts]
        if len(seen) < self._most:
            seen = self._before + seen
        return {
            word[-1]: -inf
            for word in self._heads.get(seen[-1], ())
            if tuple(seen[1 - len(word) :]) == word[:-1]
        }

    def fork(self) -> None:
        """Do nothing: nothing is kept."""
