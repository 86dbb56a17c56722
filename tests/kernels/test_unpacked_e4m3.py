"""Packed weights in e4m3 for one product of many rows: codes, scales as cuBLASLt reads them, and
which products are computed so.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from fixtures.kernels.emulation import emulate
from fixtures.kernels.packed_cases import Form, quantized
from fixtures.kernels.recording import recorded
from fixtures.tiers import quick_of
from slipstream import quant
from slipstream.fuse.places import FusedGatedLinear
from slipstream.kernels.elementwise import eight_bits
from slipstream.kernels.elementwise.eight_bits import Quantized, Unscaled
from slipstream.kernels.gemm import (
    cublaslt,
    cublaslt_api,
    cublaslt_groups,
    linear,
    tuning,
    unpacked_e4m3,
)
from slipstream.kernels.gemm.cublaslt_api import Algorithm, GemmShape
from slipstream.kernels.gemm.cublaslt_groups import matmul_by_groups, padded
from slipstream.kernels.gemm.op import E4M3, PLAIN, Around, Matrix, gemm, spec_of
from slipstream.kernels.gemm.packing import Packing
from slipstream.kernels.runtime.op import KernelError
from slipstream.kernels.runtime.registry import KNOWN, Implementation
from slipstream.layers.linear import Linear
from slipstream.layers.residual import Residual
from slipstream.quant.forms import make_blocks, make_packed, make_packed_e4m3
from slipstream.quant.matrix import Kind, QuantMatrix, dequantise
from slipstream_runtime import once
from torch import Tensor

GUESS, MEASURED = Algorithm(bytes(64), 0), Algorithm(bytes([7]) * 64, 0)
HOPPER = KNOWN["sm_90a"]
# Outputs that end within a tile, inputs within a block, an odd number of groups, groups of several
# blocks, one for a row.
SHAPES = [(21, 336, 128), (48, 640, 128), (40, 656, 256), (32, 400, 1 << 20)]
SCALES = [torch.bfloat16, torch.float16, torch.float32]


KINDS = [Kind.W4, Kind.F8]


def pair(
    outputs: int,
    inputs: int,
    group: int,
    scale: torch.dtype = torch.bfloat16,
    kind: Kind = Kind.W4,
) -> tuple[Matrix, QuantMatrix]:
    matrix = quantized(Form(kind, group, scale), outputs, inputs)
    return (make_packed_e4m3 if kind is Kind.W4 else make_blocks)(matrix), matrix


def unpacked(matrix: Matrix, run: Any = unpacked_e4m3.unpacked_e4m3) -> tuple[Tensor, Tensor]:
    assert matrix.groups is not None
    return run(matrix.values, matrix.groups)


# ---- unpacking ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
def test_codes_times_scales_are_the_weights(
    outputs: int, inputs: int, group: int, kind: Kind
) -> None:
    made, matrix = pair(outputs, inputs, group, kind=kind)
    codes, scales = unpacked(made)
    assert (codes.dtype, codes.shape) == (E4M3, (outputs, inputs))
    assert (scales.dtype, scales.shape) == (torch.float32, (-(-inputs // 128), outputs))
    spread = scales.T.repeat_interleave(128, 1)[:, :inputs]
    assert torch.equal(codes.float() * spread, dequantise(matrix))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", quick_of(SCALES, SCALES[:1]), ids=str)
def test_the_kernel_unpacks_as_its_oracle(
    scale: torch.dtype, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch)
    for outputs, inputs, group in SHAPES:
        made, _ = pair(outputs, inputs, group, scale, kind)
        codes, scales = unpacked(made, unpacked_e4m3.unpacked_e4m3.launcher)
        wanted_codes, wanted_scales = unpacked(made)
        assert torch.equal(codes.view(torch.uint8), wanted_codes.view(torch.uint8))
        assert torch.equal(scales, wanted_scales)


@pytest.mark.parametrize(("group", "inputs"), [(64, 256), (128, 200)])
def test_what_is_not_unpacked(group: int, inputs: int) -> None:
    made, _ = pair(16, inputs, group)
    with pytest.raises(KernelError, match=f"multiples of 128 inputs|{inputs} inputs"):
        unpacked(made, unpacked_e4m3.unpacked_e4m3.launcher)


# ---- the product ----


def as_cublaslt_reads(x: Tensor, weight: Tensor, of_weight: Tensor, of_x: Tensor) -> Tensor:
    """`D_nm = sum over groups b of a(m, b) s(n, b) sum over k in b of W_mk x_nk`, in fp32.

    By the addresses of cuBLAS's documentation, "128-element 1D and 128x128 2D block scaling": a(m,
    b) is word `b M + m` of the scales of A, our weights; s(n, b) is word `p L4 + b` of those of B,
    with p = n / 128 and L4 the groups, rounded up to 4.
    """
    (rows, inputs), outputs = x.shape, len(weight)
    groups = -(-inputs // 128)
    pitch = -(-groups // 4) * 4
    result = torch.zeros(rows, outputs)
    for b in range(groups):
        k = slice(b * 128, min(b * 128 + 128, inputs))
        a = torch.stack([of_weight.flatten()[b * outputs + m] for m in range(outputs)])
        s = torch.stack([of_x.flatten()[n // 128 * pitch + b] for n in range(rows)])
        result += s[:, None] * a * (x[:, k].float() @ weight[:, k].float().T)
    return result


@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
def test_the_product_is_that_of_the_weights(outputs: int, inputs: int, group: int) -> None:
    made, matrix = pair(outputs, inputs, group)
    x = eight_bits.quantize(torch.randn(133, inputs))
    codes, scales = unpacked(made)
    shape = GemmShape(133, inputs, outputs, E4M3, torch.bfloat16, (0, 0, 0), 16, False, "blocks")
    ones = torch.ones(cublaslt_groups._num_x_scales(shape))
    found = as_cublaslt_reads(x.values, codes, scales, ones)
    exact = x.values.double() @ dequantise(matrix).double().T
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)
    y = matmul_by_groups(x.values, codes, scales)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact, rtol=0.005, atol=1e-4)


@pytest.mark.parametrize(
    ("x_scales", "rows", "inputs", "count"),
    [("blocks", 260, 640, 24), ("blocks", 4, 400, 4), ("rows", 260, 640, 1300)],
)
def test_scales_of_x(x_scales: str, rows: int, inputs: int, count: int) -> None:
    shape = GemmShape(rows, inputs, 16, E4M3, torch.bfloat16, (0, 0, 0), 16, False, x_scales)
    assert cublaslt_groups._num_x_scales(shape) == count


def test_rows_are_padded_where_they_lie_if_there_is_memory_behind_them() -> None:
    quantized_rows = eight_bits._empty((5, 32), torch.device("cpu"), E4M3)
    values = quantized_rows.values
    assert (values.shape, values.is_contiguous()) == ((5, 32), True)
    assert cublaslt_groups._with_memory(values, padded(5)) is values
    bare = torch.ones(5, 32).to(E4M3)
    for rows in (bare, values[1:], torch.ones(5, 64).to(E4M3)[:, :32]):
        longer = cublaslt_groups._with_memory(rows, padded(len(rows) + 3))
        assert longer.is_contiguous()
        room = longer.untyped_storage().nbytes() - longer.storage_offset()
        assert room >= padded(len(rows) + 3) * 32
        assert torch.equal(longer[: len(rows)].view(torch.uint8), rows.view(torch.uint8))


# ---- which products ----

MADE = Packing(4, 128, 4096, 4096, torch.bfloat16, False, for_e4m3=True)


def route(rows: int, made: Packing = MADE, gate: str = "", target: str = "sm_90a") -> str:
    x = torch.empty(rows, made.inputs, dtype=torch.bfloat16, device="meta")
    values = torch.empty(made.tiles, made.blocks * 256, dtype=torch.int32, device="meta")
    groups = SimpleNamespace(packing=made)
    norm = torch.empty(made.inputs, dtype=torch.bfloat16, device="meta")
    around = Around(norm=norm, bias=norm, gate=gate, groups=groups)  # type: ignore[arg-type]
    chosen = linear.choose(spec_of(x, values, around)._replace(target=KNOWN[target]))
    return f"{chosen.path} {chosen.gemm.name}"


@pytest.mark.parametrize("gate", ["", "silu"])
def test_routes(gate: str) -> None:
    assert route(128, gate=gate) == "quantise + GEMM pipe_e4m3"  # as in the deterministic mode
    assert route(511, gate=gate) == "quantise + GEMM pipe_e4m3"
    assert route(512, gate=gate) == "quantise + GEMM + behind unpacked_e4m3"
    assert route(5001, gate=gate) == "quantise + GEMM + behind unpacked_e4m3"
    for other in (MADE._replace(group=64), MADE._replace(outputs=4088)):
        assert route(4096, other, gate).endswith(" pipe_e4m3")


BLOCKS = Packing(8, 128, 4096, 4096, torch.float32, False, "e4m3", can_round_rows=True)


@pytest.mark.parametrize("gate", ["", "silu"])
def test_routes_of_blocks_of_e4m3(gate: str) -> None:
    """Few rows stay in 16 bits; many are rounded where that is allowed and can be multiplied."""
    for rows, kernel in {1: "stream", 64: "pipe", 128: "pipe"}.items():
        assert route(rows, BLOCKS, gate) == f"norm + GEMM packed_{kernel}"
    assert route(511, BLOCKS, gate) == "norm + GEMM unpacked"
    assert route(512, BLOCKS, gate) == "quantise + GEMM + behind unpacked_e4m3"
    assert route(5001, BLOCKS, gate) == "quantise + GEMM + behind unpacked_e4m3"
    for other in (BLOCKS._replace(outputs=4088), BLOCKS._replace(can_round_rows=False)):
        assert route(5001, other, gate) == "norm + GEMM unpacked"
    scaled = BLOCKS._replace(scale=torch.bfloat16)
    assert route(128, scaled, gate) == "norm + GEMM pipe_scaled"
    assert route(5001, BLOCKS, gate, "sm_100a") == "norm + GEMM unpacked"
    with library(version=120_805):
        assert route(5001, BLOCKS, gate) == "norm + GEMM unpacked"


class FakeProblem:
    """Stands where cuBLASLt would: it has a kernel for x that is scaled so."""

    has = "blocks"
    asked: list[str] = []

    def __init__(self, shape: GemmShape, device: int) -> None:
        self.shape, self.device = shape, device
        if self.has == "nothing it knows":
            raise KernelError("cuBLASLt status 7")

    def heuristics(self, workspace: int, count: int = 8) -> list[Algorithm]:
        self.asked.append(f"{self.shape.x_scales} {workspace > 0}")
        return [GUESS] if self.shape.x_scales == self.has else []

    def algorithm_of(self, blob: bytes) -> Algorithm:
        return Algorithm(blob, 0)


class FakePlan:
    def __init__(self, problem: FakeProblem, algorithm: Algorithm) -> None:
        self.shape, self.algorithm = problem.shape, algorithm


@contextmanager
def library(
    version: int = 130_100, has: str = "blocks", choices: Sequence[tuning.Choice] = ()
) -> Iterator[list[str]]:
    """As on a Hopper with a version of cuBLASLt; what it was asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cublaslt_groups, "_is_here", lambda target: target == HOPPER)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(cublaslt_api, "version", lambda: version)
        patch.setattr(cublaslt_groups, "Problem", FakeProblem)
        patch.setattr(cublaslt_groups, "MatmulPlan", FakePlan)
        patch.setattr(tuning, "choices", lambda device: tuning.Choices(choices))
        patch.setattr(FakeProblem, "has", has)
        patch.setattr(FakeProblem, "asked", [])
        cublaslt_groups.plan_of.cache_clear()
        yield FakeProblem.asked
        cublaslt_groups.plan_of.cache_clear()


