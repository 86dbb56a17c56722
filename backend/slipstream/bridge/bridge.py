"""Run everything that a stub needs for one served model, whatever its tensors are."""

import logging
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
from slipstream_contract.contained import contained
from slipstream_contract.errors import Code, ContractError
from slipstream_contract.request import GenerateRequest
from slipstream_runtime import draining
from slipstream_runtime.admission import LoadFile, path_of
from slipstream_runtime.credit import CreditFile
from slipstream_runtime.directory import Runtime

from slipstream import wire
from slipstream.bridge.connection import Connection
from slipstream.bridge.flow import Flow, Turn
from slipstream.bridge.senders import Senders
from slipstream.bridge.streams import Call, Calls, Reply, Stream
from slipstream.bridge.watch import Watch
from slipstream.config import EngineConfig
from slipstream.launch import SupervisorStarter

_log = logging.getLogger(__name__)

_SUPERVISOR_S = 30  # time that the supervisor has to replace a stuck engine
_LOOK_S = 0.1  # while waiting for the engine, check this often for failure


@dataclass(frozen=True)
class IncomingRequest:
    """A Triton request that was read. Arrays have their batch dimension."""

    inputs: dict[str, np.ndarray]
    parameters: dict[str, object]
    request_id: str
    reply: Reply
    requested: frozenset[str]  # outputs
    arrival_ns: int  # see `wire.Perf`


def batch_size(inputs: Mapping[str, np.ndarray]) -> int:
    """Return the batch size of a request. Raises ContractError if its inputs disagree."""
    sizes = {array.shape[0] if array.ndim else 0 for array in inputs.values()}
    if len(sizes) != 1:
        raise ContractError(f"inputs have different batch sizes: {sorted(sizes)}")
    return sizes.pop()


def row(inputs: Mapping[str, np.ndarray], index: int) -> dict[str, np.ndarray]:
    """Return one row of the batch."""
    return {name: array[index] for name, array in inputs.items()}


class Bridge:
    """The connection, calls, senders, watch and flow control of one model."""

    def __init__(self, name: str, runtime: Runtime, config: EngineConfig, server_pid: int) -> None:
        """Start the threads, and an engine if none runs; does not wait for it."""
        self._name = name
        self._server_pid = server_pid
        self._supervision = SupervisorStarter(runtime, config, server_pid)
        self._senders = Senders()
        self.calls = Calls(self._send, self._senders.hand_over)
        self._senders.calls = self.calls
        self.connection = Connection(
            runtime.address,
            name,
            self.calls,
            self._supervision.ensure,
            config.stuck_after_s + _SUPERVISOR_S,
            outage=self._supervision.outage,
        )
        cancel = partial(self.calls.cancel, cause=wire.CancelCause.UNACKNOWLEDGED)
        self.flow = Flow(CreditFile(runtime.credits), self._senders.hand_over, cancel)
        self.calls.settle = self.flow.settle
        self._load_file = LoadFile(path_of(runtime.socket))
        self.repairs = runtime.repairs  # the file, see `slipstream_runtime.repairs`
        self._is_stopping = runtime.stopping.exists
        self._refuses = partial(draining.refuses, runtime)
        self._had_left = False  # whether the last client checked at a start had left
        self._watch = Watch(self.calls, self._is_stopping)

    def wait(self) -> wire.Welcome:
        """Wait until the engine is ready. Raises RuntimeError, with a reason, if it cannot be."""
        while True:
            welcome = self.connection.wait_welcome(_LOOK_S)
            if welcome is not None:
                return welcome
            failure = self._supervision.failure()
            if failure is not None:
                raise RuntimeError(f"the engine cannot start: {failure}")
            if os.getppid() != self._server_pid:
                raise RuntimeError("the server is gone")

    def raise_if_full(self, num_tokens: int = 0) -> None:
        """Raise ContractError if the engine has published that it would refuse such a prompt.

        `num_tokens` is the prompt's length; 0: not known yet.
        """
        self._load_file.raise_if_full(num_tokens)

    def submit(
        self,
        call: Call,
        request: GenerateRequest,
        streams: Sequence[Stream],
        incoming: IncomingRequest,
    ) -> wire.Submit:
        """Add an engine request to a call that has not started; one stream for each sequence."""
        sampling = request.sampling
        if sampling.seed is None:  # chosen here, so that another engine would start with the same
            sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(64))
        number, urgency = self.calls.next_request(), request.urgency
        call.add(number, streams)
        call.timeout_ns = urgency.timeout_ns
        call.deadline_ns = incoming.arrival_ns + urgency.timeout_ns if urgency.timeout_ns else 0
        return wire.Submit(
            number,
            request.token_ids,
            sampling,
            incoming.arrival_ns,
            urgency.priority,
            call.deadline_ns,
            call.timeout_ns,
            incoming.request_id,
            self._name,
            request.cache_salt,
            request.retention,
            incoming.reply.is_probe,
            request.options.is_streaming,
            request.adapter,
            request.task,
            request.table,
        )

    def start(self, call: Call, submits: list[wire.Submit], has_flow: bool = False) -> None:
        """Start a call, which is certain to end from here on.

        Raises ContractError if it cannot start. `has_flow` puts its streams under flow control.

        An ensemble gets no notice of a client that left while the request was queued, so this
        asks the server once. If no other call runs, the engine gets the request first, so that its
        first token does not wait for the answer; unless the last client asked about had left. Of a
        crowd of clients that left, only one request reaches the engine.
        """
        if self._is_stopping():
            raise ContractError("the server is stopping", Code.UNAVAILABLE, "stopping")
        if not call.reply.is_probe and self._refuses():
            raise ContractError(draining.DRAINING, Code.UNAVAILABLE, "draining")
        is_first = self.calls.is_idle and not self._had_left
        if not is_first:
            self._had_left = call.reply.is_cancelled()
            if self._had_left:
                call.reply.end()
                return
        self.raise_if_full(max((len(submit.token_ids) for submit in submits), default=0))
        try:
            turn, is_one = Turn(), len(call.streams) == 1
            for stream in call.streams if has_flow else ():
                if stream.is_streaming or not is_one:
                    stream.credit = self.flow.open(stream, turn)
            self.calls.open(call)
        except ContractError:
            self.calls.remove(call)
            raise
        try:
            self._send(*submits)
        except ContractError as error:
            self.calls.tally(call.reply).count_refusal(error)
            self.calls.fail(call, error)
        if is_first:
            self._had_left = self.calls.end_if_cancelled(call)

    def answer(self, reply: Reply, start: Callable[[], None]) -> None:
        """Run `start`; an exception becomes the one, final response, never a traceback."""
        try:
            with contained():
                start()
            return
        except ContractError as caught:
            error = caught.with_traceback(None)  # which would refer to this frame, and back
        except Exception:
            _log.exception("a request could not be started")
            error = ContractError("the request could not be started", Code.INTERNAL)
        self.calls.tally(reply).count_refusal(error)
        reply.fail(error)

    def close(self) -> None:
        """End all threads; calls that still run end with an error."""
        self.calls.fail_all(ContractError("the model is being unloaded", Code.UNAVAILABLE))
        self._watch.close()
        self.calls.end_cancelled(math.inf)
        self.flow.close()
        self.connection.close()
        self._senders.close()

    def _send(self, *messages: wire.ToEngine) -> None:
        self.connection.send(*messages)
