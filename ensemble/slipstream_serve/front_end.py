"""Whether a server's gRPC streams still move.

One thread of tritonserver serves all of them, and it can wait for itself for ever: where a stream
is cancelled it takes the lock of the request's state and then that of the stream, and who hands it
a response takes them the other way round (`ModelStreamInferHandler` of 24.10 and still of 26.09).
Then HTTP, metrics and unary calls go on, and every stream of every model hangs.
"""

from __future__ import annotations

import os

# The import reads it. What this process forks calls exec at once; gRPC's hooks would start threads.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from slipstream_serve.pulse import PATIENCE_S, SERVER_PERIOD_S, Asker
from slipstream_serve.triton import Endpoints

_FOR_NO_MODEL = service_pb2.ModelInferRequest(model_name="-")
# A server that was started again is found at once; no proxy stands between.
_OPTIONS = [(f"grpc.{which}_reconnect_backoff_ms", 200) for which in ("initial", "min", "max")]
_OPTIONS.append(("grpc.enable_http_proxy", 0))


class FrontEnd(Asker):
    """Of one server, asked for a model that is not there."""

    def __init__(self, endpoints: Endpoints) -> None:
        """It asks from now on."""
        super().__init__("streams", SERVER_PERIOD_S)
        self._channel = grpc.insecure_channel(endpoints.grpc, _OPTIONS)
        self._stream = service_pb2_grpc.GRPCInferenceServiceStub(self._channel).ModelStreamInfer
        self._call: grpc.Call | None = None
        self._has_answered = False
        self._thread.start()

    def silence_s(self) -> float:
        """Since the last answer; 0 before the first: a server may be out of reach from here."""
        return super().silence_s() if self._has_answered else 0.0

    def _ask(self) -> bool:
        call = self._call = self._stream(iter([_FOR_NO_MODEL]), timeout=PATIENCE_S)
        try:
            for _ in call:
                pass
        except grpc.RpcError:
            return False
        finally:
            self._call = None
        self.reset()  # first: silence before the first answer counts for nothing
        self._has_answered = True
        return True

    def _interrupt(self) -> None:
        call = self._call
        if call is not None:
            call.cancel()

    def _leave(self) -> None:
        self._channel.close()
