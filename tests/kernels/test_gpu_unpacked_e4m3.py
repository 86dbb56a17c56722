"""Products of many rows of e4m3 by packed weights on a GPU, by way of e4m3: against fp64."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures.kernels.checking import Judge, poison, random, same_bits, short
from fixtures.kernels.packed_cases import Form, quantized
from slipstream.kernels.elementwise import eight_bits
from slipstream.kernels.elementwise.eight_bits import Unscaled
from slipstream.kernels.gemm import cublaslt_groups, linear, search, tiles, trials, tuning
from slipstream.kernels.gemm.cublaslt_groups import matmul_by_groups
from slipstream.kernels.gemm.op import E4M3, Around, Matrix
from slipstream.kernels.gemm.unpacked_e4m3 import by_e4m3, unpacked_e4m3
from slipstream.kernels.runtime.registry import target_of
from slipstream.quant.forms import make_blocks, make_packed_e4m3
from slipstream.quant.matrix import Kind, dequantise
from torch import Tensor
from torch.nn import functional

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="no Hopper",
    ),
]

BF16 = torch.bfloat16
LARGE = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]  # outputs, inputs
# An odd number of groups, one that ends within, few outputs, less than a group.
SMALL = [(2048, 4224), (528, 656), (16, 1024), (272, 112)]
ROWS = (257, 258, 512, 1000, 2047, 4096)


@pytest.fixture(autouse=True)
def _untuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget_choices()
    yield
    forget_choices()


def forget_choices() -> None:
    tuning.choices.cache_clear()
    cublaslt_groups.plan_of.cache_clear()


@pytest.fixture(params=cublaslt_groups.X_SCALES)
def x_scales(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each way to scale x, the one that is not taken too."""
    monkeypatch.setattr(cublaslt_groups, "X_SCALES", (request.param,))
    cublaslt_groups.plan_of.cache_clear()
    yield request.param
    cublaslt_groups.plan_of.cache_clear()


def pair(
    outputs: int,
    inputs: int,
    group: int = 128,
    scale: torch.dtype = BF16,
    kind: Kind = Kind.W4,
) -> tuple[Matrix, Tensor]:
    matrix = quantized(Form(kind, group, scale), outputs, inputs, "cuda")
    return (make_packed_e4m3 if kind is Kind.W4 else make_blocks)(matrix), dequantise(matrix)


