"""Attention backends: what each supports, how it plans a step, and its two operations.

A backend is made once, from the spec of a model; a step calls `plan` for each window of its layers,
and each layer calls `decode` and `prefill`. A form of attention is a subclass here, with its rules
in `supports`; a layer of the latent form calls `attend_latents`.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.attention import rules
from slipstream.kernels.attention.decode import decode_attention, plan_decode
from slipstream.kernels.attention.latent import latent_attention
from slipstream.kernels.attention.newest import Newest
from slipstream.kernels.attention.prefill import SinkRows, prefill_attention
from slipstream.kernels.attention.scores import UNCHANGED, Scores
from slipstream.kernels.attention.sinks import Sinks, sink_attention
from slipstream.kernels.attention.spec import CAUSAL, LATENT, PREFIX, AttentionSpec
from slipstream.kernels.cache import kv_format
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
        no_rotation = _no_rotation(spec, spec.case())
        self.rotates_decodes = not spec.deterministic and no_rotation is None

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """Return why this backend does not support `spec` (field, value, limit), or None."""
        return _no_device(cls.device, spec) or _no_layout(spec) or _no_cache(spec)

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
        if not self._has_plan:
            return torch.empty(0, dtype=torch.int32, device=lengths.device)
        if spec.streams:
            window, sinks = spec.stream_window, spec.num_sinks
            return plan_decode(lengths, cache, spec.num_heads, window, num_sinks=sinks)
        scores = spec.case().scores
        return plan_decode(lengths, cache, spec.num_heads, window, tables, scores=scores)

    def decode(
        self,
        q: Tensor,
        cache: Tensor,
        rows: Rows,
        plan: Tensor,
        scale: float,
        out: Tensor,
        newest: Newest | None,
        window: int,
        sinks: Sinks | None = None,
        reads_step: bool = False,
        changed: Scores = UNCHANGED,
    ) -> None:
        """Attend with one query a row, `q [s, hq, d]`; the result goes to `out`.

        `newest` is rotated and cached on the way, if given. Sequences that stream have `sinks`.
        If it `reads_step`, rows may attend to tokens of each other, which are in the cache.
        `changed` are scores as the spec says.
        """
        where = (cache, *rows, plan, scale, out)
        decode_attention(q, *where, newest, window, sinks, reads_step, changed)

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
            prefill_attention(q, *where, out, window, self._has_plan, changed)
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
        return super().supports(spec) or _no_scores(spec) or _no_heads(spec) or _no_stream(spec)

    @classmethod
    def choose(cls, spec: AttentionSpec, window: int, is_hopper: bool) -> AttentionKernels:
        """Return the kernels of layers with this window, as the launchers choose them."""
        case = spec.case(window)
        alone = "deterministic mode" if spec.deterministic else None
        not_planned = alone or rules.no_decode_plan(case)
        not_wgmma = rules.no_wgmma(case) or (None if is_hopper else "not a Hopper GPU")
        prefill = "prefill.cu" if not_wgmma else "prefill_wgmma.cu"
        unpacked = case._replace(cached=spec.dtype)
        is_unpacked_by_wgmma = is_hopper and rules.no_wgmma(unpacked) is None
        decode = "decode_split.cu" if not_planned else "decode.cu"
        if alone or (spec.streams and not_planned):
            decode = prefill  # a decode is a chunk of one token
        return AttentionKernels(
            decode=decode,
            prefill=prefill,
            own_prefix=not_planned or rules.no_sharing(case),
            own_rotation=not_planned or _no_rotation(spec, case),
            whole_chunks=alone or rules.no_parts(case) or not_wgmma,
            packed=alone or rules.no_unpacking(case),
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
        return super().supports(spec) or _no_latents(spec)

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


# ---- reasons ----


def _no_device(device: str, spec: AttentionSpec) -> str | None:
    return None if spec.device == device else f"device = {spec.device!r} is not {device!r}"


def _no_layout(spec: AttentionSpec) -> str | None:
    """Return what no backend supports on any device, or None."""
    if spec.form not in (CAUSAL, LATENT, PREFIX):
        return f"{spec.model} needs {spec.form} attention, which no backend has"
    if spec.num_heads % spec.num_kv_heads:
        return (
            f"num_attention_heads = {spec.num_heads} is no multiple of num_key_value_heads = "
            f"{spec.num_kv_heads}"
        )
    if spec.form == LATENT and (spec.streams or any(spec.windows)):
        return f"{spec.model} has latent attention, which is without windows and of an end"
    if spec.form == LATENT and spec.changes:
        return f"{spec.model} has latent attention and {spec.changes[0]}, which no backend has"
    if spec.form == PREFIX and (reason := _no_prefix(spec)) is not None:
        return f"{reason} does not go with {spec.model}, whose tokens of a prompt see each other"
    if spec.streams and spec.changes:
        return f"attention_window = {spec.stream_window}: {spec.model} has {spec.changes[0]}"
    if spec.streams and any(spec.windows):
        return (
            f"attention_window = {spec.stream_window}: {spec.model} has windows of its own in "
            "config.json"
        )
    if spec.is_chunked and (chunk := max(spec.windows)) % spec.block_size:
        return (
            f"block_size = {spec.block_size} does not divide attention chunks of {chunk} tokens "
            f"({spec.model}, attention_chunk_size)"
        )
    return None


def _no_rotation(spec: AttentionSpec, case: rules.Case) -> str | None:
    """Return why decodes are not rotated by their attention kernel, or None."""
    if spec.form == PREFIX or spec.is_chunked:
        return "a row's length is not the position of its token"
    return rules.no_rotation(case)


def _no_prefix(spec: AttentionSpec) -> str | None:
    """Return what does not go with prompts whose tokens see each other, or None."""
    if spec.streams:
        return f"attention_window = {spec.stream_window}"
    if any(spec.windows):
        return f"a window of {max(spec.windows)} tokens in config.json"
    if spec.cache_dtype in kv_format.FORMATS.values():
        return f"kv_cache_dtype = {kv_format.name_of(spec.cache_dtype)!r}"
    if spec.deterministic:
        return "deterministic = True"
    if spec.host_bytes:
        return f"kv_cache_host_bytes = {spec.host_bytes}"
    return spec.changes[0] if spec.changes else None


def _no_scores(spec: AttentionSpec) -> str | None:
    """Return what kernels do not make of scores, or None: they make one change."""
    if spec.form == LATENT:
        return f"{spec.model} has {LATENT} attention, which is that of `LatentCuda`"
    if len(spec.changes) < 2:
        return None
    both = " and ".join(spec.changes)
    return f"device = 'cuda': {spec.model} has {both}: no kernel has both, device = 'cpu' has"


def _no_cache(spec: AttentionSpec) -> str | None:
    """Return what no cache of this format holds, or None."""
    asked = f"kv_cache_dtype = {kv_format.name_of(spec.cache_dtype)!r}"
    is_quantized = spec.cache_dtype in kv_format.FORMATS.values()
    if is_quantized and spec.block_size < kv_format.MIN_BLOCK_SIZE:
        return f"{asked} needs block_size >= {kv_format.MIN_BLOCK_SIZE}, not {spec.block_size}"
    if not kv_format.is_legal(spec.cache_dtype, spec.head_size):
        return (
            f"{asked} needs heads that are equal groups of at most {kv_format.GROUP} numbers, "
            f"and even: config.json has head_dim = {spec.head_size}"
        )
    if spec.host_bytes and (spec.streams or not spec.reuses_blocks):
        return (
            f"kv_cache_host_bytes = {spec.host_bytes} is for cached blocks, which there are only "
            "with kv_cache_reuse and without an attention_window"
        )
    return None


def _no_latents(spec: AttentionSpec) -> str | None:
    if reason := rules.no_latents(spec.case(), spec.latent_rank):
        return f"device = 'cuda': {spec.model} has {LATENT} attention: {reason}; 'cpu' takes any"
    return None


def _no_heads(spec: AttentionSpec) -> str | None:
    if reason := rules.no_kernel(spec.case()):
        return (
            f"device = 'cuda' with heads of {spec.head_size} (config.json's head_dim): {reason}; "
            "device = 'cpu' takes any"
        )
    return None


def _no_stream(spec: AttentionSpec) -> str | None:
    """Return what the streaming kernels do not take: without them decodes would be chunks."""
    asked, case = f"attention_window = {spec.stream_window}", spec.case()
    if not spec.streams or (reason := rules.no_sinks(case)) is None:
        return None
    if case.is_quantized:
        name = kv_format.name_of(spec.cache_dtype)
        return f"{asked} needs kv_cache_dtype = 'auto' on a GPU, not {name!r}"
    return (
        f"{asked} on a GPU has no kernels for heads of {spec.head_size} (config.json's head_dim): "
        f"{reason}; device = 'cpu' takes any"
    )
