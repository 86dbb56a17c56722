"""What stands at the ends of a decoder that has neither embedding nor head: a later stage's."""

from collections.abc import Callable

from torch import Tensor

from slipstream.layers.embedding import Embedding, Head
from slipstream.layers.norm import RowNorm
from slipstream.layers.residual import Residual


class Inlet(Embedding):
    """States that the stage before has made, in the place of an embedding's rows."""

    def __init__(self) -> None:
        self._states: Tensor | None = None
        self.look: Callable[[Tensor], None] = lambda token_ids: None  # at the ids of a step

    def take(self, states: Tensor) -> None:
        """Take what the next step begins with, `[n, hidden]`; the blocks change it in place."""
        self._states = states

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the states of as many tokens."""
        assert self._states is not None, "a step before its states"
        self.look(token_ids)
        return self._states[: len(token_ids)]


class Outlet(Head):
    """Stands where no head is: the first stage makes the logits."""

    def __init__(self) -> None:
        """Nothing is read."""

    def __call__(self, norm: RowNorm, residual: Residual) -> Tensor:
        """Never called."""
        raise AssertionError("a later stage has no logits")
