"""What the sixty bad inputs are written in. Data; who sends it is sixty_ask.py.

`{m}` in a path is every model that generates, `{x}` those that take texts, `{t}` those with the
ensemble's tensors, `{n}` these and tensorrt_llm, `{v}` vllm_model.

Every case goes over both protocols where it can: a body of JSON is sent as tensors of the types
that its values have, and tensors for a stage are sent to HTTP's `infer`. `alone` says why not.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from server.support import PROMPT
from slipstream_contract.tensors import TO_LLM

MODELS = ("ensemble", "tensorrt_llm_bls", "vllm_model", "tensorrt_llm")
STAGES = ("preprocessing", "postprocessing")
TEXTS = MODELS[:2]
PATHS = {
    "{m}": MODELS,
    "{x}": MODELS[:3],
    "{t}": TEXTS,
    "{n}": (*TEXTS, "tensorrt_llm"),
    "{v}": ("vllm_model",),
}
GOOD: dict[str, dict[str, Any]] = {
    "ensemble": {"text_input": PROMPT, "max_tokens": 5},
    "tensorrt_llm_bls": {"text_input": PROMPT, "max_tokens": 5},
    "vllm_model": {"text_input": PROMPT, "sampling_parameters": '{"temperature": 0}'},
    "tensorrt_llm": {"input_ids": [290, 293, 8], "input_lengths": 3, "request_output_len": 5},
    "preprocessing": {"QUERY": "a", "REQUEST_OUTPUT_LEN": 1},
    "postprocessing": {"TOKENS_BATCH": [[5, 6, 7]], "SEQUENCE_LENGTH": 3},
}
CLOSED = 0  # the status where the server closes a connection without a word
OURS = "INVALID_ARGUMENT: "
BY_SERVER = "no JSON"  # with HTTP status 500: it is of another type than the tensor
TWO_DIMENSIONS = "`generate` makes tensors of one dimension beside the batch's"
NO_TYPES = "`generate` has neither types nor shapes nor outputs of tensors"


class Beside(dict[str, Any]):
    """Fields beside, or in the place of, those of a model's good body; `...` leaves one out."""


@dataclass(frozen=True)
class Http:
    """A body for `generate` and `generate_stream`. `expected` is a regular expression."""

    path: str  # a model, or several: see above
    body: Any
    status: int
    expected: str
    alone: str = ""


@dataclass(frozen=True)
class Grpc:
    """Tensors beside, or in the place of, those of a good request; None leaves one out.

    `change` is done to the message; `statuses` are HTTP's for a stage, or for an unknown model.
    """

    model: str
    tensors: dict[str, Any]
    expected: str
    alone: str = ""
    change: Callable[[Any], None] | None = None
    code: str = "INVALID_ARGUMENT"  # of ModelInfer, where the model has that
    status: int = 400  # of `infer`, likewise
    infer_expected: str = ""  # where `infer` has other words


@dataclass(frozen=True)
class Call:
    """Bytes to a method of the gRPC service, be they a message or not."""

    method: str
    data: bytes
    code: str
    expected: str = ""
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Raw:
    """Bytes on the HTTP port, which are answered or end the connection; silence is neither."""

    data: bytes
    status: int
    expected: str = ""


@dataclass(frozen=True)
class Item:
    """One of the sixty. `why`: what it comes to here where that is another thing than an answer.

    `alone`: why it is of one protocol.
    """

    what: str
    cases: tuple[Http | Grpc | Call | Raw, ...] = ()
    why: str = ""
    alone: str = ""


def text(**extra: Any) -> dict[str, Any]:
    """A good body of all text models, with something in it."""
    return {"text_input": "def f(", "max_tokens": 3} | extra


def vllm(**sampling: Any) -> dict[str, Any]:
    """A body of vllm_model with sampling parameters."""
    return {"text_input": "def f(", "sampling_parameters": json.dumps(sampling)}


def post(headers: str, body: bytes = b"", path: str = "ensemble/generate") -> bytes:
    """A request to the ensemble, or to another path of a model."""
    start = f"POST /v2/models/{path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n"
    return start.encode() + body


def chunked(body: bytes, size: int) -> bytes:
    """A body in chunks."""
    parts = (body[at : at + size] for at in range(0, len(body), size))
    data = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return post("Transfer-Encoding: chunked\r\n", data + b"0\r\n\r\n")


def in_turn(field: str, values: dict[str, str], models: str = "{n}") -> tuple[Http, ...]:
    """A field in turn with every value, as JSON is written, and what the refusal says."""
    cases = []
    for value, expected in values.items():
        for model in PATHS[models]:
            body = _with(model, field, json.loads(value))
            status = 500 if expected == BY_SERVER else 400
            said = "Unable to parse" if expected == BY_SERVER else f"{OURS}.*{expected}"
            cases.append(Http(model, body, status, said))
    return tuple(cases)


def _with(model: str, field: str, value: Any) -> dict[str, Any]:
    if model == "vllm_model":
        return vllm(**{field: value})
    names = TO_LLM | {"max_tokens": "request_output_len"} if model == "tensorrt_llm" else {}
    return Beside({names.get(field, field): value})


def refused(value: object, **extra: str) -> tuple[Http, ...]:
    """A sampling parameter of vllm_model, and what the refusal says."""
    ((name, message),) = extra.items()
    return (Http("{v}", vllm(**{name: value}), 400, f"{OURS}{message}"),)
