"""Whole steps as CUDA graphs: the host launches one thing instead of hundreds.

A graph has fixed shapes and addresses. So a step is padded up to a shape that has a graph, and its
inputs lie where they lay at capture (equal shapes in one `Staging` do). Steps of decodes alone have
graphs by their number of rows, steps of a few small chunks by their tokens, steps of both by both.
All others, whose work takes longer than their launches, run eagerly.
Padding adds rows; the rows that were there have the bits of an eager step of the padded shape.
"""

import bisect
import gc
import logging
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.core.step_sizes import StepSizes
from slipstream.fuse import repeat
from slipstream.kernels.runtime.collection import without_collection
from slipstream.layers.sliced import ROWS
from slipstream.runner.plan import Plan
from slipstream.runner.step_shape import Layout, StepShape

_MAX_ROWS = 1024
_CHUNK_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512)
# Of steps of both: decodes, and all rows, which fill tiles of GEMMs; chunks get what is left.
_MIXED_DECODES = (8, 32, 64, 96, 128, 160, 192, 224, 256)
_MIXED_ROWS = (64, 128, 192, 256, 384, 512, 640, 768)
_FEWEST_BESIDE, _MOST_BESIDE = 24, 576  # tokens of chunks
_TILE = 128
MAX_CHUNK_ROWS = 8  # of a step
_log = logging.getLogger(__name__)
# From a shape to a step without rows: its inputs lie in place; a call launches it.
Prepare = Callable[[StepShape], Callable[[], Tensor]]
# The same of a step with adapters, with whether some have terms of experts.
PrepareAdapted = Callable[[StepShape, bool], Callable[[], Tensor]]


