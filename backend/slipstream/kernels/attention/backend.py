"""Attention backends: what each supports, how it plans a step, and its two operations.

A backend is made once, from the spec of a model; a step calls `plan` for each window of its layers,
and each layer calls `decode` and `prefill`. A form of attention is a subclass here, with its rules
in `supports`; a layer of the latent form calls `attend_latents`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.attention import refusals, rules
from slipstream.kernels.attention.decode import MOST_SEQUENCES, decode_attention, plan_decode
from slipstream.kernels.attention.latent import latent_attention
from slipstream.kernels.attention.prefill import SinkRows, prefill_attention
from slipstream.kernels.attention.scores import UNCHANGED, Scores
from slipstream.kernels.attention.sinks import sink_attention
from slipstream.kernels.attention.spec import BY_HEAD, LATENT, AttentionSpec
from slipstream.kernels.cache.kv_spec import KVSpec
from slipstream.kernels.cache.unpack import (
    MOST_CHUNKS,
    Contexts,
    Scratch,
    is_worth_it,
    num_seen_blocks,
)


class Rows(NamedTuple):
    """Sequences of a step, as attention reads their caches."""

    block_tables: Tensor  # [s, blocks] i32
    lengths: Tensor  # [s] i32, this step's tokens included


class Chunks(NamedTuple):
    """Chunks of a step: sequences with queries of several tokens."""

    query_starts: Tensor  # [s + 1] i32, of the rows of q
    max_queries: int  # of the longest
    num_unpacked: int = 0  # blocks of a quantised cache to unpack first; 0: it is read as it is


class AttentionKernels(NamedTuple):
    """The kernels of layers with one window, and why a slower one was chosen."""

    decode: str
    prefill: str
    own_prefix: str | None  # why what sequences share is read by each; None: once for all
    own_rotation: str | None  # why rotation is a kernel of its own; None: part of decode
    whole_chunks: str | None  # why no chunk is cut for several multiprocessors; None: some are
    packed: str | None  # why no chunk's blocks are unpacked first; None: those of long ones are
    unpacked: str  # the kernel of prompts over unpacked blocks


class AttentionBackend(ABC):
    """Attention over the paged cache, on one kind of device.

    Args:
        spec: what the layers need; `supports` must accept it.
    """

    name: ClassVar[str]
    device: ClassVar[str]  # cuda | cpu
    keeps_bits_in_chunks: ClassVar[bool]  # a token's bits do not depend on the chunk it comes in
    has_graphs: ClassVar[bool]  # plans are made on the device, so one CUDA graph serves any lengths

    def __init__(self, spec: AttentionSpec) -> None:
        assert self.supports(spec) is None, self.supports(spec)
        self.spec = spec
        self._has_plan = not spec.deterministic
        # Decodes may be rotated by their attention where nothing comes between it and projection.
        no_rotation = refusals.no_rotation(spec, spec.case())
        self.rotates_decodes = not spec.deterministic and no_rotation is None

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """Return why this backend does not support `spec` (field, value, limit), or None."""
        return (
            refusals.no_device(cls.device, spec)
            or refusals.no_layout(spec)
            or refusals.no_cache(spec)
        )

    @classmethod
    def has_form(cls, form: str) -> bool:
        """Whether this is a backend of this form of attention; what it says of others is no use."""
        return form != LATENT

    @classmethod
    @abstractmethod
    def choose(cls, spec: AttentionSpec, window: int, is_hopper: bool) -> AttentionKernels:
        """Return the kernels of layers with this window."""

    def reserve(self, num_tokens: int, table_blocks: int, device: torch.device) -> int:
        """Allocate what long chunks need of so many cached tokens; return the bytes.

        Chunks of more tokens, or without this call, are attended to without. `table_blocks` are
        the most of a sequence.
        """
        return 0

    def num_unpacked(self, contexts: Contexts, window: int) -> int:
        """Count the blocks to unpack for chunks of so many queries and cached tokens; 0: none."""
        return 0

    @property
    def shared(self) -> Sequence[Tensor]:
        """Return the backend's memory that layers use one after another."""
        return ()

    @property
    def kv_spec(self) -> KVSpec:
        """The layout of the cache, and its bytes."""
        s = self.spec
        return KVSpec(s.cache_dtype, s.num_kv_heads, s.head_size, s.block_size, s.layers_per_block)

    def plan(self, cache: Tensor, rows: Rows, window: int) -> Tensor:
        """Plan the decodes `rows` for all layers of a step that have this window; i32, opaque.

        `cache` is that of any of these layers. A plan of no elements: none is needed. Without a
        window it is of these block tables, else of the lengths alone.
        """
        spec, (tables, lengths) = self.spec, rows
        is_by_head = spec.form == BY_HEAD
        if not self._has_plan or (is_by_head and len(lengths) > MOST_SEQUENCES):
            return torch.empty(0, dtype=torch.int32, device=lengths.device)
        if spec.streams:
            window, sinks = spec.stream_window, spec.num_sinks
            return plan_decode(lengths, cache, spec.num_heads, window, num_sinks=sinks)
        if is_by_head:  # tables begin with blocks that few of them share
            return plan_decode(lengths, cache, spec.num_heads)
        scores = spec.case().scores
        return plan_decode(lengths, cache, spec.num_heads, window, tables, scores=scores)

    decode = staticmethod(decode_attention)  # with one query a row; no backend has its own

    def prefill(
        self,
        q: Tensor,
        cache: Tensor,
        rows: Rows,
        chunks: Chunks,
        scale: float,
        out: Tensor,
        window: int,
        sinks: SinkRows | None = None,
        changed: Scores = UNCHANGED,
    ) -> None:
        """Attend with chunks of queries, `q [n, hq, d]`; the result goes to `out`."""
        tables, lengths = rows
        starts, most, num_unpacked = chunks
        if num_unpacked:
            cache, tables = self._unpack(cache, rows, starts, window, num_unpacked)
        where = (cache, tables, starts, lengths, scale, most)
        if sinks is None:
            how = (window, self._has_plan, changed, self.spec.form == BY_HEAD)
            prefill_attention(q, *where, out, *how)
        else:
            num_sinks, angles, positions = sinks
            sink_attention(q, angles, positions, *where, window, num_sinks, out)

    def _unpack(
        self, cache: Tensor, rows: Rows, starts: Tensor, window: int, num_blocks: int
    ) -> tuple[Tensor, Tensor]:
        """Return a cache of 16 bits that has what chunks see, and tables of it."""
        raise AssertionError(f"{self.name} counts no blocks to unpack")

    def attend_latents(
        self, q: Tensor, cache: Tensor, rows: Rows, chunks: Chunks | None, scale: float, out: Tensor
    ) -> None:
        """Attend over latents with `q [n, hq, row]`, one query a row or `chunks` of them.

        The result goes to `out [n, hq, latent]`.
        """
        starts, most = chunks[:2] if chunks else (None, 1)
        tables, lengths = rows
        latent_attention(q, cache, tables, starts, lengths, out, scale, most, self._has_plan)


