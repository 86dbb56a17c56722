"""Outputs of a few rows' experts, added to the residual sum, by one wave of CTAs (sm_90a).

A CTA has some outputs of each expert, and brings their weights through a ring in shared memory
from before x is there on, beside a CTA of `streamed.py`'s kernel if both have room.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from slipstream.kernels.experts.route import Routed
from slipstream.kernels.experts.sm90.ring import LEAST_SLOTS
from slipstream.kernels.experts.sm90.streamed import ARCHITECTURE, THREADS, Step, step_of
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.registry import Target

# The most pairs an expert, on average, for which this kernel is taken, by whether weights are e4m3.
MOST_PAIRS = {False: 0.0, True: 0.0}
MOST_SLOTS = 7
_MAX_PAIRS = 64  # in shared memory


def refusal(step: Step, target: Target) -> str | None:
    """Say why the kernel does not take the place of `down_add.cu`; None: it does."""
    ring, average = step.ring, step.num_pairs / step.num_experts
    if target.architecture != ARCHITECTURE:
        return f"needs {ARCHITECTURE}"
    if average > (most := MOST_PAIRS[ring.is_fp8]):
        return f"takes {most:g} pairs an expert at most, not {average:g}"
    if step.num_pairs > _MAX_PAIRS:
        return f"takes {_MAX_PAIRS} pairs at most"
    has_room = ring.num_slots(MOST_SLOTS) >= LEAST_SLOTS
    return None if has_room else f"has no room for {ring.num_rows} rows of {ring.width}"


def variant(dtype: torch.dtype, is_fp8: bool) -> jit.Variant:
    """Return the kernel."""
    return jit.variant("experts/sm90/streamed_add.cu", dtype, FP8=int(is_fp8), GATED=0)


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    for each in product((torch.float16, torch.bfloat16), (False, True)):
        yield variant(*each)


def launch(
    x: Tensor,
    values: Tensor,
    residual: Tensor,
    routed: Routed,
    parameters: Sequence[Tensor | int],
    shared: Sequence[Tensor | int],
) -> None:
    """Start the kernel.

    Args:
        x: places `[p, k]`.
        values: weights of experts `[e, m, k]`.
        residual: `[n, m]`, changed in place.
        routed: rows and experts of places.
        parameters: of all kernels of experts (task.cuh).
        shared: what is added beside experts, as of `down_add.cu`.
    """
    ring, _, num_tiles, _ = step_of(x, values, routed)
    num_ctas = min(jit.num_multiprocessors(x.get_device()), values.shape[1] // 8)
    jit.launch(
        variant(x.dtype, ring.is_fp8),
        "streamed_add",
        (num_ctas,),
        THREADS,
        *(*parameters, len(residual), residual.stride(0), *shared, num_tiles),
        *ring.arguments(MOST_SLOTS, MOST_SLOTS),
        shared_memory=ring.num_bytes(MOST_SLOTS),
        overlaps=True,
    )
