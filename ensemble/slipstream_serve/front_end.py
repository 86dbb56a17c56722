"""Whether a server's gRPC streams still move.

One thread of tritonserver serves all of them, and it can wait for itself for ever: where a stream
is cancelled it takes the lock of the request's state and then that of the stream, and who hands it
a response takes them the other way round (`ModelStreamInferHandler` of 24.10 and still of 26.09).
Then HTTP, metrics and unary calls go on, and every stream of every model hangs.
"""

from __future__ import annotations

import os
import time

# The import reads it. What this process forks calls exec at once; gRPC's hooks would start threads.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
from slipstream_runtime.stillness import activity
from tritonclient.grpc import service_pb2, service_pb2_grpc

from slipstream_serve.pulse import PATIENCE_S, SERVER_PERIOD_S, Asker
from slipstream_serve.triton import Endpoints

_FOR_NO_MODEL = service_pb2.ModelInferRequest(model_name="-")
# A server that was started again is found at once; no proxy stands between.
_OPTIONS = [(f"grpc.{which}_reconnect_backoff_ms", 200) for which in ("initial", "min", "max")]
_OPTIONS.append(("grpc.enable_http_proxy", 0))
HUNG_S = 3.5  # without an answer, while the server has little to do
BUSY_HUNG_S = 20.0  # likewise, whatever it has to do
_BUSY = 0.5  # of a core, from which on it may only be late
_LATE_S = 1.2  # a question is asked every second


class FrontEnd(Asker):
    """Of one server, asked for a model that is not there. Look several times a second."""

    def __init__(self, endpoints: Endpoints) -> None:
        """It asks from now on."""
        super().__init__("streams", SERVER_PERIOD_S)
        self._late: tuple[float, int] | None = None  # since when (s), the server's activity (ns)
        self._channel = grpc.insecure_channel(endpoints.grpc, _OPTIONS)
        self._stream = service_pb2_grpc.GRPCInferenceServiceStub(self._channel).ModelStreamInfer
        self._call: grpc.Call | None = None
        self._has_answered = False  # whoever never did cannot be reached from here
        self._thread.start()

    def is_hung(self, pid: int) -> bool:
        """Whether this server's streams stand still, and not because it is busy."""
        silence_s = self.silence_s()
        if silence_s < _LATE_S or not self._has_answered:
            self._late = None
            return False
        active_ns, _ = activity(pid, of_all=True)
        now_s = time.monotonic()
        since_s, before_ns = self._late = self._late or (now_s, active_ns)
        is_busy = active_ns - before_ns > _BUSY * (now_s - since_s) * 1e9
        return silence_s > (BUSY_HUNG_S if is_busy else HUNG_S)

    def _ask(self) -> bool:
        call = self._call = self._stream(iter([_FOR_NO_MODEL]), timeout=PATIENCE_S)
        try:
            for _ in call:
                pass
        except grpc.RpcError:
            return False
        finally:
            self._call = None
        self._has_answered = True
        return True

    def _interrupt(self) -> None:
        call = self._call
        if call is not None:
            call.cancel()

    def _leave(self) -> None:
        self._channel.close()