class PagedCuda(AttentionBackend):
    """The CUDA kernels of this package."""

    name = "paged CUDA"
    device = "cuda"
    keeps_bits_in_chunks = True
    has_graphs = True
    _scratch: Scratch | None = None

    @property
    def shared(self) -> Sequence[Tensor]:
        """Return what blocks are unpacked into, and their tables."""
        return () if self._scratch is None else self._scratch.tensors

    def reserve(self, num_tokens: int, table_blocks: int, device: torch.device) -> int:
        """Allocate memory for unpacked blocks, if chunks may read such; return the bytes."""
        spec = self.spec
        if spec.deterministic or rules.no_unpacking(spec.case()) is not None:
            return 0
        shape = (spec.num_kv_heads, 2, spec.block_size, spec.head_size)
        self._scratch = Scratch(shape, spec.dtype, num_tokens, table_blocks, device)
        return self._scratch.num_bytes

    def num_unpacked(self, contexts: Contexts, window: int) -> int:
        """Count the blocks to unpack, which all fit; 0 where that takes longer, or they do not."""
        spec, scratch = self.spec, self._scratch
        if scratch is None or not 0 < len(contexts) <= MOST_CHUNKS:
            return 0
        count = num_seen_blocks(contexts, spec.block_size, window)
        heads = (spec.num_heads, spec.num_kv_heads)
        if count > scratch.num_blocks or not is_worth_it(contexts, *heads, spec.block_size, window):
            return 0
        return count

    def _unpack(
        self, cache: Tensor, rows: Rows, starts: Tensor, window: int, num_blocks: int
    ) -> tuple[Tensor, Tensor]:
        """Unpack what chunks see, and return it."""
        assert self._scratch is not None, "they were counted"
        return self._scratch.unpack(
            cache, rows.block_tables, starts, rows.lengths, window, num_blocks
        )

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """Return why there are no kernels for `spec`, or None."""
        return (
            super().supports(spec)
            or refusals.no_scores(spec)
            or refusals.no_heads(spec)
            or refusals.no_stream(spec)
        )

    @classmethod
    def choose(cls, spec: AttentionSpec, window: int, is_hopper: bool) -> AttentionKernels:
        """Return the kernels of layers with this window, as the launchers choose them."""
        case = spec.case(window)
        alone = "deterministic mode" if spec.deterministic else None
        by_head = "rows of heads are many, and small" if spec.form == BY_HEAD else None
        not_planned = alone or rules.no_decode_plan(case)
        not_wgmma = by_head or rules.no_wgmma(case) or (None if is_hopper else "not a Hopper GPU")
        prefill = "prefill.cu" if not_wgmma else "prefill_wgmma.cu"
        unpacked = case._replace(cached=spec.dtype)
        is_unpacked_by_wgmma = is_hopper and rules.no_wgmma(unpacked) is None
        decode = "decode_split.cu" if not_planned else "decode.cu"
        if alone or (spec.streams and not_planned):
            decode = prefill  # a decode is a chunk of one token
        return AttentionKernels(
            decode=decode,
            prefill=prefill,
            own_prefix=not_planned or by_head or rules.no_sharing(case),
            own_rotation=not_planned or refusals.no_rotation(spec, case),
            whole_chunks=alone or rules.no_parts(case) or not_wgmma,
            packed=alone or by_head or rules.no_unpacking(case),
            unpacked="prefill_wgmma.cu" if is_unpacked_by_wgmma else "prefill.cu",
        )


