"""The one form of quantised weights: its definition, what can be joined, what multiplies."""

from dataclasses import replace

import pytest
import torch
from fixtures.tiers import quick_of
from hypothesis import given
from hypothesis import strategies as st
from slipstream.kernels.gemm.packing import E2M1
from slipstream.kernels.runtime.registry import CPU
from slipstream.quant.forms import form_of, product
from slipstream.quant.matrix import (
    Kind,
    QuantMatrix,
    dequantise,
    halves,
    rows,
    stack,
    widened,
    write,
)

KINDS = {"W4": Kind.W4, "W8": Kind.W8, "F8": Kind.F8, "F4": Kind.F4}


def drawn(
    kind: Kind, n: int, k: int, group: int, seed: int, extras: frozenset[str] = frozenset()
) -> QuantMatrix:
    """A matrix whose every part matters."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-k // group)

    def floats(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator) + 0.5

    whole = torch.randint(0, 16, (n, k), generator=generator)
    codes = {
        Kind.W4: halves(whole),
        Kind.F4: halves(whole),
        Kind.W8: torch.randint(-128, 128, (n, k), generator=generator).to(torch.int8),
        Kind.F8: (floats(n, k) * 9).to(torch.float8_e4m3fn),
    }[kind]
    zeros = torch.randint(0, 16, (n, groups), generator=generator)
    return QuantMatrix(
        kind,
        codes,
        floats(n, groups),
        group,
        k,
        zeros=zeros.to(torch.uint8 if kind is Kind.W4 else torch.int8)
        if "zeros" in extras and kind in (Kind.W4, Kind.W8)
        else None,
        minimums=floats(n, groups) if "minimums" in extras else None,
        outer=floats(n) if "outer" in extras else None,
        table=floats(16) if "table" in extras and kind is Kind.F4 else None,
        order=torch.randperm(k, generator=generator) if "order" in extras else None,
        factors=floats(k) if "factors" in extras else None,
    )


def plainly(m: QuantMatrix) -> torch.Tensor:
    """The definition, an element at a time, in fp64."""
    out = torch.zeros(m.outputs, m.inputs, dtype=torch.float64)
    for row in range(m.outputs):
        for place in range(m.inputs):
            group = place // m.group
            if m.kind in (Kind.W4, Kind.F4):
                code = int(m.codes[row, place // 2]) >> (4 * (place % 2)) & 15
            else:
                code = float(m.codes[row, place])
            if m.kind is Kind.F4:
                sign = -1 if code & 8 else 1
                value = float(m.table[code]) if m.table is not None else sign * E2M1[code & 7]
            else:
                middle = 8 if m.kind is Kind.W4 else 0
                value = code - (middle if m.zeros is None else int(m.zeros[row, group]))
            value *= float(m.scales[row, group])
            value += 0 if m.minimums is None else float(m.minimums[row, group])
            value *= 1 if m.outer is None else float(m.outer[row])
            to = place if m.order is None else int(m.order[place])
            out[row, to] = value * (1 if m.factors is None else float(m.factors[to]))
    return out


EXTRAS = ("zeros", "minimums", "outer", "table", "order", "factors")
drawn_matrices = st.builds(
    drawn,
    st.sampled_from(Kind),
    st.integers(1, 5),
    st.integers(1, 70),
    st.sampled_from((1, 16, 32, 128)),
    st.integers(0, 99),
    st.frozensets(st.sampled_from(EXTRAS)),
)


@given(drawn_matrices)
def test_it_stands_for_what_its_definition_says(matrix: QuantMatrix) -> None:
    """Last groups are short; every part is there or not."""
    torch.testing.assert_close(dequantise(matrix).double(), plainly(matrix), rtol=1e-6, atol=1e-6)


@given(drawn_matrices, st.integers(1, 4))
def test_matrices_under_one_another_keep_their_scales(matrix: QuantMatrix, count: int) -> None:
    parts = [rows(matrix, slice(i, None, count)) for i in range(count) if i < matrix.outputs]
    whole = stack(parts)
    assert whole is not None
    want = torch.cat([dequantise(part) for part in parts])
    assert torch.equal(dequantise(whole), want)
    out = torch.empty(want.shape, dtype=torch.bfloat16)
    write(whole, out)
    assert torch.equal(out, want.bfloat16())


@pytest.mark.parametrize("kind", [Kind.W4, Kind.W8])
def test_zeros_that_need_no_saying_are_joined_to_others(kind: Kind) -> None:
    """A matrix whose every zero is the usual one comes without."""
    parts = [drawn(kind, 3, 70, 32, seed, frozenset({"zeros"})) for seed in (0, 1, 2)]
    parts[0] = replace(parts[0], zeros=None)
    for some in (parts, parts[::-1]):
        whole = stack(some)
        assert whole is not None
        assert torch.equal(dequantise(whole), torch.cat([dequantise(each) for each in some]))
    of_floats = drawn(Kind.F8, 3, 70, 32, 0)
    assert stack([parts[1], of_floats]) is None


def test_what_differs_is_not_joined() -> None:
    one = drawn(Kind.W4, 4, 64, 32, 0)
    others = {
        "kind": drawn(Kind.F4, 4, 64, 32, 0),
        "group": drawn(Kind.W4, 4, 64, 16, 0),
        "order": drawn(Kind.W4, 4, 64, 32, 0, frozenset({"order"})),
        "factors": drawn(Kind.W4, 4, 64, 32, 0, frozenset({"factors"})),
        "scales": replace(one, scales=one.scales.half()),
    }
    joined = [name for name, other in others.items() if stack([one, other]) is not None]
    assert joined == []
    a, b = (drawn(Kind.W4, 4, 64, 32, seed, frozenset({"order"})) for seed in (1, 2))
    assert stack([a, b]) is None


@pytest.mark.parametrize("name", quick_of(KINDS, ("W4", "W8")))
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_forms_on_a_cpu_are_exact_to_their_rounding(name: str, group: int) -> None:
    """Where scales are numbers of bfloat16; where they are not, nothing is rounded twice."""
    by_row = KINDS[name] is not Kind.W4
    matrix = drawn(KINDS[name], 64, 256, 256 if by_row else group, group)
    assert form_of(matrix, CPU, torch.bfloat16) is None  # its scales are of fp32
    matrix = replace(matrix, scales=matrix.scales.bfloat16())
    form = form_of(matrix, CPU, torch.bfloat16)
    assert (form is not None) == (KINDS[name] in (Kind.W4, Kind.W8))
    if form is None:
        return
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = x.double() @ plainly(matrix).T
    got = product(x, form.make(matrix))
    assert got.dtype == torch.bfloat16
    assert (got.double() - want).abs().max() <= 2**-8 * want.abs().max()


def test_forms_refuse_what_they_would_round() -> None:
    matrix = drawn(Kind.W4, 64, 128, 32, 0)
    matrix = replace(matrix, scales=matrix.scales.bfloat16())
    form = form_of(matrix, CPU, torch.bfloat16)
    assert form is not None
    assert form.name == "torch's product with 4 bits"
    for extra in ("zeros", "minimums", "outer", "order", "factors"):
        other = drawn(Kind.W4, 64, 128, 32, 0, frozenset({extra}))
        other = replace(other, scales=matrix.scales)
        assert form_of(other, CPU, torch.bfloat16) is None, extra


@given(
    st.lists(
        st.sampled_from(["4", "4 zeros", "4 minimums", "8", "8 minimums"]), min_size=1, max_size=3
    ),
    st.data(),
)
def test_matrices_of_any_bits_are_one_unrounded(kinds: list[str], data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 16)))
    inputs = data.draw(st.integers(1, 6)) * 32 - data.draw(st.integers(0, 31))
    parts = []
    for kind in kinds:
        group = data.draw(st.sampled_from([16, 32, 64]))
        shape = (3, -(-inputs // group))
        low, high = (0, 16) if kind[0] == "4" else (-128, 128)
        codes = torch.randint(low, high, (3, inputs), generator=generator)
        zeros = torch.randint(0, 16, shape, generator=generator).to(torch.uint8)
        minimums = torch.randn(shape, generator=generator)
        parts.append(
            QuantMatrix(
                Kind.W4 if kind[0] == "4" else Kind.W8,
                halves(codes) if kind[0] == "4" else codes.to(torch.int8),
                torch.randn(shape, generator=generator).half(),
                group,
                inputs,
                zeros if "zeros" in kind else None,
                minimums if "minimums" in kind else None,
            )
        )
    wide = widened(parts)
    assert wide is not None
    whole = stack(wide)
    assert whole is not None
    assert torch.equal(dequantise(whole), torch.cat([dequantise(each) for each in parts]))
    outer = replace(parts[0], outer=torch.ones(3))
    assert widened([*parts, outer]) is None
