"""Edit logits by rules that the host can evaluate: bias, bans, minimum length, repeats.

A step is scheduled while the step before is still sampling, so an edit must not depend on the last
token. Bias and bad words of one token never change; a minimum length depends on the number of the
next output only. All else is a `Rule`, which looks at the tokens before; a sequence that has one
`needs_every_token` before its next step. Penalties are not edits, but for DRY: the device counts
tokens itself (`kernels/sampling/sample.py`).

    EditPlan   of a request: what its sequences share
    Edits      of a sequence: its rules, which follow its outputs
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from slipstream_contract.ids import TokenIds
from slipstream_contract.sampling import SamplingParams

from slipstream.core.dry import Dry
from slipstream.core.ngrams import NoRepeat, PromptNgrams
from slipstream.core.processors import Loaded, Processed, States
from slipstream.core.records import EDIT as EDIT
from slipstream.core.records import Frame, banned_in, mask_of, pack
from slipstream.core.rules import Phrases, Rule, RuleError
from slipstream.core.stop import RawBytes
from slipstream.core.thinking import Thinking, ThinkingBudget


@dataclass(frozen=True, slots=True)
class EditContext:
    """What edits have to know of the model, and the logits processors that are loaded."""

    vocab_size: int = 0
    vocab: RawBytes | None = None
    thinking: Thinking | None = None
    processors: Loaded = field(default_factory=dict)


NO_CONTEXT = EditContext()


def needs_edits(sampling: SamplingParams) -> bool:
    """Return whether these parameters can edit a logit at all."""
    return bool(
        sampling.bias
        or sampling.bad_words
        or (sampling.min_tokens and (_ends(sampling) or sampling.guide is not None))
        or sampling.no_repeat_ngram_size
        or sampling.allowed_token_ids
        or has_dry(sampling)
        or sampling.thinking_token_budget is not None
        or sampling.logits_processors
    )


def has_dry(sampling: SamplingParams) -> bool:
    """Return whether repeats lose anything."""
    return bool(sampling.dry_multiplier and sampling.dry_penalty_last_n)


def counts_tokens(sampling: SamplingParams) -> bool:
    """Return whether the penalties depend on how often each token occurred."""
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


def _ends(sampling: SamplingParams) -> tuple[int, ...]:
    return (*sampling.end_ids, *sampling.stop_token_ids)


def can_mask(sampling: SamplingParams) -> bool:
    """Return whether a mask of bits may ban tokens: no guide has one, no value is of raw logits."""
    return sampling.guide is None and sampling.values is None and sampling.beams is None


class EditPlan:
    """The edits of a request, as far as its sequences share them. A ban is an addend of -inf."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt: TokenIds,
        context: EditContext,
        states: States = (),
        guide_ends: frozenset[int] = frozenset(),
    ) -> None:
        """Prepare the edits; `guide_ends` end a text of the request's guide."""
        self.sampling = sampling
        self._ends = guide_ends.union(_ends(sampling))
        self.prompt = prompt
        self.context = context
        self._states = states
        self.addends: dict[int, float] = {}  # at every output
        for token_id, weight in sampling.bias:
            self.addends[token_id] = self.addends.get(token_id, 0.0) + weight
        self.addends |= {word[0]: -inf for word in sampling.bad_words if len(word) == 1}
        self.early = self.addends | dict.fromkeys(self._ends, -inf)
        allowed = sampling.allowed_token_ids
        is_frame = bool(allowed) and not can_mask(sampling)
        # Of a row, in place of a ban of each token that is not allowed: see `Row.mask`.
        self.mask = mask_of(allowed, context.vocab_size) if allowed and not is_frame else None
        self.pack = Frame(allowed, context.vocab_size).pack if is_frame else pack
        self.packed = self.pack(self.addends)
        self.packed_early = self.pack(self.early) if sampling.min_tokens else b""
        self._phrases = tuple(word for word in sampling.bad_words if len(word) > 1)
        size = sampling.no_repeat_ngram_size
        self.ngrams = PromptNgrams(size, prompt) if size else None
        self._dry = Dry(sampling, prompt, context.vocab) if has_dry(sampling) else None

    def rules(self) -> list[Rule]:
        """Return the rules of one sequence."""
        rules: list[Rule] = []
        if self._phrases:
            rules.append(Phrases(self._phrases, self.prompt))
        if self.ngrams is not None:
            rules.append(NoRepeat(self.ngrams))
        if self._dry is not None:
            rules.append(self._dry.sibling())
        parts = (self.prompt, self.context.vocab_size)
        rules += [Processed(name, state, *parts) for name, state in self._states]
        return rules

    def budget(self) -> ThinkingBudget | None:
        """Return the budget of one sequence's thinking; None: it has no bound."""
        tokens = self.sampling.thinking_token_budget
        if tokens is None:
            return None
        assert self.context.thinking is not None, "refused by the bounds"
        return ThinkingBudget(self.context.thinking, tokens)

    def fields(self, num_outputs: int) -> list[str]:
        """Return the fields that ban a token at an output, whatever is before it."""
        banned = {
            "bad_words": any(len(word) == 1 for word in self.sampling.bad_words),
            "min_tokens": num_outputs < self.sampling.min_tokens and bool(self._ends),
            "allowed_token_ids": bool(self.sampling.allowed_token_ids),
        }
        return [name for name, has_bans in banned.items() if has_bans]


