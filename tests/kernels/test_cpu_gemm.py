"""The processor's GEMMs, beside their oracle; packed weights with rows rounded likewise."""

from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
from fixtures.kernels.instruction_sets import BEST, HERE, forms, within
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.errors import ConfigError
from slipstream.kernels.cpu.build import main
from slipstream.kernels.cpu.native import ROWS, VARIABLE, library, loaded, row_bits
from slipstream.kernels.gemm import cpu_packed, cpu_packing
from slipstream.kernels.gemm.cpu_packing import NUMBERS
from slipstream.kernels.gemm.linear import choose, linear
from slipstream.kernels.gemm.op import Around, Matrix, gemm, spec_of
from slipstream.kernels.runtime.registry import CPU
from slipstream.quant.forms import as_rows, make_numbers, make_tiles
from slipstream.quant.matrix import Kind, QuantMatrix, dequantise, halves
from torch import Tensor

if library() is None:
    pytest.skip("this machine has no C++ compiler or no AVX2", allow_module_level=True)

ERROR = 2e-6  # of the largest result: fp32 sums of some thousand terms


@dataclass(frozen=True)
class Case:
    """Sizes, and what weights and products have."""

    rows: int
    outputs: int
    inputs: int
    bits: int
    group: int
    seed: int
    extras: frozenset[str]


cases = st.builds(
    Case,
    rows=st.integers(0, 70),
    outputs=st.integers(1, 12).map(lambda n: 16 * n) | st.integers(1, 90),
    inputs=st.integers(1, 9).map(lambda n: 32 * n) | st.integers(1, 300),
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([16, 32, 48, 64, 128, 0, 1 << 20]),  # of 4 bits, whole blocks alone
    seed=st.integers(0, 1 << 16),
    extras=st.frozensets(
        st.sampled_from(
            [
                "zeros",
                "minimums",
                "outer",
                "halves",
                "order",
                "factors",
                "norm",
                "plus_one",
                "bias",
                "gate",
                "residual",
            ]
        )
    ),
)


