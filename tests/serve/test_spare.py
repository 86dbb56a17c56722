"""Room that is held for repairs: all of it, what there is of it, or none."""

import subprocess
import sys
from pathlib import Path

from slipstream_serve.spare import Spare

_LIMITED = """
import pathlib, resource, signal, sys
from slipstream_serve.spare import Spare
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
Spare(pathlib.Path(sys.argv[1]))
"""


def room(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_space_is_reserved_except_during_a_repair(tmp_path: Path) -> None:
    path = tmp_path / "spare"
    spare = Spare(path)
    for _ in range(2):
        assert room(path) >= 256 << 10
        spare.release()
        spare.release()
        assert not path.exists()
        spare.reserve()


def test_a_nearly_full_disk_gives_what_it_has(tmp_path: Path) -> None:
    """A limit to a file's size stands for a disk that is nearly full."""
    for limit, held in ((100 << 10, 64 << 10), (4 << 10, 4 << 10), (1 << 10, 0)):
        path = tmp_path / str(limit)
        subprocess.run([sys.executable, "-c", _LIMITED, path, str(limit)], check=True)
        assert path.stat().st_size == held


def test_without_a_file_nothing_breaks(tmp_path: Path) -> None:
    Spare(tmp_path / "missing" / "spare").release()
