"""Products with packed weights on a GPU: against fp64, poisoned, repeated bitwise."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from fixtures.kernels.checking import (
    Judge,
    naive_linear,
    poison,
    random,
    same_bits,
    short,
    spread,
)
from fixtures.kernels.packed_cases import (
    BLOCKS,
    FLOATS,
    FORMS,
    HALVES,
    PAIR,
    SHARED,
    WIDE,
    Form,
    packed_pair,
    quantized,
)
from slipstream.kernels.elementwise import eight_bits
from slipstream.kernels.gemm import linear as gemm_linear
from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.gemm.op import Around, Matrix
from slipstream.kernels.gemm.packed import packed
from slipstream.kernels.gemm.sm90.packed_pipe import packed_pipe, pipe_e4m3, pipe_scaled
from slipstream.kernels.gemm.sm90.packed_stream import packed_stream
from slipstream.kernels.gemm.sm90.packed_wgmma import packed_wgmma
from slipstream.kernels.gemm.unpacked import unpacked
from slipstream.quant.forms import make_packed_e4m3
from slipstream.quant.matrix import Kind, dequantise
from torch.nn import functional

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 512)
SHAPES = [(1, 32), (5, 64), (37, 160), (130, 576), (1000, 2048), (4096, 4096), (2112, 1536)]
# A row of tiles that fills no CTA; one of several passes; inputs that end within a block.
SHAPES_OF_ALL = [(37, 160), (2112, 1536), (4096, 4096), (9312, 2088), (128, 14336)]
ROWS_OF_ALL = (1, 8, 9, 16, 33, 64, 100, 128, 250)
LARGE = [(6144, 4096), (28672, 4096), (4096, 14336)]
DTYPES = (torch.bfloat16, torch.float16)
RECORDS = (PAIR, SHARED, HALVES, WIDE)


@dataclass
class Case:
    """A product with what stands around it."""

    x: torch.Tensor
    matrix: Matrix
    weight: torch.Tensor  # that it stands for, fp32
    bias: torch.Tensor | None = None
    gated: bool = False
    residual: torch.Tensor | None = None
    kernel: Callable[..., torch.Tensor] | None = None  # the chosen one

    def expected(self, dtype: torch.dtype) -> torch.Tensor:
        weight = self.weight.to(torch.float64 if dtype == torch.float64 else torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        y = naive_linear(self.x.to(dtype), weight.to(dtype), bias)
        if self.gated:
            gate, up = y.chunk(2, -1)
            y = functional.silu(gate) * up
        return y if self.residual is None else self.residual.to(dtype) + y

    def run(self) -> torch.Tensor:
        residual = None if self.residual is None else spread(self.residual)
        outputs = len(self.weight) // (2 if self.gated else 1)
        poison((len(self.x), outputs), dtype=self.x.dtype)
        gate = "silu" if self.gated else ""
        around = Around(bias=self.bias, gate=gate, residual=residual)
        if self.kernel is None:
            out = linear(self.x, self.matrix, around)
        else:
            around = around._replace(columns=self.matrix.scales, groups=self.matrix.groups)
            out = self.kernel(self.x, self.matrix.values, around)
        if residual is not None:
            assert out is residual
            assert bool(residual._base.view(len(out), -1)[:, :8].isnan().all())
        return out


def cases(rows: int, form: Form, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Case]:
    outputs, inputs = shape
    matrix, weight = packed_pair(form, outputs, inputs, "cuda", dtype)
    x = spread(random(rows, inputs, dtype=dtype, seed=rows))
    bias = random(outputs, dtype=dtype, seed=3)
    residual = random(rows, outputs, dtype=dtype, seed=4)
    found = {
        "plain": Case(x, matrix, weight),
        "bias, residual": Case(x, matrix, weight, bias, residual=residual),
    }
    if outputs % 2 == 0:
        found["bias, gated"] = Case(x, matrix, weight, bias, gated=True)
    return found


def judged(judge: Judge, rows: int, form: Form, shape: tuple[int, int], dtype: torch.dtype) -> None:
    for what, case in cases(rows, form, shape, dtype).items():
        name = f"{rows} x {shape} {form}, {what}"
        judge.close(name, case.run(), case.expected(torch.float64), case.expected(dtype))
        judge.repeats(name, case.run)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [(form, torch.bfloat16) for form in (*FORMS, *FLOATS, *RECORDS)]
    + [(form, torch.float16) for form in (FORMS[0], FORMS[2], FORMS[7], BLOCKS, FLOATS[0], PAIR)],
    ids=str,
)
def test_products(form: Form, dtype: torch.dtype) -> None:
    judge = Judge(f"packed {form} {short(dtype)}")
    for shape in SHAPES:
        for rows in ROWS if shape == (130, 576) else (1, 8, 16, 64, 128, 129):
            judged(judge, rows, form, shape, dtype)
    judge.verdict()


@pytest.mark.parametrize("form", [FORMS[0], FORMS[1], FORMS[6], BLOCKS, SHARED, HALVES], ids=str)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_products_of_a_large_model(shape: tuple[int, int], form: Form) -> None:
    judge = Judge(f"packed {form} {shape}")
    for rows in (1, 2, 8, 16, 32, 64, 128, 300):
        judged(judge, rows, form, shape, torch.bfloat16)
    judge.verdict()


@pytest.mark.parametrize("form", [*FORMS, *FLOATS, *RECORDS], ids=str)
def test_each_kernel_takes_all_rows(form: Form) -> None:
    """Not only those for which it is chosen."""
    judge = Judge(f"packed kernels, {form}")
    kernels = {packed: 128}
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    if is_hopper and form.record:
        kernels |= {packed_pipe: 256} | ({} if form is WIDE else {packed_stream: 8})
    elif is_hopper:
        kernels |= {packed_wgmma: 128, packed_stream: 16, packed_pipe: 128}
        if form.scale == torch.bfloat16:
            kernels |= {pipe_scaled: 256}
        elif form.kind is Kind.F4:
            kernels |= {packed_pipe: 256}
    for shape, rows, kernel in itertools.product(SHAPES_OF_ALL, ROWS_OF_ALL, kernels):
        if rows > kernels[kernel]:
            continue
        for what, case in cases(rows, form, shape, torch.bfloat16).items():
            if case.gated and shape[0] % 32:
                continue
            case.kernel = kernel
            name = f"{kernel.__name__} {rows} x {shape}, {what}"
            judge.close(name, case.run(), case.expected(torch.float64), case.expected(case.x.dtype))
            judge.repeats(name, case.run)
    judge.verdict()


@dataclass
class E4m3Case(Case):
    """A product whose rows are rounded to e4m3, by a kernel that takes them so."""

    def __post_init__(self) -> None:
        self.rounded = eight_bits.quantize(self.x)
        self.x = self.rounded.values.to(torch.float64) * self.rounded.scales.double()[:, None]

    def run(self) -> torch.Tensor:
        residual = None if self.residual is None else spread(self.residual)
        poison((len(self.x), len(self.weight) // (2 if self.gated else 1)), dtype=torch.bfloat16)
        gate = "silu" if self.gated else ""
        around = Around(bias=self.bias, gate=gate, residual=residual)
        around = around._replace(rows=self.rounded.scales, groups=self.matrix.groups)
        return pipe_e4m3(self.rounded.values, self.matrix.values, around)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="no Hopper"
)
@pytest.mark.parametrize("group", [32, 64, 128, 192, 1 << 20])
@pytest.mark.parametrize("scale", [torch.bfloat16, torch.float16, torch.float32], ids=short)
def test_rows_in_e4m3(group: int, scale: torch.dtype) -> None:
    judge = Judge(f"packed for e4m3 by {group} {short(scale)}")
    rows_of = (1, 8, 17, 40, 64, 100, 128, 129, 500)
    for shape, rows in itertools.product([(37, 160), (2112, 1536), (4096, 4096)], rows_of):
        quant = quantized(Form(group=group, scale=scale), *shape, "cuda")
        matrix, weight = make_packed_e4m3(quant), dequantise(quant)
        x = random(rows, shape[1], dtype=torch.bfloat16, seed=rows)
        bias = random(shape[0], dtype=torch.bfloat16, seed=3)
        residual = random(rows, shape[0], dtype=torch.bfloat16, seed=4)
        found = {
            "plain": E4m3Case(x, matrix, weight),
            "bias, residual": E4m3Case(x, matrix, weight, bias, residual=residual),
        }
        if shape[0] % 32 == 0:
            found["bias, gated"] = E4m3Case(x, matrix, weight, bias, gated=True)
        for what, case in found.items():
            name = f"{rows} x {shape}, {what}"
            expected = case.expected(torch.float64)
            judge.close(name, case.run(), expected, case.expected(torch.bfloat16))
            judge.repeats(name, case.run)
    judge.verdict()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("form", [*FORMS, *FLOATS, *RECORDS], ids=str)
def test_unpacked(form: Form, dtype: torch.dtype) -> None:
    for shape in [*SHAPES, (28672, 4096)]:
        matrix, _ = packed_pair(form, *shape, "cuda", dtype)
        assert matrix.groups is not None
        poison(shape, dtype=dtype)
        given = (matrix.values, matrix.groups, dtype, matrix.scales)
        assert bool((unpacked(*given) == unpacked.oracle(*given)).all()), shape


@pytest.mark.parametrize("rows", [1, 5, 8, 13, 16, 30, 32, 50, 64, 100, 128])
@pytest.mark.parametrize("poisons", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_a_poisoned_row_stays_alone(rows: int, poisons: float) -> None:
    case = cases(rows, FORMS[1], (1000, 2048), torch.bfloat16)["plain"]
    clean = case.run().clone()
    for row in {0, rows // 2, rows - 1}:
        kept = case.x[row].clone()
        case.x[row, ::7] = poisons
        found = case.run()
        others = [i for i in range(rows) if i != row]
        assert same_bits(found[others], clean[others]), row
        assert not bool(found[row].isfinite().any())
        case.x[row] = kept


@pytest.mark.parametrize("form", [FORMS[0], FORMS[6]], ids=str)
def test_rows_of_equal_batches_do_not_know_their_neighbours(form: Form) -> None:
    """As deterministic mode needs it: 128 rows, whatever else is among them, wherever it is."""
    case = cases(128, form, (1000, 2048), torch.bfloat16)["plain"]
    row = case.x[17].clone()
    first = case.run()[17].clone()
    for seed, at in ((1, 0), (2, 17), (3, 63), (4, 64), (5, 127)):
        case.x.copy_(random(128, 2048, dtype=torch.bfloat16, seed=seed) * 10)
        case.x[at] = row
        assert same_bits(case.run()[at], first), at


def captured(run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


@pytest.mark.parametrize("rows", [1, 16, 64, 128, 300])
def test_graphs_replay_chains_of_products(rows: int) -> None:
    """Each product reads what the one before wrote, while its own weights are on the way."""
    matrices = [packed_pair(FORMS[0], 4096, 4096, "cuda")[0] for _ in range(4)]
    x = random(rows, 4096, dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        y = x
        for matrix in matrices:
            y = linear(y, matrix)
        return y

    expected = run().clone()
    graph, out = captured(run)
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(out, expected)


def test_which_kernel_runs() -> None:
    matrix, _ = packed_pair(Form(Kind.W4), 4096, 4096, "cuda")
    names = {}
    for rows in (1, 16, 32, 64, 128, 129, 512):
        x = random(rows, 4096, dtype=torch.bfloat16)
        names[rows] = gemm_linear.route_of(x, matrix).gemm.name
    print(names)
    assert names[1] != "unpacked"
    assert names[512] == "unpacked"
