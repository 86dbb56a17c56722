"""Steps of decodes alone as CUDA graphs: the host launches one thing instead of hundreds.

A graph has fixed shapes and addresses. So a batch is padded up to a bucket, its inputs lie where
they lay at capture (equal shapes in one `Staging` do), and all graphs write to one output.
Padding adds rows; the rows that were there have the bits of an eager step of the padded shape.
"""

import bisect
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.arrays import TokenArrays, pad_decodes
from slipstream.engine.staging import Staging, num_bytes

_MAX_ROWS = 512  # beyond, a step's launches take less time than its work
_log = logging.getLogger(__name__)

Forward = Callable[[Sequence[Tensor], int, int], Tensor]


class Bucket(NamedTuple):
    """The shape of a graph's inputs."""

    num_rows: int
    num_blocks: int  # columns of the block tables, which decide how many CTAs attention launches


def row_buckets(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then finer and finer in proportion: a padding row costs less the more there are."""
    limit = min(max_num_seqs, _MAX_ROWS)
    steps = [1, 2, 4, *range(8, 33, 8), *range(48, 129, 16), *range(160, _MAX_ROWS + 1, 32)]
    return [*(rows for rows in steps if rows < limit), limit]


def width_buckets(max_model_len: int, block_size: int) -> list[int]:
    """Blocks: 256 tokens (what one CTA of attention reads at least), then two widths an octave.

    From 8192 tokens on attention launches no more CTAs, and the widths only double.
    """
    tokens = [256]
    while tokens[-1] < min(max_model_len, 8192):
        tokens += [2 * tokens[-1]] if tokens[-1] == 256 else [3 * tokens[-1] // 2, 2 * tokens[-1]]
    while tokens[-1] < max_model_len:
        tokens.append(2 * tokens[-1])
    most = -(-max_model_len // block_size)
    return sorted({min(most, -(-count // block_size)) for count in tokens})


class Buckets:
    """The shapes that graphs are made for."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.rows = row_buckets(max_num_seqs)
        self.widths = width_buckets(max_model_len, block_size)

    def find(self, num_rows: int, num_blocks: int) -> Bucket | None:
        """The smallest that holds so many decodes with tables so wide; None: no graph does."""
        if num_rows > self.rows[-1] or num_blocks > self.widths[-1]:
            return None
        return Bucket(
            self.rows[bisect.bisect_left(self.rows, num_rows)],
            self.widths[bisect.bisect_left(self.widths, num_blocks)],
        )


def _no_decodes() -> TokenArrays:
    empty, empty32 = np.zeros(0, np.int64), np.zeros(0, np.int32)
    start = np.zeros(1, np.int32)
    return TokenArrays(empty, empty, empty, empty, np.zeros((0, 0), np.int32), start, empty32)


@contextmanager
def _no_collection() -> Iterator[None]:
    """What the collector frees meanwhile, an old graph say, would make a capture invalid."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Graphs:
    """One graph for each bucket that was met.

    The first batch of a bucket runs eagerly, which loads all its kernels; then it is captured.
    Where memory is too short for that, the bucket's batches all run eagerly.
    All graphs share one pool of memory: they run one after the other, and keep nothing.

    Args:
        forward: staged `TokenArrays`, number of decodes and longest chunk to `[rows, vocab]`.
        buckets: the shapes.
        logits: `[rows, vocab]` of the largest bucket, on the device.
    """

    def __init__(self, forward: Forward, buckets: Buckets, logits: Tensor) -> None:
        self._forward = forward
        self._buckets = buckets
        self._logits = logits
        largest = pad_decodes(_no_decodes(), buckets.rows[-1], buckets.widths[-1])
        self._staging = Staging(logits.device, num_bytes(largest))
        self._address = self._staging.upload(largest)[0].data_ptr()
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Bucket, torch.cuda.CUDAGraph | None] = {}  # None: no memory

    def warm_up(self) -> None:
        """Capture every number of rows with the narrowest tables; the largest first."""
        begin = time.perf_counter()
        for num_rows in reversed(self._buckets.rows):
            self._run(_no_decodes(), Bucket(num_rows, self._buckets.widths[0]))
        seconds = time.perf_counter() - begin
        _log.info("%d CUDA graphs captured in %.2f s", len(self._graphs), seconds)

    def run(self, tokens: TokenArrays) -> Tensor | None:
        """`[rows, vocab]` of decodes, overwritten by the next run; None: no bucket is so large."""
        bucket = self._buckets.find(*tokens.block_tables.shape)
        return None if bucket is None else self._run(tokens, bucket)

    def _run(self, tokens: TokenArrays, bucket: Bucket) -> Tensor:
        count, padded = len(tokens.lengths), pad_decodes(tokens, *bucket)
        graph = self._graphs.get(bucket)
        if graph is not None:
            self._staging.copy(padded)
            graph.replay()
            return self._logits[:count]
        staged = self._staging.upload(padded)
        assert staged[0].data_ptr() == self._address, "the inputs of the graphs have moved"
        logits = self._forward(staged, bucket.num_rows, 0)
        if bucket not in self._graphs:
            self._graphs[bucket] = self._capture(staged, bucket)
        return logits[:count]

    def _capture(self, staged: Sequence[Tensor], bucket: Bucket) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with _no_collection(), torch.cuda.graph(graph, pool=self._pool):
                out = self._forward(staged, bucket.num_rows, 0)
                self._logits[: bucket.num_rows].copy_(out)
        except torch.OutOfMemoryError:
            _log.warning("no memory for the CUDA graph of %s: such steps run without", bucket)
            return None
        _log.debug("captured %s", bucket)
        return graph
