"""Errors of NCCL name the rank, its host and the call; the library is one that only refuses."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from slipstream.kernels.comm import nccl
from slipstream_runtime.span import host_name

SOURCE = """
static int refused, behind;
static int of(int call) { return refused == call ? 2 : 0; }
struct Id { char bytes[128]; };
using Size = unsigned long;
extern "C" {
void refuse(int call, int later) { refused = call; behind = later; }
const char *ncclGetErrorString(int status) { return status == 2 ? "system error" : "remote error"; }
const char *ncclGetLastError(void *) { return "no socket"; }
int ncclGetUniqueId(void *) { return of(1); }
int ncclCommInitRank(void **, int, Id, int) { return of(2); }
int ncclAllReduce(const void *, void *, Size, int, int, void *, void *) { return of(3); }
int ncclSend(const void *, Size, int, int, void *, void *) { return of(4); }
int ncclRecv(void *, Size, int, int, void *, void *) { return of(5); }
int ncclCommGetAsyncError(void *, int *status) { *status = behind; return 0; }
}
"""
CALLS = {
    "ncclGetUniqueId": lambda made, x: None,
    "ncclCommInitRank": lambda made, x: None,
    "ncclAllReduce of 16 bytes": lambda made, x: made.sum(x, x),
    "ncclSend of 16 bytes": lambda made, x: made.send(x, 1),
    "ncclRecv of 16 bytes": lambda made, x: made.receive(x, 1),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("nccl")
    (folder / "nccl.cpp").write_text(SOURCE)
    built = folder / "libnccl.so.2"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", built, folder / "nccl.cpp"], check=True)
    return built


@pytest.mark.parametrize("call", CALLS)
def test_a_refused_call(call: str, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = ctypes.CDLL(str(library))
    monkeypatch.setattr(nccl.ctypes, "CDLL", lambda name: loaded)
    stream = type("Stream", (), {"cuda_stream": 0})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    loaded.refuse(1 + [*CALLS].index(call), 0)
    name = None if call == "ncclGetUniqueId" else 3

    def run() -> None:
        CALLS[call](nccl.Nccl(0, 2, lambda own: own, name), torch.zeros(4))

    reason = f"rank {name or 0} on {host_name()}: {call}: system error: no socket"
    with pytest.raises(nccl.NcclError, match=f"^{re.escape(reason)}$"):
        run()


def test_an_error_behind_a_call(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = ctypes.CDLL(str(library))
    monkeypatch.setattr(nccl.ctypes, "CDLL", lambda name: loaded)
    loaded.refuse(0, 0)
    made = nccl.Nccl(1, 2, lambda own: own)
    assert made.error() is None
    loaded.refuse(0, 7)  # in progress
    assert made.error() is None
    loaded.refuse(0, 6)
    assert made.error() == f"rank 1 on {host_name()}: remote error: no socket"
