"""The engine's load as others read it: whole or not at all, and only while it is news."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream_contract import admission
from slipstream_contract.admission import Gate, Load, LoadFile, Passed, path_of
from slipstream_contract.errors import Code, ContractError

ROOM = Load(3, 40, 2, 4, 50, 10.5, 0.25)
FULL = ROOM._replace(num_requests=4)


def told(file: LoadFile, load: Load) -> Load | None:
    file.tell(load)
    return file.read()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was told once counts, however slow the machine is."""
    monkeypatch.setattr(admission, "MAX_AGE_NS", 10**12)


@pytest.mark.usefixtures("patient")
def test_another_process_reads_what_was_told(tmp_path: Path) -> None:
    path = path_of(tmp_path / "engine.sock")
    reader = LoadFile(path)
    assert reader.read() is None
    reader.check(10**9)
    code = (
        "import sys; from pathlib import Path;"
        "from slipstream_contract.admission import Load, LoadFile;"
        f"LoadFile(Path(sys.argv[1])).tell(Load{tuple(FULL)})"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    assert reader.read() == FULL
    assert LoadFile(path).read() == FULL
    with pytest.raises(ContractError, match=r"4 requests wait with 40 tokens") as caught:
        reader.check()
    assert (caught.value.code, caught.value.reason) == (Code.UNAVAILABLE, "max_waiting")


def test_an_engine_that_tells_no_more_refuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, now_ns = LoadFile(tmp_path / "load"), [10**9]
    monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic_ns=lambda: now_ns[0]))
    assert told(file, FULL) == FULL
    now_ns[0] += admission.MAX_AGE_NS
    assert file.read() == FULL
    now_ns[0] += 1
    assert file.read() is None
    file.check()
    now_ns[0] = 10**9 - 1  # the machine was started anew
    assert file.read() is None


@pytest.mark.usefixtures("patient")
def test_what_is_half_written_is_not_read(tmp_path: Path) -> None:
    file = LoadFile(tmp_path / "load")
    file.tell(FULL)
    whole = bytes(file._map[:])
    for place in range(len(whole)):
        file._map[place] ^= 1
        assert file.read() is None
        file._map[:] = whole
    assert file.read() == FULL


@pytest.mark.usefixtures("patient")
def test_readers_beside_a_writer_see_one_or_the_other(tmp_path: Path) -> None:
    writer, reader, is_over = LoadFile(tmp_path / "load"), LoadFile(tmp_path / "load"), []

    def write() -> None:
        for number in range(5000):
            writer.tell(Load(*[number] * 5, float(number), float(number)))
        is_over.append(True)

    thread = threading.Thread(target=write)
    thread.start()
    seen = set()
    while not is_over:
        load = reader.read()
        if load is not None:
            assert len(set(load)) == 1
            seen.add(load)
    thread.join()
    assert reader.read() == Load(*[4999] * 5, 4999.0, 4999.0)


def test_who_may_still_wait() -> None:
    ROOM.check(10)
    with pytest.raises(ContractError) as caught:
        ROOM.check(11)
    assert caught.value.message == (
        "the engine is full: 3 requests wait with 40 tokens, max_waiting_tokens is 50, this prompt "
        "has 11 (2 sequences are running); retry_after_ms: 50"
    )
    assert caught.value.reason == "max_waiting_tokens"
    Load(0, 0, 9, 4, 50).check(10**6)  # alone it may wait
    Load(1, 10**6, 9, 4, 50).check()  # of unknown length


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.integers(0, 2)), max_size=60),
    st.integers(1, 6),
    st.integers(20, 60),
    st.sampled_from([admission.UNKNOWN, 1.0, 10.0, 40.0, 100.0]),
)
def test_a_gate_counts_what_it_let_through(
    arrivals: list[tuple[int, int, int]], max_requests: int, max_tokens: int, ms_each: float
) -> None:
    """Requests come every few ms, of a few tokens; some wait, and the engine admits some."""
    now_ns, passed, reasons = [10**12], [], set()
    load = Load(0, 0, 2, max_requests, max_tokens, ms_each, ms_each / 10)
    window_ms = admission.ON_THEIR_WAY_NS / 1e6
    admitted = 0 if ms_each == admission.UNKNOWN else int(window_ms / ms_each)
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as directory:
        patch.setattr(admission, "time", SimpleNamespace(monotonic_ns=lambda: now_ns[0]))
        gate = Gate(lambda: load, Passed(Path(directory, "passed")))
        for pause_ms, num_tokens, num_waiting in arrivals:
            now_ns[0] += pause_ms * 1_000_000
            load = load._replace(num_requests=num_waiting, num_tokens=3 * num_waiting)
            recent = [n for ns, n in passed if now_ns[0] - ns < admission.ON_THEIR_WAY_NS]
            try:
                gate.enter(num_tokens)
            except ContractError as error:
                reasons.add(error.reason)
                expected = num_waiting + max(0, len(recent) - admitted)
                if ms_each == admission.UNKNOWN:  # those that run or wait may be of them
                    expected = max(num_waiting, len(recent) - load.num_running)
                tokens = 3 * num_waiting + sum(recent) + num_tokens
                assert expected >= max_requests or tokens > max_tokens
            else:
                passed.append((now_ns[0], num_tokens))
                assert len(recent) < max_requests + max(admitted, load.num_running)
        assert reasons <= {"max_waiting", "max_waiting_tokens"}
        load = load._replace(num_requests=0)
        now_ns[0] += admission.ON_THEIR_WAY_NS + 1
        gate.check()
        assert gate._passed.after(now_ns[0] - admission.ON_THEIR_WAY_NS) == (0, 0)


