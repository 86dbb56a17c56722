"""GEMMs of experts for steps of few rows on Hopper, by one wave of CTAs (sm_90a).

The units of all tiles, of 16 weight rows each, are shared out evenly among CTAs, one a
multiprocessor, which bring weights by bulk copies through a ring in shared memory. Results have
the bits of `skinny.cu`'s.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.elementwise.eight_bits import E4M3
from slipstream.kernels.experts.route import Routed
from slipstream.kernels.experts.sm90.ring import LEAST_SLOTS, Ring
from slipstream.kernels.experts.spec import adapted
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.registry import Target

ARCHITECTURE = "sm_90a"
# The most pairs an expert, on average, for which this kernel is taken, by whether weights are e4m3.
MOST_PAIRS = {False: 0.0, True: 0.0}
MOST_SLOTS = 5  # so that a CTA has room beside one of the router's
UNDER_WAY = 5  # slots that are on their way at once
THREADS = 288
_MAX_TILES = 256
_MAX_PAIRS = 256


class Step(NamedTuple):
    """What a kernel is chosen by."""

    ring: Ring
    num_pairs: int
    num_tiles: int
    num_experts: int


def is_wanted(target: Target, deterministic: bool, is_fp8: bool, average: float) -> bool:
    """Whether tiles are to be such as this kernel takes, by the average of pairs an expert.

    Deterministic mode has larger tiles.
    """
    is_there = not deterministic and target.architecture == ARCHITECTURE
    return is_there and average <= MOST_PAIRS[is_fp8]


def refusal(step: Step, target: Target) -> str | None:
    """Say why the kernel is not that of tiles of eight rows; None: it is."""
    ring, average = step.ring, step.num_pairs / step.num_experts
    if target.architecture != ARCHITECTURE:
        return f"needs {ARCHITECTURE}"
    if not is_wanted(target, False, ring.is_fp8, average):
        return f"takes {MOST_PAIRS[ring.is_fp8]:g} pairs an expert at most, not {average:g}"
    if ring.num_slots(MOST_SLOTS) < LEAST_SLOTS:
        return f"has no room for {ring.num_rows} rows of {ring.width}"
    if step.num_pairs > _MAX_PAIRS or step.num_tiles > _MAX_TILES:
        return f"takes {_MAX_PAIRS} pairs and {_MAX_TILES} tiles at most"
    return None


def variant(
    dtype: torch.dtype, is_fp8: bool, is_gated: bool, is_adapted: bool = False
) -> jit.Variant:
    """Return the kernel."""
    kinds = {"FP8": int(is_fp8), "GATED": int(is_gated), **adapted(is_adapted)}
    return jit.variant("experts/sm90/streamed.cu", dtype, **kinds)


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    both = (False, True)
    for dtype, is_fp8, is_gated in itertools.product((torch.float16, torch.bfloat16), both, both):
        yield variant(dtype, is_fp8, is_gated)
        if is_gated:
            yield variant(dtype, is_fp8, is_gated, is_adapted=True)


def step_of(x: Tensor, values: Tensor, routed: Routed) -> Step:
    """Return what the kernel is chosen by."""
    ring = Ring(len(x), x.shape[1], values.dtype == E4M3)
    return Step(ring, len(routed.order), len(routed.tiles), len(values))


def launch(
    wanted: jit.Variant,
    x: Tensor,
    values: Tensor,
    routed: Routed,
    parameters: Sequence[Tensor | int],
) -> None:
    """Start the kernel.

    Args:
        wanted: the variant.
        x: rows `[n, k]`, or of outputs places `[p, k]`.
        values: weights of experts `[e, m, k]`.
        routed: rows and experts of places.
        parameters: of all kernels of experts (task.cuh).
    """
    ring, num_pairs, num_tiles, _ = step_of(x, values, routed)
    units = num_tiles * -(-values.shape[1] // 16)
    num_ctas = min(jit.num_multiprocessors(x.get_device()), units)
    jit.launch(
        wanted,
        "streamed",
        (num_ctas,),
        THREADS,
        *(*parameters, ring.num_rows, num_pairs, num_tiles),
        *ring.arguments(MOST_SLOTS, UNDER_WAY),
        shared_memory=ring.num_bytes(MOST_SLOTS),
        overlaps=True,
    )
