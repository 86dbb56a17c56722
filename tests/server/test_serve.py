"""`slipstream serve` itself: what it refuses, how it ends, and that it leaves nothing behind.

The models here are tiny Python models of Triton's own: what is under test is the watcher.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from fixtures.server.serve_process import (
    Serve,
    assert_one_line,
    run_to_end,
)
from fixtures.tiers import quick_of
from fixtures.waiting import wait_for
from slipstream_runtime.directory import VARIABLE
from slipstream_serve import triton
from slipstream_serve.server import server_directory
from slipstream_serve.supervise import FIRST_PAUSE_S, STEADY_S, _Pauses
from slipstream_serve.triton import (
    SHARED_MEMORY,
    ServeError,
    check_shared_memory,
)
from slipstream_serve.workarounds.triton_24_10 import http_notes
from tritonclient.utils import InferenceServerException

pytestmark = [
    pytest.mark.triton,
    pytest.mark.beside,
    pytest.mark.skipif(not server_directory().is_dir(), reason="no tritonserver: make install"),
]
CONFIG = """
name: "echo"
backend: "python"
max_batch_size: 0
input [{ name: "IN" data_type: TYPE_STRING dims: [ 1 ] }]
output [{ name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }]
instance_group [{ kind: KIND_CPU count: 1 }]
"""
ECHO = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb.get_input_tensor_by_name(request, "IN") for request in requests]
        return [pb.InferenceResponse([pb.Tensor("OUT", tensor.as_numpy())]) for tensor in inputs]
"""
BROKEN = """
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("checkpoint/config.json: no such file")
"""
# A model that starts a process which leaves its session and ignores SIGTERM.
STUBBORN = (
    ECHO
    + """
    def initialize(self, args):
        import os, subprocess
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([os.environ["SLIPSTREAM_PYTHON"], "-c", code], start_new_session=True)
"""
)


# Its first start takes so long that a test can stop it meanwhile.
SLOW = (
    ECHO
    + """
    def initialize(self, args):
        import os, pathlib, time
        begun = pathlib.Path(os.environ["SLIPSTREAM_RUNTIME_DIR"]).parent / "begun"
        if not begun.exists():
            begun.touch()
            time.sleep(4)
"""
)


def write_model(folder: Path, code: str = ECHO) -> Path:
    """A repository with the one model `echo`."""
    (folder / "echo" / "1").mkdir(parents=True)
    (folder / "echo" / "config.pbtxt").write_text(CONFIG)
    (folder / "echo" / "1" / "model.py").write_text(code)
    return folder


@pytest.mark.parametrize(
    "number", quick_of([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], [signal.SIGTERM])
)
def test_a_signal_ends_it_without_a_trace(
    tmp_path: Path, scratch: Path, number: signal.Signals
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as if no nohup had started the tests
    serve = Serve(write_model(tmp_path), scratch)
    signal.signal(signal.SIGHUP, before)
    serve.wait_ready()
    with urllib.request.urlopen(serve.url("/v2/health/ready")) as reply:
        assert reply.status == 200
    assert len(serve.processes()) >= 2  # the server and a stub
    assert serve.shared_memory()
    assert serve.end(number) < 120
    assert serve.process.returncode == 0
    serve.assert_gone()


@pytest.mark.rest
def test_a_start_that_hangs_since_the_machine_stood_still_is_begun_again(
    tmp_path: Path, scratch: Path
) -> None:
    """Triton looks first when both go on, takes the process for dead and waits for its end."""
    serve = Serve(write_model(tmp_path, SLOW), scratch)
    wait_for(lambda: (scratch / "begun").exists())
    server, stub = serve.pid("bin/tritonserver"), serve.pid("echo_0_0")
    for pid in (server, stub):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(server, signal.SIGCONT)
    time.sleep(1)
    os.kill(stub, signal.SIGCONT)
    shown = serve.wait_ready()
    assert f"tritonserver waits for the end of echo_0_0 (pid {stub}), which does not end" in shown
    assert serve.pid("bin/tritonserver") != server
    assert serve.end(signal.SIGTERM) < 120
    serve.assert_gone()


@pytest.mark.rest
def test_a_process_that_will_not_end_is_ended(tmp_path: Path, scratch: Path) -> None:
    serve = Serve(write_model(tmp_path, STUBBORN), scratch)
    serve.wait_ready()
    assert any("SIG_IGN" in line for line in serve.processes())
    assert serve.end(signal.SIGTERM) < 120
    assert serve.process.returncode == 0
    serve.assert_gone()


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.01, 0.05, 0.2])
@pytest.mark.rest
def test_a_signal_while_starting_ends_it_too(tmp_path: Path, scratch: Path, delay_s: float) -> None:
    serve = Serve(write_model(tmp_path), scratch)
    assert serve.process.stdout is not None
    serve.process.stdout.readline()  # "starting ..."
    time.sleep(delay_s)
    assert serve.end(signal.SIGTERM) < 120
    assert serve.process.returncode == 0
    serve.assert_gone()