def test_the_library_is_asked_before_a_product_is_computed_so() -> None:
    with library() as asked:
        assert route(5001).endswith(" unpacked_e4m3")
        assert route(5003).endswith(" unpacked_e4m3")  # of as many rows, padded
        assert asked == ["blocks False"]
        plan = cublaslt_groups.plan_of(5004, 4096, 4096, 0)
        assert plan is not None
        assert plan.shape.rows == 5004
    with library(has="rows") as asked:
        assert route(5001).endswith(" unpacked_e4m3")
        assert asked == ["blocks False", "blocks True", "rows False"]
    for has in ("neither", "nothing it knows"):
        with library(has=has):
            assert route(5001).endswith(" pipe_e4m3")
            refused = cublaslt_groups.refusal(5001, 4096, 4096, HOPPER)
            assert refused == "finds no kernel in cuBLASLt"
    with library(version=120_805) as asked:
        assert route(5001).endswith(" pipe_e4m3")
        refused = cublaslt_groups.refusal(5001, 4096, 4096, HOPPER)
        assert refused == "needs version 120900 of cuBLASLt, not 120805"
        assert asked == []


def test_new_choices_are_seen_and_refusals_are_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once, "_said", set())
    with library() as asked:
        for _ in range(2):
            cublaslt_groups.plan_of(512, 4096, 4096, 0)
        with monkeypatch.context() as patch:
            patch.setattr(tuning, "choices", functools.cache(tuning.choices))
            cublaslt.discard_plans()
        cublaslt_groups.plan_of(512, 4096, 4096, 0)
        assert asked == ["blocks False"] * 2
    with library(has="nothing it knows"):
        for rows in range(512, 1024, 4):
            assert cublaslt_groups.plan_of(rows, 4096, 4096, 0) is None
    assert len(caplog.records) == len(cublaslt_groups.X_SCALES)


