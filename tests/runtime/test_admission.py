"""The engine's load as others read it: whole or not at all, and only while it is news."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream_contract.errors import Code, ContractError
from slipstream_runtime import admission
from slipstream_runtime.admission import Gate, Load, LoadFile, Passed, path_of

ROOM = Load(3, 40, 2, 4, 50, 10.5, 0.25)
FULL = ROOM._replace(num_requests=4)


def published(file: LoadFile, load: Load) -> Load | None:
    file.publish(load)
    return file.read()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what was published, or passed on, from ageing on a slow machine."""
    monkeypatch.setattr(admission, "MAX_AGE_NS", 10**12)
    monkeypatch.setattr(admission, "IN_TRANSIT_NS", 10**12)


@pytest.mark.usefixtures("patient")
def test_another_process_reads_what_was_published(tmp_path: Path) -> None:
    path = path_of(tmp_path / "engine.sock")
    reader = LoadFile(path)
    assert reader.read() is None
    reader.raise_if_full(10**9)
    code = (
        "import sys; from pathlib import Path;"
        "from slipstream_runtime.admission import Load, LoadFile;"
        f"LoadFile(Path(sys.argv[1])).publish(Load{tuple(FULL)})"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    assert reader.read() == FULL
    assert LoadFile(path).read() == FULL
    with pytest.raises(ContractError, match=r"4 requests wait with 40 tokens") as caught:
        reader.raise_if_full()
    assert (caught.value.code, caught.value.reason) == (Code.UNAVAILABLE, "max_waiting")


@pytest.mark.usefixtures("patient")
def test_counts_beyond_63_bits_are_published_as_the_most_that_fit(tmp_path: Path) -> None:
    most = 2**63 - 1
    sums = FULL._replace(max_tokens=2 * most, num_tokens=most + 1, ms_per_token=1e300)
    wanted = FULL._replace(max_tokens=most, num_tokens=most, ms_per_token=1e300)
    assert published(LoadFile(tmp_path / "load"), sums) == wanted


def test_an_outdated_load_refuses_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, now_ns = LoadFile(tmp_path / "load"), [10**9]
    monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic_ns=lambda: now_ns[0]))
    assert published(file, FULL) == FULL
    now_ns[0] += admission.MAX_AGE_NS
    assert file.read() == FULL
    now_ns[0] += 1
    assert file.read() is None
    file.raise_if_full()
    now_ns[0] = 10**9 - 1  # the machine was started anew
    assert file.read() is None


@pytest.mark.parametrize("up_ns", [1, 10**15], ids=["a machine just started", "days later"])
def test_an_idle_engine_refuses_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, up_ns: int
) -> None:
    monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic_ns=lambda: up_ns))
    file = LoadFile(tmp_path / "load")
    file.publish(FULL, is_idle=True)
    assert file.last() == (FULL, False)
    file.raise_if_full()


@pytest.mark.usefixtures("patient")
def test_what_is_half_written_is_not_read(tmp_path: Path) -> None:
    file = LoadFile(tmp_path / "load")
    file.publish(FULL)
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
            writer.publish(Load(*[number] * len(Load._fields)))
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
    assert reader.read() == Load(*[4999] * len(Load._fields))


def test_which_requests_may_still_wait() -> None:
    ROOM.raise_if_full(10)
    with pytest.raises(ContractError) as caught:
        ROOM.raise_if_full(11)
    assert caught.value.message == (
        "the engine is full: 3 requests wait with 40 tokens, max_waiting_tokens is 50, this prompt "
        "has 11 (2 sequences are running); retry_after_ms: 50"
    )
    assert caught.value.reason == "max_waiting_tokens"
    Load(0, 0, 9, 4, 50).raise_if_full(10**6)  # alone it may wait
    Load(1, 10**6, 9, 4, 50).raise_if_full()  # of unknown length


class Engine:
    """An engine as a gate sees it: requests passed on arrive later, wait, and are admitted."""

    def __init__(self, folder: Path, max_requests: int, max_tokens: int) -> None:
        self.file = LoadFile(folder / "load")
        self.gate = Gate(self.file, Passed(folder / "passed"))
        self.in_transit: list[int] = []  # tokens of each
        self.waiting: list[int] = []
        self.looked_ns = admission.time.monotonic_ns()
        self._received: list[int] = []
        self._bounds = max_requests, max_tokens
        self.publish()

    def publish(self) -> None:
        waits, came = self.waiting, self._received
        load = Load(len(waits), sum(waits), 1, *self._bounds, 9.0, 0.9, len(came), sum(came))
        self.file.publish(load._replace(looked_ns=self.looked_ns))

    def send(self, num_tokens: int) -> str:
        """Send a request; return why it is refused, or an empty text."""
        try:
            self.gate.pass_on(num_tokens)
        except ContractError as error:
            return error.reason
        self.in_transit.append(num_tokens)
        return ""

    def receive(self, count: int) -> None:
        came, self.in_transit = self.in_transit[:count], self.in_transit[count:]
        self._received += came
        self.waiting += came
        self.looked_ns = admission.time.monotonic_ns()
        self.publish()

    def receive_from_others(self, count: int) -> None:
        self.in_transit = [1] * count + self.in_transit
        self.receive(count)
        self.admit(count)

    def admit(self, count: int) -> None:
        self.waiting = self.waiting[count:]
        self.publish()


