"""Load and unload models of a running server, over gRPC, which has a thread for each such call.

Over HTTP one of the eight threads that serve all clients would do it, and write nothing to its
other connections until it is done. Their responses are noted in a socket that takes some 280 notes;
Triton drops the rest unnoticed: these answers end too early without an error, or never
(docs/faults.md).
"""

from __future__ import annotations

import os

# Read by the import. Children of this process exec at once; gRPC's fork hooks would start threads.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

_KEY_PREFIX = "triton-grpc-protocol-"  # Triton puts it before the header's name
_OPTIONS = [("grpc.enable_http_proxy", 0)]  # no proxy is used


def control(
    address: str, header: str, key: str, verb: str, model: str, timeout_s: float
) -> str | None:
    """Run `load` or `unload` for a model; return None, or the error in one line."""
    with grpc.insecure_channel(address, _OPTIONS) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call, request = {
            "load": (stub.RepositoryModelLoad, service_pb2.RepositoryModelLoadRequest),
            "unload": (stub.RepositoryModelUnload, service_pb2.RepositoryModelUnloadRequest),
        }[verb]
        try:
            call(request(model_name=model), timeout_s, ((_KEY_PREFIX + header, key),))
        except grpc.RpcError as error:
            return _line_of(error)
    return None


def loaded(address: str, header: str, key: str, timeout_s: float) -> set[str] | str:
    """Return the models that are ready; or the error in one line."""
    with grpc.insecure_channel(address, _OPTIONS) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = service_pb2.RepositoryIndexRequest(ready=True)
        try:
            answer = stub.RepositoryIndex(request, timeout_s, ((_KEY_PREFIX + header, key),))
        except grpc.RpcError as error:
            return _line_of(error)
    return {model.name for model in answer.models}


def _line_of(error: grpc.RpcError) -> str:
    lines = str(error.details() or "").strip().splitlines()
    return lines[0] if lines else str(error.code().name)
