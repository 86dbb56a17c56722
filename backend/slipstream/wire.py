"""Typed messages between bridge and engine: msgspec (MessagePack) frames over ZeroMQ `ipc://`.

The engine binds a ROUTER, every bridge connects a DEALER: one frame is one message. A bridge opens
with `Hello` and waits for `Welcome`; another protocol or version is answered by `Refused`. The
engine sends each bridge at most one `StepOutputs` a step, holding all that bridge's sequences.
Nothing here is ever pickled, and a frame that does not decode is counted and dropped, never
asserted on. What comes with every token can be in no cycle, and there is much of it: Python's
garbage collector does not look at it (`gc=False`).
"""

from array import array
from enum import StrEnum

import msgspec
from slipstream_contract.ids import TokenIds
from slipstream_contract.retention import Retention
from slipstream_contract.sampling import SamplingParams
from slipstream_contract.urgency import DEFAULT_PRIORITY

PROTOCOL = 8


class FinishReason(StrEnum):
    """Why a sequence ended."""

    END = "end"  # an end id
    STOP = "stop"  # a stop word or stop token id
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"
    DEADLINE = "deadline"  # over its time; `Finished.error` says which
    ERROR = "error"  # `Finished.error` says which


class CancelCause(StrEnum):
    """Why a request was ended before its end."""

    CLIENT = "client"  # cancelled it, or is gone
    UNACKNOWLEDGED = "unacknowledged"  # likewise, of an ensemble; or postprocessing lost a part
    STOP = "stop"  # the contract's input `stop`
    DEADLINE = "deadline"
    FAILED = "failed"  # another part of the same Triton request failed
    SERVER = "server"  # is stopping, or the model is being unloaded
    BRIDGE = "bridge"  # is gone, and nobody listens any more


# --- to the engine -------------------------------------------------------------------------------


