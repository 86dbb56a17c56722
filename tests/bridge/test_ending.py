"""Where a tritonserver listens, and the file that announces its end to the bridges."""

import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from slipstream.bridge.ending import EndWatch, http_address
from slipstream_runtime.directory import Runtime


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ([], ("127.0.0.1", 8000)),
        (["--http-port=81", "--grpc-port=82"], ("127.0.0.1", 81)),
        (["--http-port", "81", "--http-address", "0.0.0.0"], ("127.0.0.1", 81)),
        (["--disable-auto-complete-config", "--http-address=10.1.2.3"], ("10.1.2.3", 8000)),
        (["--allow-http=false"], None),
        (["--allow-http", "0"], None),
        (["--http-port=x"], None),
    ],
)
def test_where_it_listens(options: list[str], address: tuple[str, int] | None) -> None:
    assert http_address(["tritonserver", "--model-repository=m", *options]) == address


@pytest.mark.parametrize("how", ["listens no more", "turns away"])
def test_a_server_that_takes_no_connection_is_ending(tmp_path: Path, how: str) -> None:
    runtime = Runtime(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        option = f"--http-port={listening.getsockname()[1]}"
        command = [sys.executable, "-c", "import sys; sys.stdin.read()", option]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            while option not in Path(f"/proc/{process.pid}/cmdline").read_text():
                time.sleep(0.01)
            watch = EndWatch(runtime, process.pid)
            for _ in range(3):
                with listening.accept()[0] as link:
                    assert link.recv(1) == b""  # until it has looked
            assert not runtime.stopping.exists()
            if how == "turns away":
                listening.settimeout(0.01)
            else:
                listening.close()
            begin = time.monotonic()
            while not runtime.stopping.exists():
                assert time.monotonic() - begin < 120
                if how == "turns away":
                    with suppress(TimeoutError):
                        listening.accept()[0].close()
                else:
                    time.sleep(0.01)
            watch.close()
            process.stdin.close()


def test_one_that_never_listened_is_not_ending(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody else listens there meanwhile
        option = f"--http-port={unused.getsockname()[1]}"
        command = [sys.executable, "-c", "import sys; sys.stdin.read()", option]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            while option not in Path(f"/proc/{process.pid}/cmdline").read_text():
                time.sleep(0.01)
            watch = EndWatch(Runtime(tmp_path), process.pid)
            time.sleep(0.5)
            watch.close()
            process.stdin.close()
    assert not Runtime(tmp_path).stopping.exists()
