"""Turn errors of gRPC and Triton into typed ones.

Slipstream's errors start with a code (`INVALID_ARGUMENT: top_p ...`), after the name of the
ensemble if Triton puts it first; Triton's own errors have only a gRPC status.
"""

import re

import grpc
from slipstream_contract.errors import Code, ContractError

# gRPC itself writes `UNAVAILABLE: ipv4:127.0.0.1:8001: ...` when a connection broke.
_OURS = re.compile(rf"(?:^|[\s,;:'\"])({'|'.join(Code)}): (?!ipv[46]:|unix:)(.*)", re.DOTALL)
# The message of grpc.aio for a call that ended just as a read started.
_ENDED = "Internal error from Core"
# What Triton says of a name that its repository does not have, by a status of its own choice.
_UNKNOWN = re.compile(r"unknown model: '([^']*)' is not found")
# What Triton says of calls that the server's operator has closed.
_RESTRICTED = "This protocol is restricted"
_STATUS = {
    "UNIMPLEMENTED": Code.UNSUPPORTED,
    "FAILED_PRECONDITION": Code.UNAVAILABLE,
    "RESOURCE_EXHAUSTED": Code.UNAVAILABLE,
    "OUT_OF_RANGE": Code.INVALID_ARGUMENT,
}


class RequestTimeoutError(TimeoutError):
    """A request did not end within the client's `timeout_s`; it is cancelled on the server."""


def error_from_text(text: str, status: str = "INTERNAL") -> ContractError:
    """Parse an error message; `status`, gRPC's name, decides if the text has no code."""
    found = _OURS.search(text)
    if found:
        return ContractError(found[2].strip(), Code(found[1]))
    if found := _UNKNOWN.search(text):
        return ContractError(
            f"the server has no model {found[1]!r:.64}: `slipstream models` lists deployments",
            Code.NOT_FOUND,
        )
    code = Code(status) if status in Code.__members__ else _STATUS.get(status, Code.INTERNAL)
    return ContractError(text.strip() or status, code)


def error_from_rpc(
    error: grpc.RpcError, url: str, is_late: bool = False
) -> ContractError | RequestTimeoutError:
    """Translate the error of a broken call; `is_late` if its deadline has passed."""
    status, details = error.code(), error.details() or ""
    if status is grpc.StatusCode.DEADLINE_EXCEEDED or (is_late and details == _ENDED):
        return RequestTimeoutError(f"no complete answer from {url} in time")
    if status is grpc.StatusCode.UNAVAILABLE and not _OURS.search(details):
        if details.startswith(_RESTRICTED):
            return ContractError(
                f"{url} does not let clients load and unload models: `slipstream serve "
                "--model-control explicit` does",
                Code.UNSUPPORTED,
            )
        reason = details.rpartition(": ")[2] or "no reason given"
        return ContractError(
            f"no server answers at {url} ({reason}): is it running, and is this its gRPC port?",
            Code.UNAVAILABLE,
        )
    return error_from_text(details, status.name)


def error_from_sending(url: str, is_late: bool) -> ContractError | RequestTimeoutError:
    """Return the error of a call that ended before its request was written; `is_late` as above."""
    if is_late:
        return RequestTimeoutError(f"no complete answer from {url} in time")
    return ContractError(f"the connection to {url} ended with the request", Code.UNAVAILABLE)
