"""Define the messages between bridge and engine: msgspec (MessagePack) frames over ZeroMQ `ipc://`.

The engine binds a ROUTER, every bridge connects a DEALER; one frame is one message. A bridge sends
`Hello` and waits for `Welcome`; another protocol or version is answered by `Refused`. The engine
sends each bridge at most one `StepOutputs` a step, with all of the bridge's sequences. Nothing is
ever pickled. A frame that does not decode is counted and dropped, never asserted on. Messages with
tokens are numerous and cannot form cycles, so the garbage collector skips them (`gc=False`).
"""

from array import array
from collections.abc import Mapping
from enum import StrEnum

import msgspec
from slipstream_contract.ids import TokenIds
from slipstream_contract.lora import LoraTask
from slipstream_contract.prompt_table import PromptTable
from slipstream_contract.retention import Retention
from slipstream_contract.sampling import SamplingParams
from slipstream_contract.urgency import DEFAULT_PRIORITY

PROTOCOL = 15


class FinishReason(StrEnum):
    """The reason why a sequence ended."""

    END = "end"  # an end id
    STOP = "stop"  # a stop word or stop token id
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"
    DEADLINE = "deadline"  # its timeout has passed; details in `Finished.error`
    ERROR = "error"  # details in `Finished.error`


class CancelCause(StrEnum):
    """The reason why a request was ended early."""

    CLIENT = "client"  # the client cancelled it or disconnected
    UNACKNOWLEDGED = "unacknowledged"  # an ensemble's client did, or postprocessing lost a part
    STOP = "stop"  # by the contract's input `stop`
    DEADLINE = "deadline"
    FAILED = "failed"  # another part of the same Triton request failed
    SERVER = "server"  # the server is stopping, or the model is being unloaded
    BRIDGE = "bridge"  # the bridge is gone


# --- to the engine -------------------------------------------------------------------------------


