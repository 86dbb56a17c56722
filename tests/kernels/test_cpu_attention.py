"""The processor's rotation, cache writes and attention, beside their oracles in torch."""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from fixtures.kernels.attention_cases import attend, in_format, make_case
from fixtures.kernels.instruction_sets import HERE, forms, within
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.kernels.attention.decode import decode_attention
from slipstream.kernels.attention.prefill import prefill_attention
from slipstream.kernels.attention.scores import UNCHANGED, Scores
from slipstream.kernels.cache import kv_format
from slipstream.kernels.cpu.native import library
from slipstream.kernels.elementwise.rope import HeadStages, rope_and_cache

if library() is None:
    pytest.skip("this machine has no C++ compiler or no AVX2", allow_module_level=True)

FORMATS = {"float32": torch.float32, **kv_format.FORMATS}
NO_PLAN = torch.empty(0, dtype=torch.int32)


@dataclass(frozen=True)
class Drawn:
    """Sequences, heads and a cache."""

    chunks: list[int]
    before: list[int]  # tokens in front of each chunk
    heads: tuple[int, int]
    head_size: int
    block_size: int
    format: str
    window: int
    sinks: list[float] | None  # of heads, by turns
    seed: int


drawn = st.builds(
    Drawn,
    chunks=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    before=st.lists(st.integers(0, 130), min_size=4, max_size=4),
    heads=st.sampled_from([(1, 1), (9, 3), (4, 4), (7, 1), (71, 1)]),
    head_size=st.sampled_from([8, 48, 64, 80, 128]),
    block_size=st.sampled_from([16, 32]),
    format=st.sampled_from(sorted(FORMATS)),
    window=st.integers(0, 90),
    sinks=st.none()
    | st.lists(st.sampled_from([-torch.inf, -30.0, -2.0, 0.5, 4.0, 90.0]), min_size=1),
    seed=st.integers(0, 1 << 16),
)


def changed_by(d: Drawn) -> Scores:
    """Return scores with the sinks that were drawn, if any."""
    if d.sinks is None:
        return UNCHANGED
    return Scores(sinks=torch.tensor([*itertools.islice(itertools.cycle(d.sinks), d.heads[0])]))


@settings(deadline=None)
@given(drawn, st.booleans(), forms, forms)
def test_attention_is_its_definition(d: Drawn, decodes: bool, form: str, other: str) -> None:
    """Blocks that no query sees are NaN, or nowhere; two instruction sets have the same bits.

    Sinks are far below scores, among them and far above.
    """
    chunks = [min(chunk, 1) for chunk in d.chunks] if decodes else d.chunks
    if decodes:
        chunks = [1] * len(chunks)
    lengths = [before + chunk for before, chunk in zip(d.before, chunks, strict=False)]
    sizes = d.heads, d.head_size, d.block_size, torch.float32, "cpu", d.seed, d.window
    case = replace(make_case(chunks, lengths, *sizes), changed=changed_by(d))
    plain = case
    if d.format != "float32":
        case, plain = in_format(case, FORMATS[d.format])
    where = (case.cache, case.block_tables)
    outs = []
    for each in (form, other):
        out = torch.full((len(case.q), *case.q.shape[1:]), torch.nan)
        with within(each):
            if decodes:
                how = case.lengths, NO_PLAN, case.scale, out
                decode_attention(case.q, *where, *how, window=d.window, changed=case.changed)
            else:
                starts = (case.query_starts, case.lengths, case.scale, max(chunks), out, d.window)
                prefill_attention(case.q, *where, *starts, changed=case.changed)
        outs.append(out)
    want = attend(plain, torch.float64)
    assert torch.allclose(outs[0].double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(*outs)


@pytest.mark.parametrize("changed", [UNCHANGED, Scores(sinks=torch.linspace(-1, 3, 9))])
def test_a_token_has_the_same_bits_whatever_chunk_it_comes_in(changed: Scores) -> None:
    case = make_case([97], [97], (9, 3), 64, 16, torch.float32, "cpu", 3, 50)
    where = case.cache, case.block_tables, case.query_starts, case.lengths, 0.125, 97
    whole = prefill_attention(case.q, *where, None, 50, changed=changed)
    begin = 0
    for end, form in zip((1, 2, 40, 96, 97), itertools.cycle(HERE), strict=False):
        starts = torch.tensor([0, end - begin], dtype=torch.int32)
        lengths = torch.tensor([end], dtype=torch.int32)
        where = case.cache, case.block_tables, starts, lengths, 0.125, end - begin
        with within(form):
            part = prefill_attention(case.q[begin:end], *where, None, 50, changed=changed)
        assert torch.equal(part, whole[begin:end]), (begin, end)
        begin = end


@settings(deadline=None)
@given(
    st.integers(0, 30),
    st.sampled_from([(1, 1), (9, 3), (5, 5)]),
    st.sampled_from([8, 40, 64, 128, 192]),
    st.sampled_from(sorted(FORMATS)),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1 << 16),
    forms,
)
def test_rotation_and_cache_are_those_of_torch(
    n: int,
    heads: tuple[int, int],
    size: int,
    name: str,
    normed: bool,
    late: bool,
    seed: int,
    form: str,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_q, num_kv = heads
    qkv = torch.randn(n, (num_q + 2 * num_kv) * size, generator=generator)
    qkv *= 10.0 ** torch.randint(-6, 5, (n, 1), generator=generator)
    if n > 2:
        qkv[1, -1], qkv[2, num_q * size] = torch.nan, torch.inf
    row = kv_format.row_size(FORMATS[name], size)
    caches = [torch.zeros(5, num_kv, 2, 16, row).to(FORMATS[name]) for _ in range(3)]
    slots = torch.randperm(80, generator=generator)[:n]
    slots[::5] = -1
    positions = torch.randint(0, 50, (n,), generator=generator)
    cos_sin = torch.randn(50, size, generator=generator)
    factors = torch.rand(50, generator=generator) + 0.5 if late else None
    stages = HeadStages(are_late=late, factors=factors)
    if normed:
        norms = [torch.rand(size, generator=generator) for _ in range(2)]
        stages = HeadStages(None, *norms, 1e-6, None, late, factors)
    results = []
    runs = rope_and_cache, rope_and_cache, rope_and_cache.oracle
    for run, cache, each in zip(runs, caches, (form, HERE[0], form), strict=True):
        rows = qkv.clone()
        parts = torch.split(rows, [num_q * size, num_kv * size, num_kv * size], 1)
        q, k, v = (part.unflatten(1, (-1, size)) for part in parts)
        with within(each):
            run(q, k, v, cos_sin, positions, slots, cache, stages)
        results.append(q)
    assert torch.allclose(*results[1:], rtol=1e-5, atol=1e-6, equal_nan=True)
    for both in (results[:2], caches[:2]):
        assert torch.equal(*(x.contiguous().view(torch.uint8) for x in both))
    caches = caches[1:]
    ours, theirs = (cache.view(torch.uint8) for cache in caches)
    if not normed:
        if name == "float32":
            ours, theirs = (cache.nan_to_num(7.0) for cache in caches)
        assert torch.equal(ours, theirs)
        return
    read = [kv_format.read(cache).float() for cache in caches]
    finite = read[1].isfinite()
    assert torch.equal(read[0].isfinite(), finite)
    step = {"float32": 1e-5, "fp8": 0.13, "int8": 0.02, "int4": 0.2}[name]
    apart = (read[0] - read[1])[finite].abs()
    assert bool(
        (
            apart
            <= step * read[1].where(finite, 0).abs().amax(-1, True).expand_as(read[1])[finite]
            + 1e-6
        ).all()
    )
