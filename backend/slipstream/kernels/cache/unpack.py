"""Blocks of a quantised cache as 16-bit numbers, for a step's chunks to read.

Attention of a chunk turns a quantised block into numbers again for every query head and every 64
of its queries. Where that is often, the blocks are unpacked once for a layer, and the kernels of a
16-bit cache read the copy. The copy has the numbers that the other kernel computes with.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.cache import kv_format
from slipstream.kernels.cache.pages import first_seen
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.flat import flattened
from slipstream.kernels.runtime.op import op

MOST_CHUNKS = 128  # a CTA of the kernel counts the blocks of all chunks before its own
_MOST_BYTES = 256 << 20  # of the copy
_THREADS = 256
# What is saved must exceed what is spent, in (kv head or query head, token) pairs: reading packed
# and writing 16 bits takes about as long as two that attention unpacks, a launch as 32,768.
_QUERIES, _PAIR, _LAUNCH = 64, 2, 1 << 15

Contexts = Sequence[tuple[int, int]]  # of chunks: queries, and cached tokens, theirs included


def num_seen_blocks(chunks: Contexts, block_size: int, window: int) -> int:
    """Count the blocks that chunks see, each block as often as chunks see it."""
    seen = 0
    for queries, length in chunks:
        if queries and length:
            seen += -(-length // block_size) - first_seen(length - queries, window) // block_size
    return seen


def is_worth_it(
    chunks: Contexts, num_heads: int, num_kv_heads: int, block_size: int, window: int
) -> bool:
    """Whether unpacking what chunks see takes less time than attention over packed blocks does."""
    read = 0
    for queries, length in chunks:
        each = length - queries // 2  # by each query head's tiles, on average
        if window:
            each = min(each, window + _QUERIES)
        read += -(-queries // _QUERIES) * num_heads * each
    tokens = num_seen_blocks(chunks, block_size, window) * block_size
    return read > _PAIR * tokens * num_kv_heads + _LAUNCH


class UnpackCall(NamedTuple):
    """Arguments of `unpack_blocks`."""

    cache: Tensor  # quantised: [block, kv head, K or V, token in block, row]
    block_tables: Tensor  # [s, blocks], of the cache
    query_starts: Tensor  # [s + 1]
    lengths: Tensor  # [s], cached tokens
    into: Tensor  # [block, kv head, K or V, token in block, d], in 16 bits
    tables: Tensor  # [s, blocks], of `into`
    window: int = 0  # tokens that a query sees; 0: all
    num_blocks: int = 0  # that are seen, or more; they size the grid, and `into` holds the seen


@op(
    "cache[_,h,2,b,_]:any, block_tables[s,w]:i32, query_starts[s1]:i32, lengths[s]:i32, "
    "into[_,h,2,b,d]:T, tables[s,w]:i32"
)
@flattened(UnpackCall)
def unpack_blocks(call: UnpackCall) -> None:
    """Write the blocks that chunks see to `into`, in order, and where they are to `tables`.

    Chunks are as `prefill_attention` has them. Entries of `tables` for blocks that no query sees
    stay as they are.
    """
    cache, block_tables, query_starts, lengths, into, tables, window, _ = call
    size, used, starts = cache.shape[3], 0, query_starts.tolist()
    for s, length in enumerate(lengths.tolist()):
        num_queries = starts[s + 1] - starts[s]
        if not num_queries or not length:
            continue
        first = first_seen(length - num_queries, window) // size
        blocks = block_tables[s, first : -(-length // size)].long()
        own = slice(used, used := used + len(blocks))
        into[own] = kv_format.read(cache[blocks]).to(into.dtype)
        tables[s, first : first + len(blocks)] = torch.arange(own.start, own.stop)


def _variant(dtype: torch.dtype, cached: torch.dtype, head_size: int) -> jit.Variant:
    macros = kv_format.macros(cached)
    return jit.variant("cache/unpack.cu", dtype, HEAD_SIZE=head_size, **macros)


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    for dtype in (torch.float16, torch.bfloat16):
        for cached in kv_format.FORMATS.values():
            for head_size in jit.HEAD_SIZES:
                yield _variant(dtype, cached, head_size)


@unpack_blocks.cuda
@flattened(UnpackCall)
def _unpack_blocks(call: UnpackCall) -> None:
    cache, block_tables, query_starts, lengths, into, tables, window, num_blocks = call
    name, num_chunks, head_size = "unpack_blocks", lengths.shape[0], into.shape[4]
    jit.require(kv_format.is_quantized(cache), f"{name}: a cache of {cache.dtype}")
    jit.require(into.dtype != torch.float32, f"{name}: no copy in {into.dtype}")
    holds = kv_format.head_size_of(cache) == jit.head_size_of(into.dtype, head_size)
    jit.require(holds, f"{name}: rows of {cache.shape[4]} do not hold heads of {head_size}")
    has_starts = query_starts.shape[0] == num_chunks + 1
    jit.require(has_starts, f"{name}: {query_starts.shape[0]} query_starts for {num_chunks}")
    are_whole = all(x.is_contiguous() for x in (cache, query_starts, lengths, into))
    rows = (block_tables, tables)
    are_rows = all(x.stride(1) == 1 or x.shape[1] <= 1 for x in rows)
    are_aligned = cache.data_ptr() % 16 == 0 and into.data_ptr() % 16 == 0
    jit.require(are_whole and are_rows and are_aligned, f"{name}: layouts are not the kernel's")
    is_whole = cache.shape[3] >= kv_format.MIN_BLOCK_SIZE
    jit.require(is_whole, f"{name}: blocks of {cache.shape[3]} tokens of {cache.dtype}")
    is_held = num_blocks <= into.shape[0]
    jit.require(is_held, f"{name}: {num_blocks} blocks for {into.shape[0]}")
    if num_blocks == 0 or num_chunks == 0:
        return
    jit.launch(
        _variant(into.dtype, cache.dtype, head_size),
        name,
        (num_blocks, cache.shape[1]),
        _THREADS,
        cache,
        block_tables,
        block_tables.stride(0),
        query_starts,
        lengths,
        num_chunks,
        into,
        tables,
        tables.stride(0),
        cache.shape[1],
        jit.block_shift(cache.shape[3]),
        window,
    )


class Scratch:
    """The memory that blocks are unpacked into; layers use it one after another.

    Args:
        shape: of a block in 16 bits, `[kv head, 2, token, d]`.
        dtype: of its numbers.
        num_tokens: that it should hold; it holds fewer where these take more than 256 MiB.
        table_blocks: most blocks of a sequence.
        device: of all.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        num_tokens: int,
        table_blocks: int,
        device: torch.device,
    ) -> None:
        heads, parts, size, head_size = shape
        most = _MOST_BYTES // (heads * parts * size * head_size * dtype.itemsize)
        self.num_blocks = min(most, -(-num_tokens // size))
        self._into = torch.zeros((self.num_blocks, *shape), dtype=dtype, device=device)
        tables = (MOST_CHUNKS, table_blocks)
        self._tables = torch.zeros(tables, dtype=torch.int32, device=device)
        self.tensors = self._into, self._tables  # all of it
        self.num_bytes = self._into.nbytes + self._tables.nbytes

    def unpack(
        self,
        cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        lengths: Tensor,
        window: int,
        num_blocks: int,
    ) -> tuple[Tensor, Tensor]:
        """Return a cache of 16 bits, and tables of it; both hold until the next call."""
        tables = self._tables[: len(lengths), : block_tables.shape[1]]
        where = (cache, block_tables, query_starts, lengths, self._into, tables)
        unpack_blocks(*where, window, num_blocks)
        return self._into, tables
