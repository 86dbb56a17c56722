"""Low-rank terms on a GPU: by torch in fp32, in graphs, repeated, and beside other rows."""

import random

import pytest
import torch
from fixtures.kernels.checking import poison_all
from fixtures.kernels.lora import Adapted, Shape
from fixtures.kernels.packed_cases import FLOATS, FORMS, Form, packed_pair
from slipstream.kernels.elementwise.activation import activate
from slipstream.kernels.elementwise.norm import RmsNorm, rms_norm
from slipstream.kernels.gemm.op import (
    COUNTS,
    WHOLE_ROWS,
    Around,
    TermTable,
    gemm,
    scratch_of,
    spec_of,
)
from slipstream.kernels.gemm.sm90 import gemv, packed_pipe, packed_stream
from slipstream.kernels.lora import terms as lora
from slipstream.quant.matrix import Kind
from torch import Tensor

pytestmark = pytest.mark.gpu
EPSILON = {torch.float16: 2**-10, torch.bfloat16: 2**-7}
DTYPES = list(EPSILON)


def drawn(seed: int) -> tuple[Shape, list[int]]:
    """A place, its adapters, and the adapters of rows."""
    rng = random.Random(seed)
    sizes = tuple(2 * rng.randint(1, 700) for _ in range(rng.randint(1, 3)))
    most = rng.choice((16, 64, 512))
    own = [tuple(rng.choice((0, rng.randint(1, most))) for _ in sizes) for _ in range(5)]
    num_rows = rng.choice((1, 7, 16, 33, 128, 256, 300))
    numbers = [rng.choice((0, rng.randint(1, 5))) for _ in range(num_rows)]
    return Shape(8 * rng.randint(1, 700), sizes, tuple(own)), numbers


def rows_of(shape: Shape, count: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator("cuda").manual_seed(seed)
    sizes = ((count, sum(shape.sizes)), (count, shape.inputs))
    y, x = (torch.randn(*size, generator=rng, device="cuda").to(dtype) for size in sizes)
    return y, x


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(12))
def test_terms_are_those_of_torch(seed: int, dtype: torch.dtype, is_fixed: bool) -> None:
    shape, numbers = drawn(seed)
    made = Adapted(shape, dtype, "cuda", seed)
    y, x = rows_of(shape, len(numbers), dtype, seed)
    poison_all()
    found = made.run(y, x, numbers, is_fixed=is_fixed)
    wanted = made.by_torch(y, x, numbers)
    apart = (found.float() - wanted).abs() / (1 + wanted.abs())
    assert apart.max() < EPSILON[dtype]
    others = [n == 0 for n in numbers]
    assert torch.equal(found[others], y[others])
    for _ in range(3):
        poison_all()
        assert torch.equal(made.run(y, x, numbers, is_fixed=is_fixed), found)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_comes_first(dtype: torch.dtype, plus_one: bool) -> None:
    shape = Shape(4096, (512, 128, 128), ((16, 16, 0), (3, 40, 8)))
    made = Adapted(shape, dtype, "cuda")
    numbers = [i % 3 for i in range(50)]
    y, x = rows_of(shape, len(numbers), dtype, 0)
    weight = torch.randn(4096, device="cuda").to(dtype)
    found = made.run(y, 7 * x, numbers, RmsNorm(weight, 1e-5, plus_one))
    wanted = made.by_torch(y, rms_norm(7 * x, weight, 1e-5, plus_one), numbers)
    assert ((found.float() - wanted).abs() / (1 + wanted.abs())).max() < 2 * EPSILON[dtype]


