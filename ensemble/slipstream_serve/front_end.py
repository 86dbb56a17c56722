"""Probe whether a server's gRPC streams still move.

One thread of tritonserver serves all gRPC streams, and it can deadlock: cancelling a stream takes
the lock of the request's state and then that of the stream, sending a response takes them in the
other order (`ModelStreamInferHandler` of 24.10, and still of 26.09). Then HTTP, metrics and unary
calls go on, and every stream of every model hangs.
"""

from __future__ import annotations

import os

# Read by the import. Children of this process exec at once; gRPC's fork hooks would start threads.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from slipstream_serve.pulse import PATIENCE_S, SERVER_PERIOD_S, Prober
from slipstream_serve.triton import Endpoints

_FOR_NO_MODEL = service_pb2.ModelInferRequest(model_name="-")
# A restarted server is found at once; no proxy is used.
_OPTIONS = [(f"grpc.{which}_reconnect_backoff_ms", 200) for which in ("initial", "min", "max")]
_OPTIONS.append(("grpc.enable_http_proxy", 0))


class FrontEnd(Prober):
    """Probes a server's gRPC streams with requests for a model that does not exist."""

    def __init__(self, endpoints: Endpoints) -> None:
        """Start to send probes."""
        super().__init__("streams", SERVER_PERIOD_S)
        self._channel = grpc.insecure_channel(endpoints.grpc, _OPTIONS)
        self._stream = service_pb2_grpc.GRPCInferenceServiceStub(self._channel).ModelStreamInfer
        self._call: grpc.Call | None = None
        self._has_answered = False
        self._thread.start()

    def silence_s(self) -> float:
        """Return the seconds since the last answer; 0 before the first: gRPC may be unreachable."""
        return super().silence_s() if self._has_answered else 0.0

    def _probe(self) -> bool:
        call = self._call = self._stream(iter([_FOR_NO_MODEL]), timeout=PATIENCE_S)
        try:
            for _ in call:
                pass
        except grpc.RpcError:
            return False
        finally:
            self._call = None
        self.reset()  # first: silence before the first answer does not count
        self._has_answered = True
        return True

    def _interrupt(self) -> None:
        call = self._call
        if call is not None:
            call.cancel()

    def _disconnect(self) -> None:
        self._channel.close()
