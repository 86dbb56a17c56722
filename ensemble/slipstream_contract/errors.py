"""The one error that reaches a client: a code of Triton's; field, value and limit in the text."""

from enum import StrEnum


class Code(StrEnum):
    """Triton's own error codes and one more; gRPC has one of the same meaning for each."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    UNSUPPORTED = "UNSUPPORTED"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"  # a status of gRPC; Triton has none of its own
    INTERNAL = "INTERNAL"


_OTHER = "other"
REASONS = (
    *("max_waiting", "max_waiting_tokens", "engine_down", "stopping", "draining"),
    *(code.lower() for code in Code),
    _OTHER,
)


def label_of(reason: str) -> str:
    """Return the word for metrics: one of `REASONS`, `other` for any other word."""
    return reason if reason in REASONS else _OTHER


class ContractError(Exception):
    """A request that cannot be served; the error goes to its client alone.

    The text always starts with the code, because a gRPC stream of Triton's loses the status:
    clients can rely on `"INVALID_ARGUMENT: top_p ..."`.
    """

    def __init__(self, message: str, code: Code = Code.INVALID_ARGUMENT, reason: str = "") -> None:
        """Take `reason`, a word for metrics, of `REASONS`; empty: the code's name."""
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.reason = reason or code.lower()


def clip(value: object, limit: int = 64) -> str:
    """Return the `repr` of a value from outside, short enough for an error message."""
    text = repr(value[: limit + 1] if isinstance(value, str | bytes) else value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