_TURN = st.tuples(st.sampled_from(["send", "send", "receive", "admit"]), st.integers(1, 9))


@given(
    st.lists(st.tuples(st.integers(0, 75), _TURN), max_size=80),
    st.integers(1, 6),
    st.integers(20, 60),
)
def test_requests_in_transit_count_as_waiting(
    turns: list[tuple[int, tuple[str, int]]], max_requests: int, max_tokens: int
) -> None:
    """No request is refused too early; none passes that IN_TRANSIT_NS shows to be too many.

    However long the transit takes, and however long a step in which the engine does not look.
    """
    now_ns, last_alone_ns = [10**12], 10**12
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as directory:
        patch.setattr(admission, "time", SimpleNamespace(monotonic_ns=lambda: now_ns[0]))
        engine = Engine(Path(directory), max_requests, max_tokens)
        for pause_ms, (what, number) in turns:
            now_ns[0] += pause_ms * 1_000_000
            if what != "send":
                getattr(engine, what)(number)
                continue
            engine.publish()
            if not engine.in_transit:
                last_alone_ns = now_ns[0]
            is_all_seen = engine.looked_ns - last_alone_ns < admission.IN_TRANSIT_NS
            there = engine.waiting + engine.in_transit
            is_full = len(there) >= max_requests
            is_too_much = bool(there) and sum(there) + number > max_tokens
            if engine.send(number):
                assert is_full or is_too_much
            else:
                assert not (is_all_seen and (is_full or is_too_much))


@pytest.mark.usefixtures("patient")
def test_a_burst_counts_once(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 4, 1000)
    for came in (0, 1, 1, 1):
        assert not engine.send(100)
        engine.receive(came)
    assert (len(engine.waiting), len(engine.in_transit)) == (3, 1)
    assert engine.send(100) == "max_waiting"
    engine.admit(1)
    assert engine.send(701) == "max_waiting_tokens"
    assert not engine.send(700)


@pytest.mark.usefixtures("patient")
def test_an_engine_that_starts_anew_has_received_nothing(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 1, 1000)
    engine.receive_from_others(9)
    assert not engine.send(1)
    assert engine.send(1) == "max_waiting"
    engine.file.publish(Load(0, 0, 0, 1, 1000))
    assert not engine.send(1)


@pytest.mark.usefixtures("patient")
def test_a_gate_passes_requests_if_there_is_no_load(tmp_path: Path) -> None:
    gate = Gate(LoadFile(tmp_path / "load"), Passed(tmp_path / "passed"))
    for _ in range(100):
        gate.pass_on(10**6)


@contextlib.contextmanager
def another_process(path: Path, num_tokens: int) -> Iterator[None]:
    """Run a process that has passed on one request."""
    code = (
        "import sys; from pathlib import Path; from slipstream_runtime.admission import Passed;"
        f"passed = Passed(Path(sys.argv[1])); passed.add({num_tokens}, None);"
        "print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"\n"
        yield
        process.communicate()


@pytest.mark.usefixtures("patient")
def test_processes_of_a_stage_count_what_each_lets_through(tmp_path: Path) -> None:
    path, load = tmp_path / "passed", Load(0, 0, 0, 4, 1000)
    passed, file = Passed(path), LoadFile(tmp_path / "load")
    gate = Gate(file, passed)
    file.publish(load)
    gate.pass_on(1)
    with another_process(path, 10), another_process(path, 100):
        assert passed.in_transit(load) == (3, 111)
        gate.pass_on(1000 - 111)
        with pytest.raises(ContractError, match="4 requests wait"):
            gate.raise_if_full()


def test_a_row_is_free_again_when_its_process_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "passed"
    passed = Passed(path)
    for number in range(1, Passed._NUM_ROWS + 2):
        passed._entries[:] = 0
        with another_process(path, number):
            assert np.argwhere(passed._entries[1] == number).tolist() == [[1, 0]]


@pytest.mark.usefixtures("patient")
def test_without_a_row_a_process_counts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "passed"
    monkeypatch.setattr(Passed, "_NUM_ROWS", 1)
    with another_process(path, 5):
        passed = Passed(path)
        passed.add(1, None)
        assert passed.in_transit(ROOM) == (1, 1)


@pytest.mark.usefixtures("patient")
def test_the_oldest_of_many_are_forgotten(tmp_path: Path) -> None:
    passed = Passed(tmp_path / "passed")
    for number in range(1000):
        passed.add(number, ROOM)
    kept = range(1000 - Passed._NUM_KEPT, 1000)
    now = ROOM._replace(num_received=3, num_received_tokens=7)
    assert passed.in_transit(now) == (len(kept) - 3, sum(kept) - 7)


def test_without_a_file_the_engine_alone_refuses(tmp_path: Path) -> None:
    file = LoadFile(tmp_path / "nowhere" / "load")
    file.publish(FULL)
    LoadFile(tmp_path / "nowhere" / "load").raise_if_full()


def test_its_room_is_taken_when_it_is_made(tmp_path: Path) -> None:
    LoadFile(tmp_path / "load")
    assert (tmp_path / "load").stat().st_blocks > 0