@pytest.mark.rest
def test_a_server_that_aborts_while_it_starts_is_started_again(
    tmp_path: Path, scratch: Path
) -> None:
    serve = Serve(write_model(tmp_path), scratch)
    assert serve.process.stdout is not None
    serve.process.stdout.readline()  # "starting ..."
    while not any("--http-port=" in line for line in serve.processes()):
        time.sleep(0.01)
    os.kill(serve.pid("--http-port="), signal.SIGABRT)
    serve.wait_ready()
    assert echo(serve)
    assert serve.end(signal.SIGTERM) < 120
    serve.assert_gone()


def echo(serve: Serve) -> bytes:
    with urllib.request.urlopen(serve.url("/v2/models/echo/generate"), b'{"IN": "to"}') as reply:
        return reply.read()


def test_responses_have_room_from_the_first_start_on(tmp_path: Path, scratch: Path) -> None:
    """Not only after a repair: what waits for a busy HTTP thread is lost without it."""
    serve = Serve(write_model(tmp_path), scratch)
    serve.wait_ready()
    rooms = []
    try:
        for end in http_notes._pairs(serve.pid("--http-port=")):
            with end:
                rooms.append(end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
    except OSError as error:
        pytest.skip(f"no process may reach into another here: {error}")
    finally:
        serve.end(signal.SIGTERM)
    usual = int(Path("/proc/sys/net/core/wmem_default").read_text())
    allowed = int(Path("/proc/sys/net/core/wmem_max").read_text())
    assert min(rooms) >= 2 * allowed > usual


def test_no_socket_pair_is_opened_after_ready(tmp_path: Path) -> None:
    """The metrics' pairs are opened after the port for HTTP answers."""
    server = triton.TritonServer(write_model(tmp_path), triton.Endpoints.free(), tmp_path / "log")
    try:
        server.start()
        deadline = time.monotonic() + 120
        while not server.is_ready():
            assert time.monotonic() < deadline
        counts = [count_pairs(server.pid)]
        time.sleep(0.3)
        counts.append(count_pairs(server.pid))
    except PermissionError as error:
        pytest.skip(f"no process may reach into another here: {error}")
    finally:
        server.stop()
    assert counts[0] == counts[1] > 0


def count_pairs(pid: int) -> int:
    ends = list(http_notes._pairs(pid))
    for end in ends:
        end.close()
    return len(ends)


def test_what_dies_is_started_again(tmp_path: Path, scratch: Path) -> None:
    """The server itself would go on calling itself ready, and its clients would wait for ever."""
    serve = Serve(write_model(tmp_path), scratch)
    serve.wait_ready()
    os.kill(serve.pid("--http-port="), signal.SIGKILL)
    line = serve.wait_line("repair 1, ")
    assert "tritonserver was ended by SIGKILL" in line
    assert line.endswith("; started tritonserver again\n")
    assert b"to" in echo(serve)
    server = serve.pid("--http-port=")
    os.kill(serve.pid("triton_python_backend_stub"), signal.SIGKILL)
    line = serve.wait_line("repair 2, ")
    assert re.search(r"the process of model echo( \(pid \d+\))? ended; loaded echo again$", line)
    assert b"to" in echo(serve)
    assert serve.pid("--http-port=") == server
    assert serve.end(signal.SIGTERM) < 120
    assert serve.process.returncode == 0
    serve.assert_gone()


@pytest.mark.rest
def test_nobody_else_may_unload_a_model(tmp_path: Path, scratch: Path) -> None:
    serve = Serve(write_model(tmp_path), scratch)
    serve.wait_ready()
    url = serve.url("/v2/repository/models/echo/unload")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, b"{}")
    assert refused.value.code == 403
    with grpcclient.InferenceServerClient(f"127.0.0.1:{serve.ports[1]}") as client:
        with pytest.raises(InferenceServerException, match="restricted"):
            client.unload_model("echo")
        assert client.is_model_ready("echo")
    serve.end(signal.SIGTERM)


def test_repairs_of_one_thing_wait_longer_and_longer() -> None:
    now_s = time.monotonic()
    pauses = _Pauses()
    waits = []
    for _ in range(10):
        pauses.note(now_s)
        waits.append(round(pauses.due_s() - pauses.repaired_s, 3))
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]
    pauses.note(now_s + 2 * STEADY_S)
    assert pauses.due_s() - pauses.repaired_s == FIRST_PAUSE_S


