import contextlib
import fcntl
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from fixtures.bridge.launching import CONFIG, Deaf, Server, is_alive, wait_lost
from fixtures.waiting import wait_for
from slipstream.bridge.connection import Connection
from slipstream.config import EngineConfig
from slipstream.launch import SupervisorStarter
from slipstream_runtime.directory import Runtime, open_runtime
from slipstream_runtime.turns import Standstill, Turns
from slipstream_runtime.waking import gentle_children


@pytest.fixture
def server(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_PYTHON", sys.executable)
    config = EngineConfig(checkpoint=str(checkpoint), load_format="random", device="cpu")
    server = Server(tmp_path / "run", config)
    yield server
    server.stop()
    wait_for(lambda: not server.supervisor and not server.engine)


def test_one_engine_serves_all_and_is_replaced_when_it_dies_and_ends_with_the_server(server):
    for supervision in server.supervisions:
        supervision.ensure()
    connection = server.connect()
    first = connection.wait_welcome(180)
    assert first is not None, server.runtime.log.read_text()
    assert first.engine_pid == server.engine
    assert server.is_locked
    os.kill(first.engine_pid, signal.SIGKILL)
    wait_lost(connection, first.engine_pid)
    second = connection.wait_welcome(180)
    assert second is not None
    assert second.engine_pid != first.engine_pid
    # A supervisor that is killed takes its engine along, and the bridges start the next.
    os.kill(server.supervisor, signal.SIGKILL)
    wait_for(lambda: not is_alive(second.engine_pid))
    wait_lost(connection, second.engine_pid)
    third = connection.wait_welcome(180)
    assert third is not None
    assert third.engine_pid not in (first.engine_pid, second.engine_pid)
    connection.close()
    server.stop()
    wait_for(lambda: not server.supervisor and not server.engine)
    assert not server.runtime.socket.exists()
    assert not server.runtime.error.exists()


def policies(pid: int) -> set[int]:
    """Return the scheduling policies of all threads of a process."""
    found = set()
    for entry in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            found.add(os.sched_getscheduler(int(entry.name)))
    return found


@pytest.mark.rest
def test_an_engine_wakes_at_once_though_all_that_starts_it_wakes_gently(server):
    with gentle_children():
        server.supervisions[0].ensure()
    connection = server.connect()
    for _ in range(2):
        welcome = connection.wait_welcome(180)
        assert welcome is not None, server.runtime.log.read_text()
        assert policies(server.supervisor) == {os.SCHED_BATCH}
        assert policies(welcome.engine_pid) == {os.SCHED_OTHER}
        os.kill(welcome.engine_pid, signal.SIGKILL)
        wait_for(lambda: connection.wait_welcome(0) is None)
    connection.close()


@pytest.mark.rest
def test_a_hangup_ends_neither_engine_nor_supervisor(server):
    """The kernel sends SIGHUP to a group that is orphaned while a process of it is stopped."""
    server.supervisions[0].ensure()
    connection = server.connect()
    welcome = connection.wait_welcome(180)
    assert welcome is not None, server.runtime.log.read_text()
    assert os.getpgid(welcome.engine_pid) == server.supervisor != os.getpgrp()
    os.killpg(server.supervisor, signal.SIGHUP)
    time.sleep(0.2)
    assert connection.wait_welcome(0) is welcome
    assert is_alive(welcome.engine_pid)
    assert is_alive(server.supervisor)
    connection.close()


@pytest.mark.rest
def test_an_engine_that_cannot_start_leaves_one_line_and_no_process(server, checkpoint):
    (checkpoint / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["Gpt5"]}))
    for supervision in server.supervisions:
        supervision.ensure()
    wait_for(lambda: server.supervisions[2].failure() is not None)
    text = server.runtime.error.read_text()
    assert "Gpt5" in text
    assert text.count("\n") == 1
    assert "Traceback" not in text
    wait_for(lambda: not server.is_locked)
    with pytest.raises(RuntimeError, match="Gpt5"):
        server.supervisions[1].ensure()  # the others need not try the same
    # A bridge that comes later begins with a clean slate.
    (checkpoint / "config.json").write_text(json.dumps(CONFIG))
    time.sleep(0.1)
    later = SupervisorStarter(server.runtime, server.supervisions[0]._config, server.process.pid)
    assert later.failure() is None
    later.ensure()
    connection = server.connect()
    assert connection.wait_welcome(180)
    connection.close()


