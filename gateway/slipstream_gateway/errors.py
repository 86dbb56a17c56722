"""The one error that reaches an HTTP client: status, message and the field that is wrong."""

from slipstream_contract.errors import Code, ContractError

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


def api_error(error: ContractError, param: str | None = None) -> ApiError:
    """Return the HTTP form of a contract error. A full engine is 429, one that is down 503."""
    status = 429 if error.reason in _FULL else _STATUS[error.code]
    code = "rate_limit_exceeded" if status == 429 else None
    return ApiError(status, error.message, param, code)
