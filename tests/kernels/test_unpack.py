"""Unpacked blocks: the oracle, the CUDA source emulated, and when chunks read them."""

import dataclasses

import pytest
import torch
from fixtures.kernels.attention_cases import Case, in_format, make_case
from fixtures.kernels.emulation import emulate
from fixtures.tiers import quick_of
from hypothesis import given
from hypothesis import strategies as st
from slipstream.core.batch import Batch, Row
from slipstream.kernels.attention import backend as backends
from slipstream.kernels.attention.backend import Chunks, PagedCuda, Rows
from slipstream.kernels.attention.prefill import prefill_attention
from slipstream.kernels.attention.table import spec_of
from slipstream.kernels.cache.kv_format import FORMATS
from slipstream.kernels.cache.unpack import (
    MOST_CHUNKS,
    Scratch,
    is_worth_it,
    num_seen_blocks,
    unpack_blocks,
    variants,
)
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import KernelError
from slipstream.layers.attention import AttentionInputs, StepRows
from slipstream.runner.step_shape import Layout
from slipstream_contract.sampling import SamplingParams
from torch import Tensor

CHUNKS, LENGTHS = [3, 0, 17, 1, 40, 0], [3, 40, 60, 33, 90, 0]
CASES = [(name, d, block) for name in FORMATS for d, block in ((64, 16), (80, 32), (256, 16))]
CPU = torch.device("cpu")


def packed_case(name: str, head_size: int, block: int, window: int = 0) -> Case:
    case = make_case(
        CHUNKS, LENGTHS, (4, 2), head_size, block, torch.bfloat16, "cpu", window=window
    )
    return in_format(case, FORMATS[name])[0]