def matrix_of(case: Case, generator: torch.Generator) -> QuantMatrix:
    """Random weights."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    n, k, has = case.outputs, case.inputs, case.extras.__contains__
    low, high = (0, 16) if case.bits == 4 else (-128, 128)
    kind = Kind.W4 if case.bits == 4 else Kind.W8
    codes = torch.randint(low, high, (n, k), generator=generator)
    group = case.group or k  # a row
    if case.bits == 4 and group % 32 and group < k:
        group *= 2
    groups = -(-k // group)
    dtype = torch.float16 if has("halves") else torch.float32
    zeros = torch.randint(low, high, (n, groups), generator=generator)
    of = torch.uint8 if case.bits == 4 else torch.int8
    return QuantMatrix(
        kind,
        halves(codes) if case.bits == 4 else codes.to(torch.int8),
        (uniform(n, groups) * 0.01 + 0.001).to(dtype),
        group,
        k,
        zeros=zeros.to(of) if has("zeros") else None,
        minimums=(uniform(n, groups) - 0.5).to(dtype) if has("minimums") else None,
        outer=uniform(n) + 0.5 if has("outer") else None,
        order=torch.randperm(k, generator=generator) if has("order") else None,
        factors=uniform(k) + 0.5 if has("factors") else None,
    )


def packed_of(case: Case, generator: torch.Generator) -> Matrix:
    """Random weights as the kernels have them; of 16 bits bf16."""
    if case.bits < 16:
        return make_tiles(matrix_of(case, generator))
    weight = torch.randn(case.outputs, case.inputs, generator=generator)
    return make_numbers(weight if case.bits == 32 else weight.bfloat16())


def by_row(weight: Tensor) -> Matrix:
    """Weights of fp32 as they lie."""
    found = as_rows(weight, CPU)
    assert found is not None
    return found


def around_of(case: Case, generator: torch.Generator) -> Around:
    """Random stages; a gate has no sum."""
    n, k, has = case.outputs, case.inputs, case.extras.__contains__
    around = Around()
    if has("norm"):
        weight = torch.rand(k, generator=generator) + 0.5
        around = around._replace(norm=weight, eps=1e-5, plus_one=has("plus_one"))
    if has("bias"):
        around = around._replace(bias=torch.randn(n, generator=generator))
    if has("gate") and n % 2 == 0:
        around = around._replace(gate="silu")
    elif has("residual"):
        around = around._replace(residual=torch.randn(case.rows, n, generator=generator))
    return around


def with_own_sum(around: Around) -> Around:
    """Stages with a copy of what the GEMM adds to."""
    residual = around.residual
    return around._replace(residual=None if residual is None else residual.clone())


def rounded(x: Tensor, bits: int) -> Tensor:
    """Rows as the kernels take them: whole numbers of so many bits, by 32 inputs."""
    most = 2 ** (bits - 1) - 1
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    largest = padded.abs().amax(-1, keepdim=True)
    codes = (padded * (most / largest)).nan_to_num(0.0).round()
    scale = largest / most
    return (codes * scale).flatten(1)[:, : x.shape[1]]


def want_of(x: Tensor, matrix: QuantMatrix, around: Around, row_bits: int) -> tuple[Tensor, float]:
    """By the definition of the weights, in double, with rows rounded on the way; the largest sum of
    sizes.
    """
    y = x
    if around.norm is not None:
        factor = around.norm + (1 if around.plus_one else 0)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + around.eps) * factor
    if matrix.factors is not None:
        y = y * matrix.factors
    if matrix.order is not None:
        y = y.index_select(1, matrix.order)
    plain = dequantise_plain(matrix)
    most = max(1.0, float((y.abs() @ plain.abs().T).max())) if len(y) else 1.0
    y = rounded(y, row_bits).double() @ plain.double().T
    y = y if around.bias is None else y + around.bias
    if around.gate:
        gate, up = y.chunk(2, 1)
        y = torch.nn.functional.silu(gate) * up
        most *= 2 * most
    return (y if around.residual is None else y + around.residual), most


def dequantise_plain(matrix: QuantMatrix) -> Tensor:
    """The weights of inputs as they lie."""
    return dequantise(
        QuantMatrix(
            *(matrix.kind, matrix.codes, matrix.scales, matrix.group, matrix.inputs),
            *(matrix.zeros, matrix.minimums, matrix.outer),
        )
    )


@settings(deadline=None)
@given(cases, st.sampled_from([8, 16]), forms, forms)
def test_gemms_are_those_of_rounded_rows(case: Case, row_bits: int, form: str, other: str) -> None:
    """And have the same bits by any two instruction sets."""
    rows = row_bits if case.bits == 4 else 16
    generator = torch.Generator().manual_seed(case.seed)
    matrix, around = matrix_of(case, generator), around_of(case, generator)
    x = torch.randn(case.rows, case.inputs + 3, generator=generator)[:, : case.inputs]
    packed = make_tiles(matrix)
    assert packed.groups is not None
    weights = cpu_packing.dense(packed.values, packed.groups)
    assert torch.allclose(weights, dequantise_plain(matrix), rtol=1e-5, atol=1e-6)
    want, most = want_of(x, matrix, around, rows)
    oracle = gemm.oracle(x, packed.values, with_own_sum(around)._replace(groups=packed.groups))
    with patch.object(cpu_packed, "row_bits", lambda: row_bits):
        with within(form):
            got = linear(x, packed, with_own_sum(around))
        with within(other):
            assert torch.equal(linear(x, packed, with_own_sum(around)), got)
    assert got.shape == want.shape == oracle.shape
    if case.rows == 0:
        return
    coarse = (1e-2 if rows == 8 else 1e-4) * most
    assert (got - oracle).abs().max() <= coarse
    # A number just between two codes may go either way.
    assert (got - want).abs().max() <= coarse
    if around.norm is None:
        assert (got - want).abs().median() <= ERROR * most


@pytest.mark.parametrize("form", HERE)
@pytest.mark.parametrize("kind", [Kind.W4, Kind.F4, Kind.W8])
def test_each_form_multiplies_each_kind(kind: Kind, form: str) -> None:
    """Rows of 16 bits, one to many, are those of the oracle, with the bits of the narrowest."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (48, 160), generator=generator, dtype=torch.int8)
    if kind is not Kind.W8:
        codes = codes.view(torch.uint8)[:, :80].contiguous()
    scales = torch.exp2(torch.randint(-9, -5, (48, 5), generator=generator))
    packed = make_tiles(QuantMatrix(kind, codes, scales, 32, 160))
    assert packed.groups is not None
    for rows in (1, 2, 7, 8, 19):
        x = torch.randn(rows, 160, generator=generator)
        want = gemm.oracle(x, packed.values, Around(groups=packed.groups))
        with within(HERE[0]):
            narrow = linear(x, packed)
        with within(form):
            got = linear(x, packed)
        assert torch.equal(got, narrow)
        assert (got - want).abs().max() <= 1e-4 * want.abs().max()


