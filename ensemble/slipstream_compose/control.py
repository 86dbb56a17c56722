"""Loads and unloads models of a running server: over gRPC, which has a thread for each such call.

Over HTTP one of the eight threads that serve all clients would do it, and until it is done write
nothing to those whose connections it has. What they are owed is then noted in a socket that takes
some 280 notes; Triton drops the rest and never looks: these answers end too early and in good
order, or not at all (docs/faults.md).
"""

from __future__ import annotations

import os

# The import reads it. What this process forks calls exec at once; gRPC's hooks would start threads.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc

_METHODS = {
    verb: f"/inference.GRPCInferenceService/RepositoryModel{verb.capitalize()}"
    for verb in ("load", "unload")
}
_KEY_PREFIX = "triton-grpc-protocol-"  # Triton puts it before the header's name
_MODEL_NAME = b"\x12"  # field 2 of both requests
_OPTIONS = [("grpc.enable_http_proxy", 0)]  # no proxy stands between


def control(
    address: str, header: str, key: str, verb: str, model: str, timeout_s: float
) -> str | None:
    """`load` or `unload` a model; None, or one line that says why it failed."""
    with grpc.insecure_channel(address, _OPTIONS) as channel:
        call = channel.unary_unary(_METHODS[verb])  # bytes go and come as they are
        try:
            call(_request(model), timeout_s, ((_KEY_PREFIX + header, key),))
        except grpc.RpcError as error:
            lines = str(error.details() or "").strip().splitlines()
            return lines[0] if lines else error.code().name
    return None


def _request(model: str) -> bytes:
    """A `RepositoryModelLoadRequest`, or one to unload, of that name alone."""
    name = model.encode()
    size, length = len(name), b""
    while size > 0x7F:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return _MODEL_NAME + length + bytes([size]) + name
