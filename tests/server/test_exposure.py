"""What a server shows to others: sockets, files, and what its processes do with data from outside.

The sockets are those that the kernel lists for every process of a server, not those that a
configuration names.
"""

import json
import os
import re
import shlex
import signal
import socket
import stat
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from fixtures.server.listening import listening
from fixtures.server.serve_process import Serve, environment, living, short_directory
from fixtures.server.support import PROMPT
from slipstream_serve.triton import SHARED_MEMORY
from tritonclient.utils import InferenceServerException

pytestmark = [pytest.mark.triton, pytest.mark.beside]

AUDIT = Path(__file__).with_name("audited_engine.py")


def assert_exposed(pids: list[int], host: str, ports: set[int], runtime: Path, server: int) -> None:
    """The three ports, on that address and by tritonserver alone; all else in the directory."""
    deadline = time.monotonic() + 120  # the page of metrics comes last, a moment after the others
    while True:
        found = list(listening(pids))
        network = [(each.address, each.port) for each in found if each.kind != "unix"]
        if len(network) >= len(ports) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert sorted(port for _, port in network) == sorted(ports)
    # gRPC on all addresses includes those of IPv6.
    assert {address for address, _ in network} - {"::" if host == "0.0.0.0" else host} <= {host}
    assert {each.pid for each in found if each.kind != "unix"} == {server}
    local = [each for each in found if each.kind == "unix"]
    assert {Path(each.address) for each in local} == {runtime / "engine.sock"}
    state = runtime.lstat()
    assert stat.S_ISDIR(state.st_mode)
    assert stat.S_IMODE(state.st_mode) == 0o700
    assert state.st_uid == os.getuid()


def test_the_walk_sees_what_listens():
    closed = os.open(os.devnull, os.O_RDONLY)
    with short_directory() as folder, socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        tcp.bind(("127.0.0.1", 0))
        unix.bind(str(folder / "x"))
        assert not [each for each in listening([os.getpid()]) if each.address == str(folder / "x")]
        tcp.listen()
        unix.listen()
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as udp:
            udp.bind(("::", 0))
            os.close(closed)  # its number goes to the listing itself, below those of the sockets
            found = {(each.kind, each.address, each.port) for each in listening([os.getpid()])}
            assert ("udp", "::", udp.getsockname()[1]) in found
        assert ("tcp", "127.0.0.1", tcp.getsockname()[1]) in found
        assert ("unix", str(folder / "x"), 0) in found


def test_a_server_listens_on_its_three_ports_of_this_machine_alone(client):
    ends = client.server.endpoints
    ports = {ends.http_port, ends.grpc_port, ends.metrics_port}
    place = (ports, client.server.runtime.directory, client.server.pid)
    assert_exposed(list(client.server.processes()), "127.0.0.1", *place)
    client.generate("ensemble", text_input=PROMPT, max_tokens=4)
    client.stream("tensorrt_llm_bls", text_input=PROMPT, max_tokens=4, stream=True)
    client.stream("ensemble", text_input=PROMPT, max_tokens=4, stream=True)
    client.health()
    assert_exposed(list(client.server.processes()), "127.0.0.1", *place)
    assert len(list(client.server.processes())) >= 8  # the server, stubs, supervisor and engine


def test_the_triton_side_loads_neither_torch_nor_a_loader_of_objects(client):
    """By the libraries that each stub has mapped, beside the import rules for our own modules."""
    stubs = client.server.stubs()
    assert stubs
    for pid in stubs:
        maps = Path(f"/proc/{pid}/maps").read_text()
        packages = set(re.findall(r"site-packages/(\w+?)(?:\.libs)?/\S+\.so", maps))
        assert "numpy" in packages  # which each of them needs: the pattern finds what there is
        assert packages <= {"numpy", "msgspec", "zmq", "pyzmq", "tokenizers", "markupsafe"}


def write_audited_python(path: Path, events: Path) -> None:
    """An executable that, as `SLIPSTREAM_PYTHON`, runs the engine's processes audited."""
    words = shlex.join([sys.executable, "-P", str(AUDIT), str(events)])
    path.write_text(f'#!/bin/sh\nexec {words} "$0" "$@"\n')
    path.chmod(0o755)


def is_import(line: str) -> bool:
    """Whether the event is a module's source being compiled, and no text of eval or exec."""
    return line.startswith("compile ") and "<string>" not in line


