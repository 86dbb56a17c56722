"""Sampling on the processor, by the kernel in C++: a pass or two over a row, and no sort."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.cpu.native import Sampling, library, loaded, num_threads
from slipstream.kernels.sampling.sample import ROW, sample

_FIELDS = (  # in the order of `enum Field`
    *("temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency", "slot"),
    *("seed", "number", "result", "first_edit", "end_edit", "likeliest", "heat", "low", "high"),
)
assert ROW.fields is not None
_WHERE = np.array([ROW.fields[name][1] for name in _FIELDS], np.int32)


def _takes(spec: tuple[tuple[object, ...], ...]) -> str | None:
    if spec[0][1] != torch.float32:
        return "takes logits of fp32"
    return "is not built" if library() is None else None


@sample.implementation("C++", "cpu", takes=_takes, cost=0.5)
def sampled(
    logits: Tensor,
    rows: Tensor,
    edits: Tensor,
    counts: Tensor,
    token_ids: Tensor,
    log_probs: Tensor,
    outcomes: Tensor,
    mirrors: Sequence[Tensor] = (),
) -> None:
    """`sample`; rows of logits that are not dense are sampled by torch."""
    of = rows, edits, counts, token_ids, log_probs, outcomes
    if mirrors or logits.stride(1) != 1 or not all(each.is_contiguous() for each in of):
        sample.oracle(logits, *of, mirrors)
        return
    sizes = logits.stride(0), logits.shape[1], len(logits)
    where = [each.data_ptr() for each in of]
    how = Sampling(
        logits.data_ptr(), *sizes, where[0], _WHERE.ctypes.data, *where[1:], ROW.itemsize
    )
    loaded().sample(how, num_threads())
