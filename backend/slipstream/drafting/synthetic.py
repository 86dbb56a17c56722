"""Synthetic drafts: each counts as right with a given probability, whatever the model says.

They load-test a server as a drafter of that quality would, where there is none. A draft that counts
as right *is* the token of the output, so that the cache holds what the output says; the text means
nothing. Whether one does is decided by the seed of its sequence and the number of the token, so the
same request has as many right drafts each time. What a text must not break is kept: a sequence that
asks for bans, bias, a guide or log probs has no drafts, and no draft ends a text.
"""

from slipstream.core.drafts import Proposal
from slipstream.core.sequence import Sequence, mix_seed
from slipstream.errors import ConfigError

_NAME = "synthetic"


def rates_of(text: str) -> tuple[float, ...]:
    """Return the probabilities in a list such as 0.8,0.7,0.6. Raises ConfigError."""
    said = f"synthetic_acceptance = {text[:100]!r}"
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{said} is not a list of probabilities, such as 0.8,0.7") from None
    for rate in rates:
        if not 0.0 <= rate <= 1.0:
            raise ConfigError(f"{said}: {rate} is not a probability, 0 to 1")
    return rates


class SyntheticDrafts:
    """Drafts that are right at given rates; a `Drafter`, and the `Accepted` of its `Speculation`.

    Args:
        rates: of the first draft of a step, of the second if the first was right, and so on; the
            last one is that of all further drafts.
    """

    def __init__(self, rates: tuple[float, ...]) -> None:
        self._rates = rates

    def propose(self, sequence: Sequence, k: int) -> Proposal:
        """Return `k` tokens of the prompt, none of which ends the sequence; see `Drafter`."""
        if not _may_have_any_text(sequence):
            return Proposal([], _NAME)
        known, watched = sequence.num_known, sequence.stop.watched
        usual = next(i for i in range(len(watched) + 1) if i not in watched)
        found = [sequence.prompt[i % sequence.num_prompt] for i in range(known, known + k)]
        drafts = [usual if token_id in watched else token_id for token_id in found]
        return Proposal(drafts, _NAME, [self._rate(i) for i in range(k)], is_certain=True)

    def __call__(self, sequence: Sequence, num_drafts: int) -> int:
        """Return how many of the next `num_drafts` drafts of a sequence count as right."""
        first = sequence.num_outputs
        for i in range(num_drafts):
            if mix_seed(sequence.seed, first + i + 1) >= self._rate(i) * 2**64:
                return i
        return num_drafts

    def release(self, sequence: Sequence) -> None:
        """Hold nothing of a sequence."""

    def _rate(self, place: int) -> float:
        return self._rates[min(place, len(self._rates) - 1)]


def _may_have_any_text(sequence: Sequence) -> bool:
    """Return whether a sequence asks for nothing that a token of no meaning would break."""
    sampling = sequence.sampling
    has_bans = sampling.bad_words or sampling.bias or sequence.needs_every_token
    has_values = sampling.log_probs or sequence.wants_values
    return not (has_bans or has_values or sampling.guide is not None)
