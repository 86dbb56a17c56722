"""What `make install` takes for a machine, and how it tells how far it is."""

import contextlib
import io
import itertools
import os
import re
import sys
import time
from pathlib import Path

import pytest
from slipstream_serve import gpu_packages, install
from slipstream_serve.gpu_packages import GpuPackagesError, cuda_extra, described, torch_major
from slipstream_serve.install import Wanted, wanted
from slipstream_serve.progress import Packages, Printer, follow, size_of

SMI = "| NVIDIA-SMI 570.86.15    Driver Version: 570.86.15    CUDA Version: 12.8     |"
PROC = "NVRM version: NVIDIA UNIX {}x86_64 Kernel Module  {}  Wed Feb 1\nGCC version: 12.2.0\n"


# ---- CUDA 12 or 13 ----


@pytest.mark.parametrize(
    ("driver", "torch", "extra"),
    [
        ((13, 0), (13, 0), "cuda13"),
        ((13, 1), (13, 0), "cuda13"),
        ((13, 0), (12, 9), "cuda12"),  # a newer driver runs older programs
        ((14, 0), (13, 0), "cuda13"),
        ((12, 2), (12, 9), "cuda12"),  # within a major version, newer ones too
        ((12, 8), (12, 6), "cuda12"),
        (None, (13, 0), "cuda13"),
        (None, (12, 8), "cuda12"),
        ((13, 0), None, ""),
        (None, None, ""),
    ],
)
def test_cupy_is_for_the_cuda_of_torch(driver, torch, extra) -> None:
    assert cuda_extra(driver, torch) == extra
    line = described(driver, torch, extra)
    assert ("cupy-" + extra + "x" if extra else "no CuPy") in line
    for version in filter(None, (driver, torch)):
        assert f"CUDA {version[0]}.{version[1]}" in line


@pytest.mark.parametrize(
    ("driver", "torch", "words"),
    [
        ((12, 8), (13, 0), r"torch is built for CUDA 13.0, but .* runs CUDA 12.8 at most: update"),
        ((13, 0), (11, 8), r"torch is built for CUDA 11.8, the kernels for CUDA 12 and CUDA 13"),
        ((15, 0), (14, 0), r"torch is built for CUDA 14.0"),
    ],
)
def test_a_torch_that_cannot_work_here_is_refused(driver, torch, words) -> None:
    with pytest.raises(GpuPackagesError, match=words):
        cuda_extra(driver, torch)


def test_the_driver_decides_which_torch() -> None:
    drivers = [(13, 0), (13, 2), (14, 1), None, (12, 0), (12, 9)]
    assert [torch_major(driver) for driver in drivers] == [13, 13, 13, 13, 12, 12]
    with pytest.raises(GpuPackagesError, match=r"runs CUDA 11\.8 at most, 12\.0 is needed: update"):
        torch_major((11, 8))


def test_whatever_torch_is_chosen_its_cupy_is() -> None:
    for driver in (None, *itertools.product((12, 13, 14), (0, 9))):
        major = torch_major(driver)
        assert cuda_extra(driver, (major, 0)) == f"cuda{major}"


@pytest.mark.parametrize(
    ("given", "has_gpu", "driver", "expected"),
    [
        (None, False, None, Wanted("engine,gateway,convert,dev,load,nvrtc", 0)),
        (None, True, (13, 0), Wanted("engine,gateway,convert,dev,load,nvrtc", 13, (13, 0))),
        (None, True, (12, 4), Wanted("engine,gateway,convert,dev,load", 12, (12, 4))),
        ("dev,nvrtc,cuda12", True, (13, 0), Wanted("engine,gateway,dev", 12, (13, 0))),
        ("dev,cuda13", False, None, Wanted("engine,gateway,dev", 13)),  # to build an image
        ("dev, load", True, (13, 0), Wanted("engine,gateway,dev,load", 0, (13, 0))),
        ("", True, (11, 4), Wanted("engine,gateway", 0, (11, 4))),
    ],
)
def test_extras_and_machine(given, has_gpu, driver, expected) -> None:
    assert wanted(given, has_gpu, driver) == expected


