"""Every instantiation of every kernel compiles for three architectures, without a spill."""

import importlib
import pkgutil
import re
from collections.abc import Callable, Hashable, Iterator
from types import ModuleType

import pytest
from slipstream import kernels
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.jit import Variant

bindings = pytest.importorskip("cuda.bindings", reason="NVRTC comes with the extra nvrtc")

from fixtures.kernels.cubins import num_summed_copies  # noqa: E402
from fixtures.kernels.nvrtc import OTHER, Nvrtc, find_other  # noqa: E402
from fixtures.kernels.pairs import covering, pairs_of  # noqa: E402


def modules() -> Iterator[ModuleType]:
    """Every module of the kernels that names variants."""
    for found in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        module = importlib.import_module(found.name)
        if hasattr(module, "variants"):
            yield module


def entries(source: str) -> set[str]:
    """The entry points that a .cu file declares."""
    text = (jit.FOLDER / source).read_text()
    text = re.sub(r"__launch_bounds__\([^)]*\)", "", text)
    return set(re.findall(r"__global__[^(;{]*?(\w+)\s*\(", text))


def is_tried(wanted: Variant) -> bool:
    """All but changes of scores in other variants than bf16's: these are three times as many; and
    activations of every column likewise, as they change the end of a kernel alone.
    """
    defines = dict(wanted.defines)
    if "ACTIVATES" in defines:
        return defines["ELEMENT"] != "Half" and (defines["CHUNKS"], defines["ROWS"]) == ("2", "1")
    if "SCORES" not in defines:
        return True
    is_usual = defines.get("ELEMENT") != "Half" and defines["HEAD_SIZE"] in ("64", "128", "256")
    return is_usual and defines.get("SLOTS") != "2" and defines.get("ROTATES") != "0"


