"""What a model's process does at its start: bytes written faster, a collector that rests."""

import gc
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream_runtime import stub
from slipstream_runtime.stub import must_end, quicken_bytes, rest_collector


def of_2410(array: np.ndarray) -> Any:
    """What Triton's Python backend did in 24.10: each element behind its length."""
    if array.size == 0:
        return ()
    parts = []
    for item in array.ravel():
        data = item if type(item) is bytes else str(item).encode()
        parts += [struct.pack("<I", len(data)), data]
    return b"".join(parts)


def of_another(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(of_2410(array), np.uint8)


def quickened(theirs: Callable[[np.ndarray], Any]) -> Callable[[np.ndarray], Any]:
    utilities = SimpleNamespace(serialize_byte_tensor=theirs)
    quicken_bytes(utilities)
    serialize: Callable[[np.ndarray], Any] = utilities.serialize_byte_tensor
    return serialize


@given(st.lists(st.binary(max_size=9) | st.text(max_size=5), max_size=6), st.booleans())
def test_bytes_are_written_as_before(items: list[bytes | str], is_column: bool) -> None:
    array = np.empty((len(items), 1) if is_column else len(items), dtype=object)
    array.ravel()[:] = items
    serialize = quickened(of_2410)
    assert serialize is not of_2410
    assert serialize(array) == of_2410(array)


def test_arrays_of_fixed_sizes_are_left_to_the_server() -> None:
    array = np.array([b"ab", b"c"])
    assert quickened(of_2410)(array) == of_2410(array)


def test_a_server_that_writes_otherwise_keeps_its_own() -> None:
    assert quickened(of_another) is of_another
    quicken_bytes(SimpleNamespace())  # and one that has none is as it was


@pytest.fixture
def collector() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("collector")
def test_waiting_tokens_bring_no_collection_about() -> None:
    """Hold 4 waiting tokens for each of 512 streams; cycles of ended requests are still found."""
    rest_collector()
    before = [each["collections"] for each in gc.get_stats()]
    for _ in range(20):
        waiting = [[[number], []] for number in range(4 * 512)]
        del waiting
    assert [each["collections"] for each in gc.get_stats()] == before
    collected = gc.get_stats()[0]["collected"]
    for _ in range(30_000):
        cycle: list[Any] = []
        cycle.append(cycle)
    assert gc.get_stats()[0]["collected"] > collected


def test_a_process_that_waits_for_a_dead_server_ends() -> None:
    """No thread of Python could end it: the call keeps the interpreter."""
    code = (
        "import ctypes\n"
        "from slipstream_runtime.stub import must_end\n"
        "with must_end(0.2): pass\n"
        "ctypes.PyDLL(None).usleep(700_000)\n"  # keeps the interpreter
        "print('past', flush=True)\n"
        "with must_end(0.2): ctypes.PyDLL(None).sleep(600)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert found.stdout == b"past\n"
    assert found.returncode == 1
    assert b"Timeout (0:00:00" in found.stderr


def test_a_process_with_a_reply_goes_on() -> None:
    with pytest.raises(KeyError), must_end(30.0):
        raise KeyError


def test_a_process_keeps_no_connection_of_its_parent(tmp_path: Path) -> None:
    """Pairs are closed as well, so that the other side sees the end. A socket with a name stays."""
    ends, pair, named = connected(), socket.socketpair(), socket.socket(socket.AF_UNIX)
    named.bind(str(tmp_path / "named"))
    named.listen()
    program = f"""
import sys
sys.path.insert(0, {str(Path(stub.__file__).parents[1])!r})
from slipstream_runtime.stub import close_inherited
close_inherited()
import socket
socket.socket(fileno={named.fileno()}).accept()[0].sendall(b"here")
sys.stdin.read()
"""
    inherited = (ends[1].fileno(), pair[1].fileno(), named.fileno())
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=inherited) as process:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(30)
            client.connect(named.getsockname())
            assert client.recv(4) == b"here"
        for near, far in (ends, pair):
            far.close()
            near.settimeout(5)
            assert near.recv(1) == b""
            near.close()
        process.communicate()
    named.close()


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return client, listener.accept()[0]