def test_serving_needs_a_part_and_leaves_the_rest() -> None:
    """What is there stays there, whichever is asked for; a newer checkout asks for its own."""
    serving = wanted(None, False, None, install.SERVING_EXTRAS)
    whole = wanted(None, False, None)
    both = set(serving.extras.split(",")) | set(whole.extras.split(","))
    assert both == set(whole.extras.split(",")) != set(serving.extras.split(","))
    assert install.with_installed(serving, "") == serving
    assert install.with_installed(serving, install.stamp(whole)) == whole
    assert install.with_installed(whole, install.stamp(whole)) == whole
    grown = install.with_installed(whole, install.stamp(serving))
    assert set(grown.extras.split(",")) == both
    assert install.stamp(grown) != install.stamp(serving)
    for other in (
        install.stamp(whole).replace(str(install.ROOT), "/elsewhere"),
        install.stamp(wanted("dev,cuda13", False, None)),
        install.stamp(whole)[:-3] + "00\n",
        "a stamp of another form\n",
    ):
        assert install.with_installed(serving, other) == serving


def test_two_cuda_versions_at_once_are_refused() -> None:
    with pytest.raises(GpuPackagesError, match="EXTRAS=cuda12,cuda13 names two"):
        wanted("cuda12,cuda13", True, (13, 0))


def test_what_drivers_report() -> None:
    assert gpu_packages.read_number(13000) == (13, 0)
    assert gpu_packages.read_number(12080) == (12, 8)
    assert gpu_packages.read_number(0) is None
    assert gpu_packages.read_smi(SMI) == (12, 8)
    assert gpu_packages.read_smi("NVIDIA-SMI has failed") is None
    kinds = ("", "Open Kernel Module for ")
    for kind, (driver, cuda) in itertools.product(
        kinds, (("580.65.06", 13), ("595.1.2", 13), ("550.54.15", 12), ("470.57.02", 11))
    ):
        text = PROC.format(kind, driver)
        if kind:
            text = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release"
        assert gpu_packages.read_proc(text) == (cuda, 0)
    assert gpu_packages.read_proc("nothing of the kind") is None


def test_the_first_that_tells_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_packages.ctypes, "CDLL", no_library)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu_packages, "DRIVER_FILE", tmp_path / "version")
    assert gpu_packages.driver_cuda() is None
    (tmp_path / "version").write_text(PROC.format("", "580.65.06"))
    assert gpu_packages.driver_cuda() == (13, 0)
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{SMI}'\n")
    program.chmod(0o755)
    assert gpu_packages.driver_cuda() == (12, 8)


def no_library(name: str) -> None:
    raise OSError(name)


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("cuda: Optional[str] = '13.0'", (13, 0)),
        ("cuda = '12.8'", (12, 8)),
        ("cuda: Optional[str] = None", None),
    ],
)
def test_what_torch_reports(tmp_path: Path, line: str, version: object) -> None:
    assert gpu_packages.torch_cuda(tmp_path) is None
    path = tmp_path / "lib/python3.12/site-packages/torch/version.py"
    path.parent.mkdir(parents=True)
    path.write_text(f"__version__ = '2.13.0'\n{line}\nhip: Optional[str] = None\n")
    assert gpu_packages.torch_cuda(tmp_path) == version


def test_a_torch_for_cuda_12_is_looked_for_newest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def probe(command: list[str], *_: object, **__: object) -> tuple[int, str]:
        asked.append(" ".join(command[command.index("off") + 1 :]))
        return int("whl/cu126 " not in asked[-1]), ""

    monkeypatch.setattr(install, "follow", probe)
    printer = Printer(io.StringIO())
    found = install.torch_arguments(12, printer)
    assert found == ["--extra-index-url", f"{install.TORCH_INDEX}/cu126", f"{install.TORCH}+cu126"]
    assert [line.split("+")[-1] for line in asked] == ["cu129"] * 2 + ["cu128"] * 2 + ["cu126"] * 2
    assert install.torch_arguments(13, printer) == [install.TORCH]
    monkeypatch.setattr(install, "follow", lambda *_, **__: (1, ""))
    with pytest.raises(GpuPackagesError, match=r"no index has torch==.* for CUDA 12"):
        install.torch_arguments(12, printer)
    assert install.torch_arguments(0, printer) == [install.TORCH]