class ToEngine(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What a bridge says."""


class Hello(ToEngine, frozen=True):
    """First message of a connection."""

    protocol: int
    version: str
    bridge: str  # the Triton model it serves, perhaps beside other processes
    pid: int = 0  # of this process; one that says hello anew has lost its connection before


class Submit(ToEngine, frozen=True):
    """Generate. `request` is the bridge's own number, used once per connection."""

    request: int
    token_ids: TokenIds  # as bytes on the way
    sampling: SamplingParams
    arrival_ns: int  # when Triton handed the request over; see `Perf`
    priority: int = DEFAULT_PRIORITY  # 0 is admitted first
    deadline_ns: int = 0  # time.monotonic_ns() at which it ends with an error; 0: none
    timeout_ns: int = 0  # how long before that it came
    request_id: str = ""  # the client's; unique in a model
    model: str = ""  # the Triton model it was sent to, likewise
    cache_salt: str = ""  # keys and values are shared where it is the same
    retention: Retention | None = None
    is_probe: bool = False  # counted apart from clients


class Cancel(ToEngine, frozen=True):
    """Stop all sequences of a request. An unknown number is counted, not an error."""

    request: int
    cause: CancelCause = CancelCause.CLIENT
    noticed_ns: int = 0  # time.monotonic_ns() when the bridge came to know; 0: now


class Ping(ToEngine, frozen=True):
    """Ask for `Status`. Samples of `Figures` are told once: one bridge alone asks for those."""

    number: int
    with_figures: bool = False


class Bye(ToEngine, frozen=True):
    """The bridge is unloading; what it still runs is cancelled."""


# --- to the bridge -------------------------------------------------------------------------------


class ToBridge(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What the engine says."""


class Welcome(ToBridge, frozen=True):
    """The engine is ready to be given requests."""

    protocol: int
    version: str
    model: str
    engine_pid: int
    vocab_size: int
    max_model_len: int


class Refused(ToBridge, frozen=True):
    """Another protocol or version: this connection is of no use."""

    reason: str


class Perf(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What `return_perf_metrics` reports.

    Times are of `time.monotonic_ns()`: all processes of a machine have it in common, it does not
    jump, and only differences mean anything. 0: it never got so far.
    """

    arrival_ns: int
    first_scheduled_ns: int
    first_token_ns: int
    last_token_ns: int
    kv_alloc_new_blocks: int
    kv_reused_blocks: int
    kv_alloc_total_blocks: int


class Finished(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The end of one sequence, carried by its last `Tokens`."""

    reason: FinishReason
    num_input_tokens: int
    num_output_tokens: int
    perf: Perf
    stop_reason: int | str | None = None  # vLLM's: the stop token id or stop word that matched
    error: str | None = None


class Tokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one sequence: those no stop word can take back any more."""

    request: int
    index: int  # sequence of the request, 0 .. n-1
    token_ids: list[int]
    log_probs: list[float]  # one a token if asked for, else empty
    drop_bytes: int = (
        0  # cut from the last token's bytes at their end: a stop word's border is inside
    )
    finished: Finished | None = None
    start: int = 0  # tokens of this sequence that were told before


class StepOutputs(ToBridge, frozen=True):
    """All that one step made for one bridge."""

    step: int
    made_ns: int  # time.time_ns()
    tokens: list[Tokens]


class Rejected(ToBridge, frozen=True):
    """A `Submit` that cannot be served; nothing else follows for that request."""

    request: int
    code: str  # slipstream_contract.errors.Code
    message: str
    reason: str = ""  # for metrics: which bound; empty: the code says all


class Figures(msgspec.Struct, frozen=True, array_like=True):
    """What the engine counted since it began, by the names of `slipstream.figures`."""

    gauges: dict[str, float]
    counters: dict[str, float]
    histograms: dict[str, tuple[list[int], float]]  # values in each bucket, the last open; sum
    samples: dict[str, list[float]]  # since they were last asked for


class Status(ToBridge, frozen=True):
    """Answer to `Ping`. A cached block that no sequence uses counts as free."""

    number: int
    model: str
    engine_pid: int
    kv_blocks_free: int
    kv_blocks_total: int
    running: int
    waiting: int
    last_step_age_s: float  # since the end of the last step; 0 while idle
    num_steps: int
    num_preemptions: int
    bridges: list[str]
    num_prompt_tokens: int = 0  # of prompts that are computed, since the engine began
    num_output_tokens: int = 0  # generated, likewise
    num_prefix_queries: int = 0  # tokens of prompts that were admitted, likewise
    num_prefix_hits: int = 0  # of those, the ones that were in the cache
    figures: Figures | None = None  # if the `Ping` asked for them
    requests: list[int] | None = None  # of the bridge that asked, all that have not ended


EngineMessage = Hello | Submit | Cancel | Ping | Bye
BridgeMessage = Welcome | Refused | StepOutputs | Rejected | Status


def _to_bytes(token_ids: object) -> bytes:
    assert isinstance(token_ids, array)
    assert token_ids.typecode == "i"
    return token_ids.tobytes()


def _from_bytes(kind: type, data: object) -> TokenIds:
    assert kind is array
    if not isinstance(data, bytes):
        raise ValueError("token ids that are no bytes")
    return array("i", data)


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_bytes)
_engine_decoder = msgspec.msgpack.Decoder(EngineMessage, dec_hook=_from_bytes)
_bridge_decoder = msgspec.msgpack.Decoder(BridgeMessage)


def encode(message: ToEngine | ToBridge) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def decode_engine(frame: bytes) -> EngineMessage:
    """What a bridge sent. Raises `msgspec.DecodeError` (`ValidationError` is one)."""
    try:
        message: EngineMessage = _engine_decoder.decode(frame)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from None
    return message


def decode_bridge(frame: bytes) -> BridgeMessage:
    """What the engine sent. Raises `msgspec.DecodeError`."""
    try:
        message: BridgeMessage = _bridge_decoder.decode(frame)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from None
    return message