def row_buckets(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then finer and finer in proportion.

    Up to 128 rows a step reads weights all the while, and padding rows are nearly free. Beyond it
    computes for some of its time, and a padding row costs as much as any other.
    """
    limit = min(max_num_seqs, _MAX_ROWS)
    few, many = [1, 2, 4, *range(8, 33, 8), *range(48, 129, 16)], range(528, _MAX_ROWS + 1, 16)
    steps = [*few, *range(136, 513, 8), *many]
    return [*(rows for rows in steps if rows < limit), limit]


def token_buckets(max_num_batched_tokens: int) -> list[int]:
    """Return the numbers of tokens of steps of chunks alone."""
    return _up_to(max_num_batched_tokens, _CHUNK_TOKENS)


def _up_to(most: int, buckets: tuple[int, ...]) -> list[int]:
    """The buckets that hold up to `most`, or up to the last of them; none for 0."""
    limit = min(most, buckets[-1])
    return [*(count for count in buckets if count < limit), limit] if limit > 0 else []


def layout_of(plan: Plan) -> Layout:
    """Return the layout of all steps."""
    if plan.model.axes.two_way is not None:
        return Layout(has_chunks=False)
    if not plan.config.deterministic:
        return Layout(window=plan.window)
    has_chunks = plan.attention.keeps_bits_in_chunks
    return Layout(ROWS, has_decodes=False, has_chunks=has_chunks, window=plan.window)


class Buckets:
    """The shapes that graphs are made for.

    Args:
        max_num_seqs, max_num_batched_tokens: of a step.
        layout: of all steps.
        max_num_rows: of decodes with drafts; 0: there are no drafts.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        layout: Layout | None = None,
        max_num_rows: int = 0,
    ) -> None:
        self._layout = layout = layout or Layout()
        self._rows = sorted({layout.up(rows) for rows in row_buckets(max_num_seqs)})
        drafts = row_buckets(max_num_rows)[1:] if max_num_rows and layout.has_decodes else []
        self._drafts = sorted({layout.up(rows) for rows in drafts})
        if max_num_rows and not layout.has_decodes:
            more = {layout.up(rows) for rows in row_buckets(max_num_rows)}
            self._rows = sorted({*self._rows, *more})
        tokens = token_buckets(max_num_batched_tokens)
        self._tokens = sorted({layout.up(count) for count in tokens})
        # Of steps of both, with or without drafts; where a decode is a chunk there are none.
        self._has_drafts = bool(drafts)
        most = max(max_num_seqs, max_num_rows)
        most = min(most - 1, max_num_batched_tokens - 1) if layout.has_decodes else 0
        self._most_tokens = max_num_batched_tokens
        all_decodes = _up_to(most, _MIXED_DECODES)
        fewest = (1, *(decodes + 1 for decodes in all_decodes))
        mixed = [(n, self._beside(n, least)) for n, least in zip(all_decodes, fewest, strict=False)]
        alone = [(0, tuple(self._tokens))] if layout.has_decodes else []
        self.sizes = StepSizes((*alone, *[each for each in mixed if each[1]]), _TILE)

    @property
    def shapes(self) -> list[StepShape]:
        """All of them, of each kind the largest first."""
        mixed = [
            self._of_both(decodes, tokens)
            for decodes, beside in reversed(self.sizes.graphs)
            for tokens in reversed(beside)
            if decodes
        ]
        chunks = [self._of_tokens(tokens) for tokens in reversed(self._tokens)]
        drafts = [self._of_drafts(rows) for rows in reversed(self._drafts)]
        return mixed + chunks + drafts + [self._of_rows(rows) for rows in reversed(self._rows)]

    @property
    def max_rows(self) -> int:
        """The most rows of any shape."""
        return max(shape.num_rows for shape in self.shapes)

    @property
    def max_tokens(self) -> int:
        """The most tokens of any shape."""
        return max(shape.num_tokens for shape in self.shapes)

    def find(self, shape: StepShape) -> StepShape | None:
        """The smallest that holds a step; None: it has no graph."""
        if shape.has_drafts and shape.num_decodes == shape.num_tokens:
            at = bisect.bisect_left(self._drafts, shape.num_tokens)
            return self._of_drafts(self._drafts[at]) if at < len(self._drafts) else None
        if shape.max_queries <= 1 and shape.num_samples == shape.num_tokens:
            if shape.num_tokens > self._rows[-1]:
                return None
            return self._of_rows(self._rows[bisect.bisect_left(self._rows, shape.num_tokens)])
        decodes, tokens = shape.num_decodes, shape.num_tokens - shape.num_decodes
        if shape.num_rows - decodes > MAX_CHUNK_ROWS:
            return None
        if decodes == 0:
            if tokens > self._tokens[-1]:
                return None
            return self._of_tokens(self._tokens[bisect.bisect_left(self._tokens, tokens)])
        found = self.sizes.graph_of(decodes, tokens)
        if found is None or shape.has_drafts > self._has_drafts:
            return None
        return self._of_both(*found)

    def _beside(self, decodes: int, least: int) -> tuple[int, ...]:
        """Return the tokens of chunks beside so many decodes, or fewer, but at least `least`."""
        left = self._most_tokens - least
        most = min(_MOST_BESIDE, left)
        sizes = {rows - decodes for rows in _MIXED_ROWS}
        found = {size for size in sizes if _FEWEST_BESIDE <= size <= most}
        return tuple(sorted(found | ({left} if 0 < left < _MOST_BESIDE else set())))

    def _of_rows(self, rows: int) -> StepShape:
        if self._layout.has_decodes:
            return StepShape(rows, rows, rows, rows, 0)
        return StepShape(rows, rows, 0, rows, 1)

    @staticmethod
    def _of_drafts(rows: int) -> StepShape:
        return StepShape(rows, rows, rows, rows, 0, True)

    def _of_tokens(self, tokens: int) -> StepShape:
        return StepShape(tokens, MAX_CHUNK_ROWS, 0, self._layout.up(MAX_CHUNK_ROWS), tokens)

    def _of_both(self, decodes: int, tokens: int) -> StepShape:
        rows = decodes + MAX_CHUNK_ROWS
        sizes = (decodes + tokens, rows, decodes, self._layout.up(rows), tokens)
        return StepShape(*sizes, self._has_drafts)


