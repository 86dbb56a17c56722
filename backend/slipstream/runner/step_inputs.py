"""A step's arrays on the device, by name."""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.runner.sampler import SamplingInputs
from slipstream.runner.staging import Staging
from slipstream.runner.step_arrays import StepArrays


class StepInputs(NamedTuple):
    """The tensors of a step: those of `StepArrays`, in its order, and the memory around them."""

    header: Tensor
    token_ids: Tensor
    sources: Tensor
    sample_rows: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    sample_starts: Tensor
    lengths: Tensor
    rows: Tensor
    edits: Tensor
    tables: Tensor
    words: Tensor  # [w] i32: all of it; `start_step` finds the tables there

    @classmethod
    def of(cls, base: Tensor, arrays: StepArrays) -> "StepInputs":
        """Name the pieces of `base [bytes] u8`, to which the arrays' memory was copied."""
        # On a CPU nothing was copied.
        is_here = base.device.type == "cpu"
        pieces = map(torch.from_numpy, arrays) if is_here else Staging.views(base, arrays)
        return cls._make([*pieces, base.view(torch.int32)])

    @property
    def sampling(self) -> SamplingInputs:
        """Inputs of sampling, by row."""
        return SamplingInputs(self.rows, self.edits)
