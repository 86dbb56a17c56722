"""Processes that need the processor's library at the same time: one builds it."""

import threading
from pathlib import Path

import pytest
from slipstream.kernels.cpu import build
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