# ---- how far it is ----


OUTPUT = """\
Looking in indexes: https://example.org/simple
Obtaining file:///home/user/slipstream
Collecting torch==2.13.0+cpu
Downloading https://example.org/torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl (191.8 MB)
Requirement already satisfied: numpy>=1.26 in ./lib (from slipstream==1.0) (2.4.6)
Collecting tritonclient[grpc]>=2.73 (from slipstream==1.0)
  Using cached tritonclient-2.73.0-py3-none-any.whl (14.2 MB)
Collecting numpy
Installing collected packages: torch, tritonclient, slipstream
""".splitlines()


def test_what_pip_says_becomes_a_status() -> None:
    packages = Packages()
    shown = []
    for line in OUTPUT:
        packages.read(line.strip())
        shown.append(packages.status(42_400_000, 1))
    assert shown[1] == "0 packages found, 42 MB fetched"
    assert shown[3] == "1 package found, 42 MB fetched, now torch (191.8 MB)"
    assert shown[7] == "3 packages found, 42 MB fetched, now tritonclient (14.2 MB)"
    assert shown[8] == "installing 3 packages, 1 in place"


CHATTY = """
import sys, time
for i in range(6):
    print(f"Collecting package{i}", flush=True)
    time.sleep(0.1)
sys.exit("ERROR: no space left")
"""


def test_lines_follow_where_there_is_no_terminal() -> None:
    packages, stream = Packages(), io.StringIO()
    code, errors = follow(
        [sys.executable, "-c", CHATTY],
        Printer(stream, interval_s=0.15),
        lambda: packages.status(0, 0),
        read=packages.read,
    )
    assert code == 1
    assert errors.strip() == "ERROR: no space left"
    lines = stream.getvalue().splitlines()
    assert len(lines) >= 2
    for line in lines:
        assert re.fullmatch(r"slipstream: +\d+ s: [0-6] packages? found, 0 MB fetched", line)
    assert packages.num_found == 6


def test_a_terminals_line_is_rewritten_and_removed_at_the_end() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    printer = Printer(stream, interval_s=0.001)
    for text in ("first", "second"):
        time.sleep(0.002)
        printer.show(lambda text=text: text)
    printer.clear()
    assert "\n" not in stream.getvalue()
    assert re.findall(r"\r([^\r\x1b]*)\x1b\[K", stream.getvalue()) == [
        "slipstream:    0 s: first",
        "slipstream:    0 s: second",
        "",
    ]


def test_the_size_of_a_folder_that_changes(tmp_path: Path) -> None:
    (tmp_path / "unpacked").mkdir()
    (tmp_path / "unpacked" / "wheel").write_bytes(bytes(1000))
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    assert size_of(tmp_path) >= 1000
    assert size_of(tmp_path / "gone") == 0


def test_packages_are_compiled_beside_files_that_cannot_be(tmp_path, monkeypatch) -> None:
    packages = tmp_path / "lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (packages / "good.py").write_text("answer = 42\n")
    (packages / "old.py").write_text("print 'of another Python'\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    monkeypatch.setattr(install, "VENV", tmp_path)
    with install.beside(install.compile_bytecode(), install.clean_environment()) as process:
        process.wait()
    assert [file.name.split(".")[0] for file in packages.rglob("*.pyc")] == ["good"]


def test_what_runs_beside_ends_with_all_that_it_has_started(tmp_path, monkeypatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    monkeypatch.setattr(install, "VENV", tmp_path)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)

    def is_held() -> bool:
        try:
            return os.read(reader, 1) != b""
        except BlockingIOError:  # somebody may still write
            return True

    child = f"import subprocess; subprocess.run(['sleep', '600'], stdout=open({str(fifo)!r}, 'w'))"
    with (
        contextlib.suppress(KeyboardInterrupt),
        install.beside(["-c", child], install.clean_environment()) as process,
    ):
        while not is_held():
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert process.returncode is not None
    while is_held():  # a process that is killed ends a moment later
        time.sleep(0.01)
    os.close(reader)
