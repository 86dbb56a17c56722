"""Installing the server: which packages the error names if something is missing, and the files."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from slipstream_serve import install, server

ROOT = server.repository_root()
needs_server = pytest.mark.skipif(
    not server.server_directory().is_dir(), reason="no tritonserver: make install"
)


def test_a_missing_libpython_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "shared_libpython", lambda: None)
    monkeypatch.setattr(server, "python_version", lambda: (3, 12))
    line = server.missing_parts()
    assert line.startswith("Python 3.12 lacks a shared libpython3.12.so.1.0: ")
    assert "sudo apt-get install libpython3.12 " in line
    assert "\n" not in line


def test_all_that_is_missing_is_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "shared_libpython", lambda: None)
    monkeypatch.setattr(server, "python_version", lambda: (3, 11))
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: None)
    line = server.missing_parts()
    assert "sudo apt-get install python3.11-venv libpython3.11 " in line


@pytest.mark.parametrize(
    ("machine", "glibc"), [("aarch64", "2.41"), ("x86_64", "2.31"), ("x86_64", "")]
)
def test_a_machine_that_the_binaries_do_not_run_on(
    monkeypatch: pytest.MonkeyPatch, machine: str, glibc: str
) -> None:
    monkeypatch.setattr(server.platform, "machine", lambda: machine)
    monkeypatch.setattr(server.platform, "libc_ver", lambda: ("glibc", glibc))
    assert f"here: {machine}, glibc {glibc}" in server.missing_parts()


@pytest.mark.parametrize("version", [(3, 10), (3, 14)])
def test_a_python_without_a_stub_is_refused_by_number(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]
) -> None:
    monkeypatch.setattr(server, "python_version", lambda: version)
    line = server.missing_parts()
    assert f"Python {version[0]}.{version[1]} " in line
    assert "3.11, 3.12 or 3.13" in line


def test_a_python_that_must_compile_numpy_asks_for_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "python_version", lambda: (3, 13))
    monkeypatch.setattr(server, "shared_libpython", lambda: Path("libpython3.13.so.1.0"))
    monkeypatch.setattr(server, "_can_compile", lambda: False)
    line = server.missing_parts()
    assert "sudo apt-get install gcc g++ python3.13-dev" in line
    monkeypatch.setattr(server, "_can_compile", lambda: True)
    assert server.missing_parts() == ""


def test_this_python_can_carry_it() -> None:
    assert server.missing_parts() == ""
    command = [sys.executable, str(ROOT / "ensemble/slipstream_serve/server.py"), "--missing"]
    assert subprocess.run(command, check=False).returncode == 0


def test_the_installer_falls_back_to_another_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A `python3` that cannot carry the stub beside a `python3.11` that can."""
    unfit = tmp_path / "python3"
    unfit.write_text("#!/bin/sh\necho 'Python 3.13 cannot carry it'; exit 1\n")
    fit = tmp_path / "python3.11"
    fit.write_text("#!/bin/sh\nexit 0\n")
    for script in (unfit, fit):
        script.chmod(0o755)
    monkeypatch.setattr(install.sys, "executable", str(unfit))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    monkeypatch.setattr(install, "CANDIDATES", ("python3.11",))
    assert install.find_python() == str(fit)


def test_the_installer_ends_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unfit = tmp_path / "python3"
    unfit.write_text("#!/bin/sh\necho 'no shared libpython: apt-get install it'; exit 1\n")
    unfit.chmod(0o755)
    monkeypatch.setattr(install.sys, "executable", str(unfit))
    monkeypatch.setattr(install, "CANDIDATES", ())
    with pytest.raises(SystemExit) as end:
        install.find_python()
    assert end.value.code == 1
    assert capsys.readouterr().err.count("apt-get install it") == 1


def test_the_environment_of_a_pip_run_is_the_venvs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET"):
        monkeypatch.setenv(name, "/somewhere/else")
    clean = install.clean_environment()
    assert not {"PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET"} & set(clean)
    assert "PATH" in clean


def test_every_requirement_is_held_to_one_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    names = {re.split("[=;]", line)[0].lower().replace("_", "-") for line in lines if "==" in line}
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    parts = ["engine", *install.DEFAULT_EXTRAS.split(","), "convert", "cuda12", "cuda13"]
    wanted = [*project["dependencies"], *(one for part in parts for one in extras[part])]
    missing = {re.split(r"[\[<>=;@ ]", one)[0].lower() for one in wanted} - names
    assert not missing
    pinned = {line.split("==")[0].lower(): line for line in lines}
    for one in server.STUB_REQUIREMENTS:
        if not one.startswith("numpy"):
            assert pinned[one.split("==")[0]].lower() == one, "the stub's versions are .venv's"


def test_cuda_12_is_not_held_to_the_packages_of_cuda_13(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(install, "VENV", tmp_path)
    assert install.constraints(0) == install.constraints(13) == "constraints.txt"
    text = Path(install.constraints(12)).read_text()
    assert "cuda-bindings" not in text
    assert "torch==" in text


@needs_server
def test_the_stub_environment_is_the_stubs_own() -> None:
    """numpy 1, our packages from this checkout, and neither torch nor the hub."""
    code = (
        "import numpy, slipstream, slipstream_contract, tokenizers, zmq, msgspec, jinja2\n"
        "assert numpy.__version__ == '1.26.4'\n"
        "import importlib.util as find\n"
        "for name in ('torch', 'cupy', 'huggingface_hub', 'model', 'backend'):\n"
        "    assert find.find_spec(name) is None, name\n"
        "print(slipstream.__file__)"
    )
    python = server.stub_directory() / "bin" / "python3"
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).resolve() == ROOT / "backend/slipstream/__init__.py"


@needs_server
def test_every_library_of_the_binaries_is_found() -> None:
    home, stub = server.server_directory(), server.stub_directory()
    environment = server.server_environment(home, stub)
    binaries = [home / "bin" / "tritonserver", home / "bin" / "perf_analyzer"]
    binaries.append(home / "backends" / "python" / "triton_python_backend_stub")
    for binary in binaries:
        done = subprocess.run(
            ["ldd", str(binary)], capture_output=True, text=True, check=False, env=environment
        )
        assert "not found" not in done.stdout, f"{binary.name}: {done.stdout}"
        assert done.returncode == 0, done.stderr


def test_an_up_to_date_server_is_left_alone_and_a_moved_one_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[Path] = []
    monkeypatch.setattr(server, "assemble_server", lambda folder, root: made.append(folder))
    monkeypatch.setattr(server, "assemble_stub", lambda folder, root: made.append(folder))
    home = tmp_path / "here" / ".slipstream"
    assert server.assemble(home.parent) is True
    assert sorted(made) == [home / "server", home / "stub"]
    assert server.assemble(home.parent) is False
    assert len(made) == 2
    home.parent.rename(tmp_path / "there")
    assert server.assemble(tmp_path / "there") is True


def test_an_existing_server_gets_our_backends_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "backends" / "python").mkdir(parents=True)
    for _ in range(2):  # a second build of the same image layer must not fail
        server.link_backends(tmp_path, ROOT)
    assert {path.name for path in (tmp_path / "backends").iterdir()} == {
        "python",
        *server.BACKENDS,
    }