def test_who_runs_already_does_not_wait(tmp_path: Path) -> None:
    load = Load(1, 400, 1, 2, 1000)
    gate = Gate(lambda: load, Passed(tmp_path / "passed"))
    gate.enter(300)  # it runs
    gate.enter(400)  # it waits
    gate.check()
    with pytest.raises(ContractError, match="max_waiting_tokens is 1000"):
        gate.check(700)
    gate.enter(500)
    with pytest.raises(ContractError, match="max_waiting is 2"):
        gate.check()


def test_a_gate_lets_through_what_nobody_tells_of(tmp_path: Path) -> None:
    gate = Gate(lambda: None, Passed(tmp_path / "passed"))
    for _ in range(100):
        gate.enter(10**6)


@contextlib.contextmanager
def another_process(path: Path, num_tokens: int) -> Iterator[None]:
    """It has let through one request."""
    code = (
        "import sys; from pathlib import Path; from slipstream_contract.admission import Passed;"
        f"passed = Passed(Path(sys.argv[1])); passed.add({num_tokens});"
        "print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"\n"
        yield
        process.communicate()


def test_processes_of_a_stage_count_what_each_lets_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "ON_THEIR_WAY_NS", 10**12)
    path = tmp_path / "passed"
    passed = Passed(path)
    gate = Gate(lambda: Load(0, 0, 0, 4, 1000), passed)
    gate.enter(1)
    with another_process(path, 10), another_process(path, 100):
        assert passed.after(0) == (3, 111)
        gate.enter(1000 - 111)
        with pytest.raises(ContractError, match="4 requests wait"):
            gate.check()


def test_a_row_is_free_again_when_its_process_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "passed"
    passed = Passed(path)
    for number in range(1, Passed._NUM_ROWS + 2):
        since_ns = time.monotonic_ns()
        with another_process(path, number):
            assert passed.after(since_ns) == (1, number)


def test_without_a_row_a_process_counts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "passed"
    monkeypatch.setattr(Passed, "_NUM_ROWS", 1)
    with another_process(path, 5):
        passed = Passed(path)
        passed.add(1)
        assert passed.after(0) == (1, 1)


def test_the_oldest_of_many_are_forgotten(tmp_path: Path) -> None:
    passed = Passed(tmp_path / "passed")
    for number in range(1000):
        passed.add(number)
    count, tokens = passed.after(0)
    assert (count, tokens) == (Passed._NUM_KEPT, sum(range(1000 - Passed._NUM_KEPT, 1000)))


def test_without_a_file_the_engine_alone_refuses(tmp_path: Path) -> None:
    file = LoadFile(tmp_path / "nowhere" / "load")
    file.tell(FULL)
    LoadFile(tmp_path / "nowhere" / "load").check()


def test_its_room_is_taken_when_it_is_made(tmp_path: Path) -> None:
    LoadFile(tmp_path / "load")
    assert (tmp_path / "load").stat().st_blocks > 0
