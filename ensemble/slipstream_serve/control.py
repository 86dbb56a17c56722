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
from tritonclient.grpc import service_pb2, service_pb2_grpc

_KEY_PREFIX = "triton-grpc-protocol-"  # Triton puts it before the header's name
_OPTIONS = [("grpc.enable_http_proxy", 0)]  # no proxy stands between


def control(
    address: str, header: str, key: str, verb: str, model: str, timeout_s: float
) -> str | None:
    """`load` or `unload` a model; None, or one line that says why it failed."""
    with grpc.insecure_channel(address, _OPTIONS) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call, request = {
            "load": (stub.RepositoryModelLoad, service_pb2.RepositoryModelLoadRequest),
            "unload": (stub.RepositoryModelUnload, service_pb2.RepositoryModelUnloadRequest),
        }[verb]
        try:
            call(request(model_name=model), timeout_s, ((_KEY_PREFIX + header, key),))
        except grpc.RpcError as error:
            lines = str(error.details() or "").strip().splitlines()
            return lines[0] if lines else error.code().name
    return None
