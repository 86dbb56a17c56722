"""A class of transformers without data, and its two parts: what makes states, what makes logits."""

import copy
import threading
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.foreign.interface import NAME

_MAKING = threading.Lock()  # of the process' default dtype, which transformers sets and restores


def empty_model(kind: type[Any], config: Any, dtype: torch.dtype) -> Any:
    """Return a model of the class on torch's device `meta`; `config` stays as it is."""
    with _MAKING, torch.device("meta"):
        model = kind._from_config(copy.deepcopy(config), dtype=dtype, attn_implementation=NAME)
    return model.eval()


class _Given(nn.Module):
    """Stands in for what makes states, and returns those that were given."""

    output: Any = None

    def forward(self, *_: object, **__: object) -> Any:
        """Return what was given."""
        return self.output


class Parts:
    """The model cut where its states are final; both parts are the class' own code.

    Args:
        model: its base model is replaced, so parameters must have been read before.
    """

    def __init__(self, model: Any) -> None:
        self._body, self._model, self._given = model.base_model, model, _Given()
        setattr(model, model.base_model_prefix, self._given)
        self._kind: Any = None

    def states(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the last states `[n, hidden]` of one row of tokens, `[n] i64` each."""
        given = {"input_ids": token_ids[None], "position_ids": positions[None]}
        output = self._body(**given, use_cache=False)
        self._kind = type(output)
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    def logits(self, states: Tensor) -> Tensor:
        """Return `[n, vocab]` of `states [n, hidden]`; `states` must have been called before."""
        assert self._kind is not None
        self._given.output = self._kind(last_hidden_state=states[None])
        ids = torch.zeros((1, len(states)), dtype=torch.int64, device=states.device)
        logits = self._model(input_ids=ids, use_cache=False).logits[0]
        self._given.output = None
        return logits  # type: ignore[no-any-return]
