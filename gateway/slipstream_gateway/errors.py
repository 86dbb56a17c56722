"""The one error that reaches an HTTP client: status, message and the field that is wrong."""

import re
from collections.abc import Container

import msgspec
from slipstream_contract.errors import Code, ContractError
from slipstream_contract.guide import VLLM_NAMES

_STATUS = {
    Code.INVALID_ARGUMENT: 400,
    Code.UNSUPPORTED: 400,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.CANCELLED: 499,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
    Code.INTERNAL: 500,
}
_FULL = ("max_waiting", "max_waiting_tokens")
_CONTEXT = re.compile(r"the context (?:of the model )?has (\d+)")  # of a prompt that is too long
_TOO_LONG = "context_length_exceeded"  # OpenAI's code, by which agents compact their context
_CODES = {429: "rate_limit_exceeded", 503: "service_unavailable", 504: "deadline_exceeded"}
_RETRY = re.compile(r"retry_after_ms: (\d+)")
_FIELD = re.compile(r"(\w+)(?: or (\w+))?")  # such as `embedding_bias or logit_bias: ...`
_GUIDE = "the guide is refused"
_ADAPTER = "adapter "
_GUIDES = ("response_format", *sorted(VLLM_NAMES), "tools")  # fields that make one
_DOWN_MS = 1000  # an engine that is down is back after some time like this, or longer


class ApiError(Exception):
    """A request that cannot be served; a dialect writes it in its own shape.

    Attributes:
        status: HTTP status.
        message: names field, value and limit.
        param: the field of the request that is wrong; None: none is.
        code: a word for programs, such as `model_not_found`; None: the status says all.
        retry_after_ms: when to try again; None: never, or not known.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_ms = retry_after_ms


def api_error(error: ContractError, fields: Container[str]) -> ApiError:
    """Return the HTTP form of a contract error. A full engine is 429, one that is down 503.

    `fields`: the fields of the request; the first word of the message names the wrong one.
    """
    status = 429 if error.reason in _FULL else _STATUS[error.code]
    word = _FIELD.match(error.message)
    named = () if word is None else word.groups()
    names = _GUIDES if error.message.startswith(_GUIDE) else named
    if error.message.startswith(_ADAPTER):  # by its own field, or by its name as a model
        names = ("lora_name", "model")
    param = next((name for name in names if name and name in fields), None)
    retry_ms = None
    if status in (429, 503):
        said = _RETRY.search(error.message)
        retry_ms = int(said[1]) if said is not None else _DOWN_MS
    context = _CONTEXT.search(error.message)
    if context is None:
        return ApiError(status, error.message, param, _CODES.get(status), retry_ms)
    # OpenAI's words, which tools look for in the message to see that they must shorten a prompt.
    message = f"{error.message}. This model's maximum context length is {context[1]} tokens."
    return ApiError(status, message, param, _TOO_LONG, retry_ms)


def openai_error(error: ApiError) -> dict[str, object]:
    """Return OpenAI's object of an error, that of bodies and of events alike."""
    kind = "invalid_request_error" if error.status != 429 else "rate_limit_error"
    return {
        "message": error.message,
        "type": kind if error.status < 500 else "server_error",
        "param": error.param,
        "code": error.code,
    }


def openai_body(error: ApiError) -> bytes:
    """Return the body of OpenAI's response to a request that cannot be served."""
    return msgspec.json.encode({"error": openai_error(error)})
