"""The cache of compiled kernels, and what the launchers refuse; no GPU needed."""

import ctypes
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from slipstream.kernels.attention.decode import decode_attention
from slipstream.kernels.attention.prefill import prefill_attention
from slipstream.kernels.elementwise.activation import silu_mul
from slipstream.kernels.elementwise.norm import rms_norm
from slipstream.kernels.elementwise.rope import rope_and_cache
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import KernelError, op
from slipstream.kernels.sampling.sample import sample
from torch import Tensor

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC comes with the dev extra")

SMALL = jit.variant("elementwise/activation.cu", torch.float16, VECTOR=8)


def test_cubin_is_compiled_once(tmp_path: Path) -> None:
    first = jit.cubin_path(SMALL, "sm_90", tmp_path)
    before = os.stat(first)
    assert jit.cubin_path(SMALL, "sm_90", tmp_path) == first
    assert os.stat(first).st_mtime_ns == before.st_mtime_ns
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    other = jit.variant("elementwise/activation.cu", torch.float16, VECTOR=1)
    assert jit.cubin_path(other, "sm_90", tmp_path) != first
    assert jit.cubin_path(SMALL, "sm_80", tmp_path) != first


def test_cubins_lie_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jit.cubin_path(SMALL, "sm_90").parent == tmp_path / "slipstream" / "kernels"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the kernels' sources, from which `jit` reads."""
    for path in jit.FOLDER.rglob("*.cu*"):
        if path.suffix in (".cu", ".cuh"):
            copy = tmp_path / path.relative_to(jit.FOLDER)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(jit, "FOLDER", tmp_path)
    return tmp_path


