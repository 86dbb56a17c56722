"""What the command and its client processes tell each other: frames of msgpack over pipes."""

import struct
from typing import IO

import msgspec

_LENGTH = struct.Struct("<I")


class Job(msgspec.Struct, frozen=True, array_like=True):
    """One request, ready to be sent."""

    index: int
    offset_ns: int  # when it is due, after the beginning; -1: as soon as a user is free
    payload: bytes


class Plan(msgspec.Struct, frozen=True, tag=True):
    """What a client process does. It warms up, says `Ready` and waits for `Go`."""

    protocol: str  # "grpc" or "http"
    address: str  # host:port
    model: str
    jobs: list[Job]
    warm_up: list[bytes]
    num_users: int  # each has one request at a time; 0: jobs have times of their own
    is_repeated: bool  # users begin again with the first job, until the end
    timeout_s: float
    num_retries: int  # of a refused request, after the pause that the refusal names


class Go(msgspec.Struct, frozen=True, tag=True):
    """Times of CLOCK_MONOTONIC, which all processes of a machine share."""

    begin_ns: int
    end_ns: int  # no request begins later; what runs is waited for


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Connected and warm. `records` are those of the warm-up."""

    records: "list[Record]"


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Counts so far."""

    ended: int
    running: int
    refused: int
    failed: int


class Record(msgspec.Struct, array_like=True):
    """One request as its client saw it; times in ns of CLOCK_MONOTONIC.

    `code` is empty for a whole answer, else the contract's code or gRPC's name of the status.
    """

    index: int
    intended_ns: int
    sent_ns: int  # of the last try
    ended_ns: int = 0
    times_ns: bytes = b""  # of every response that held tokens: int64
    counts: bytes = b""  # their tokens: int32
    num_input_tokens: int = -1
    num_tries: int = 1
    code: str = ""
    message: str = ""
    is_refused: bool = False


class Done(msgspec.Struct, frozen=True, tag=True):
    """The end of a run."""

    records: list[Record]
    cpu_s: float
    wall_s: float
    peak_cpu: float  # of its event loop, in the busiest second: 1.0 is all that there is
    late_ms: list[float]  # how late the process's own event loop woke, 20 times a second


Message = Plan | Go | Ready | Progress | Done
_decoder: "msgspec.msgpack.Decoder[Message]" = msgspec.msgpack.Decoder(Message)


def write(pipe: IO[bytes], message: Message) -> None:
    """One frame. Raises OSError where nobody reads any more."""
    data = msgspec.msgpack.encode(message)
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def read(pipe: IO[bytes]) -> Message | None:
    """The next frame; None at the end of the pipe."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    data = pipe.read(_LENGTH.unpack(head)[0])
    return _decoder.decode(data)