def post(url: str, body: dict[str, object]) -> str:
    request = urllib.request.Request(url, data=json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.read().decode()


@pytest.mark.rest
def test_more_than_loopback_only_if_asked_and_no_object_is_ever_unpickled(repository, monkeypatch):
    """`slipstream serve --host 0.0.0.0`, its engine under an audit of what the interpreter does."""
    with short_directory() as folder:
        events = folder / "events"
        events.touch()
        write_audited_python(folder / "python", events)
        monkeypatch.setenv("SLIPSTREAM_PYTHON", str(folder / "python"))
        serve = Serve(repository, folder / "scratch", "--host", "0.0.0.0")
        try:
            assert "there is no authentication" in serve.wait_ready()
            (runtime,) = serve.scratch.glob("slipstream-serve-*")
            mark = f"SLIPSTREAM_RUNTIME_DIR={runtime}".encode()
            started = {pid: line for pid, line in living() if mark in environment(pid)}
            pids = [serve.process.pid, *started]
            (server,) = [pid for pid, line in started.items() if "/bin/tritonserver" in line]
            assert_exposed(pids, "0.0.0.0", set(serve.ports), runtime, server)
            num_before = len(events.read_text())
            bodies = {
                "ensemble": {"text_input": PROMPT, "max_tokens": 4, "stop_words": ["\n\n"]},
                "vllm_model": {"text_input": PROMPT},
            }
            for model, body in bodies.items():
                assert "text_output" in post(serve.url(f"/v2/models/{model}/generate"), body)
                assert "error" in post(serve.url(f"/v2/models/{model}/generate"), {"text_input": 3})
            assert_exposed(pids, "0.0.0.0", set(serve.ports), runtime, server)
        finally:
            serve.end(signal.SIGTERM)
        lines = [line.split(" ", 1) for line in events.read_text().splitlines()]
        after = events.read_text()[num_before:].splitlines()
        assert any(kind == "begin" and "slipstream.engine.process" in text for kind, text in lines)
        assert [text for kind, text in lines if kind in ("pickle.find_class", "os.system")] == []
        assert [text for kind, text in lines if kind == "socket.connect"] == []
        assert [line for line in after if not is_import(line)] == []


CLOSED = {
    "v2/systemsharedmemory/region/x/register": {"key": "/x", "offset": 0, "byte_size": 8},
    "v2/systemsharedmemory/status": None,
    "v2/cudasharedmemory/status": None,
    "v2/repository/index": {},
    "v2/repository/models/ensemble/unload": {},
    "v2/repository/models/ensemble/load": {"parameters": {"config": "{}"}},
    "v2/trace/setting": {"trace_level": ["TIMESTAMPS"]},
    "v2/logging": {"log_verbose_level": 9},
}


@pytest.mark.parametrize("path", CLOSED)
def test_what_no_client_needs_is_closed_over_http(client, path):
    body = CLOSED[path]
    request = urllib.request.Request(
        f"{client.http}/{path}", data=None if body is None else json.dumps(body).encode()
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=120)
    assert caught.value.code == 403
    request.add_header("slipstream-control", "0" * 32)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=120)
    assert caught.value.code == 403


def test_what_no_client_needs_is_closed_over_grpc(client):
    with grpcclient.InferenceServerClient(client.address) as remote:
        for call in (
            lambda: remote.register_system_shared_memory("x", "/x", 8),
            lambda: remote.get_system_shared_memory_status(),
            lambda: remote.get_cuda_shared_memory_status(),
            lambda: remote.get_model_repository_index(),
            lambda: remote.unload_model("ensemble"),
            lambda: remote.load_model("ensemble", config="{}"),
            lambda: remote.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]}),
            lambda: remote.update_log_settings({"log_verbose_level": 9}),
        ):
            with pytest.raises(InferenceServerException, match="restricted"):
                call()
        assert remote.is_server_ready()
        assert remote.get_model_config("ensemble")
        assert remote.get_inference_statistics("ensemble")


def test_nobody_else_can_read_what_the_models_share(client):
    prefix = client.server._prefix
    regions = list(SHARED_MEMORY.glob(f"{prefix}*"))
    assert len(regions) >= len(client.server.stubs()) > 0
    for region in regions:
        assert stat.S_IMODE(region.stat().st_mode) & 0o077 == 0, region