@pytest.mark.rest
def test_an_engine_that_is_stuck_is_ended_and_says_where(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_PYTHON", sys.executable)
    config = EngineConfig(
        checkpoint=str(checkpoint), load_format="random", device="cpu", stuck_after_s=3
    )
    server = Server(tmp_path / "run", config)
    connection = server.connect()
    try:
        first = connection.wait_welcome(180)
        assert first is not None, server.runtime.log.read_text()
        time.sleep(1.0)
        assert server.engine == first.engine_pid
        os.kill(first.engine_pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(first.engine_pid, signal.SIGCONT)
        assert connection.request_status(30).engine_pid == first.engine_pid
        os.kill(first.engine_pid, signal.SIGSTOP)
        wait_for(lambda: connection.wait_welcome(0) is None)
        second = connection.wait_welcome(180)
        assert second is not None
        assert second.engine_pid != first.engine_pid
        assert f"(pid {first.engine_pid}) made no turn for 3 s" in server.runtime.log.read_text()
        os.kill(second.engine_pid, signal.SIGUSR1)
        wait_for(lambda: "in turn" in server.runtime.log.read_text())
    finally:
        connection.close()
        server.stop()
        wait_for(lambda: not server.supervisor and not server.engine)


def test_only_time_spent_looking_counts(tmp_path, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr("slipstream_runtime.turns.time.monotonic", lambda: now_s)
    path = tmp_path / "turns"
    path.write_bytes(b"another!")
    standstill = Standstill(path)
    now_s += 500
    assert standstill.look() == 0  # it has not begun
    turns = Turns(path)
    for _ in range(3):
        turns.count()
        now_s += 1
        assert standstill.look() == 0
    for seconds in (1, 2):
        now_s += 1
        assert standstill.look() == seconds
    now_s += 500  # all stood still, the supervisor too
    assert standstill.look() == 4
    turns.count()
    assert standstill.look() == 0


def test_turns_need_no_room_for_a_file(tmp_path):
    turns = Turns(tmp_path / "absent" / "turns")
    turns.count()
    path = tmp_path / "turns"
    Turns(path).count()
    place = path.stat().st_ino
    Standstill(path)
    Turns(path).count()
    assert (path.stat().st_ino, path.read_bytes()) == (place, b"\x01" + bytes(7))


def test_a_failure_is_new_or_old_whatever_the_clock_says(tmp_path, monkeypatch):
    runtime = Runtime(tmp_path)
    config = EngineConfig(checkpoint="absent")
    runtime.error.write_text("old")
    for ahead_s in (-3600, 0, 3600):
        os.utime(runtime.error, (time.time() + ahead_s,) * 2)
        supervision = SupervisorStarter(runtime, config, os.getpid())
        assert supervision.failure() is None
        runtime.error.unlink()
        assert supervision.failure() is None
        runtime.error.write_text("new")
        os.utime(runtime.error, (time.time() - 2 * ahead_s - 1,) * 2)
        assert supervision.failure() == "new"
        with pytest.raises(RuntimeError, match="new"):
            supervision.ensure()


@pytest.fixture
def short_path(monkeypatch):
    """The temporary directory of servers that run alone; a socket's name has room in it."""
    with tempfile.TemporaryDirectory(prefix="run-", dir="/tmp") as folder:
        monkeypatch.delenv("SLIPSTREAM_RUNTIME_DIR", raising=False)
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)


def test_the_runtime_directory_is_private(short_path, monkeypatch):
    server = os.getpid()
    runtime = open_runtime(server)
    assert runtime == open_runtime(server)
    assert runtime != open_runtime(os.getppid())
    assert runtime.directory.stat().st_mode & 0o777 == 0o700
    runtime.directory.chmod(0o777)
    with pytest.raises(PermissionError):
        open_runtime(server)
    (short_path / "elsewhere").mkdir(mode=0o700)
    runtime.directory.rmdir()
    runtime.directory.symlink_to(short_path / "elsewhere")
    with pytest.raises(PermissionError):
        open_runtime(server)
    monkeypatch.setattr("tempfile.tempdir", str(short_path / ("x" * 90)))
    (short_path / ("x" * 90)).mkdir()
    with pytest.raises(ValueError, match="longer than"):
        open_runtime(server)


def test_a_server_takes_nothing_over_from_one_of_the_same_number(short_path):
    """A container that is started again has its files, and its processes have their numbers."""
    server = os.getpid()
    number = f"slipstream-{os.getuid()}-{server}"
    dead, living = short_path / f"{number}-0000000a", short_path / f"{number}-0000000b"
    for directory in (dead, living):
        directory.mkdir(mode=0o700)
        Runtime(directory).stopping.touch()
        Runtime(directory).lock.touch()
    other = short_path / f"{number}1-0000000a"  # of another number
    other.mkdir()
    with Runtime(living).lock.open("rb") as lock:  # as a supervisor of another container does
        fcntl.flock(lock, fcntl.LOCK_EX)
        runtime = open_runtime(server)
    assert not runtime.stopping.exists()
    assert set(short_path.iterdir()) == {runtime.directory, living, other}


def processes_of(module: str, directory: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            is_ours = str(directory).encode() in command and module.encode() in command
            if is_ours and is_alive(int(entry.name)):
                found.append(int(entry.name))
    return found


@pytest.mark.rest
def test_an_engine_ends_when_its_last_model_is_unloaded_and_comes_back_with_the_next(server):
    directory = server.runtime.directory
    first, second = server.connect(), server.connect()
    engine = first.wait_welcome(180).engine_pid
    assert second.wait_welcome(180).engine_pid == engine
    first.close()
    time.sleep(4.5)
    assert second.wait_welcome(10).engine_pid == engine  # one that is left keeps it
    second.close()
    wait_for(lambda: not server.engine)
    wait_for(lambda: not server.is_locked)
    parked = server.supervisor
    assert parked  # it cleans up where no other does
    assert server.runtime.unloaded.exists()
    third = server.connect()
    again = third.wait_welcome(180)
    assert again is not None
    assert again.engine_pid != engine
    assert not server.runtime.unloaded.exists()
    wait_for(lambda: not is_alive(parked))
    assert len(processes_of("slipstream.launch", directory)) == 1
    third.close()
    wait_for(lambda: not server.engine)
    server.stop()
    wait_for(lambda: not server.supervisor)


def test_a_connection_that_keeps_nothing_does_not_keep_the_engine(server):
    model = server.connect()
    engine = model.wait_welcome(180).engine_pid
    address = server.runtime.address
    gateway = Connection(address, "gateway", Deaf(), lambda: None, keeps_engine=False)
    assert gateway.wait_welcome(180).engine_pid == engine
    model.close()
    wait_for(lambda: not server.engine)
    gateway.close()


@pytest.mark.rest
def test_engines_of_a_server_have_files_of_their_own(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_PYTHON", sys.executable)
    config = EngineConfig(checkpoint=str(checkpoint), load_format="random", device="cpu")
    server = Server(tmp_path / "run", config)
    other = server.runtime.of("engine-chat")
    other.home.mkdir()
    starter = SupervisorStarter(other, config, server.process.pid)
    plain = server.connect()
    chat = Connection(other.address, "test", Deaf(), starter.ensure)
    try:
        pids = {plain.wait_welcome(180).engine_pid, chat.wait_welcome(60).engine_pid}
        assert len(pids) == 2
        os.kill(chat.wait_welcome(0).engine_pid, signal.SIGKILL)
        wait_for(lambda: chat.wait_welcome(0) is None)
        assert plain.wait_welcome(0) is not None
        assert chat.wait_welcome(180).engine_pid not in pids
        assert other.log.exists()
    finally:
        plain.close()
        chat.close()
        server.stop()
        wait_for(lambda: not server.supervisor and not server.engine)