@pytest.mark.parametrize("gate", ["silu", "gelu"])
@pytest.mark.parametrize("size", [1024, 14336, 700, 702])
@pytest.mark.parametrize("num_rows", [33, 128, 2048])
def test_a_gate_is_applied_to_all_rows_on_the_way(num_rows: int, size: int, gate: str) -> None:
    """To the bits of its own kernel, again and again."""
    own = ((16, 3), (0, 40), (0, 0), (300, 16))
    made = Adapted(Shape(4096, (size, size), own), torch.bfloat16, "cuda")
    numbers = [i * 7 % 5 if num_rows < 2048 else i // 500 for i in range(num_rows)]
    y, x = rows_of(made.shape, num_rows, torch.bfloat16, size)
    wanted = activate(gate, made.run(y, x, numbers))
    for _ in range(3):
        poison_all()
        assert torch.equal(made.run(y, x, numbers, gate=gate), wanted)


@pytest.mark.parametrize("num_adapters", [1, 8, 128])
def test_rows_of_many_groups_are_those_of_torch(num_adapters: int) -> None:
    """As prompts have them: a CTA comes to many groups, of one adapter or of others."""
    own = tuple((16, 16 * (i % 3), 5) for i in range(num_adapters))
    made = Adapted(Shape(4096, (4096, 1024, 1024), own), torch.bfloat16, "cuda")
    numbers = [1 + i * num_adapters // 2100 for i in range(2100)]
    y, x = rows_of(made.shape, len(numbers), torch.bfloat16, 0)
    wanted = made.by_torch(y, x, numbers)
    found = made.run(y, x, numbers)
    assert ((found.float() - wanted).abs() / (1 + wanted.abs())).max() < EPSILON[torch.bfloat16]


@pytest.mark.parametrize("seed", range(6))
def test_bits_of_a_row_do_not_depend_on_others(seed: int) -> None:
    shape, numbers = drawn(100 + seed)
    made = Adapted(shape, torch.bfloat16, "cuda", seed)
    y, x = rows_of(shape, len(numbers), torch.bfloat16, seed)
    found = made.run(y, x, numbers, is_fixed=True)
    for row in random.Random(seed).sample(range(len(numbers)), min(5, len(numbers))):
        here = slice(row, row + 1)
        alone = made.run(y[here], x[here], [numbers[row]], is_fixed=True)
        assert torch.equal(alone, found[here])


def test_one_graph_serves_any_mix() -> None:
    shape = Shape(1024, (256, 64), ((16, 0), (1, 300), (512, 512)))
    made = Adapted(shape, torch.bfloat16, "cuda")
    y, x = rows_of(shape, 48, torch.bfloat16, 0)
    table, out = made.table([0] * 47 + [1], spare=49), torch.empty_like(y)

    def step() -> None:
        out.copy_(y)
        t = lora.shrink(x, table.groups, table.rows, 1, made.width)
        lora.expand(out, table.groups, table.rows, t, 1, shape.sizes)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(5):
        rng = random.Random(seed)
        numbers = [rng.randint(0, 3) for _ in range(48)]
        other = made.table(numbers, spare=0)
        table.groups.zero_()
        table.groups[: len(other.groups)] = other.groups
        table.rows.copy_(other.rows)
        graph.replay()
        assert torch.equal(out, made.run(y, x, numbers))


def of_gemv(seed: int) -> tuple[Shape, list[int], str]:
    """A place that a GEMV takes, the adapters of one or two rows, and the stage behind."""
    rng = random.Random(seed)
    stage = rng.choice(("", "silu", "residual"))
    size = 2 * rng.randint(1, 3000)
    sizes = {
        "silu": (size, size),
        "residual": (size,),
        "": tuple(2 * rng.randint(1, 3000) for _ in range(3)),
    }[stage]
    widest = 1792 if stage == "residual" else 1024
    most = rng.choice((16, 64, 512))
    own = [tuple(rng.choice((0, rng.randint(1, most))) for _ in sizes) for _ in range(3)]
    numbers = [rng.randint(0, 3) for _ in range(rng.choice((1, 2)))]
    return Shape(8 * rng.randint(1, widest), sizes, tuple(own)), numbers, stage


@pytest.mark.parametrize("seed", range(40))
def test_a_gemv_adds_terms(seed: int) -> None:
    """Again and again, as launches share the counts; rows without an adapter keep their bits."""
    shape, numbers, stage = of_gemv(seed)
    dtype = (torch.bfloat16, torch.float16)[seed % 2]
    made = Adapted(shape, dtype, "cuda", seed)
    y, x = rows_of(shape, len(numbers), dtype, seed)
    rng = torch.Generator("cuda").manual_seed(seed)
    weight = torch.randn(sum(shape.sizes), shape.inputs, generator=rng, device="cuda")
    weight = (weight * shape.inputs**-0.5).to(dtype)
    norm = None if stage == "residual" else x[0].clone()
    gate = stage if stage == "silu" else ""

    def around() -> Around:
        return Around(norm, 1e-5, gate=gate, residual=y.clone() if stage == "residual" else None)

    if gemv.adapts(spec_of(x, weight, around())) is not None:
        pytest.skip("a GEMM of more rows takes it")
    table = made.table(numbers)
    scratch = scratch_of(made.width, torch.device("cuda"))
    terms = TermTable(table.groups, table.rows, 1, scratch, shape.sizes)
    plain = gemm.oracle(x, weight, Around(norm, 1e-5))
    behind = x if norm is None else rms_norm(x, norm, 1e-5, False)
    wanted = made.by_torch(plain, behind, numbers)
    wanted = activate(gate, wanted) if gate else wanted
    wanted = wanted + y.float() if stage == "residual" else wanted
    first = gemv.adapted(x, weight, around(), terms)
    # The GEMV rounds `x * norm`, the oracle what is scaled, too: errors go by the size of terms.
    added = made.by_torch(torch.zeros_like(plain), behind, numbers).square().mean().sqrt()
    apart = (first.float() - wanted).abs() / (4 + 4 * wanted.abs() + added)
    assert apart.max() < EPSILON[dtype]
    others = [n == 0 for n in numbers]
    assert torch.equal(first[others], gemv.gemv(x, weight, around())[others])
    for _ in range(20):
        assert torch.equal(gemv.adapted(x, weight, around(), terms), first)
    assert scratch[:2].tolist() == [0, 0]


def test_gemvs_with_terms_behind_each_other_in_a_graph() -> None:
    """Each waits for t of its own while the next is on its way; any mix of two rows."""
    shape = Shape(4096, (4096,), ((16,), (300,), (0,)))
    made = Adapted(shape, torch.bfloat16, "cuda")
    _, x = rows_of(shape, 2, torch.bfloat16, 0)
    weight = torch.randn(4096, 4096, device="cuda").bfloat16() / 64
    table = made.table([0, 1], spare=3)
    scratch = scratch_of(made.width, torch.device("cuda"))
    terms = TermTable(table.groups, table.rows, 1, scratch, shape.sizes)
    out = torch.empty_like(x)

    def step() -> None:
        rows = x
        for _ in range(12):
            rows = gemv.adapted(rows, weight, Around(x[0], 1e-5), terms)
        out.copy_(rows)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for numbers in ([0, 1], [2, 1], [3, 0], [1, 1], [0, 0], [2, 2]):
        other = made.table(numbers, spare=0)
        table.groups.zero_()
        table.groups[: len(other.groups)] = other.groups
        table.rows.copy_(other.rows)
        graph.replay()
        found = out.clone()
        step()
        assert torch.equal(found, out)
        wanted = x
        for _ in range(12):
            behind = rms_norm(wanted, x[0], 1e-5, False)
            plain = gemm.oracle(wanted, weight, Around(x[0], 1e-5))
            wanted = made.by_torch(plain, behind, numbers).bfloat16()
        assert ((out.float() - wanted.float()).abs().max() / wanted.float().abs().max()) < 0.1


def of_packed(seed: int) -> tuple[Shape, list[int], str, Form]:
    """A place over packed weights, the adapters of up to eight rows, the stage behind, the form."""
    rng = random.Random(seed)
    stage = rng.choice(("", "silu", "residual"))
    size = 32 * rng.randint(1, 448)
    sizes = {
        "silu": (size, size),
        "residual": (size,),
        "": tuple(2 * rng.randint(1, 3000) for _ in range(3)),
    }[stage]
    most = rng.choice((16, 16, 64, 512))
    own = [tuple(rng.choice((0, rng.randint(1, most))) for _ in sizes) for _ in range(5)]
    numbers = [rng.randint(0, 5) for _ in range(rng.choice((1, 1, 2, 3, 8)))]
    form = rng.choice((FORMS[0], *FORMS, FLOATS[1]))
    return Shape(8 * rng.randint(1, 1024), sizes, tuple(own)), numbers, stage, form


@pytest.mark.parametrize("seed", range(16))
def test_packed_gemms_add_terms(seed: int) -> None:
    """Again and again, as launches share t; rows without an adapter keep their bits."""
    shape, numbers, stage, form = of_packed(seed)
    is_short = seed % 3 == 2 and form.kind is not Kind.F4  # whose results fp16 may not hold
    dtype = torch.float16 if is_short else torch.bfloat16
    made = Adapted(shape, dtype, "cuda", seed)
    y, x = rows_of(shape, len(numbers), dtype, seed)
    matrix, dense = packed_pair(form, sum(shape.sizes), shape.inputs, "cuda", dtype)
    gate = stage if stage == "silu" else ""

    def around() -> Around:
        residual = y.clone() if stage == "residual" else None
        how = Around(columns=matrix.scales, groups=matrix.groups)
        return how._replace(gate=gate, residual=residual)

    spec = spec_of(x, matrix.values, around())
    assert packed_stream.adapts(spec) is None
    table = made.table(numbers)
    scratch = scratch_of(made.width, torch.device("cuda"))
    terms = TermTable(table.groups, table.rows, 1, scratch, shape.sizes)
    wanted = made.by_torch(x.float() @ dense.float().t(), x, numbers)
    wanted = activate(gate, wanted) if gate else wanted
    wanted = wanted + y.float() if stage == "residual" else wanted
    nothing = torch.zeros(len(numbers), sum(shape.sizes), device="cuda")
    added = made.by_torch(nothing, x, numbers).square().mean().sqrt()
    others = [n == 0 for n in numbers]
    adapted = [packed_stream.adapted]
    adapted += [packed_pipe.adapted] if packed_pipe.adapts(spec) is None else []
    for run in adapted:
        first = run(x, matrix.values, around(), terms)
        apart = (first.float() - wanted).abs() / (4 + 4 * wanted.abs() + added)
        assert apart.max() < EPSILON[dtype]
        if run is packed_stream.adapted:  # the other's CTAs share out inputs where rows have none
            alone = packed_stream.packed_stream(x, matrix.values, around())
            assert torch.equal(first[others], alone[others])
        for _ in range(20):
            poison_all()
            assert torch.equal(run(x, matrix.values, around(), terms), first)
        assert not scratch[:COUNTS].any()
        assert not scratch[COUNTS + WHOLE_ROWS * made.width :].any()


@pytest.mark.parametrize("num_rows", [1, 2, 8])
def test_packed_gemms_with_terms_behind_each_other_in_a_graph(num_rows: int) -> None:
    """Each waits for t of its own while the next is on its way; the four places of a block."""
    rng, own = torch.Generator("cuda").manual_seed(0), ((16, 16, 16), (16, 0, 40), (0, 0, 0))
    sizes = ((4096, 1024, 1024), (4096,), (14336, 14336), (4096,))
    inputs = (4096, 4096, 4096, 14336)
    shapes = [
        Shape(k, size, tuple(ranks[: len(size)] for ranks in own))
        for k, size in zip(inputs, sizes, strict=True)
    ]
    made = [Adapted(shape, torch.bfloat16, "cuda", i) for i, shape in enumerate(shapes)]
    pairs = [packed_pair(FORMS[0], sum(s.sizes), s.inputs, "cuda") for s in shapes]
    x = torch.randn(num_rows, 4096, generator=rng, device="cuda").bfloat16()
    scratch = scratch_of(max(each.width for each in made), torch.device("cuda"))
    tables = [each.table([1] * num_rows, spare=num_rows) for each in made]

    def place(number: int, rows: Tensor, gate: str = "", residual: Tensor | None = None) -> Tensor:
        matrix, table = pairs[number][0], tables[number]
        terms = TermTable(table.groups, table.rows, 1, scratch, sizes[number])
        around = Around(columns=matrix.scales, groups=matrix.groups, gate=gate, residual=residual)
        adapted = (packed_pipe if gate else packed_stream).adapted  # as routes have them
        return adapted(rows, matrix.values, around, terms)

    def step() -> Tensor:
        rows = x.clone()
        for _ in range(8):
            place(1, place(0, rows)[:, :4096], residual=rows)
            place(3, place(2, rows, "silu"), residual=rows)
            rows = rms_norm(rows, x[0], 1e-5, False)
        return rows

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in range(8):
        numbers = [(seed + i * i) % 3 + 1 if seed % 4 else 0 for i in range(num_rows)]
        for table, each in zip(tables, made, strict=True):
            other = each.table(numbers, spare=0)
            table.groups.zero_()
            table.groups[: len(other.groups)] = other.groups
            table.rows.copy_(other.rows)
        graph.replay()
        found = out.clone()
        for _ in range(20):
            graph.replay()
        assert torch.equal(found, out)
        assert torch.equal(step(), out)
        assert bool(out.isfinite().all())
        assert not scratch.any()