def copies(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A copy full of NaN with one block to spare, and tables of -1."""
    count = num_seen_blocks(contexts(case), case.cache.shape[3], case.window) + 1
    shape = (count, *case.cache.shape[1:4], case.q.shape[2])
    return torch.full(shape, torch.nan, dtype=dtype), torch.full_like(case.block_tables, -1)


def contexts(case: Case) -> list[tuple[int, int]]:
    return list(zip(case.chunks, case.lengths.tolist(), strict=True))


def call_of(case: Case, into: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return (case.cache, case.block_tables, case.query_starts, case.lengths, *into)


def attend(case: Case) -> Tensor:
    where = (case.cache, case.block_tables, case.query_starts, case.lengths, case.scale)
    return prefill_attention(case.q, *where, max(CHUNKS), window=case.window)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(("name", "d", "block"), CASES)
def test_attention_over_the_copy_is_the_same(name: str, d: int, block: int, window: int) -> None:
    """By the oracles, whose products are of the numbers rounded to 16 bits, both times."""
    case = packed_case(name, d, block, window)
    into, tables = copies(case, torch.bfloat16)
    unpack_blocks(*call_of(case, (into, tables)), window)
    copied = dataclasses.replace(case, cache=into, block_tables=tables)
    assert torch.equal(attend(copied), attend(case))


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format_case", quick_of(CASES, [c for c in CASES if c[1] == 80]), ids=str)
def test_the_kernel(
    format_case: tuple[str, int, int],
    dtype: torch.dtype,
    window: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit; what no chunk sees, and the block to spare, stay as they are."""
    case = packed_case(*format_case, window)
    wanted, found = copies(case, dtype), copies(case, dtype)
    unpack_blocks.oracle(*call_of(case, wanted), window)
    emulate(monkeypatch)
    unpack_blocks.launcher(*call_of(case, found), window, len(found[0]))
    assert torch.equal(found[1], wanted[1])
    same = found[0].view(torch.int16) == wanted[0].view(torch.int16)
    assert bool((same | (found[0].isnan() & wanted[0].isnan())).all())
    assert bool(found[0][-1].isnan().all())


def test_what_has_no_kernel_is_refused() -> None:
    case = packed_case("fp8", 64, 16)
    call = call_of(case, copies(case, torch.bfloat16))
    with pytest.raises(KernelError, match="1000 blocks for"):
        unpack_blocks.launcher(*call, 0, 1000)
    with pytest.raises(KernelError, match="no copy in"):
        unpack_blocks.launcher(*call_of(case, copies(case, torch.float32)), 0, 1)
    plain = make_case(CHUNKS, LENGTHS, (4, 2), 64, 16, torch.bfloat16, "cpu")
    with pytest.raises(KernelError, match=r"a cache of torch\.bfloat16"):
        unpack_blocks.launcher(*call_of(plain, copies(plain, torch.bfloat16)), 0, 1)


# ---- when ----


def backend_of(cached: str, **changes: object) -> PagedCuda:
    spec = dataclasses.replace(spec_of("cuda"), cache_dtype=FORMATS[cached], **changes)
    return PagedCuda(spec)


def test_long_prompts_are_worth_it_and_short_ones_are_not() -> None:
    """The sizes: 32 heads over 8, blocks of 32 tokens, no window."""
    sizes = (32, 8, 32, 0)
    for chunks in ([(2048, 2048)], [(512, 512)] * 4, [(2048, 18432)], [(16, 8208)]):
        assert is_worth_it(chunks, *sizes), chunks
    for chunks in ([(64, 64)], [(5, 500)], [(1, 1)] * 100, []):
        assert not is_worth_it(chunks, *sizes), chunks
    assert not is_worth_it([(60, 60_000)], 8, 8, 32, 0), "one tile of queries a head"


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3000)), max_size=9),
    st.sampled_from([16, 64]),
    st.sampled_from([0, 1, 100, 4096]),
)
def test_seen_blocks(drawn: list[tuple[int, int]], size: int, window: int) -> None:
    """Blocks that have a token which a query sees, by going through the tokens."""
    chunks = [(queries, queries + before) for queries, before in drawn]
    blocks = 0
    for queries, length in chunks:
        first = max(0, length - queries - window + 1) if window else 0
        blocks += len({token // size for token in range(first, length)}) if queries else 0
    assert num_seen_blocks(chunks, size, window) == blocks


def test_only_what_fits_is_unpacked() -> None:
    backend, long = backend_of("int8"), [(2048, 2048)]
    assert backend.num_unpacked(long, 0) == 0, "nothing is reserved"
    backend.reserve(3000, 100, CPU)
    assert backend.num_unpacked(long, 0) == 64
    assert backend.num_unpacked([(2048, 3100)], 0) == 0
    assert backend.num_unpacked([(2048, 3100)], 100) == 68
    assert backend.num_unpacked([(20, 20)] * (MOST_CHUNKS + 1), 0) == 0
    scratch = Scratch((64, 2, 32, 256), torch.bfloat16, 1 << 40, 4, torch.device("meta"))
    assert scratch.num_blocks * 64 * 2 * 32 * 256 * 2 == 256 << 20


@pytest.mark.parametrize("changes", [{"deterministic": True}, {"dtype": torch.float32}])
def test_bits_that_may_not_depend_on_neighbours_never_do(changes: dict[str, object]) -> None:
    backend = backend_of("fp8", **changes)
    backend.reserve(3000, 100, CPU)
    assert backend.num_unpacked([(2048, 2048)], 0) == 0


def test_a_backend_attends_over_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is given 16 bits, and finds what the packed blocks have."""
    case = packed_case("int4", 64, 16)
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "block_size": 16}
    backend = backend_of("int4", **sizes)
    backend.reserve(300, case.block_tables.shape[1], CPU)
    given_caches = []

    def attention(q: Tensor, cache: Tensor, *rest: object) -> Tensor:
        given_caches.append(cache.dtype)
        return prefill_attention(q, cache, *rest)

    monkeypatch.setattr(backends, "prefill_attention", attention)
    rows, results = Rows(case.block_tables, case.lengths), []
    for count in (0, num_seen_blocks(contexts(case), 16, 0)):
        out = torch.zeros(case.q.shape, dtype=case.q.dtype)
        chunks = Chunks(case.query_starts, max(CHUNKS), count)
        backend.prefill(case.q, case.cache, rows, chunks, case.scale, out, 0)
        results.append(out)
    assert 0 < backend.reserve(300, 9, CPU) < 1 << 20
    assert given_caches == [torch.uint8, torch.bfloat16]
    assert torch.equal(*results)


def test_a_step_counts_by_its_chunks() -> None:
    """From the rows that were scheduled to each layer; the last one has few queries."""
    backend = backend_of("fp8", windows=(0, 100))
    backend.reserve(3000, 100, CPU)
    sampling = SamplingParams(max_tokens=5)
    tables = ([1] * 100,)
    decode = Row(1, 0, [7], 500, tables, True, sampling, 0, 3)
    chunk = Row(2, 1, [7] * 1000, 600, tables, True, sampling, 0, 0, gap=64)
    shape = Layout().shape_of(Batch((decode, chunk), 1))
    assert shape.contexts == ((1000, 1536),)
    assert Layout().shape_of(Batch((decode,), 1)).contexts == ()
    none = torch.zeros(2, dtype=torch.int32)
    rows = StepRows(none, none, none[:, None], none, none, 1, 1000, False, shape.contexts)
    for window, count in ((0, 48), (100, 35)):
        inputs = AttentionInputs(backend, rows, none, window)
        assert inputs.chunks.num_unpacked == count
        assert inputs.of_last_layer(none, none).chunks.num_unpacked == 0


def test_variants_are_of_16_bits() -> None:
    defines = [dict(wanted.defines) for wanted in variants()]
    assert {wanted["ELEMENT"] for wanted in defines} == {"Half", "BFloat16"}
    assert len(defines) == 2 * len(FORMATS) * len(jit.HEAD_SIZES)