@settings(deadline=None)
@given(cases, st.sampled_from(sorted(NUMBERS, key=str)), forms, forms)
def test_numbers_are_multiplied_as_they_are(
    case: Case, dtype: torch.dtype, form: str, other: str
) -> None:
    """Sums of many rows come in parts, and have the same bits by any two instruction sets."""
    generator = torch.Generator().manual_seed(case.seed)
    rows, inputs = case.rows * (1 + case.seed % 3), case.inputs * (1 + case.seed % 2)
    case = replace(case, rows=rows, inputs=inputs)
    around = around_of(case, generator)
    weight = torch.randn(case.outputs, inputs, generator=generator).to(dtype)
    x = torch.randn(rows, inputs + 3, generator=generator)[:, :inputs]
    packed = make_numbers(weight)
    assert packed.groups is not None
    assert torch.equal(cpu_packing.dense(packed.values, packed.groups), weight.float())
    want = gemm.oracle(x, weight, with_own_sum(around))
    most = max(1.0, float((x.abs() @ weight.float().abs().T).max())) if rows else 1.0
    with within(form):
        got = linear(x, packed, with_own_sum(around))
    with within(other):
        assert torch.equal(linear(x, packed, with_own_sum(around)), got)
    assert got.shape == want.shape
    if rows:
        assert (got - want).abs().max() <= ERROR * (2 * most * most if around.gate else most)


@settings(deadline=None)
@given(cases, forms, forms)
def test_rows_of_weights_are_multiplied_as_they_lie(case: Case, form: str, other: str) -> None:
    """A row has the same bits alone, and by any two instruction sets."""
    generator = torch.Generator().manual_seed(case.seed)
    case = replace(case, extras=case.extras - {"gate"})
    around = around_of(case, generator)
    weight = torch.randn(case.outputs, case.inputs, generator=generator)
    x = torch.randn(case.rows, case.inputs + 3, generator=generator)[:, : case.inputs]
    packed = by_row(weight)
    assert packed.values.data_ptr() == weight.data_ptr()
    want = gemm.oracle(x, weight, with_own_sum(around))
    with within(form):
        got = linear(x, packed, with_own_sum(around))
    with within(other):
        assert torch.equal(linear(x, packed, with_own_sum(around)), got)
        if case.rows and around.residual is None:
            assert torch.equal(linear(x[-1:], packed, around), got[-1:])
    if case.rows:
        most = max(1.0, float((x.abs() @ weight.abs().T).max()))
        assert (got - want).abs().max() <= ERROR * most


@pytest.mark.parametrize("form", HERE)
@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_a_row_has_the_same_bits_whatever_is_beside_it(bits: int, form: str) -> None:
    """And whatever the number of threads."""
    case = Case(137, 320, 288, bits, 32, 7, frozenset({"norm", "zeros", "gate", "bias"}))
    generator = torch.Generator().manual_seed(case.seed)
    packed, around = packed_of(case, generator), around_of(case, generator)
    x = torch.randn(case.rows, case.inputs, generator=generator)
    before = torch.get_num_threads()
    with within(form):
        together = linear(x, packed, around)
        alone = torch.cat([linear(row[None], packed, around) for row in x])
        assert torch.equal(together, alone)
        try:
            torch.set_num_threads(3)
            assert torch.equal(linear(x, packed, around), together)
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("form", HERE)
@pytest.mark.parametrize("bits", [4, 8, 16, 32])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bits: int, value: float, form: str) -> None:
    case = Case(3, 32, 96, bits, 32, 5, frozenset())
    packed = packed_of(case, torch.Generator().manual_seed(1))
    x = torch.ones(3, 96)
    x[1, 50] = value
    with within(form):
        got = linear(x, packed)
    assert not got[1].isfinite().any()
    assert got[[0, 2]].isfinite().all()


def test_it_is_chosen_for_what_it_takes_alone() -> None:
    packed = make_tiles(matrix_of(Case(1, 48, 64, 4, 32, 1, frozenset()), torch.Generator()))
    around = Around(groups=packed.groups, gate="silu")
    x = torch.ones(2, 64)
    assert choose(spec_of(x, packed.values, around)).path.finishes  # 24 columns are no tiles
    whole = around._replace(gate="")
    assert not choose(spec_of(x, packed.values, whole)).path.finishes


def test_an_instruction_set_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "neon")
    with pytest.raises(ConfigError, match=r"SLIPSTREAM_CPU_ISA = 'neon' is not one of none, avx2"):
        library.__wrapped__()
    monkeypatch.setenv(ROWS, "4")
    with pytest.raises(ConfigError, match="SLIPSTREAM_CPU_ROWS = '4' is not 8 or 16"):
        row_bits.__wrapped__()
    monkeypatch.setenv(VARIABLE, "none")
    assert library.__wrapped__() is None
    found = loaded()
    with (
        patch.object(found, "_choose", lambda form: -1),
        pytest.raises(ConfigError, match=f"'vnni': the best of this processor is {BEST}"),
    ):
        found.choose("vnni")


def test_a_machine_without_a_compiler_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert library.__wrapped__() is None
    assert main() == 0
    said = capsys.readouterr().out
    assert "CXX = 'no-such-compiler' is not a program: apt-get install g++" in said