VARIANTS = list(dict.fromkeys(v for m in modules() for v in m.variants() if is_tried(v)))
SOURCES = {str(path.relative_to(jit.FOLDER)) for path in jit.FOLDER.rglob("*.cu")}
ENTRIES = {source: entries(source) for source in sorted(SOURCES)}
# Codes, scales, parts, zeros: integers by 128 and with all that there is, e2m1 by 16, e4m3 by 128.
PACKED_KINDS = {
    ("4", "INTEGERS", "BFloat16", "1", "0"),
    ("8", "INTEGERS", "float", "4", "1"),
    ("4", "E2M1", "BFloat16", "8", "0"),
    ("8", "E4M3", "float", "1", "0"),
}
RECORDED_KINDS = {("4", "2"), ("8", "3"), ("8", "4")}  # bits, records: of Q4_K, Q6_K, and of both
WIDEST_PACKED = {("8", "8"), ("16", "4"), ("32", "4"), ("64", "2"), ("128", "1")}
WIDEST_OF_SOURCE = {
    "gemm/sm90/packed_stream.cu": {("8", "4"), ("16", "2")},
    "gemm/sm90/packed_pipe.cu": {("64", "2"), ("128", "1"), ("128", "2"), ("256", "1")},
}
WIDEST_ADAPTED = {("8", "4"), ("16", "2")}  # with terms of adapters
ADDITIONS = ("WINDOWED", "SINKS", "SHARES", "SPLITS", "LATE")
REPORT = re.compile(
    r"entry function '(?P<entry>\w+)'.*?(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)
# A function that is called and not inlined: no entry.
OF_CALLED = re.compile(r"Function properties for _Z\w+\n.*?(\d+) bytes spill stores")


def compile_and_check(wanted: Variant, arch: str, max_spill: int = 0) -> None:
    cubin, log = jit.compile_variant(wanted, arch)
    assert cubin[:4] == b"\x7fELF"
    assert arch == "sm_80" or num_summed_copies(cubin) == 0
    assert "warning" not in log.lower(), log
    assert "Potential Performance Loss" not in log, log  # products of a warpgroup made to wait
    reports = list(REPORT.finditer(log))
    assert {report["entry"] for report in reports} == ENTRIES[wanted.source], log
    for report in reports:
        spilled = int(report["stores"]) + int(report["loads"])
        assert spilled <= max_spill, f"{wanted} {arch} {report['entry']} spills {spilled} bytes"
    called = sum(int(stores) for stores in OF_CALLED.findall(log))
    assert called <= max_spill, f"{wanted} {arch} spills {called} bytes in what it calls"


def is_quantized(wanted: Variant) -> bool:
    """Over a cache in fewer bits, of a kernel that has others, too."""
    return "FORMAT" in dict(wanted.defines) and wanted.source != "cache/unpack.cu"


def is_addition(wanted: Variant) -> bool:
    """To a kernel that is there without."""
    adds = not {(name, "1") for name in ADDITIONS}.isdisjoint(wanted.defines)
    return adds or is_quantized(wanted) or "SCORES" in dict(wanted.defines)


def is_everyday(wanted: Variant) -> bool:
    """All without additions, but of heads of 256 one 16-bit type; one of each source with."""
    defines = dict(wanted.defines)
    skinny = (defines.get("HEAD_SIZE", "128"), defines.get("ELEMENT", "BFloat16"))
    is_smaller = defines.get("SLOTS") == "2"  # a CTA for other GPUs
    if skinny == ("256", "Half"):  # shapes and registers of BFloat16
        return False
    is_one = skinny == ("128", "BFloat16") and not is_smaller
    if "PARTS" in defines:  # packed weights
        kind = tuple(defines[name] for name in ("BITS", "CODE_TYPE", "SCALE", "PARTS", "ZEROS"))
        shape = (defines.get("COLUMNS", "8"), defines.get("TILES", "8"))
        is_usual = kind in PACKED_KINDS
        if "RECORD" in defines:
            is_usual = (defines["BITS"], defines["RECORD"]) in RECORDED_KINDS
            shape = shape if shape != ("32", "3") else ("32", "4")  # the widest with minimums
        if defines.get("FP8") == "1":  # fewer registers than rows of 16 bits
            return is_usual and shape == ("128", "1")
        widest = WIDEST_OF_SOURCE.get(wanted.source, WIDEST_PACKED)
        if defines.get("ADAPTS") == "1":
            widest = WIDEST_ADAPTED
        return is_one and is_usual and shape in widest
    if wanted.source == "gemm/sm90/skinny.cu":  # the same for every width of a tile
        return is_one and defines["ROWS"] in ("48", "64", "224")
    if wanted.source == "gemm/sm90/tall.cu" and not {"CLUSTER", "GROUPS"}.isdisjoint(defines):
        return is_one and defines["ROWS"] in ("96", "144", "224")  # and so are these
    if wanted.source.startswith("experts/"):
        is_usual = defines.get("ROWS", "16") in ("16", "128") and defines.get("VALUES", "4") == "4"
        return is_usual and defines["ELEMENT"] == "BFloat16"
    if "SCORES" in defines:  # of each change one, in the widest kernel without others
        alone = not is_quantized(wanted) and defines.keys().isdisjoint(("SHARES", "SINKS"))
        is_usual = alone and defines["WINDOWED"] == "0" and defines.get("STAGES") != "3"
        return is_one and is_usual and defines.get("ROTATES") != "0"
    if is_quantized(wanted):
        tiled = "STAGES" in defines  # the formats have little code of their own there
        return is_one and defines.get("WINDOWED") != "1" and (not tiled or defines["FORMAT"] == "3")
    return not is_addition(wanted) or (is_one and defines.get("ROTATES") != "0")


Case = tuple[Variant, str]  # and the architecture that it is compiled for
Parts = set[tuple[Hashable, ...]]


def values_of(case: Case) -> Parts:
    """A source with the value of each macro, for whichever architecture, and with each of these."""
    wanted, arch = case
    return {(wanted.source, arch), *((wanted.source, *define) for define in wanted.defines)}


def pairs_of_values(case: Case) -> Parts:
    """Every two macros' values that meet in a source."""
    values = values_of(case)
    return set(pairs_of(sorted(values))) | values


def marked(cases: list[Case], parts: Callable[[Case], Parts], is_in_quick: bool) -> list[object]:
    """Put everyday cases that have all parts of any into the rest tier.

    The quick tier has the first everyday one of each source, or none.
    """
    everyday = [case for case in cases if is_everyday(case[0])]
    firsts = {case[0].source: case for case in reversed(everyday)} if is_in_quick else {}
    chosen = covering(everyday, parts)

    def marks(case: Case) -> object:
        if case == firsts.get(case[0].source):
            return ()
        return pytest.mark.rest if case in chosen else pytest.mark.slow

    return [pytest.param(*case, id=f"{case[1]} {case[0]}", marks=marks(case)) for case in cases]


def is_widest(wanted: Variant) -> bool:
    """The variants that need most: the largest heads of either shape, the widest accesses."""
    defines = dict(wanted.defines)
    if wanted.only or is_quantized(wanted) or (is_addition(wanted) and not is_everyday(wanted)):
        return False
    if defines.get("SCORES") in ("1", "3"):  # less code than ALiBi
        return False
    return defines.get("HEAD_SIZE", "128") in ("128", "256") and defines.get("VECTOR") != "1"


HOPPER = [(wanted, "sm_90a") for wanted in VARIANTS]
HOPPER_CASES = marked(HOPPER, pairs_of_values, is_in_quick=True)
WIDEST = list(filter(is_widest, VARIANTS))
# Each architecture comes first in turn, and so has half of the values.
IN_TURN = (("sm_80", "sm_100a"), ("sm_100a", "sm_80"))
OTHERS = [(wanted, arch) for index, wanted in enumerate(WIDEST) for arch in IN_TURN[index % 2]]
OTHER_ARCHITECTURES = marked(OTHERS, values_of, is_in_quick=False)


@pytest.mark.parametrize(("wanted", "arch"), HOPPER_CASES)
def test_hopper(wanted: Variant, arch: str) -> None:
    assert wanted.only in ("", arch)
    compile_and_check(wanted, arch)


@pytest.mark.parametrize(("wanted", "arch"), OTHER_ARCHITECTURES)
def test_other_architectures(wanted: Variant, arch: str) -> None:
    compile_and_check(wanted, arch)


@pytest.mark.parametrize(
    ("cases", "parts"), [(HOPPER_CASES, pairs_of_values), (OTHER_ARCHITECTURES, values_of)]
)
def test_everyday_variants_are_compiled_with_all_that_any_has(
    cases: list[object], parts: Callable[[Case], Parts]
) -> None:
    """Have every two macros' values that meet for sm_90a, and each value for one of the others."""
    everyday = [case.values for case in cases if is_everyday(case.values[0])]
    not_slow = [case for case in cases if "slow" not in {mark.name for mark in case.marks}]
    compiled = {part for case in not_slow for part in parts(case.values)}
    assert {part for case in everyday for part in parts(case)} <= compiled
    assert {wanted.source for wanted, _ in everyday} <= {source for source, *_ in compiled}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
@pytest.mark.parametrize("wanted", list(filter(is_quantized, VARIANTS)), ids=str)
def test_other_architectures_with_fewer_bits(wanted: Variant, arch: str) -> None:
    compile_and_check(wanted, arch)


def test_every_cu_file_is_covered() -> None:
    assert {wanted.source for wanted in VARIANTS} == SOURCES
    assert all(ENTRIES.values())


# ---- the other CUDA: 12 beside 13 ----


@pytest.fixture(scope="module")
def other_nvrtc() -> Nvrtc:
    library = find_other()
    if library is None:
        pytest.skip("NVRTC of a second CUDA version comes with the extra nvrtc")
    return Nvrtc(library)


@pytest.fixture
def other_cuda(other_nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch) -> int:
    """The major version of the CUDA with which `jit` compiles in this test."""
    ours = bindings.nvrtc.nvrtcVersion()[1]
    monkeypatch.setattr(bindings, "nvrtc", other_nvrtc)
    return OTHER[ours]


def on_architectures(variants: list[Variant]) -> list[object]:
    """Every variant with each architecture that it is for.

    The rest tier has one of each source and architecture, bf16 with the most macros.
    """

    def likely(wanted: Variant) -> tuple[bool, int]:
        return dict(wanted.defines).get("ELEMENT") != "BFloat16", -len(wanted.defines)

    by_use = sorted(variants, key=likely)
    cases = [(v, "sm_90a") for v in by_use]
    cases += [(v, arch) for arch in ("sm_80", "sm_100a") for v in by_use if is_widest(v)]
    firsts = {(v.source, arch): v for v, arch in reversed(cases)}

    def marks(wanted: Variant, arch: str) -> object:
        return pytest.mark.rest if firsts[wanted.source, arch] == wanted else pytest.mark.slow

    return [pytest.param(v, arch, id=f"{arch} {v}", marks=marks(v, arch)) for v, arch in cases]


OTHER_CASES = on_architectures([v for v in VARIANTS if is_everyday(v)])


@pytest.mark.parametrize(("wanted", "arch"), OTHER_CASES)
def test_other_cuda(wanted: Variant, arch: str, other_cuda: int) -> None:
    """CUDA 12.9 spills 16 bytes for heads of 256 on sm_100, CUDA 13 none."""
    assert bindings.nvrtc.nvrtcVersion()[1] == other_cuda
    compile_and_check(wanted, arch, max_spill=16)


def test_both_compile_every_source_for_every_architecture_that_it_has() -> None:
    not_slow = [c.values for c in OTHER_CASES if "slow" not in {mark.name for mark in c.marks}]
    expected = {
        (wanted.source, arch)
        for wanted in VARIANTS
        for arch in ("sm_80", "sm_90a", "sm_100a")
        if wanted.only in ("", arch)
    }
    assert sorted((wanted.source, arch) for wanted, arch in not_slow) == sorted(expected)
