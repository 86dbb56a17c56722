"""The count of requests in flight: right for every reader, however the process ends."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from slipstream_runtime.credit import CreditFile
from slipstream_runtime.inflight import InFlight, count, count_clients


def test_threads_lose_no_count(tmp_path: Path) -> None:
    in_flight = InFlight(tmp_path / "word")

    def work() -> None:
        for _ in range(2000):
            in_flight.add(2)
            in_flight.add(-1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count(tmp_path / "word") == 16_000


def test_the_count_of_a_killed_process_is_read(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path;"
        "from slipstream_runtime.inflight import InFlight;"
        "InFlight(Path(sys.argv[1])).add(3); os.kill(os.getpid(), 9)"
    )
    path = tmp_path / "word"
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert count(path) == 3
    InFlight(path)  # the same name again begins anew
    assert count(path) == 0


def test_probes_are_requests_and_no_clients(tmp_path: Path) -> None:
    path = tmp_path / "word"
    in_flight = InFlight(path)
    in_flight.add(3)
    in_flight.add_probes(1)
    assert (count(path), count_clients(path)) == (3, 2)
    in_flight.add(-3)
    assert (count(path), count_clients(path)) == (0, 0)  # a reader between the two words
    in_flight.add_probes(-1)
    in_flight.add(1)
    assert (count(path), count_clients(path)) == (1, 1)


def test_no_file_is_no_request(tmp_path: Path) -> None:
    assert count(tmp_path / "none") == count_clients(tmp_path / "none") == 0


@pytest.mark.parametrize("kind", [CreditFile, InFlight])
def test_its_room_is_taken_when_it_is_made(tmp_path: Path, kind: type) -> None:
    """On a full disk a sparse file is made without complaint, and its first use is SIGBUS."""
    kind(tmp_path / "file")
    state = (tmp_path / "file").stat()
    assert 512 * state.st_blocks >= state.st_size > 0
