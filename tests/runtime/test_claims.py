"""Parts of a file, each claimed by one process at a time."""

import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from slipstream.kernels.gemm import tuning
from slipstream.kernels.gemm.tuning import Choice, Machine, Product
from slipstream_runtime.claims import Claims

MACHINE = Machine(gpu="NVIDIA H200", num_sms=132, driver=13000, cublaslt=130100)
PRODUCT = Product(inputs=64, outputs=64, dtype="bfloat16", out_dtype="bfloat16", adds=False)
HOLDER = """
import sys
from pathlib import Path
from slipstream_runtime.claims import Claims
claims = Claims(Path(sys.argv[1]))
assert claims.take("one")
print("taken", flush=True)
sys.stdin.read()
"""

WRITER = """
import os, signal, sys
from pathlib import Path
from slipstream_runtime.claims import Claims
with Claims(Path(sys.argv[1])).writing(0.0):
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_parts_are_claimed_apart_and_released(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    with closing(Claims(path)) as ours, closing(Claims(path)) as theirs:
        assert ours.take("one")
        assert ours.take("one")
        assert theirs.take("two")
        assert not theirs.take("one")
        assert not ours.take("two")
        ours.release("one")
        assert theirs.take("one")
        ours.close()
        assert not path.exists()
    with closing(Claims(path)) as next_one:
        assert next_one.take("one")


def test_the_end_of_a_process_releases_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"taken\n"
        with closing(Claims(path)) as ours:
            assert not ours.take("one")
            assert ours.take("two")
            os.kill(holder.pid, signal.SIGKILL)
            holder.wait()
            assert ours.take("one")


def test_a_process_that_stops_while_it_writes_stops_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command) as writer, closing(Claims(path)) as ours:
        os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WNOWAIT)
        with pytest.raises(TimeoutError, match=r"file\.json: another process writes it, for 0.1 s"):
            ours.writing(0.1).__enter__()
        assert ours.take("one")
        os.kill(writer.pid, signal.SIGCONT)
        with ours.writing(60.0):
            pass


def test_what_two_save_at_once_is_both_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, other = (Choice(PRODUCT, rows, "07" * 64, "", 1.0, 2.0) for rows in (8, 16))
    whole = tuning.disk_cache.write_whole
    beside = threading.Thread(target=tuning.save, args=(MACHINE, [other]))

    def write_late(path: Path, data: bytes) -> None:
        """Write what was read before the other one writes, if it does not wait."""
        monkeypatch.setattr(tuning.disk_cache, "write_whole", whole)
        beside.start()
        beside.join(0.3)
        whole(path, data)

    monkeypatch.setattr(tuning.disk_cache, "write_whole", write_late)
    tuning.save(MACHINE, [one])
    beside.join()
    assert tuning.load(MACHINE) == [one, other]


def test_where_nothing_can_be_locked_all_is_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a file").touch()
    with caplog.at_level(logging.WARNING), closing(Claims(tmp_path / "a file" / "x.json")) as ours:
        assert ours.take("one")
        with ours.writing(0.0):
            ours.release("one")
    assert "what other processes do is not known" in caplog.text