class Edits:
    """The edits of one sequence."""

    def __init__(self, plan: EditPlan) -> None:
        self._plan = plan
        self._rules = plan.rules()
        self._budget = plan.budget()
        self._min_tokens = plan.sampling.min_tokens
        self.needs_every_token = bool(self._rules) or self._budget is not None

    @property
    def mask(self) -> bytes | None:
        """A bit a token, 1 for those that are ever allowed; None: the records say all."""
        return self._plan.mask

    def pack_early(self, num_outputs: int) -> bytes:
        """Return the `EDIT` records of output number `num_outputs`, whatever is before it."""
        assert not self.needs_every_token, "edits before the last token is known"
        return self._plan.packed_early if num_outputs < self._min_tokens else self._plan.packed

    def pack(self, outputs: Sequence[int], drafts: Sequence[int] = ()) -> bytes:
        """Return the `EDIT` records of the next output, by rising token id, each id at most once.

        Raises RuleError.

        Args:
            outputs: all outputs that are known.
            drafts: tokens that may follow them, and come before the one to sample.
        """
        plan, is_early = self._plan, len(outputs) + len(drafts) < self._min_tokens
        if self._budget is not None:
            forced = self._budget.forced(outputs, drafts)
            if forced is not None:
                return Frame([forced], plan.context.vocab_size).packed
        found = [_addends(rule, outputs, drafts) for rule in self._rules]
        if not any(found):
            return plan.packed_early if is_early else plan.packed
        addends = (plan.early if is_early else plan.addends).copy()
        for each in found:
            _add(addends, each)
        return plan.pack(addends)

    def banned(self, outputs: Sequence[int]) -> set[int]:
        """Return the tokens that cannot follow these outputs. Raises RuleError."""
        found = banned_in(self.pack(outputs))
        if self._plan.mask is not None:
            allowed = self._plan.sampling.allowed_token_ids
            found |= set(range(self._plan.context.vocab_size)).difference(allowed)
        return found

    def fields(self, outputs: Sequence[int]) -> list[str]:
        """Return which fields ban tokens after these outputs. Raises RuleError."""
        if self._budget is not None and self._budget.forced(outputs, ()) is not None:
            return [self._budget.field]
        fields = self._plan.fields(len(outputs))
        for rule in self._rules:
            if -inf in _addends(rule, outputs, ()).values() and rule.field not in fields:
                fields.append(rule.field)
        return fields

    def read_prompt(self, end: int) -> None:
        """Read the prompt's first `end` tokens ahead, as the steps compute them."""
        if self._plan.ngrams is not None:
            self._plan.ngrams.read(end)

    def fork(self) -> None:
        """Note that the outputs are another sequence's from here on."""
        for rule in self._rules:
            rule.fork()
        if self._budget is not None:
            self._budget.fork()


def _addends(rule: Rule, outputs: Sequence[int], drafts: Sequence[int]) -> Mapping[int, float]:
    """Return what a rule adds to the next token's logits. Raises RuleError."""
    try:
        return rule.addends(outputs, drafts)
    except RuleError:
        raise
    except Exception as error:
        raise RuleError(f"{rule.field} failed: {type(error).__name__}") from error


def _add(addends: dict[int, float], more: Mapping[int, float]) -> None:
    for token_id, addend in more.items():
        addends[token_id] = addends.get(token_id, 0.0) + addend