def test_the_measured_kernel_is_taken() -> None:
    product = tuning.Product(4096, 4096, "float8_e4m3fn", "bfloat16", False, "blocks")
    choice = tuning.Choice(product, 1024, MEASURED.blob.hex(), "", 1.0, 2.0)
    other = msgspec.structs.replace(choice, product=msgspec.structs.replace(product, x_scales=""))
    for kept, found in ((choice, MEASURED), (other, GUESS)):
        with library(choices=[kept]):
            plan = cublaslt_groups.plan_of(1000, 4096, 4096, 0)
            assert plan is not None
            assert plan.algorithm == found


# ---- what follows ----


@pytest.mark.parametrize("outer", [False, True], ids=["groups", "groups and rows"])
def test_scales_of_rows_and_biases_are_left_to_the_reader(outer: bool) -> None:
    made, matrix = pair(48, 640, 128)
    columns = torch.rand(48) if outer else None
    made = made._replace(scales=columns)
    path = linear.Path(quantises=True, finishes=True, scales=True)
    way = linear.Route(path, Implementation("unpacked_e4m3", by_oracles, "cpu"))
    x, bias = torch.randn(5, 640).bfloat16(), torch.randn(48).bfloat16()
    y = linear.follow(way, x, made, Around(bias=bias))
    assert isinstance(y, Unscaled)
    rows = eight_bits.quantize(x)
    weight = dequantise(matrix) * (1 if columns is None else columns[:, None])
    exact = (rows.values.float() * rows.scales[:, None]) @ weight.T + bias.float()
    torch.testing.assert_close(y.finish(torch.float32), exact, rtol=0.01, atol=0.01)
    whole = gemm.oracle(rows.values, made.values, around(rows, made)._replace(bias=bias))
    torch.testing.assert_close(y.finish(torch.bfloat16), whole, rtol=0.02, atol=0.02)


