"""Log probs beside a step's samples: launched behind the step, for rows alone that want them."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.core.batch import Batch, Top
from slipstream.kernels.sampling.top_log_probs import (
    ASK,
    ASK_WORDS,
    MAX_TOP,
    TopResults,
    top_log_probs,
)
from slipstream.runner.sampler import SamplingInputs
from slipstream.runner.staging import Staging

Ask = tuple[int, int, int]  # number of a sample, likeliest tokens wanted, flags of `TopMode`


def asks_of(batch: Batch) -> list[Ask]:
    """Return what rows of a batch want beside their samples."""
    if not batch.may_have_tops:
        return []
    rows = [row for row in batch.rows if row.samples]
    return [(i, row.num_top, row.top_mode) for i, row in enumerate(rows) if row.num_top >= 0]


class Tops:
    """The likeliest tokens of a step's samples, where the host reads them.

    Of the `size` places a step uses those from its first result on, so that two steps may overlap.
    """

    def __init__(self, size: int, device: torch.device) -> None:
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
        numbers = [number for number, _, _ in asks]
        records["row"] = places[numbers]
        records["num_top"] = [num_top for _, num_top, _ in asks]
        records["mode"] = [mode for _, _, mode in asks]
        records["token"] = -1
        assert int(records["num_top"].max()) <= MAX_TOP, "more than the kernel selects"
        (words,) = self.staging.upload([records.view(np.int32).reshape(-1, ASK_WORDS)])
        out = TopResults._make(tensor[first : first + len(asks)] for tensor in self._results)
        top_log_probs(logits, words, inputs.rows, inputs.edits, counts, sampled, out)

    def read(self, asks: list[Ask], first: int) -> dict[int, Top]:
        """Return what a completed step found, by number of the sample."""
        most = max(num_top for _, num_top, _ in asks)
        ids, values, ranks, own = (a[first : first + len(asks)] for a in self._on_host)
        parts = (ids[:, :most].tolist(), values[:, :most].tolist(), ranks.tolist(), own.tolist())
        return {
            number: Top(ids[:num_top], values[:num_top], rank, value)
            for (number, num_top, _), ids, values, rank, value in zip(asks, *parts, strict=True)
        }
