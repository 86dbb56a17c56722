"""Everything that runs in a stub for one served model, whatever its tensors are."""

import logging
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
from slipstream_contract.errors import Code, ContractError
from slipstream_contract.request import GenerateRequest
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

_SUPERVISOR_S = 30  # so much earlier the supervisor should have ended an engine that is stuck
_LOOK_S = 0.1  # how often a bridge that waits for its engine looks whether it still may


@dataclass(frozen=True)
class Question:
    """A Triton request, read. Arrays have their batch dimension."""

    inputs: dict[str, np.ndarray]
    parameters: dict[str, object]
    request_id: str
    reply: Reply
    requested: frozenset[str]  # outputs
    arrival_ns: int  # see `wire.Perf`


def batch_size(inputs: Mapping[str, np.ndarray]) -> int:
    """Of a request to a model with a batch dimension. Raises ContractError if inputs disagree."""
    sizes = {array.shape[0] if array.ndim else 0 for array in inputs.values()}
    if len(sizes) != 1:
        raise ContractError(f"inputs have different batch sizes: {sorted(sizes)}")
    return sizes.pop()


def row(inputs: Mapping[str, np.ndarray], index: int) -> dict[str, np.ndarray]:
    """One element of the batch."""
    return {name: array[index] for name, array in inputs.items()}


class Bridge:
    """Connection, calls, senders, watch and flow control of one model."""

    def __init__(self, name: str, runtime: Runtime, config: EngineConfig, server_pid: int) -> None:
        """Start the threads and see to it that an engine is started; does not wait for it."""
        self._name = name
        self._server_pid = server_pid
        self._supervision = SupervisorStarter(runtime, config, server_pid)
        self._senders = Senders()
        self.calls = Calls(self._send, self._senders.hand_over)
        self._senders.calls = self.calls
        ensure = self._supervision.ensure
        max_unanswered = config.stuck_after_s + _SUPERVISOR_S
        self.connection = Connection(runtime.address, name, self.calls, ensure, max_unanswered)
        cancel = partial(self.calls.cancel, cause=wire.CancelCause.UNACKNOWLEDGED)
        self.flow = Flow(CreditFile(runtime.credits), self._senders.hand_over, cancel)
        self.calls.settle = self.flow.settle
        self._load_file = LoadFile(path_of(runtime.socket))
        self.repairs = runtime.repairs  # the file, see `slipstream_runtime.repairs`
        self._is_stopping = runtime.stopping.exists
        self._had_left = False  # the client that the server was last asked about at a beginning
        self._watch = Watch(self.calls, self._is_stopping)

    def wait(self) -> wire.Welcome:
        """Until the engine is ready. Raises RuntimeError, with its reason, if it cannot start."""
        while True:
            welcome = self.connection.wait_welcome(_LOOK_S)
            if welcome is not None:
                return welcome
            failure = self._supervision.failure()
            if failure is not None:
                raise RuntimeError(f"the engine cannot start: {failure}")
            if os.getppid() != self._server_pid:
                raise RuntimeError("the server is gone")

    def check_room(self, num_tokens: int = 0) -> None:
        """Raise ContractError if the engine has said that it would refuse so long a prompt.

        0: its length is not known yet.
        """
        self._load_file.raise_if_full(num_tokens)

    def submit(
        self,
        call: Call,
        request: GenerateRequest,
        streams: Sequence[Stream],
        question: Question,
    ) -> wire.Submit:
        """Add an engine request to a call that is not begun yet; one stream for each sequence."""
        sampling = request.sampling
        if sampling.seed is None:  # drawn here: another engine may have to begin anew
            sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(64))
        number, urgency = self.calls.next_request(), request.urgency
        call.add(number, streams)
        call.timeout_ns = urgency.timeout_ns
        call.deadline_ns = question.arrival_ns + urgency.timeout_ns if urgency.timeout_ns else 0
        return wire.Submit(
            number,
            request.token_ids,
            sampling,
            question.arrival_ns,
            urgency.priority,
            call.deadline_ns,
            call.timeout_ns,
            question.request_id,
            self._name,
            request.cache_salt,
            request.retention,
            question.reply.is_probe,
        )

    def begin(self, call: Call, submits: list[wire.Submit], has_flow: bool = False) -> None:
        """Let a call run: from here on it will be ended.

        Raises ContractError if it cannot begin. `has_flow` puts its streams under flow control.

        The server is asked whether the client has left while the request was queued: the last that
        an ensemble hears of it. Where no other runs, the engine gets the request first, and its
        first token does not wait for the answer; unless the one asked about before had left: no
        second one of a crowd that left reaches the engine.
        """
        if self._is_stopping():
            raise ContractError("the server is stopping", Code.UNAVAILABLE, "stopping")
        is_first = self.calls.is_idle and not self._had_left
        if not is_first:
            self._had_left = call.reply.is_cancelled()
            if self._had_left:
                call.reply.end()
                return
        self.check_room(max((len(submit.token_ids) for submit in submits), default=0))
        try:
            turn, is_one = Turn(), len(call.streams) == 1
            for stream in call.streams if has_flow else ():
                if stream.is_streaming or not is_one:
                    stream.credit = self.flow.open(stream, turn)
            self.calls.open(call)
        except ContractError:
            self.calls.forget(call)
            raise
        try:
            self._send(*submits)
        except ContractError as error:
            self.calls.tally(call.reply).count_refusal(error)
            self.calls.fail(call, error)
        if is_first:
            self._had_left = self.calls.ask(call)

    def answer(self, reply: Reply, begin: Callable[[], None]) -> None:
        """Run `begin`; what it raises becomes the one, final response, never a traceback."""
        try:
            begin()
            return
        except ContractError as caught:
            error = caught.with_traceback(None)  # which would hold this frame, and it the error
        except Exception:
            _log.exception("a request could not be begun")
            error = ContractError("the request could not be begun", Code.INTERNAL)
        self.calls.tally(reply).count_refusal(error)
        reply.fail(error)

    def close(self) -> None:
        """End everything; calls that still run end with an error."""
        self.calls.fail_all(ContractError("the model is being unloaded", Code.UNAVAILABLE))
        self._watch.close()
        self.calls.end_left(math.inf)
        self.flow.close()
        self.connection.close()
        self._senders.close()

    def _send(self, *messages: wire.ToEngine) -> None:
        self.connection.send(*messages)
