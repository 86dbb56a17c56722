"""Sums and exchanges over GPUs whose memory each has mapped: what they compute, and their kernels.

Three ways of a sum, by its bytes: packs that need no flag (`one_shot`), a sum of parts and an
exchange of these (`two_shot`), or NCCL, which has other bits. See `peers.cuh`.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.elementwise.norm import RmsNorm
from slipstream.kernels.runtime import jit

GRID, THREADS, MAX_RANKS = 128, 512, 8  # as peers.cuh has them, like all below
PACK_BYTES = 16
PACKS = 1 << 20
ROOM_BYTES = 8 << 20
PACKS_AT = 2 * GRID * MAX_RANKS * 4
EMPTY_BYTES = 2 * PACKS * PACK_BYTES  # from there on: all ones before the first call
MEMORY_BYTES = PACKS_AT + EMPTY_BYTES + 4 * ROOM_BYTES
_MAX_PACKS = 4  # of a row, that a thread has
# Ranks -> bytes up to which packs are faster: each rank sends them whole to every other, and of two
# ranks no way sends less. Of more ranks by the bytes that pass through a link, not measured.
_ONE_SHOT = {2: 1 << 62, 4: 1 << 20, 8: 512 << 10}


def total(parts: Sequence[Tensor], before: Tensor | None = None) -> Tensor:
    """Return the sum of parts in their order, in fp32, then `before`, rounded once: the oracle."""
    found = parts[0].float()
    for part in parts[1:]:
        found = found + part.float()
    return (found if before is None else found + before.float()).to(parts[0].dtype)


def most_of(size: int) -> int:
    """Return for how many ranks the kernels are built that so many take: 2, 4 or 8."""
    return next(most for most in _ONE_SHOT if size <= most)


def way_of(num_bytes: int, size: int, has_nccl: bool) -> str:
    """Return the way of a sum, in pieces if it is large: `one_shot`, `two_shot` or `nccl`."""
    if num_bytes <= _ONE_SHOT[most_of(size)]:
        return "one_shot"
    return "nccl" if has_nccl and num_bytes > ROOM_BYTES else "two_shot"


class Peers(NamedTuple):
    """The memory of all ranks, as the kernels take it."""

    bases: tuple[int, ...]  # addresses here, by rank
    rank: int
    epochs: Tensor  # [GRID] i32
    limit: Tensor  # [1] i64: ns of a wait
    late: int  # address of 2 words of the host: 1 + the rank that is late, in which epoch

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.bases)

    @property
    def arguments(self) -> tuple[Tensor | int, ...]:
        """What every kernel has first."""
        bases = self.bases + (0,) * (MAX_RANKS - self.size)
        return *bases, self.rank, self.size, self.epochs, self.limit, self.late


def _variant(dtype: torch.dtype, size: int) -> jit.Variant:
    return jit.variant("comm/all_reduce.cu", dtype, RANKS=most_of(size))


def _exchange_variant(size: int) -> jit.Variant:
    return jit.variant("comm/exchange.cu", RANKS=most_of(size))


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    for size in _ONE_SHOT:
        yield _exchange_variant(size)
        for dtype in jit.DTYPES:
            yield _variant(dtype, size)


def _require(name: str, *tensors: Tensor | None) -> None:
    for x in tensors:
        jit.require(
            x is None or (x.is_contiguous() and x.data_ptr() % 16 == 0 and x.nbytes % 16 == 0),
            "{}: tensors must be contiguous, and aligned to 16 bytes at both ends",
            name,
        )


def sum_into(peers: Peers, way: str, x: Tensor, residual: Tensor | None, out: Tensor) -> None:
    """Write the ranks' sum of `x`, plus `residual` if there is one, to `out`, which may be that.

    `x` has at most a rank's share of `PACKS` in one shot, and `ROOM_BYTES` in two.
    """
    _require(way, x, residual, out)
    most = PACKS // peers.size * PACK_BYTES if way == "one_shot" else ROOM_BYTES
    jit.require(0 < x.nbytes <= most, "{}: {} bytes, above {}", way, x.nbytes, most)
    args = (*peers.arguments, x, residual, out, x.nbytes // PACK_BYTES)
    jit.launch(_variant(x.dtype, peers.size), way, (GRID,), THREADS, *args, overlaps=True)


def can_norm(num_rows: int, width: int, itemsize: int, size: int) -> bool:
    """Whether one kernel may make sum and norm of rows."""
    num_bytes = width * itemsize
    is_row = num_bytes % 16 == 0 and num_bytes <= _MAX_PACKS * THREADS * PACK_BYTES
    most = min(_ONE_SHOT[most_of(size)], PACKS // size * PACK_BYTES)
    return is_row and 0 < num_rows <= GRID and num_rows * num_bytes <= most


def sum_norm(peers: Peers, x: Tensor, residual: Tensor, norm: RmsNorm) -> Tensor:
    """Add the ranks' sum of `x` to `residual [n, m]`; return its norm. Only where `can_norm`."""
    weight, eps, plus_one = norm
    _require("one_shot_norm", x, residual, weight)
    num_rows, width = x.shape
    is_right = can_norm(num_rows, width, x.itemsize, peers.size)
    jit.require(is_right, "one_shot_norm: {} rows of {}", num_rows, width)
    out = torch.empty_like(x)
    args = (x, residual, weight, out, num_rows, width, float(eps), float(plus_one))
    wanted = _variant(x.dtype, peers.size)
    jit.launch(wanted, "one_shot_norm", (GRID,), THREADS, *peers.arguments, *args, overlaps=True)
    return out


def exchange(peers: Peers, x: Tensor, out: Tensor, first: int, count: int) -> None:
    """Write `x [rows, width]` of `count` ranks from `first` on to `out [rows, count, width]`.

    Both are of words of 8 bytes (i64); `x` has at most `ROOM_BYTES`. A count of 0 leaves `out`.
    """
    jit.require(x.dtype == out.dtype == torch.int64, "exchange: {}, not words", x.dtype)
    jit.require(x.is_contiguous() and out.is_contiguous(), "exchange: rows must be contiguous")
    jit.require(0 < x.nbytes <= ROOM_BYTES, "exchange: {} bytes, above {}", x.nbytes, ROOM_BYTES)
    args = (*peers.arguments, x, out, x.numel(), x.shape[-1], first, count)
    jit.launch(_exchange_variant(peers.size), "exchange", (GRID,), THREADS, *args, overlaps=True)
