"""Guide the answer behind a model's thinking: until its marker all but an end is legal.

    outputs    thought ... thought  </think>  answer ...
    matcher    (at the start)                 the outputs after the marker
    mask       all but the ends               of the grammar

While it thinks a sequence runs without masks, unless filters or an end that it sampled ask for one.
"""

from slipstream_contract.sampling import SamplingParams

from slipstream.core.guided import Guided
from slipstream.core.thinking import Thinking
from slipstream.guide.interface import Template


class GuidedLater(Guided):
    """A guided sequence that thinks first."""

    __slots__ = ("_first_mask", "_last", "_thinking", "is_thinking")

    def __init__(
        self,
        template: Template,
        sampling: SamplingParams,
        end_ids: frozenset[int],
        thinking: Thinking,
    ) -> None:
        """Stand before the first thought; see `Guided` for the rest."""
        self.is_thinking = True  # at once: nothing is forced
        super().__init__(template, sampling, end_ids)
        self._thinking = thinking
        self._last: tuple[int, ...] = ()  # outputs, as many as the marker has
        self._first_mask = self._mask
        self.needs_mask = self.needs_all
        self._mask = _all_but(self._end_ids, len(self._mask))

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end is legal."""
        return not self.is_thinking and super().is_finished

    def finishes(self, token_id: int) -> bool:
        """Return whether nothing but an end is legal after a token, if it can be taken at all."""
        return not self.is_thinking and super().finishes(token_id)

    def look_ahead(self) -> None:
        """Find the tokens that have to come next: none in thoughts."""
        if not self.is_thinking:
            super().look_ahead()

    def take(self, token_id: int) -> bool:
        """Take a sample if it is legal; return whether it is. Raises GuideError."""
        if not self.is_thinking:
            return super().take(token_id)
        if self.is_end(token_id):
            self.needs_mask = True
            return False
        marker = self._thinking.marker
        self._last = (*self._last, token_id)[-len(marker) :]
        if self._last == marker:
            self.is_thinking, self.needs_mask = False, True
            self._mask = self._first_mask
            self.look_ahead()
        return True


def _all_but(token_ids: frozenset[int], num_bytes: int) -> bytes:
    """Return a mask by which all tokens but some are legal."""
    mask = bytearray(b"\xff" * num_bytes)
    for token_id in token_ids:
        if token_id >> 3 < num_bytes:
            mask[token_id >> 3] &= ~(1 << (token_id & 7))
    return bytes(mask)