def by_oracles(x: Tensor, weight: Tensor, given: Around) -> Tensor:
    assert given == PLAIN._replace(groups=given.groups), "the product is bare"
    assert given.groups is not None
    return matmul_by_groups(x, *unpacked_e4m3.unpacked_e4m3(weight, given.groups))


def around(rows: Quantized, matrix: Matrix) -> Around:
    return Around(rows=rows.scales, columns=matrix.scales, groups=matrix.groups)


def test_matrices_that_take_quantised_rows() -> None:
    made, matrix = pair(16, 128, 128)
    assert made.takes_quantized
    assert made.groups is not None
    factors = made.groups._replace(factors=torch.ones(128))
    assert not made._replace(groups=factors).takes_quantized
    for_16_bits = made.groups._replace(packing=made.groups.packing._replace(for_e4m3=False))
    assert not made._replace(groups=for_16_bits).takes_quantized
    assert Matrix(torch.zeros(4, 4).to(E4M3)).takes_quantized
    assert not Matrix(torch.zeros(4, 4)).takes_quantized
    assert matrix.is_plain


def gated(made: Matrix, down: Matrix, rows: int) -> tuple[object, list[str]]:
    """The result of a gate whose product another layer reads, and its kernels."""
    linears = [Linear(quant.named("w4a8"), matrix, None, False) for matrix in (made, down)]
    place = FusedGatedLinear(linears[0], "silu", linears[1])
    residual = Residual(torch.empty(rows, 256, dtype=torch.bfloat16))
    with recorded() as notes:
        y = place(lambda values: values, residual)  # type: ignore[arg-type,return-value]
    found = [name for name, _ in notes if not name.startswith("torch.")]
    return y, [name for name in found if name != "packed_pipe_sum"]


LONG = ["quantize", "unpacked_e4m3", "cublaslt_groups"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_gate_is_quantised_with_its_scales_and_not_before_adapters_of_few_rows(
    kind: Kind,
) -> None:
    """Adapters of a layer with packed weights have its rows as they are where that is free."""
    made, down = (pair(outputs, 256, 128, kind=kind)[0] for outputs in (512, 256))
    y, names = gated(made, down, 16)
    assert isinstance(y, Tensor)
    assert names == (["quantize"] if kind is Kind.W4 else []) + ["packed_pipe"]
    y, names = gated(made, down, 600)
    assert isinstance(y, Quantized)
    assert names == [*LONG, "silu_mul_quantize"]


def test_a_gate_is_not_quantised_for_a_reader_in_16_bits() -> None:
    made, _ = pair(512, 256, 128, kind=Kind.F8)
    whole, _ = pair(256, 256, 128, kind=Kind.F8)
    assert whole.groups is not None
    for down in (
        pair(248, 256, 128, kind=Kind.F8)[0],  # of which cuBLASLt has no such product
        whole._replace(groups=whole.groups._replace(order=torch.arange(256))),
        make_packed(quantized(Form(Kind.F8, 128), 256, 256)),
    ):
        y, names = gated(made, down, 600)
        assert isinstance(y, Tensor)
        assert names[:3] == LONG
        assert "silu_mul_quantize" not in names
