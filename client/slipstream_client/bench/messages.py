"""Messages between the command and its client processes: frames of msgpack over pipes."""

import struct
from typing import IO

import msgspec

_LENGTH = struct.Struct("<I")


class Job(msgspec.Struct, frozen=True, array_like=True):
    """A request, ready to be sent."""

    index: int
    offset_ns: int  # due time after the start; -1: as soon as a user is free
    payload: bytes


class WorkerPlan(msgspec.Struct, frozen=True, tag=True):
    """The work of a client process. It warms up, sends `Ready` and waits for `Start`."""

    protocol: str  # one of `protocols.PROTOCOLS`
    address: str  # host:port
    model: str
    jobs: list[Job]
    warm_up: list[bytes]
    num_users: int  # each has one request in flight; 0: jobs are sent at their offsets
    is_repeated: bool  # start over with the first job, until `Start.end_ns`
    timeout_s: float
    num_retries: int  # retries of a refused request, after its retry_after_ms


class Start(msgspec.Struct, frozen=True, tag=True):
    """Start and end of the run, in ns of CLOCK_MONOTONIC, which all processes share."""

    begin_ns: int
    end_ns: int  # no request starts later; running ones finish


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A client process is connected and warm. `records` are those of the warm-up."""

    records: "list[Record]"


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Counts so far, in requests."""

    ended: int
    running: int
    refused: int
    failed: int


class Record(msgspec.Struct, array_like=True):
    """A request as its client saw it; times in ns of CLOCK_MONOTONIC.

    `code` is empty for a whole answer, else the contract's code or gRPC's name of the status.
    """

    index: int
    intended_ns: int
    sent_ns: int  # of the last attempt
    ended_ns: int = 0
    times_ns: bytes = b""  # int64: arrival of every response with tokens
    counts: bytes = b""  # int32: tokens of those responses
    num_input_tokens: int = -1
    num_tries: int = 1
    code: str = ""
    message: str = ""
    is_refused: bool = False


class Done(msgspec.Struct, frozen=True, tag=True):
    """The results of a run."""

    records: list[Record]
    cpu_s: float
    wall_s: float
    peak_cpu: float  # CPU share of the event loop in the busiest second: at most 1.0
    late_ms: list[float]  # lateness of the event loop's wake-ups, 20 a second


Message = WorkerPlan | Start | Ready | Progress | Done
_decoder: "msgspec.msgpack.Decoder[Message]" = msgspec.msgpack.Decoder(Message)


def write(pipe: IO[bytes], message: Message) -> None:
    """Write one frame. Raises OSError if the reader has closed the pipe."""
    data = msgspec.msgpack.encode(message)
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def read(pipe: IO[bytes]) -> Message | None:
    """Read the next frame; None at the end of the pipe."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    data = pipe.read(_LENGTH.unpack(head)[0])
    return _decoder.decode(data)