def keys(folder: Path) -> dict[str, str]:
    """The cache key of every .cu file, without macros."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*.cu")]
    return {name: jit.cache_key(jit.variant(name), "sm_90") for name in names}


def includers(folder: Path) -> dict[str, set[str]]:
    """For every file, the .cu files that cannot do without it: the closure of `#include`."""
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.cu*")}
    reached = {name: {name} for name in files}
    for _ in files:  # as many rounds as the longest chain could have links
        for name, text in files.items():
            for other in files:
                if f'#include "{other}"' in text:
                    reached[name] |= reached[other]
    kernels = [name for name in files if name.endswith(".cu")]
    return {name: {kernel for kernel in kernels if name in reached[kernel]} for name in files}


@pytest.mark.rest
def test_a_change_of_a_file_changes_the_keys_of_the_kernels_that_include_it(sources: Path) -> None:
    before = keys(sources)
    for name, expected in includers(sources).items():
        path = sources / name
        text = path.read_text()
        path.write_text(text + " ")
        after = keys(sources)
        path.write_text(text)
        assert {kernel for kernel in before if before[kernel] != after[kernel]} == expected, name
    assert keys(sources) == before


def test_a_conditional_include_counts(sources: Path) -> None:
    kernel = sources / "elementwise/activation.cu"
    kernel.write_text('#if 0\n # include  "runtime/mma.cuh"\n#endif\n' + kernel.read_text())
    before = jit.cache_key(SMALL, "sm_90")
    (sources / "runtime/mma.cuh").write_text("")
    assert jit.cache_key(SMALL, "sm_90") != before


def test_the_compiler_sees_no_header_that_the_key_leaves_out(sources: Path) -> None:
    kernel = sources / "elementwise/activation.cu"
    kernel.write_text('#define OTHER "runtime/mma.cuh"\n#include OTHER\n' + kernel.read_text())
    with pytest.raises(KernelError, match=r'cannot open source file "runtime/mma\.cuh"'):
        jit.compile_variant(SMALL, "sm_90")


def test_options_and_arch_count(monkeypatch: pytest.MonkeyPatch) -> None:
    original = jit.cache_key(SMALL, "sm_90")
    assert jit.cache_key(SMALL, "sm_100") != original
    monkeypatch.setattr(jit, "options", lambda arch: (f"-arch={arch}", "-std=c++20"))
    assert jit.cache_key(SMALL, "sm_90") != original


def test_unwritable_cache_still_compiles(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    path = jit.cubin_path(SMALL, "sm_90", blocker / "kernels")
    assert path.read_bytes()[:4] == b"\x7fELF"


def test_compile_error_names_the_variant() -> None:
    broken = jit.variant("elementwise/activation.cu", torch.float16, VECTOR=3)
    with pytest.raises(KernelError, match=r"activation\.cu ELEMENT=Half VECTOR=3 for sm_90"):
        jit.compile_variant(broken, "sm_90")


def attention_arguments(
    head_size: int = 64, block_size: int = 16, heads: tuple[int, int] = (4, 2), dtype=torch.float16
) -> tuple[Tensor, ...]:
    q = torch.zeros(3, heads[0], head_size, dtype=dtype)
    cache = torch.zeros(4, heads[1], 2, block_size, head_size, dtype=dtype)
    return q, cache, torch.zeros(3, 4, dtype=torch.int32), torch.ones(3, dtype=torch.int32)


def decode(*args: Tensor) -> object:
    assert decode_attention.launcher is not None
    plan = torch.empty(0, dtype=torch.int32)
    return decode_attention.launcher(*args, plan, 0.125)


def prefill(q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor) -> object:
    assert prefill_attention.launcher is not None
    starts = torch.arange(4, dtype=torch.int32)
    return prefill_attention.launcher(q, cache, tables, starts, lengths, 0.125, 1)


@pytest.mark.parametrize("run", [decode, prefill])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_size": 112}, "head size 112"),
        ({"head_size": 512}, "head size 512"),
        ({"block_size": 24}, "block size 24"),
        ({"block_size": 4}, "block size 4"),
        ({"block_size": 512}, "block size 512"),
        ({"heads": (5, 2)}, "5 query heads"),
        ({"dtype": torch.float64}, "float64"),
    ],
)
def test_attention_refuses(
    run: Callable[..., object], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(KernelError, match=message):
        run(*attention_arguments(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("run", [decode, prefill])
def test_attention_refuses_layouts(run: Callable[..., object]) -> None:
    q, cache, tables, lengths = attention_arguments()
    wide = torch.zeros(3, 4 * 64 + 1, dtype=torch.float16)
    with pytest.raises(KernelError, match="aligned"):
        run(wide[:, :-1].unflatten(1, (4, 64)), cache, tables, lengths)
    with pytest.raises(KernelError, match="heads of a row"):
        run(torch.zeros(3, 64, 4, dtype=torch.float16).transpose(1, 2), cache, tables, lengths)
    with pytest.raises(KernelError, match="cache must be contiguous"):
        run(q, torch.zeros(4, 2, 2, 16, 128, dtype=torch.float16)[..., :64], tables, lengths)
    with pytest.raises(KernelError, match="lengths must be contiguous"):
        run(q, cache, tables, torch.ones(6, dtype=torch.int32)[::2])
    with pytest.raises(KernelError, match="block_tables"):
        run(q, cache, torch.zeros(4, 3, dtype=torch.int32).T, lengths)


def test_rowwise_kernels_refuse() -> None:
    assert rms_norm.launcher is not None
    assert silu_mul.launcher is not None
    assert sample.launcher is not None
    assert rope_and_cache.launcher is not None
    x = torch.zeros(4, 8)
    with pytest.raises(KernelError, match="contiguous"):
        rms_norm.launcher(x.T, torch.zeros(4), 1e-5)
    with pytest.raises(KernelError, match="float64"):
        rms_norm.launcher(x.double(), torch.zeros(8).double(), 1e-5)
    with pytest.raises(KernelError, match="odd"):
        silu_mul.launcher(x[:, :7])
    row = torch.zeros(4)
    with pytest.raises(KernelError, match="contiguous"):
        sample.launcher(x.T.contiguous().T, row, row.int(), row, row, row.long(), row.long())
    heads = torch.zeros(4, 2, 112)
    cache = torch.zeros(2, 2, 2, 16, 112)
    ids = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(KernelError, match="head size 112"):
        rope_and_cache.launcher(heads, heads, heads, torch.zeros(9, 112), ids, ids, cache)


def test_vector_width() -> None:
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    assert jit.vector_width(64, x) == 8
    assert jit.vector_width(32, x[:, 8:40]) == 8
    assert jit.vector_width(32, x[:, 1:33]) == 1
    assert jit.vector_width(60, x[:, :60]) == 1
    assert jit.vector_width(63, torch.zeros(4, 63)) == 1
    assert jit.vector_width(64, torch.zeros(4, 64)) == 4


def test_signature_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Again where others of the same shapes, dtypes or devices were found to fit."""
    monkeypatch.setattr("slipstream.kernels.runtime.op._MOST_CHOICES", 3)

    @op("x[n,d]:T, weight[d]:T")
    def scale(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    for rows in (3, 4, 5, 6, 3, 4):
        assert scale(torch.zeros(rows, 4), torch.zeros(4)).shape == (rows, 4)
        assert scale(torch.zeros(rows, 4).half(), torch.zeros(4).half()).dtype == torch.float16
        with pytest.raises(AssertionError, match="weight disagrees on d: 5 vs 4"):
            scale(torch.zeros(rows, 4), torch.zeros(5))
        with pytest.raises(AssertionError, match="weight is torch"):
            scale(torch.zeros(rows, 4), torch.zeros(4).half())
        with pytest.raises(AssertionError, match="x has 1 dims"):
            scale(torch.zeros(4), torch.zeros(4))
        with pytest.raises(AssertionError, match="several devices"):
            scale(torch.zeros(rows, 4), torch.zeros(4, device="meta"))
        with pytest.raises(AssertionError, match="weight is not a tensor"):
            scale(torch.zeros(rows, 4), [0.0] * 4)  # type: ignore[arg-type]
    assert len(scale._chosen) <= 3


def test_requirements_name_what_they_miss() -> None:
    jit.require(True, "{}: {} of {}", "x", 3, 4)
    with pytest.raises(KernelError, match="x: 3 of 4"):
        jit.require(False, "{}: {} of {}", "x", 3, 4)
    with pytest.raises(KernelError, match=r"\{\} as it is"):
        jit.require(False, "{} as it is")


def test_splits_fit_what_is_allocated() -> None:
    """The launcher's bound on splits holds for every length that the table can hold."""
    for tile in (32, 64):
        for capacity in range(8, 40_000, 264):
            bound = max(1, min(32, math.ceil(capacity / 256)))
            for length in {1, capacity // 2 + 1, capacity - 1, capacity}:
                share = max(256, math.ceil(math.ceil(length / 32) / tile) * tile)
                assert math.ceil(length / share) <= bound


def test_arguments_lie_where_the_driver_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pointers, 64-bit integers and floats, each behind its own pointer, launch after launch."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings: the dev extra")
    seen = []

    def launch(config: object, handle: object, arguments: int, extra: int) -> tuple[int]:
        places = (ctypes.c_void_p * 5).from_address(arguments)
        types = (ctypes.c_uint64, ctypes.c_int64, ctypes.c_float, ctypes.c_int64)
        values = [t.from_address(at).value for t, at in zip(types, places[:4], strict=True)]
        shape = [config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX]
        shape.append(config.sharedMemBytes)
        seen.append((int(handle), shape, int(config.hStream), extra, values, places[4]))
        return (0,)

    monkeypatch.setattr(driver, "cuLaunchKernelEx", launch)
    function = SimpleNamespace(kernel=SimpleNamespace(ptr=0xABC0))
    kernel = jit.Kernel(function, "Pqf4xqP", 128, 1000)
    kernel.overlap()
    for pointer, grid in ((2**64 - 16, (5,)), (4096, (5, 6)), (16, (1, 2, 3))):
        values = [pointer, -3, 0.5, 2**40, 0]
        tensor_map = jit.TensorMap(pointer // 2, None)
        assert kernel(grid, jit._stream(0x77), values, {4: tensor_map}) == 0
        shape = [*[*grid, 1, 1][:3], 128, 1000]
        assert seen.pop() == (0xABC0, shape, 0x77, 0, values[:4], pointer // 2)


def test_a_folder_of_an_architecture_is_for_it_alone() -> None:
    names = ("gemm/linear.cu", "gemm/sm90/gemv.cu", "gemm/sm100/gemm.cu", "gemm/sm80/gemm.cu")
    only = [jit.variant(name).only for name in names]
    assert only == ["", "sm_90a", "sm_100a", "sm_80"]