class _Bytes:
    """Device memory that something else owns."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 2,
        }


def unowned(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory that does not keep it from being handed out again."""
    size = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = _Bytes(tensor.data_ptr(), size * tensor.element_size())
    flat = torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


class Captured(NamedTuple):
    """A graph, and where it leaves the logits until the next graph runs."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor


def largest_shapes(
    plan: Plan, layout: Layout
) -> tuple[StepShape, StepShape, *tuple[StepShape, ...]]:
    """Return steps of the most rows: alone, and with all tokens that a step may have; then, where
    blocks are repeated and these are more, with the most tokens of such a step, whose blocks keep
    memory for it.
    """
    budget = plan.max_num_batched_tokens
    size = min(plan.max_num_seqs, budget)
    count, num_decodes = layout.up(size), size if layout.has_decodes else 0
    alone = StepShape(count, size, num_decodes, count, int(num_decodes == 0))

    def mixed(tokens: int) -> StepShape:
        rows = min(size, tokens)
        longest, beside = tokens - rows + 1, max(0, min(num_decodes, rows) - 1)
        contexts = ((min(longest, 2048),) * 2,)  # so that kernels over unpacked blocks are loaded
        return StepShape(
            *(layout.up(tokens), rows, beside, layout.up(rows)), longest, contexts=contexts
        )

    most = repeat.MOST_TOKENS
    return alone, mixed(budget), *([mixed(most)] if most < budget else [])


def is_of_memory(error: RuntimeError) -> bool:
    """Whether memory was too short: torch's own allocator says so by another type than CUDA does,
    which makes instances of graphs.
    """
    is_cuda = isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)
    short = is_cuda and "out of memory" in str(error)
    return short or isinstance(error, torch.OutOfMemoryError)


class Capture:
    """Captures graphs, which share one pool of memory: they run one after the other, and keep
    nothing.
    """

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, step: Callable[[], Tensor], mode: str) -> Captured:
        """Capture without `torch.cuda.graph`, which returns memory to the device every time.

        `mode`: whether calls of other threads end the capture (`global`).
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode=mode)
            try:
                logits = step()
            finally:
                graph.capture_end()
        return Captured(graph, unowned(logits))


