"""Settings of a gateway, as an operator gives them."""

from dataclasses import dataclass, field
from pathlib import Path

from slipstream_gateway.keys import Keys

MAX_BODY_BYTES = 8 << 20  # a million token ids; reading as many stops all streams for 0.3 s
MAX_DEPTH = 100  # levels of JSON in a body
MAX_HEADER_BYTES = 64 << 10
MAX_PROMPTS = 512  # of one completion
QUIET_S = 10.0
STALL_S = 60.0


@dataclass(frozen=True)
class Settings:
    """Settings of one gateway; times are in seconds.

    Attributes:
        repository: the model repository whose engine answers.
        runtime: the runtime directory of the engine's server; None: this gateway starts an engine.
        allowed_origins: origins whose pages may read answers; `*`: all.
        has_request_templates: whether a request may bring its own chat template.
        header_s, body_s: time that a client has to send the headers, or the body, of a request.
        idle_s: time that a connection without a request stays open.
        quiet_s: time without an event after which a stream gets a comment.
        stall_s: time that a client may read nothing while its answer waits.
        drain_s: time that running answers have when the gateway ends.
    """

    repository: Path
    runtime: Path | None = None
    host: str = "127.0.0.1"
    port: int = 9000
    keys: Keys = field(default_factory=Keys)
    allowed_origins: tuple[str, ...] = ()
    has_request_templates: bool = False
    chat_template: Path | None = None  # in the place of the checkpoint's
    tool_parser: str = "auto"  # by the chat template, or `none`, or a name
    reasoning_parser: str = "auto"
    max_body_bytes: int = MAX_BODY_BYTES
    header_s: float = 20.0
    body_s: float = 60.0
    idle_s: float = 75.0
    quiet_s: float = QUIET_S
    stall_s: float = STALL_S
    drain_s: float = 4.0
