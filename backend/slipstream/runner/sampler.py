"""Sampling of a step on the device: one token a row of logits; the host reads it later."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.runtime.zeroed import zeroed
from slipstream.kernels.sampling.constrain import Masks, constrain
from slipstream.kernels.sampling.narrow import narrow
from slipstream.kernels.sampling.sample import count_tokens, sample


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How to sample each of `n` rows (`SamplingArrays`), on the logits' device."""

    rows: Tensor  # [n, ROW_WORDS] i32: `ROW` records
    edits: Tensor  # [e, 2] i32: `EDIT` records


@dataclass(frozen=True, slots=True)
class HistoryInputs:
    """Sequences whose tokens are counted anew (`HistoryArrays`), on the device of the counts."""

    tokens: Tensor  # [t] i32
    slots: Tensor  # [h] i32
    starts: Tensor  # [h + 1] i32
    num_prompts: Tensor  # [h] i32


class Results:
    """The samples of a step, on the device and, as a copy, where the host reads them.

    A row says which of the `size` places is its own: steps that take turns between two halves may
    overlap. The host reads after an event recorded behind the samples; on a CPU there is one copy.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        dtypes = (torch.int64, torch.float32, torch.uint8)
        on_device = [torch.zeros(size, dtype=dtype, device=device) for dtype in dtypes]
        self.token_ids, self.log_probs, self.outcomes = on_device
        self.mirrors: tuple[Tensor, ...] = ()
        if device.type == "cuda":  # pinned memory has one address for both sides
            self.mirrors = tuple(torch.zeros(size, dtype=d, pin_memory=True) for d in dtypes)
        self._host = [tensor.numpy() for tensor in self.mirrors or on_device]

    def read(self, first: int, count: int) -> tuple[list[int], list[float], list[int]]:
        """Token ids, log probs and outcomes of `count` results from `first` on."""
        token_ids, log_probs, outcomes = (a[first : first + count].tolist() for a in self._host)
        return token_ids, log_probs, outcomes


def make_counts(num_slots: int, vocab_size: int, device: torch.device) -> Tensor:
    """The state of penalties, `[num_slots, vocab_size]` i16; a slot means nothing until counted."""
    return zeroed((num_slots, vocab_size), torch.int16, device)


def count(counts: Tensor, inputs: HistoryInputs) -> None:
    """Make slots of `counts` anew: of sequences with penalties, before their first sample there."""
    count_tokens(counts, inputs.tokens, inputs.slots, inputs.starts, inputs.num_prompts)


def sample_tokens(
    logits: Tensor,
    inputs: SamplingInputs,
    counts: Tensor,
    results: Results,
    masks: Masks | None = None,
) -> None:
    """Sample a token of each row of `logits [n, vocab]`, in the model's dtype, into `results`.

    Rows that have a mask ban tokens in `logits`. Launches depend on shapes and addresses alone: a
    CUDA graph may hold them.
    """
    if masks is not None:
        mirror = results.mirrors[2] if results.mirrors else None
        constrain(logits, inputs.rows, results.outcomes, masks, mirror)
    narrow(logits, inputs.rows, inputs.edits, counts)
    out = (results.token_ids, results.log_probs, results.outcomes)
    sample(logits, inputs.rows, inputs.edits, counts, *out, results.mirrors)