@pytest.mark.rest
def test_a_killed_watcher_takes_the_server_with_it(tmp_path: Path, scratch: Path) -> None:
    serve = Serve(write_model(tmp_path), scratch)
    serve.wait_ready()
    serve.end(signal.SIGKILL)
    deadline = time.monotonic() + 120
    while serve.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert serve.processes() == []


@pytest.mark.rest
def test_a_path_with_spaces_and_quotes(tmp_path: Path, scratch: Path) -> None:
    serve = Serve(write_model(tmp_path / "it's a path; with $HOME"), scratch)
    serve.wait_ready()
    data = b'{"IN": "to and fro"}'
    with urllib.request.urlopen(serve.url("/v2/models/echo/generate"), data) as reply:
        assert b"to and fro" in reply.read()
    serve.end(signal.SIGTERM)
    serve.assert_gone()


@pytest.mark.rest
def test_a_model_that_cannot_load_is_named(tmp_path: Path, scratch: Path) -> None:
    serve = Serve(write_model(tmp_path, BROKEN), scratch)
    _, errors = serve.process.communicate(timeout=120)
    assert serve.process.returncode == 1
    assert errors == "slipstream: echo: checkpoint/config.json: no such file\n"
    serve.assert_gone()


@pytest.mark.parametrize("name", ["http", "grpc", "metrics"])
def test_a_port_in_use_is_named(tmp_path: Path, name: str) -> None:
    free = triton.Endpoints.free()
    ports = {"http": free.http_port, "grpc": free.grpc_port, "metrics": free.metrics_port}
    with socket.socket() as other:
        other.bind(("127.0.0.1", ports[name]))
        other.listen()
        flags = [text for key, port in ports.items() for text in (f"--{key}-port", str(port))]
        done = run_to_end("--model-repository", str(write_model(tmp_path)), *flags)
    assert_one_line(done, str(ports[name]), f"--{name}-port")


def test_ports_that_are_no_ports(tmp_path: Path) -> None:
    repository = str(write_model(tmp_path))
    same = run_to_end("--model-repository", repository, "--http-port", "8001")
    assert_one_line(same, "differ")
    beyond = run_to_end("--model-repository", repository, "--http-port", "70000")
    assert beyond.returncode == 2  # as other arguments that are none
    [line] = beyond.stderr.splitlines()
    for word in ("70000", "--http-port", "65535"):
        assert word in line


def test_repositories_that_cannot_be_served(tmp_path: Path) -> None:
    assert_one_line(run_to_end("--model-repository", str(tmp_path / "none")), "no such directory")
    assert_one_line(run_to_end("--model-repository", str(tmp_path)), "contains no model")
    (tmp_path / "config.json").touch()
    with pytest.raises(triton.ServeError, match="compose` makes a repository of a checkpoint"):
        triton.check_repository(tmp_path)
    repository = write_model(tmp_path)
    shutil.rmtree(repository / "echo" / "1")
    assert_one_line(run_to_end("--model-repository", str(repository)), "version directory")


def test_too_little_shared_memory_is_said_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_shared_memory()
    little = types.SimpleNamespace(f_bavail=16, f_frsize=1 << 20)
    monkeypatch.setattr(triton.os, "statvfs", lambda path: little)
    with pytest.raises(ServeError, match=r"/dev/shm has 16 MiB free, 32 are needed"):
        check_shared_memory(7)
    with pytest.raises(ServeError, match=r"80 are needed"):
        check_shared_memory(20)


CLEAN = """
import os, sys
from slipstream_serve.triton import clean_leftovers
os.mkdir(os.path.join(sys.argv[1], f"slipstream-serve-{os.getpid()}-abcd"))
clean_leftovers()
"""


def test_only_leftovers_of_dead_watchers_are_removed(scratch: Path) -> None:
    """Remove those of a process with this pid, too: a restarted container reuses it."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    pids = (ended.pid, os.getpid())
    regions = [SHARED_MEMORY / f"slipstream_{pid}_00000000_test" for pid in pids]
    folders = [scratch / f"slipstream-serve-{pid}-abcd" for pid in pids]
    for region, folder in zip(regions, folders, strict=True):
        region.write_bytes(b"")
        folder.mkdir()
        (folder / "engine.log").write_text("")
    stubs = [
        subprocess.Popen(["sleep", "600"], env={**os.environ, VARIABLE: str(folder)})
        for folder in folders
    ]
    try:
        environment = os.environ | {"TMPDIR": str(scratch)}
        subprocess.run([sys.executable, "-c", CLEAN, str(scratch)], env=environment, check=True)
        assert [path.exists() for path in regions] == [False, True]
        assert list(scratch.glob("slipstream-serve-*")) == folders[1:]
        assert stubs[0].wait(10) == -signal.SIGKILL  # which held its server's ports
        assert stubs[1].poll() is None
    finally:
        regions[1].unlink()
        for stub in stubs:
            stub.kill()
            stub.wait()
