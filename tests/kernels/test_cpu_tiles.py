"""Products by AMX's tiles, with the arithmetic of the instructions in plain C++.

The form's own source runs, where no processor has AMX; the few lines that are instructions are
replaced. `make test-amx` runs the instructions themselves, on an emulated processor.
"""

import ctypes
import os
import shlex
import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from fixtures.kernels.instruction_sets import HERE, within
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.kernels.cpu import build, native
from slipstream.kernels.cpu.native import FLAGS, Library
from slipstream.kernels.gemm import cpu_packed, cpu_packing
from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.gemm.op import Around
from slipstream.quant.forms import make_tiles
from slipstream.quant.matrix import Kind, QuantMatrix, halves

if "vnni" not in HERE:
    pytest.skip("this processor has no AVX-512 with VNNI", allow_module_level=True)
pytestmark = pytest.mark.rest

SOURCE = """
#include "vnni.h"

#include "tiles.h"

#include "product.h"

extern "C" void multiply_by_tiles(const slipstream::Product *p, const float *x, int64_t x_stride,
                                  int64_t n, float *y, int64_t y_stride, int adds, int threads) {
    product(*p, x, x_stride, n, y, y_stride, adds != 0, threads);
}
"""


@pytest.fixture(scope="module")
def by_tiles(tmp_path_factory: pytest.TempPathFactory) -> "ctypes._NamedFuncPointer":
    """The form's product, compiled without the instructions."""
    folder = tmp_path_factory.mktemp("tiles")
    (folder / "tiles.cpp").write_text(SOURCE)
    sources = Path(build.__file__).parent
    own = [f for f in build._SOURCES["amx.cpp"] if "amx" not in f]
    more = shlex.split(os.environ.get(FLAGS, ""))
    flags = [*build._FLAGS, "-O1", *own, *more, "-DSLIPSTREAM_PLAIN_TILES", f"-I{sources}"]
    files = [str(folder / "tiles.cpp"), str(sources / "pool.cpp")]
    library = folder / "tiles.so"
    subprocess.run(
        [build.compiler(), *flags, "-shared", *files, "-o", str(library)],
        check=True,
        capture_output=True,
    )
    function = ctypes.CDLL(str(library)).multiply_by_tiles
    types = Library(build.built(tuple(more))).product.argtypes
    function.restype, function.argtypes = None, types
    return function


def matrix_of(kind: Kind, outputs: int, inputs: int, group: int, is_shifted: bool) -> QuantMatrix:
    """Random weights of all codes; those of e2m1 have no minimums."""
    low, high = (-128, 128) if kind is Kind.W8 else (0, 16)
    codes = torch.randint(low, high, (outputs, inputs))
    groups = -(-inputs // group)
    scales, minimums = torch.rand(2, outputs, groups) * 0.01
    return QuantMatrix(
        kind,
        codes.to(torch.int8) if kind is Kind.W8 else halves(codes),
        scales.half(),
        min(group, inputs),
        inputs,
        minimums=minimums.half() if is_shifted and kind is not Kind.F4 else None,
    )


@settings(deadline=None)
@given(
    rows=st.integers(1, 90),
    outputs=st.integers(1, 100),
    inputs=st.integers(1, 200).map(lambda n: n if n % 2 else 16 * n),
    kind=st.sampled_from([Kind.W4, Kind.F4, Kind.W8]),
    group=st.sampled_from([32, 64, 96, 1 << 20]),
    flags=st.tuples(*[st.booleans()] * 4),
    threads=st.sampled_from([1, 3]),
)
def test_tiles_have_the_bits_of_the_other_forms(
    by_tiles: "ctypes._NamedFuncPointer",
    rows: int,
    outputs: int,
    inputs: int,
    kind: Kind,
    group: int,
    flags: tuple[bool, bool, bool, bool],
    threads: int,
) -> None:
    """Rows beyond whole groups of 16 go the other form's way; a large value in all places."""
    is_shifted, has_norm, has_gate, has_bias = flags
    outputs = outputs * 32 if has_gate else outputs
    packed = make_tiles(matrix_of(kind, outputs, inputs, group, is_shifted))
    around = Around(
        norm=torch.rand(inputs) + 0.5 if has_norm else None,
        gate="silu" if has_gate else "",
        bias=torch.randn(outputs) if has_bias else None,
    )
    x = torch.randn(rows, inputs + 3)[:, :inputs]
    x[:, ::7] *= 100
    with (
        patch.object(cpu_packed, "num_threads", lambda: threads),
        within("vnni"),
    ):
        want = linear(x, packed, around)
        with patch.object(native.loaded(), "product", by_tiles):
            got = linear(x, packed, around)
    assert torch.equal(got, want)


def test_extremes_of_codes_do_not_overflow(by_tiles: "ctypes._NamedFuncPointer") -> None:
    """Sums of 32 of the largest products of either sign."""
    extremes = ((Kind.W4, 15), (Kind.F4, 7), (Kind.F4, 15), (Kind.W8, -128), (Kind.W8, 127))
    for kind, code in extremes:
        matrix = matrix_of(kind, 32, 96, 32, False)
        matrix.codes.fill_(code if kind is Kind.W8 else code * 17)
        packed = make_tiles(matrix)
        assert packed.groups is not None
        weights = cpu_packing.dense(packed.values, packed.groups)
        for sign in (1.0, -1.0):
            x = torch.full((32, 96), sign)
            with within("vnni"), patch.object(native.loaded(), "product", by_tiles):
                got = linear(x, packed)
            want = x.double() @ weights.double().T
            assert (got - want).abs().max() <= 1e-4 * want.abs().max()
