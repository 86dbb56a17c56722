"""Where files that can be made again lie, and that nobody ever sees half of one."""

import os
from pathlib import Path

import pytest
from slipstream.kernels.runtime import disk_cache


def test_folder_honours_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert disk_cache.folder("kernels") == tmp_path / "xdg" / "slipstream" / "kernels"
    default = tmp_path / "home" / ".cache" / "slipstream" / "kernels"
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert disk_cache.folder("kernels") == default
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert disk_cache.folder("kernels") == default


def test_write_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "file"
    disk_cache.write_whole(path, b"first")
    disk_cache.write_whole(path, b"second")
    assert path.read_bytes() == b"second"

    def fail(source: str, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        disk_cache.write_whole(path, b"third")
    assert path.read_bytes() == b"second"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]
