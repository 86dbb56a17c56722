"""The start of a step on the device: tokens that the host has not seen, and tables in place."""

from collections.abc import Iterator

from torch import Tensor

from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import op

_THREADS = 256


@op(
    "header[3]:i32, staged[w]:i32, token_ids[n]:i64, sources[n]:i32, "
    "sampled[r]:i64, tables[s,_]:i32",
    package=__package__,
)
def start_step(
    header: Tensor,
    staged: Tensor,
    token_ids: Tensor,
    sources: Tensor,
    sampled: Tensor,
    tables: Tensor,
) -> None:
    """Complete the inputs of a step, in place.

    `token_ids[i] = sampled[sources[i]]` where a source is not negative. Block tables come side by
    side in `staged`, as wide as the longest needs, and go to the first rows of `tables`, the rest
    of which is left as it is.

    Args:
        header: where in `staged` the tables begin, how many columns they have, how many they are.
        staged: words, among them the tables.
        token_ids, sources: of the step's tokens.
        sampled: tokens of the step before.
        tables: of a fixed width; rows must be contiguous.
    """
    chosen = sources >= 0
    token_ids[chosen] = sampled[sources[chosen].long()]
    begin, width, count = header.tolist()
    tables[:count, :width] = staged[begin : begin + count * width].view(count, width)


def _variant() -> jit.Variant:
    return jit.variant("staging/stage.cu")


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    yield _variant()


@start_step.cuda
def _start_step(
    header: Tensor,
    staged: Tensor,
    token_ids: Tensor,
    sources: Tensor,
    sampled: Tensor,
    tables: Tensor,
) -> None:
    num_tokens, num_rows = len(token_ids), len(tables)
    jit.require(
        all(t.is_contiguous() for t in (header, staged, token_ids, sources, sampled)),
        "start_step: inputs must be contiguous",
    )
    jit.require(tables.shape[1] <= 1 or tables.stride(1) == 1, "start_step: rows of tables")
    grid = (max(1, min(128, max(num_rows, -(-num_tokens // _THREADS)))),)
    args = (header, staged, token_ids, sources, num_tokens, sampled, tables, tables.stride(0))
    jit.launch(_variant(), "begin_step", grid, _THREADS, *args)