KINDS = [Kind.W4, Kind.F8]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [BF16, torch.float16, torch.float32], ids=short)
def test_unpacking(scale: torch.dtype, kind: Kind) -> None:
    for shape in [*SMALL, *LARGE]:
        for group in (128, 256, 1 << 20):
            matrix, _ = pair(*shape, group, scale, kind)
            assert matrix.groups is not None
            poison((shape[0] * shape[1] // 4,), dtype=torch.float32)
            codes, scales = unpacked_e4m3(matrix.values, matrix.groups)
            wanted = unpacked_e4m3.oracle(matrix.values, matrix.groups)
            assert same_bits(codes, wanted[0]), (shape, group)
            assert same_bits(scales, wanted[1]), (shape, group)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [*SMALL, *LARGE], ids=str)
def test_products(shape: tuple[int, int], kind: Kind, x_scales: str) -> None:
    judge = Judge(f"{kind} by groups {shape}, x by {x_scales}")
    matrix, weight = pair(*shape, kind=kind)
    why = cublaslt_groups.refusal(ROWS[0], shape[1], shape[0], target_of(torch.device("cuda", 0)))
    if why is not None and shape in SMALL:
        pytest.skip(why)
    for rows in ROWS:
        x = eight_bits.quantize(random(rows, shape[1], dtype=BF16, seed=rows)).values
        exact = x.double() @ weight.double().T

        def run(x: Tensor = x) -> Tensor:
            poison((len(x), shape[0]), dtype=BF16)
            return by_e4m3(x, matrix.values, Around(groups=matrix.groups))

        judge.close(f"{rows} rows", run(), exact, exact.to(BF16))
        judge.repeats(f"{rows} rows", run)
    judge.verdict()


@pytest.mark.parametrize("poisons", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_a_poisoned_row_stays_alone(poisons: float, x_scales: str) -> None:
    matrix, _ = pair(2048, 4224)
    x = random(517, 4224, dtype=BF16)

    def run() -> Tensor:
        y = linear.multiply(x, matrix)
        assert isinstance(y, Unscaled)
        return y.finish(BF16)

    clean = run().clone()
    for row in (0, 258, 516):
        kept = x[row].clone()
        x[row, ::7] = poisons
        found = run()
        others = [i for i in range(len(x)) if i != row]
        assert same_bits(found[others], clean[others]), row
        assert not bool(found[row].isfinite().any())
        x[row] = kept


def test_rows_that_are_not_there_may_hold_anything() -> None:
    matrix, _ = pair(528, 656)
    groups = Around(groups=matrix.groups)
    memory = eight_bits.quantize(random(600, 656, dtype=BF16)).values
    memory.view(torch.uint8)[597:] = 0x7F  # NaN
    clean = by_e4m3(memory[:597].clone(), matrix.values, groups).clone()
    assert same_bits(by_e4m3(memory[:597], matrix.values, groups), clean)
    assert bool(clean.isfinite().all())


@pytest.mark.parametrize("rows", [513, 2048])
def test_layers(rows: int) -> None:
    """With all that stands around the product, which others compute."""
    judge = Judge(f"layers of {rows} rows")
    for shape in ((2112, 1536), (4096, 4224)):
        matrix, weight = pair(*shape)
        x, bias = random(rows, shape[1], dtype=BF16), random(shape[0], dtype=BF16, seed=3)
        assert linear.route_of(x, matrix, Around(bias=bias)).gemm.name == "unpacked_e4m3"
        rounded = eight_bits.quantize(x)
        values = rounded.values.double() * rounded.scales.double()[:, None]
        exact = values @ weight.double().T + bias.double()
        residual = random(rows, shape[0], dtype=BF16, seed=4)
        gate, up = exact.chunk(2, -1)
        for what, around, wanted in (
            ("bias", Around(bias=bias), exact),
            ("sum", Around(bias=bias, residual=residual.clone()), residual.double() + exact),
            ("gate", Around(bias=bias, gate="silu"), functional.silu(gate) * up),
        ):
            # The product, and what stands before a gate, are rounded once more.
            naive = wanted * (1 + 2 * torch.finfo(BF16).eps)
            judge.close(f"{shape}, {what}", linear.linear(x, matrix, around), wanted, naive)
    judge.verdict()


def test_graphs_replay_chains_of_products() -> None:
    """Each product reads what the one before wrote; the weights of all lie in the same memory."""
    matrices = [pair(4096, 4096, group)[0] for group in (128, 256, 512, 1 << 20)]
    x = random(600, 4096, dtype=BF16)

    def run() -> Tensor:
        y = x
        for matrix in matrices:
            y = linear.linear(y, matrix)
        return y

    expected = run().clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(out, expected)


@pytest.mark.parametrize("rows", [512, 1000])
def test_tuned(rows: int) -> None:
    """What the search finds is what then runs, with the bits of the guess."""
    matrix, _ = pair(2048, 4096)
    x = eight_bits.quantize(random(rows, 4096, dtype=BF16)).values
    sizes = (4096, 2048)
    guessed = by_e4m3(x, matrix.values, Around(groups=matrix.groups)).clone()
    guess = cublaslt_groups.plan_of(rows, *sizes, 0)
    assert guess is not None
    operands = replace(trials.Operands.random(*sizes, E4M3), x_scales=guess.shape.x_scales)
    found = search.search(operands, rows)
    print(rows, tiles.describe(found.algorithm), found.seconds, found.default_seconds)
    product = tuning.Product.of(operands.shape(rows))
    choice = tuning.Choice(product, rows, found.algorithm.blob.hex(), "", 1.0, 1.0)
    tuning.save(tuning.Machine.of(0), [choice])
    forget_choices()
    for n in (rows - 8, rows):
        y = by_e4m3(x[:n], matrix.values, Around(groups=matrix.groups))
        plan = cublaslt_groups.plan_of(n, *sizes, 0)
        assert plan is not None
        assert plan.algorithm.blob == found.algorithm.blob
        assert same_bits(y, guessed[:n])


def test_which_products_are_computed_so() -> None:
    matrix, _ = pair(4096, 4096)
    found = {}
    for rows in (1, 128, 511, 512, 4096):
        x = random(rows, 4096, dtype=BF16)
        found[rows] = linear.route_of(x, matrix).gemm.name
    assert found == dict.fromkeys((1, 128, 511), "pipe_e4m3") | dict.fromkeys(
        (512, 4096), "unpacked_e4m3"
    )
    plan = cublaslt_groups.plan_of(4096, 4096, 4096, 0)
    assert plan is not None
    print(f"x scaled by {plan.shape.x_scales}, {plan.algorithm.workspace} bytes of workspace")


def test_the_oracle_is_the_definition() -> None:
    matrix, weight = pair(528, 656)
    assert matrix.groups is not None
    x = eight_bits.quantize(random(300, 656, dtype=BF16)).values
    found = matmul_by_groups.oracle(x, *unpacked_e4m3.oracle(matrix.values, matrix.groups))
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(found.double(), exact, rtol=0.005, atol=1e-3)
