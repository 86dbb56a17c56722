"""What sequences share, on the GPU: the twin's words; attention against fp64, repeated bitwise."""

import dataclasses
import random

import pytest
import torch
from fixtures.kernels.attention_cases import Case, attend, configurations
from fixtures.kernels.checking import Judge, poison, same_bits, short
from fixtures.kernels.compiling import compile_all, those_with
from fixtures.kernels.newest import HALVES, newest_of
from fixtures.kernels.prefix_cases import Rows, Words, shared_case
from slipstream.kernels.attention import decode as module
from slipstream.kernels.attention import decode_prefixes, decode_shapes
from slipstream.kernels.attention.decode import decode_attention, plan_decode
from slipstream.kernels.attention.decode_prefixes import Work, find_prefixes, num_words
from slipstream.kernels.elementwise.rope import rope_and_cache

pytestmark = pytest.mark.gpu

SIZES = (1, 5, 33, 64, 7, 90, 31, 32, 256, 2, 17, 300)
# Pieces are whole blocks of every size up to 256.
MIXES: dict[str, Rows] = {
    "one run": [([("a", 256)], size) for size in SIZES],
    "nobody": [([(str(i), 256)], size) for i, size in enumerate(SIZES)],
    "two runs": [([(name, 512)], size) for name in "ab" for size in SIZES],
    "levels": [([("a", 256), (name, 512)], size) for name in "bbcd" for size in SIZES]
    + [([("a", 256)], 9), ([("z", 256)], 40), ([], 3), ([], 0)],
    "three levels": [
        ([("a", 256), (x, 256), (x + y, 768)], size) for x in "bc" for y in "de" for size in SIZES
    ],
    "long": [([("a", 8192)], size) for size in (1, 300, 40)] + [([("b", 5120)], 5)] * 2,
    "more of their own": [([("a", 512)], 43 * i) for i in range(1, 60)],
    "many": [([("a", 256)], 1 + i % 70) for i in range(150)] + [([], 0)] * 3,
}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All that is tested here."""
    plain = {"FORMAT": None, "SCORES": None, "SINKS": None, "WINDOWED": 0}
    wanted = those_with(module.variants(), **plain)
    compile_all(v for v in wanted if v.source != "attention/decode_split.cu")


@pytest.fixture(autouse=True)
def little_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_prefixes, "_MIN_SAVED_BYTES", 1)


def plan_of(case: Case) -> torch.Tensor:
    return plan_decode(case.lengths, case.cache, case.q.shape[1], block_tables=case.block_tables)


def work_of(case: Case) -> Work:
    num_ctas, shape = module._device(0, case.cache.dtype, case.q.shape[2])
    return module._work(case.cache, case.q.shape[1], num_ctas, shape)


def num_items(case: Case, plan: torch.Tensor) -> int:
    return int(plan[len(plan) - num_words(work_of(case), len(case.lengths))])


def poison_scratch(case: Case) -> None:
    """What plan, parts and states are given may hold anything."""
    num_ctas, shape = module._device(0, case.cache.dtype, case.q.shape[2])
    rows, heads, size = case.q.shape
    words = num_ctas * 2 * decode_shapes.part_words(size)
    states = work_of(case).max_states(rows) * heads * decode_shapes.state_words(size)
    plan = module._plan_size(rows, num_ctas, shape.warps, True) + num_words(work_of(case), rows)
    poison(case.q.shape, dtype=case.q.dtype)
    poison((words + states,), (plan,), dtype=torch.float32)


def decode(case: Case) -> torch.Tensor:
    poison_scratch(case)
    plan = plan_of(case)
    return decode_attention(case.q, case.cache, case.block_tables, case.lengths, plan, case.scale)


def check(judge: Judge, name: str, case: Case) -> None:
    out = decode(case)
    judge.close(name, out, attend(case, torch.float64), attend(case, case.q.dtype))
    judge.true(f"{name}: length 0", not out[case.lengths == 0].any())
    judge.repeats(name, lambda: decode(case))


def test_the_words_are_those_of_the_twin() -> None:
    judge = Judge("find_prefixes")
    for seed in range(150):
        rng = random.Random(seed)
        block = rng.choice([8, 16, 32, 64, 128])
        sizes = [block * i for i in (1, 3, 8, 40)]
        rows: Rows = []
        for _ in range(rng.choice([2, 5, 33, 64, 257, 1024])):
            depth = rng.randint(0, 4)
            pieces = [
                (rng.choice("abc"), rng.choice(sizes[: rng.randint(1, 4)])) for _ in range(depth)
            ]
            rows.append((pieces, rng.choice([0, 1, 9, 40])))
        case = shared_case(rows, (2, 1), 8, block, torch.float16)
        group, heads = rng.choice([(4, 8), (3, 2), (8, 1), (1, 4), (16, 8), (7, 2)])
        work = Work(
            block, heads, group, rng.choice([64, 128]), rng.choice([3, 132]), rng.choice([1, 9999])
        )
        size = num_words(work, len(rows))
        want = find_prefixes(
            case.block_tables, case.lengths, torch.empty(size, dtype=torch.int32), work
        )
        out = torch.full((size,), 0x7A7A7A7A, dtype=torch.int32, device="cuda")
        find_prefixes(case.block_tables.cuda(), case.lengths.cuda(), out, work)
        got, known = (Words(x.tolist(), len(rows), work) for x in (out, want))
        judge.true(
            f"seed {seed}: header and rows",
            torch.equal(out[: 4 + 2 * len(rows)].cpu(), want[: 4 + 2 * len(rows)]),
        )
        judge.true(f"seed {seed}: items", got.items == known.items)
        used = max((i.first_member + i.num_rows // group for i in known.items), default=0)
        judge.true(f"seed {seed}: members", got.members[:used] == known.members[:used])
    judge.verdict()


@pytest.mark.parametrize("dtype", HALVES, ids=short)
@pytest.mark.parametrize("mix", MIXES)
def test_mixes(mix: str, dtype: torch.dtype) -> None:
    judge = Judge(f"{mix} {short(dtype)}")
    for heads, d, block in (
        ((8, 2), 128, 32),
        ((7, 1), 80, 16),
        ((16, 1), 64, 256),
        ((6, 6), 96, 8),
    ):
        case = shared_case(MIXES[mix], heads, d, block, dtype, "cuda")
        shared = num_items(case, plan_of(case)) > 0
        judge.true(f"heads {heads}: shared {shared}", shared == (mix != "nobody"))
        check(judge, f"heads {heads} d {d} block {block}", case)
    judge.verdict()


def test_what_lies_behind_a_run_weighs_nothing() -> None:
    """All scores are far below those of the zeros that fill a tile."""
    judge = Judge("behind a run")
    for size in (96, 80, 336):
        rows: Rows = [([("a", size)], own) for own in (1, 33, 64, 90) * 5]
        case = shared_case(rows, (8, 2), 80, 16, torch.bfloat16, "cuda")
        case.q.fill_(1)
        keys = case.cache[:, :, 0]
        keys.copy_(torch.where(keys.isnan(), keys, -1 - keys.abs()))
        check(judge, f"{size} tokens", case)
    judge.verdict()


def test_configurations() -> None:
    judge = Judge("configurations")
    for heads, d, block in configurations():
        rows = MIXES["levels"][::3] + MIXES["one run"]
        check(
            judge,
            f"heads {heads} d {d} block {block}",
            shared_case(rows, heads, d, block, torch.bfloat16, "cuda"),
        )
    judge.verdict()


def test_smaller_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes of a CTA for other GPUs."""
    judge = Judge("smaller shapes")
    for shape in decode_shapes.shapes(torch.bfloat16, 128)[1:]:
        monkeypatch.setattr(decode_shapes, "shapes", lambda *_, shape=shape: (shape,))
        module._device.cache_clear()
        for d in (80, 128):
            case = shared_case(MIXES["levels"], (8, 2), d, 16, torch.bfloat16, "cuda")
            check(judge, f"{shape} d {d}", case)
    module._device.cache_clear()
    judge.verdict()


