"""Read requests from Triton and send it responses."""

import logging
from typing import Any

import numpy as np
import triton_python_backend_utils as pb
from slipstream_contract.errors import Code, ContractError
from slipstream_runtime.inflight import InFlight

from slipstream.bridge.streams import Outputs

_log = logging.getLogger(__name__)

_MAX_COPIED = 1 << 20  # bytes
_TRITON_NAMES = {Code.INVALID_ARGUMENT: "INVALID_ARG", Code.DEADLINE_EXCEEDED: "CANCELLED"}


def triton_error(error: ContractError) -> Any:
    """Return it as Triton's error; the text starts with the code, which gRPC streams lose."""
    name = _TRITON_NAMES.get(error.code, error.code.value)
    return pb.TritonError(str(error), getattr(pb.TritonError, name))


def read_inputs(request: Any) -> dict[str, np.ndarray]:
    """Return all input tensors by name; call it before `execute` returns.

    The server takes its memory back then. Small tensors are copied, so that they can be kept; large
    ones are refused by size or processed at once, and are not worth a copy.
    """
    arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    return {
        name: array.copy() if array.nbytes <= _MAX_COPIED else array
        for name, array in arrays.items()
    }


def make_tensors(outputs: Outputs, requested: frozenset[str] | None = None) -> list[Any]:
    """Return the tensors of those outputs that were requested; None: of all."""
    return [
        pb.Tensor(name, array)
        for name, array in outputs.items()
        if requested is None or name in requested
    ]


class TritonReply:
    """The responses of one request; only one if it is not decoupled. See `streams.Reply`.

    Every response is built in the thread that sends it. The final one releases the server's object:
    a model that is being unloaded waits for the last of these.
    """

    def __init__(self, request: Any, in_flight: InFlight, is_decoupled: bool = True) -> None:
        """Start; `in_flight` counts requests without their final response."""
        self.requested = frozenset(request.requested_output_names())
        self.is_probe = False
        self._sender = request.get_response_sender()
        self._in_flight = in_flight
        self._is_decoupled = is_decoupled
        in_flight.add(1)

    def mark_probe(self) -> None:
        """Say that the request is a probe, which is known once its parameters are read."""
        self.is_probe = True
        self._in_flight.add_probes(1)

    def send(self, outputs: Outputs, is_final: bool) -> None:
        """Send one response with the outputs that were requested."""
        response = pb.InferenceResponse(make_tensors(outputs, self.requested))
        if is_final:
            self._end(response)
        else:
            self._sender.send(response)

    def fail(self, error: ContractError) -> None:
        """Send an error, final."""
        self._end(pb.InferenceResponse(error=triton_error(error)))

    def end(self) -> None:
        """End without a response, or with one of no outputs where there must be one."""
        self._end(*([] if self._is_decoupled else [pb.InferenceResponse([])]))

    def is_cancelled(self) -> bool:
        """Return whether the client cancelled. A round trip to the server; not after the end."""
        return bool(self._sender.is_cancelled())

    def _end(self, *response: Any) -> None:
        sender, self._sender = self._sender, None
        assert sender is not None, "a second end"
        sender.send(*response, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        self._in_flight.add(-1)
        if self.is_probe:
            self._in_flight.add_probes(-1)
