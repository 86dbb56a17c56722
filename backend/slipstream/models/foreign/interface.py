"""Slipstream's entry in transformers' registry of attention functions, and what a class asks of it.

A class that looks its attention up in that registry calls `_attend` once a layer; what it does
there the caller of the class decides: `attending`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from slipstream.models.reader import words

NAME = "slipstream"
# What classes may pass on beside queries, keys and values that asks for nothing more than causal
# attention over all or over a window.
_USUAL = words(
    "dropout scaling sliding_window position_ids use_cache cache_position past_key_values "
    "output_attentions output_hidden_states output_router_logits return_dict is_causal"
)


class Attend(Protocol):
    """The attention of one layer."""

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, asked: Mapping[str, object]
    ) -> Tensor:
        """Return `[1, n, heads, d]` of `q [1, heads, n, d]`; `k` and `v` are `[1, kv heads, n, d]`.

        `module` is the class' layer; `asked` has what else it passes.
        """


_attend_now: ContextVar[Attend] = ContextVar("slipstream_attention")


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    **asked: object,
) -> tuple[Tensor, None]:
    """The registered function, of transformers' signature."""
    asked["attention_mask"] = attention_mask
    return _attend_now.get()(module, query, key, value, asked), None


AttentionInterface.register(NAME, _attend)


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Have `attend` do the attention of all layers that run within."""
    token = _attend_now.set(attend)
    try:
        yield
    finally:
        _attend_now.reset(token)


class LayerAsk(NamedTuple):
    """What one layer asks of attention."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    window: int  # 0: all tokens
    others: tuple[str, ...]  # whatever is more than causal attention


class Recorder:
    """Stands in for attention, and keeps what each layer asks of it."""

    def __init__(self) -> None:
        self.layers: list[LayerAsk] = []

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, asked: Mapping[str, object]
    ) -> Tensor:
        """See `Attend`; returns nothing of use."""
        window, others = asked.get("sliding_window"), set()
        for name, value in asked.items():
            if name not in _USUAL and value is not None and value is not False:
                others.add(name)
        causal = asked.get("is_causal")
        if (getattr(module, "is_causal", True) if causal is None else causal) is False:
            others.add("is_causal = false")
        heads = (q.shape[1], k.shape[1], q.shape[3], v.shape[3])
        self.layers.append(
            LayerAsk(*heads, window if isinstance(window, int) else 0, tuple(sorted(others)))
        )
        return torch.zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3], device=q.device).to(v)