@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_nothing_shared_changes_no_bit(dtype: torch.dtype) -> None:
    case = shared_case(MIXES["nobody"], (8, 2), 128, 32, dtype, "cuda")
    plain = plan_decode(case.lengths, case.cache, 8)
    where = (case.q, case.cache, case.block_tables, case.lengths)
    assert same_bits(decode(case), decode_attention(*where, plain, case.scale))


def test_one_graph_for_every_mix() -> None:
    """Tables and lengths change in place; three layers follow one another."""
    judge = Judge("one graph")
    size, width = 160, 300
    cases = {
        name: shared_case(rows, (8, 2), 128, 32, torch.bfloat16, "cuda")
        for name, rows in MIXES.items()
        if len(rows) <= size
    }
    num_blocks = max(len(case.cache) for case in cases.values())
    cache = torch.zeros((num_blocks, 2, 2, 32, 128), dtype=torch.bfloat16, device="cuda")
    q = torch.zeros((size, 8, 128), dtype=torch.bfloat16, device="cuda")
    tables = torch.zeros((size, width), dtype=torch.int32, device="cuda")
    lengths = torch.zeros(size, dtype=torch.int32, device="cuda")
    whole = Case(q, cache, tables, torch.empty(0), lengths, [1] * size)

    def layers() -> list[torch.Tensor]:
        plan = plan_of(whole)
        return [decode_attention(q, cache, tables, lengths, plan, whole.scale) for _ in range(3)]

    layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = layers()
    for name, case in [*cases.items(), *cases.items()]:
        count = len(case.lengths)
        q.normal_()
        lengths.zero_()
        lengths[:count] = case.lengths
        tables.fill_(2**30)  # of nobody
        tables[:count, : case.block_tables.shape[1]] = case.block_tables
        cache.fill_(float("nan"))
        cache[: len(case.cache)] = case.cache
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        part = dataclasses.replace(
            whole,
            q=q[:count],
            block_tables=tables[:count],
            lengths=lengths[:count],
            chunks=[1] * count,
        )
        exact, naive = attend(part, torch.float64), attend(part, torch.bfloat16)
        judge.close(name, outs[0][:count], exact, naive)
        judge.true(f"{name}: layers", all(same_bits(out, outs[0]) for out in outs))
        judge.true(f"{name}: padding", not outs[0][count:].any())
    judge.verdict()


