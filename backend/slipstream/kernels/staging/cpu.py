"""The start of a step on the processor, in C++."""

from torch import Tensor

from slipstream.kernels.cpu.native import Start, library, loaded
from slipstream.kernels.staging.stage import start_step


def _takes(spec: object) -> str | None:
    return "is not built" if library() is None else None


@start_step.implementation("C++", "cpu", takes=_takes, cost=0.5)
def started(
    header: Tensor,
    staged: Tensor,
    token_ids: Tensor,
    sources: Tensor,
    sampled: Tensor,
    tables: Tensor,
) -> None:
    """`start_step`, whose tensors a step has contiguous."""
    of = header, staged, sources, token_ids, sampled
    assert all(each.is_contiguous() for each in of), "pieces of one memory"
    where = [each.data_ptr() for each in of]
    loaded().start(Start(*where, tables.data_ptr(), len(token_ids), tables.stride(0)))
