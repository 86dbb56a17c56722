"""The processor's library: one process of several builds it, and an emulator runs all of it."""

import re
import threading
from pathlib import Path

import pytest
from fixtures.kernels.emulated_processor import functions_of
from fixtures.kernels.instruction_sets import within
from slipstream.kernels.cpu import build
from slipstream.kernels.cpu.native import Library, library, loaded
from slipstream_runtime import locking
from slipstream_runtime.locking import locked


def test_one_that_waits_for_another_to_build_gives_signs_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By short sleeps: a rank that stands still in one call for minutes counts as hanging."""
    slept, path = threading.Event(), tmp_path / "kernels.so"

    class Clock:
        monotonic = staticmethod(locking.time.monotonic)

        @staticmethod
        def sleep(seconds: float) -> None:
            assert seconds < 1
            slept.set()

    monkeypatch.setattr(locking, "time", Clock)
    monkeypatch.setattr(build, "compiler", lambda: "g++")
    monkeypatch.setattr(build, "path_of", lambda command, flags: path)
    found: list[Path] = []
    waits = threading.Thread(target=lambda: found.append(build.built()), daemon=True)
    with locked(tmp_path / "lock"):
        waits.start()
        was_seen = slept.wait(30)
        path.touch()
    waits.join()
    assert was_seen
    assert found == [path]


def test_what_a_killed_build_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kernels.so"
    (tmp_path / "building-left").mkdir()
    (tmp_path / "building-left/pool.cpp.o").write_text("half of it")
    (tmp_path / "kernels-of-another.so").touch()
    monkeypatch.setattr(build, "compiler", lambda: "g++")
    monkeypatch.setattr(build, "path_of", lambda command, flags: path)
    monkeypatch.setattr(build, "_run", lambda command: Path(command[-1]).touch())
    assert build.built() == path
    assert {file.name for file in tmp_path.iterdir()} == {
        path.name,
        "kernels-of-another.so",
        "lock",
    }


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler or no AVX2")
def test_an_emulator_runs_all_functions_of_the_library() -> None:
    """And gives one thread to those that C has threads of."""
    source = (Path(build.__file__).parent / "step.cpp").read_text()
    declared = re.findall(r"^(?:void|int) (slipstream_\w+)\(([^)]*)\)", source, re.MULTILINE)
    of_c = {name: arguments.endswith("int threads") for name, arguments in declared}
    del of_c["slipstream_best_form"]  # is asked once, before there are others
    with within(loaded().form):  # a library's start chooses a form for all
        own = functions_of(Library(build.built()))
    assert dict(own.values()) == of_c
