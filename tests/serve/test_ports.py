"""Ports for servers of tests: nobody gets one that somebody has, or may get from the kernel."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from slipstream_serve import ports
from slipstream_serve.triton import Endpoints

TAKER = """
import sys
from slipstream_serve import ports
ports.random.shuffle = lambda found: None
print(*ports.free_ports(8), flush=True)
sys.stdin.read()
"""


def test_ports_are_below_the_kernels_and_nobody_gets_one_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ports.random, "shuffle", lambda found: None)  # each in the same order
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = [Endpoints.free() for _ in range(20)]
    given = [n for each in found for n in (each.http_port, each.grpc_port, each.metrics_port)]
    assert len(set(given)) == len(given) == 60
    assert max(given) < first
    for each in found:
        each.check_free()


def test_processes_that_live_share_no_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    takers = [start() for _ in range(3)]
    try:
        given = [ports_of(each) for each in takers]
        assert len(set().union(*given)) == 24
        takers[0].kill()
        takers[0].wait()
        takers.append(start())
        again = ports_of(takers[-1])
        assert again.isdisjoint(given[1] | given[2])
        assert again & given[0]
    finally:
        for each in takers:
            each.kill()
            each.communicate()


def start() -> subprocess.Popen[str]:
    """Start a process that takes ports, in the order that all do."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", TAKER], text=True, **pipes)


def ports_of(taker: subprocess.Popen[str]) -> set[int]:
    assert taker.stdout is not None
    return set(map(int, taker.stdout.readline().split()))


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    [port] = ports.free_ports(1)
    monkeypatch.setattr(ports, "_given", set())
    monkeypatch.setattr(ports.random, "shuffle", lambda found: found.append(port))
    with socket.socket() as used:
        used.bind(("127.0.0.1", port))
        assert ports.free_ports(1) != [port]
    assert ports.free_ports(1) == [port]
