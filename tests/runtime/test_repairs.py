"""The counts of repairs, as others read them."""

from pathlib import Path

from slipstream_runtime.repairs import Repairs, read


def test_they_are_read_as_they_were_noted(tmp_path: Path) -> None:
    path = tmp_path / "repairs"
    assert read(path) == {"model": 0, "server": 0}
    repairs = Repairs(path)
    assert read(path) == {"model": 0, "server": 0}
    for kind in ("model", "server", "model"):
        repairs.note(kind)
    assert read(path) == {"model": 2, "server": 1}
    path.write_bytes(b"half")
    assert read(path) == {"model": 0, "server": 0}
    path.unlink()
    repairs.note("model")  # makes it again
    assert read(path) == {"model": 3, "server": 1}