@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_rotation_and_cache_within(dtype: torch.dtype) -> None:
    """Each member's query is rotated by its own position, in what it shares too."""
    judge = Judge(f"rotation within {short(dtype)}")
    for heads, d, block in configurations()[:: 1 if dtype == torch.bfloat16 else 4]:
        case = shared_case(MIXES["levels"][::2], heads, d, block, dtype, "cuda")
        newest, positions, slots = newest_of(case, heads[1])
        keep = slots >= 0
        case.cache[slots[keep] // block, :, :, slots[keep] % block] = float("nan")
        before = case.cache.clone()
        turned = dataclasses.replace(case, q=case.q.clone(), cache=before.clone())
        rope_and_cache(turned.q, *newest, positions, slots, turned.cache)
        name = f"heads {heads} d {d} block {block}"
        outs = []
        for _ in range(5):
            case.cache.copy_(before)
            poison_scratch(case)
            where = (case.q, case.cache, case.block_tables, case.lengths, plan_of(case), case.scale)
            outs.append(decode_attention(*where, newest=newest))
        judge.close(name, outs[0], attend(turned, torch.float64), attend(turned, dtype))
        judge.true(f"{name}: repeats", all(same_bits(out, outs[0]) for out in outs))
        judge.true(f"{name}: v", same_bits(case.cache[:, :, 1], turned.cache[:, :, 1]))
    judge.verdict()


@pytest.mark.parametrize("num_ctas", [1, 5, 40])
def test_few_ctas(num_ctas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has many items, and tiles of its own after them."""
    judge = Judge(f"{num_ctas} CTAs")
    shape = module._device(0, torch.bfloat16, 128)[1]
    monkeypatch.setattr(module, "_device", lambda *_: (num_ctas, shape))
    for mix in ("one run", "three levels", "more of their own", "many"):
        case = shared_case(MIXES[mix], (8, 2), 128, 32, torch.bfloat16, "cuda")
        judge.true(f"{mix}: shared", num_items(case, plan_of(case)) > 0)
        check(judge, mix, case)
    judge.verdict()


LARGE: dict[str, Rows] = {
    "256 x (1024 + 64..127)": [([("a", 1024)], 64 + i % 64) for i in range(256)],
    "64 x (992 + 1608)": [([("a", 992)], 1608)] * 64,
    "8 x 32 x (512 + 1024 + 100)": [([("a", 512), (str(i % 8), 1024)], 100) for i in range(256)],
}


@pytest.mark.parametrize("mix", LARGE)
def test_large_batches_repeat(mix: str) -> None:
    """150 runs, in graphs where they overlap, have the bits of the first."""
    judge = Judge(mix)
    case = shared_case(LARGE[mix], (32, 8), 128, 32, torch.bfloat16, "cuda")
    plan = plan_of(case)
    judge.true("shared", num_items(case, plan) > 0)
    where = (case.q, case.cache, case.block_tables, case.lengths)
    first = decode_attention(*where, plan, case.scale)
    few = [0, 1, len(first) // 2, len(first) - 1]
    some = dataclasses.replace(
        case,
        q=case.q[few],
        block_tables=case.block_tables[few],
        lengths=case.lengths[few],
        chunks=[1] * 4,
    )
    judge.close("some", first[few], attend(some, torch.float64), attend(some, torch.bfloat16))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = plan_of(case)
        layers = [decode_attention(*where, plan, case.scale) for _ in range(15)]
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(10):
        for out in layers:
            out.fill_(float("nan"))
        graph.replay()
        for out in layers:
            differing += (out.view(torch.int16) != first.view(torch.int16)).any()
    judge.true(f"{int(differing)} of 150 differ", int(differing) == 0)
    judge.verdict()