class LatentCuda(AttentionBackend):
    """The CUDA kernel of latents, which needs no plan: the grid is of the capacity of tables."""

    name = "latent CUDA"
    device = "cuda"
    keeps_bits_in_chunks = True
    has_graphs = True

    @classmethod
    def has_form(cls, form: str) -> bool:
        """Whether this is a backend of this form of attention."""
        return form == LATENT

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """Return why there is no kernel for `spec`, or None."""
        if spec.form != LATENT:
            return f"{spec.model} has {spec.form} attention, not {LATENT}"
        return super().supports(spec) or refusals.no_latents(spec)

    @classmethod
    def choose(cls, spec: AttentionSpec, window: int, is_hopper: bool) -> AttentionKernels:
        """Return the one kernel, for all."""
        own = "one kernel reads latents, whatever sequences share"
        alone = "deterministic mode" if spec.deterministic else None
        rotated, packed = "latent_rows.cu does", "nothing is packed"
        return AttentionKernels("latent.cu", "latent.cu", own, rotated, alone, packed, "latent.cu")

    def plan(self, cache: Tensor, rows: Rows, window: int) -> Tensor:
        """Return a plan of no elements."""
        return torch.empty(0, dtype=torch.int32, device=rows.lengths.device)


class TorchCpu(AttentionBackend):
    """The operations in torch: the oracle of tests, and the backend of a CPU."""

    name = "torch CPU"
    device = "cpu"
    keeps_bits_in_chunks = False  # its sums have an order that depends on the chunk
    has_graphs = False

    @classmethod
    def has_form(cls, form: str) -> bool:
        """Whether this is a backend of this form of attention: of all."""
        return True

    @classmethod
    def choose(cls, spec: AttentionSpec, window: int, is_hopper: bool) -> AttentionKernels:
        """Return torch for everything."""
        return AttentionKernels(
            decode="torch",
            prefill="torch",
            own_prefix="one sequence at a time",
            own_rotation=None,
            whole_chunks="one chunk at a time",
            packed="each sequence's are, by torch",
            unpacked="torch",
        )


BACKENDS: tuple[type[AttentionBackend], ...] = (PagedCuda, LatentCuda, TorchCpu)


def backend_for(spec: AttentionSpec) -> type[AttentionBackend] | str:
    """Return the first backend that supports `spec`, or why those of its device do not."""
    reasons = []
    for backend in BACKENDS:
        if (reason := backend.supports(spec)) is None:
            return backend
        if backend.device == spec.device and backend.has_form(spec.form):
            reasons.append(reason)
    return "; ".join(reasons) or f"device = {spec.device!r} has no attention backend"
