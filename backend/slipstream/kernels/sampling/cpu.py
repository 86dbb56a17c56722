"""Sampling on the processor, by the kernel in C++: a pass or two over a row, and no sort."""

import numpy as np
import torch

from slipstream.kernels.cpu.native import Sampling, library, loaded, num_threads
from slipstream.kernels.runtime.flat import flattened
from slipstream.kernels.sampling.sample import ROW, SampleCall, sample

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
@flattened(SampleCall)
def sampled(call: SampleCall) -> None:
    """`sample`; rows of logits that are not dense are sampled by torch."""
    logits, *of, mirrors = call
    if mirrors or logits.stride(1) != 1 or not all(each.is_contiguous() for each in of):
        sample.oracle(*call)
        return
    sizes = logits.stride(0), logits.shape[1], len(logits)
    where = [each.data_ptr() for each in of]
    how = Sampling(
        logits.data_ptr(), *sizes, where[0], _WHERE.ctypes.data, *where[1:], ROW.itemsize
    )
    loaded().sample(how, num_threads())