class Graphs:
    """Holds one graph for each shape of `buckets`, all made at start, a second one for steps with
    adapters, and a third for those with terms of experts, made when the first such step comes or in
    idle times. None is ever discarded.

    A shape for which memory is too short, of its first run, its capture or its instance, has no
    graph. Ranks that share layers have the same graphs: they make each at the same step, as it has
    sums over them, and those of a shape for which one has no memory to capture it are on none. A
    rank that is short of it in the first run fails: others wait in sums for its part.

    Args:
        buckets: the shapes, which are the same on all ranks.
        all_can: from whether this rank has a graph to whether all that share its layers have it.
        capture: from a step, which has run once, to its graph; None: the device's.
        has_sums: whether other ranks wait for this one in a step.
    """

    def __init__(
        self,
        buckets: Buckets,
        all_can: Callable[[bool], bool] = bool,
        capture: Callable[[Callable[[], Tensor], str], Captured] | None = None,
        has_sums: bool = False,
    ) -> None:
        self._buckets, self._all_can, self._has_sums = buckets, all_can, has_sums
        # None: memory was too short.
        self._graphs: dict[StepShape, Captured | None] = {}
        self._adapted: dict[StepShape, Captured | None] = {}
        self._of_experts: dict[StepShape, Captured | None] = {}
        self._capture = capture or Capture()

    def shape_of(
        self, shape: StepShape, is_adapted: bool = False, has_experts: bool = False
    ) -> StepShape | None:
        """Return the shape of the graph for a step, padded; None: it has none.

        `is_adapted`: the step has adapters; its graph may have to be captured yet. `has_experts`:
        some have terms of experts.
        """
        found = self._buckets.find(shape)
        of_adapters = self._of_experts if has_experts else self._adapted
        if found is None or (is_adapted and found not in of_adapters):
            return found
        graph = (of_adapters if is_adapted else self._graphs).get(found)
        return None if graph is None else found

    def graph(
        self,
        shape: StepShape,
        prepare_adapted: PrepareAdapted | None = None,
        has_experts: bool = False,
    ) -> Captured | None:
        """Return the graph of a shape that `shape_of` gave; None: memory was too short.

        `prepare_adapted`: of a step with adapters, as `capture` has it. Its graph is captured now
        if it is the first of the shape: on ranks that share layers by all, at the same step.
        """
        if prepare_adapted is None:
            return self._graphs.get(shape)
        graphs = self._of_experts if has_experts else self._adapted
        if shape not in graphs:
            graphs[shape] = self._captured(shape, lambda: prepare_adapted(shape, has_experts))
        return graphs[shape]

    @torch.inference_mode()
    def _captured(
        self, shape: StepShape, prepare: Callable[[], Callable[[], Tensor]]
    ) -> Captured | None:
        """Capture the graph of a shape with adapters, beside steps."""
        begin = time.perf_counter()
        with without_collection():
            made = self._made(shape, prepare(), "thread_local")
        seconds = time.perf_counter() - begin
        _log.info("CUDA graph of %s with adapters captured in %.2f s", shape, seconds)
        return made

    def capture(self, prepare: Prepare) -> None:
        """Capture all graphs.

        Args:
            prepare: from a shape to a step without rows: its inputs lie in place, and calling it
                launches the step's kernels on the current stream, and returns the logits.
        """
        begin = time.perf_counter()
        gc.collect()
        with without_collection():
            for shape in self._buckets.shapes:
                self._graphs[shape] = self._made(shape, prepare(shape), "global")
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        _log.info("%d CUDA graphs captured in %.2f s", len(self._graphs), seconds)

    def captured_ahead(
        self, prepare_adapted: PrepareAdapted, has_experts: bool = False
    ) -> Iterator[None]:
        """Capture the graphs of steps with adapters that no step has had captured yet, each by a
        `next`; no step may be in flight. Memory that garbage holds is freed before the first.
        """
        graphs = self._of_experts if has_experts else self._adapted
        left = [shape for shape in self._buckets.shapes if shape not in graphs]
        if left:
            gc.collect()
        for shape in left:
            if shape not in graphs:  # a step may have had it captured meanwhile
                self.graph(shape, prepare_adapted, has_experts)
                torch.cuda.synchronize()
                yield

    def recaptured(
        self,
        prepare: Prepare,
        prepare_adapted: PrepareAdapted,
        is_stale: Callable[[StepShape], bool],
    ) -> Iterator[None]:
        """Capture graphs of stale shapes anew, each by a `next`; no step may be in flight.

        Where memory is too short the old graph stays.
        """
        for graphs, make in (
            (self._graphs, prepare),
            (self._adapted, lambda shape: prepare_adapted(shape, False)),
            (self._of_experts, lambda shape: prepare_adapted(shape, True)),
        ):
            stale = [shape for shape, graph in graphs.items() if graph and is_stale(shape)]
            for shape in stale:
                with torch.inference_mode(), without_collection():
                    graphs[shape] = self._made(shape, make(shape), "thread_local") or graphs[shape]
                torch.cuda.synchronize()
                yield

    def _made(self, shape: StepShape, step: Callable[[], Tensor], mode: str) -> Captured | None:
        """Capture the graph of a step; None: memory is too short, on this rank or another."""
        made, has_run = None, False
        try:
            step()  # loads, and chooses, all its kernels
            has_run = True
            made = self._capture(step, mode)
        except RuntimeError as error:
            if not is_of_memory(error) or (self._has_sums and not has_run):
                raise
        if self._all_can(made is not None):
            return made
        where = "" if made is None else " on another rank"
        _log.warning("no memory%s for the CUDA graph of %s: it runs eagerly", where, shape)
        return None
