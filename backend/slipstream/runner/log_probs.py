"""Log probs beside a step's samples: launched behind the step, for rows alone that want them."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from slipstream_contract.sampling import FIELDS
from torch import Tensor

from slipstream.core.batch import Batch, Row, Top, TopMode
from slipstream.kernels.sampling.sample import CHOSEN
from slipstream.kernels.sampling.top_log_probs import (
    ASK,
    ASK_WORDS,
    MAX_TOP,
    TopResults,
    top_log_probs,
)
from slipstream.runner.sampler import SamplingInputs
from slipstream.runner.staging import Staging

# Parameters of the device that the kernel knows: with others a row is the reference's to compute.
_KNOWN = {"temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"}
_PROCESSED = int(TopMode.PROCESSED)
_OTHERS = [(name, FIELDS[name].default) for name in CHOSEN.values() if name not in _KNOWN]


class Ask(NamedTuple):
    """What a row wants beside its sample."""

    sample: int  # its number among the samples
    num_top: int
    mode: int  # flags of `TopMode`
    is_filtered: bool  # the kernel cannot compute it


def _ask(sample: int, row: Row) -> Ask:
    sampling, is_filtered = row.sampling, False
    if row.top_mode & _PROCESSED and sampling.temperature:
        is_filtered = bool(row.moved)
        is_filtered |= any(getattr(sampling, name) != default for name, default in _OTHERS)
    return Ask(sample, row.num_top, row.top_mode, is_filtered)


def asks_of(batch: Batch) -> list[Ask]:
    """Return what rows of a batch want beside their samples; those for the kernel come first."""
    if not batch.may_have_tops:
        return []
    rows = [row for row in batch.rows if row.samples]
    asks = [_ask(i, row) for i, row in enumerate(rows) if row.num_top >= 0]
    return sorted(asks, key=lambda ask: ask.is_filtered)


class Tops:
    """The likeliest tokens of a step's samples, where the host reads them.

    Of the `size` places a step uses those from its first result on, so that two steps may overlap.
    """

    def __init__(self, size: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size

        def make(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")

        i32, f32 = torch.int32, torch.float32
        self._results = TopResults(
            make(size, MAX_TOP, dtype=i32),
            make(size, MAX_TOP, dtype=f32),
            make(size, dtype=i32),
            make(size, dtype=f32),
        )
        self._on_host = [tensor.numpy() for tensor in self._results]
        self.staging = Staging(device, size * ASK.itemsize)

    @torch.inference_mode()
    def launch(
        self,
        logits: Tensor,
        asks: list[Ask],
        places: NDArray[np.int64],
        inputs: SamplingInputs,
        counts: Tensor,
        sampled: Tensor,
        first: int,
    ) -> None:
        """Find them behind what the stream does, for `read`.

        Args:
            logits: `[n, vocab]`, which the step sampled from.
            asks: `asks_of` the step.
            places: of each sample, its row of the logits.
            inputs, counts, sampled: what `sample` had, and made.
            first: where the step's results begin.
        """
        records = np.zeros(len(asks), ASK)
        records["row"] = places[[ask.sample for ask in asks]]
        records["num_top"] = [ask.num_top for ask in asks]
        records["mode"] = [ask.mode for ask in asks]
        records["token"] = -1
        assert int(records["num_top"].max()) <= MAX_TOP, "more than the kernel selects"
        (words,) = self.staging.upload([records.view(np.int32).reshape(-1, ASK_WORDS)])
        size = len(asks) - sum(ask.is_filtered for ask in asks)
        own = (inputs.rows, inputs.edits, counts, sampled)
        if size:
            top_log_probs(logits, words[:size], *own, self._places(first, size))
        if size < len(asks):
            out = self._places(first + size, len(asks) - size)
            made = TopResults._make(torch.empty_like(x, device=logits.device) for x in out)
            top_log_probs.oracle(logits, words[size:], *own, made)
            for place, tensor in zip(out, made, strict=True):
                place.copy_(tensor, non_blocking=True)

    def _places(self, first: int, count: int) -> TopResults:
        return TopResults._make(tensor[first : first + count] for tensor in self._results)

    def read(self, asks: list[Ask], first: int) -> dict[int, Top]:
        """Return what a completed step found, by number of the sample."""
        most = max(ask.num_top for ask in asks)
        ids, values, ranks, own = (a[first : first + len(asks)] for a in self._on_host)
        parts = (ids[:, :most].tolist(), values[:, :most].tolist(), ranks.tolist(), own.tolist())
        found = {}
        for ask, top_ids, top_values, rank, value in zip(asks, *parts, strict=True):
            end = min(ask.num_top, self._vocab_size)
            if end < len(top_ids):
                top_ids, top_values = top_ids[:end], top_values[:end]
            found[ask.sample] = Top(top_ids, top_values, rank, value)
        return found