class ToEngine(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A message from a bridge."""


class Hello(ToEngine, frozen=True):
    """The first message of a connection."""

    protocol: int
    version: str
    bridge: str  # the Triton model that it serves, maybe one process of several
    pid: int = 0  # of this process; a second Hello of it replaces the first connection
    keeps_engine: bool = True  # the engine ends once the last such connection has said `Bye`
    prefix_key: bytes = b""  # wants `Prefixes`, by this key if the engine's cache is empty


class Submit(ToEngine, frozen=True):
    """A request to generate. `request` is the bridge's own number, used once per connection."""

    request: int
    token_ids: TokenIds  # sent as bytes
    sampling: SamplingParams
    arrival_ns: int  # when Triton handed the request over; see `Perf`
    priority: int = DEFAULT_PRIORITY  # 0 is admitted first
    deadline_ns: int = 0  # time.monotonic_ns() at which it is ended; 0: none
    timeout_ns: int = 0  # the timeout that `deadline_ns` was computed from
    request_id: str = ""  # the client's id; unique within a model
    model: str = ""  # the Triton model that the client called
    cache_salt: str = ""  # only requests with the same salt share blocks
    retention: Retention | None = None
    is_probe: bool = False  # counted apart from clients
    is_streaming: bool = False  # of a beam search: the beams are wanted after every step
    adapter: str = ""  # its name; empty: none
    task: LoraTask | None = None  # an adapter that the client has numbered
    table: PromptTable | None = None  # embeddings of virtual tokens

    @property
    def num_streams(self) -> int:
        """Number of indices of its `Tokens`: all beams of a search come together."""
        return 1 if self.sampling.beams is not None else self.sampling.n


class Cancel(ToEngine, frozen=True):
    """A request to end all sequences of a request. An unknown number is counted, not an error."""

    request: int
    cause: CancelCause = CancelCause.CLIENT
    noticed_ns: int = 0  # time.monotonic_ns() at which the bridge noticed; 0: now


class LoadAdapter(ToEngine, frozen=True):
    """A request to load an adapter under a name, which may have one already. See `Answered`."""

    number: int
    name: str
    path: str  # below the engine's `adapter_root`


class UnloadAdapter(ToEngine, frozen=True):
    """A request to discard an adapter's name; what runs with it goes on. See `Answered`."""

    number: int
    name: str


class Ping(ToEngine, frozen=True):
    """A request for `Status`. Samples of `Figures` are sent once, to the bridge that asks."""

    number: int
    with_figures: bool = False
    with_adapters: bool = False  # with `Status.adapter_counts`


class Bye(ToEngine, frozen=True):
    """The end of a connection; requests of the bridge that still run are cancelled."""


# --- to the bridge -------------------------------------------------------------------------------


class ToBridge(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A message from the engine."""


class AdapterInfo(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that requests may name."""

    name: str
    path: str
    rank: int  # the largest
    num_bytes: int
    digest: str  # in hexadecimal


class Welcome(ToBridge, frozen=True):
    """The answer to `Hello`: the engine accepts requests."""

    protocol: int
    version: str
    model: str
    engine_pid: int
    vocab_size: int
    max_model_len: int
    architecture: str = ""  # as the checkpoint calls it
    dtype: str = ""  # of weights and activations, as float32
    device: str = ""  # cpu or cuda
    has_thinking: bool = False  # the model marks where its thinking ends, so a budget has an effect
    adapters: list[AdapterInfo] = []  # that it has now; `Adapters` says what changes


class Refused(ToBridge, frozen=True):
    """The answer to `Hello` of another protocol or version: the connection cannot be used."""

    reason: str


class Perf(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The times and blocks that `return_perf_metrics` reports.

    Times are by `time.monotonic_ns()`, which all processes of a machine share and which never
    jumps; only differences have a meaning. 0: the sequence did not get that far.
    """

    arrival_ns: int
    first_scheduled_ns: int
    first_token_ns: int
    last_token_ns: int
    kv_alloc_new_blocks: int
    kv_reused_blocks: int
    kv_alloc_total_blocks: int
    num_drafted: int = 0  # drafts that were verified
    num_accepted: int = 0  # of these, those that were right


class Finished(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The end of a sequence, part of its last `Tokens`."""

    reason: FinishReason
    num_input_tokens: int
    num_output_tokens: int
    perf: Perf
    stop_reason: int | str | None = None  # stop token id or stop word that matched, as vLLM has it
    error: str | None = None
    is_refusal: bool = False  # the error is the request's, not the engine's


class Beam(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A whole beam as it stands; the next message may have another in its place."""

    token_ids: list[int]
    log_probs: list[float]  # one a token if requested, else empty
    cum_log_prob: float  # as the search has it: with an end id's
    drop_bytes: int = 0  # as of `Tokens`
    reason: FinishReason | None = None  # None: it goes on
    stop_reason: int | str | None = None


class Likely(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log probs at the places of `num` tokens, in columns of 4 bytes each.

    Likely tokens are by falling value, equal ones by rising id; a rank is that of the token which
    is there, from 1. Values may be logits (`logprobs_mode`).
    """

    num: int
    num_top: int
    top_ids: bytes  # [num, num_top] i32
    top_values: bytes  # [num, num_top] f32
    ranks: bytes  # [num] i32
    values: bytes  # [num] f32, of the token which is there


class Values(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The values that a request wants beside its tokens, of new ones."""

    likely: Likely | None = None  # of each new token
    logits: list[bytes] = []  # of each new token, fp32 `[vocab]`
    prompt: list[Likely] = []  # of the prompt's tokens but the first, in parts; once
    context: list[bytes] = []  # fp32 `[tokens of the prompt, vocab]`, in parts; once
    mode: int = 0  # flags of `TopMode` in core/batch.py
    num_context: int = 0  # rows of `context`: virtual tokens have one each


class Tokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of a sequence: those that no stop word can remove any more."""

    request: int
    index: int  # sequence within the request, 0 .. n-1
    token_ids: list[int]
    log_probs: list[float]  # one a token if requested, else empty
    drop_bytes: int = 0  # cut from the end of the last token's bytes: a stop word starts inside
    finished: Finished | None = None
    start: int = 0  # tokens of this sequence in earlier messages
    beams: list[Beam] | None = None  # of a beam search, whose tokens are here alone, the best first
    values: Values | None = None


class StepOutputs(ToBridge, frozen=True):
    """The tokens of one step for one bridge."""

    step: int
    made_ns: int  # time.time_ns()
    tokens: list[Tokens]


class Rejected(ToBridge, frozen=True):
    """The answer to a `Submit` that cannot be served; nothing else follows for that request."""

    request: int
    code: str  # slipstream_contract.errors.Code
    message: str
    reason: str = ""  # name of the limit, for metrics; empty: see `code`


class Adapters(ToBridge, frozen=True):
    """Adapters that have changed since `Welcome`, sent to all bridges."""

    adapters: list[AdapterInfo]  # new, or of names that point to others now
    removed: list[str] = []  # names

    def onto(self, before: Mapping[str, AdapterInfo]) -> dict[str, AdapterInfo]:
        """Return the adapters by name, of those before; other threads may read these."""
        found = {**before, **{info.name: info for info in self.adapters}}
        for name in self.removed:
            found.pop(name, None)
        return found


class Prefixes(ToBridge, frozen=True):
    """Whole blocks that are in the cache now, by their digests (`core/prefix.py`), or no more.

    It is sent to connections that want it (`Hello.prefix_key`): all at first, then what is new.
    """

    key: bytes  # of the digests
    block_size: int  # tokens
    is_whole: bool  # all that there are; false: since the last message
    added: list[bytes]
    removed: list[bytes]


class Answered(ToBridge, frozen=True):
    """The answer to `LoadAdapter` or `UnloadAdapter`."""

    number: int
    code: str = ""  # of an error, as in `Rejected`; empty: it is done
    message: str = ""


class Figures(msgspec.Struct, frozen=True, array_like=True):
    """Metrics since the engine's start, by the names of `slipstream.figures`."""

    gauges: dict[str, float]
    counters: dict[str, float]
    histograms: dict[str, tuple[list[int], float]]  # counts of each bucket, the last unbounded; sum
    samples: dict[str, list[float]]  # since the last message with figures


class ReplicaState(msgspec.Struct, frozen=True):
    """An engine of several that serve one model, as of its last `Status`."""

    number: int  # from 0
    engine_pid: int
    is_up: bool
    running: int = 0
    waiting: int = 0
    kv_blocks_free: int = 0
    kv_blocks_total: int = 0
    num_requests: int = 0  # ever sent to it
    num_restarts: int = 0


class AdapterCount(msgspec.Struct, frozen=True, array_like=True):
    """What requests of an adapter's name have used since the engine started."""

    name: str
    num_requests: int  # accepted
    num_prompt_tokens: int
    num_output_tokens: int  # of sequences that have ended


class Status(ToBridge, frozen=True):
    """The answer to `Ping`. A cached block that no sequence uses counts as free."""

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
    num_prompt_tokens: int = 0  # of computed prompts, since the engine started
    num_output_tokens: int = 0  # generated since the engine started
    num_prefix_queries: int = 0  # prompt tokens of admitted sequences
    num_prefix_hits: int = 0  # those of them that were in the cache
    figures: Figures | None = None  # if the `Ping` requested them
    requests: list[int] | None = None  # unfinished requests of that bridge
    running_adapters: list[str] = []  # names, of sequences that run
    waiting_adapters: list[str] = []
    replicas: list[ReplicaState] = []  # if there are several
    adapter_counts: list[AdapterCount] = []  # if the `Ping` requested them


EngineMessage = Hello | Submit | Cancel | LoadAdapter | UnloadAdapter | Ping | Bye
BridgeMessage = Welcome | Refused | StepOutputs | Rejected | Status | Adapters | Answered | Prefixes


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
    """Return a message as one frame."""
    return _encoder.encode(message)


def decode_engine(frame: bytes) -> EngineMessage:
    """Return a bridge's message. Raises `msgspec.DecodeError` (`ValidationError` is one)."""
    try:
        message: EngineMessage = _engine_decoder.decode(frame)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from None
    return message


def decode_bridge(frame: bytes) -> BridgeMessage:
    """Return the engine's message. Raises `msgspec.DecodeError`."""
    try:
        message: BridgeMessage = _bridge_decoder.decode(frame)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from None
    return message
