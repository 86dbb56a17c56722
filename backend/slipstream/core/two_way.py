"""Prompts whose tokens see each other both ways: how far, and where answers stand.

Two tokens of a prompt say so. All tokens before the first `begin` see each other; it and all tokens
behind it see those up to themselves. They have two positions: that of the first of `masks` that the
prompt has, and their number from `begin` on, 1 for itself. Tokens before it have their own, and 0.
"""

from dataclasses import dataclass
from typing import NamedTuple

from slipstream_contract.errors import ContractError
from slipstream_contract.ids import TokenIds


class Sight(NamedTuple):
    """What a sequence's tokens see of its prompt, and where those behind that stand."""

    place: int = 0  # first position of the tokens from `seen` on
    seen: int = 0  # tokens that see each other


ONE_WAY = Sight()


@dataclass(frozen=True, slots=True)
class TwoWay:
    """Ids of the tokens that say what a prompt's tokens see.

    begin: the first token of an answer (`bos_token_id`).
    masks: what an answer stands for, the first that a prompt has (`gmask_token_id`,
    `mask_token_id`).
    """

    begin: int
    masks: tuple[int, ...]

    def sight(self, prompt: TokenIds) -> Sight:
        """Return what tokens of a prompt see; raises `ContractError` if it does not say."""
        if self.begin not in prompt:
            raise ContractError(
                f"input_ids: the prompt has no token {self.begin} (bos_token_id), behind which the "
                "model answers"
            )
        mask = next((token_id for token_id in self.masks if token_id in prompt), None)
        if mask is None:
            names = " or ".join(map(str, self.masks))
            raise ContractError(
                f"input_ids: the prompt has no token {names} (gmask_token_id, mask_token_id), "
                "where the model's answer stands"
            )
        return Sight(prompt.index(mask), prompt.index(self.begin))
