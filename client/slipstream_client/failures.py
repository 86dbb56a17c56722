"""Turn errors of gRPC and Triton into typed ones.

Slipstream's errors start with a code (`INVALID_ARGUMENT: top_p ...`), after the name of the
ensemble if Triton puts it first; Triton's own errors have only a gRPC status.
"""

import json
import re

import grpc
from slipstream_contract.errors import Code, ContractError, clip

# gRPC itself writes `UNAVAILABLE: ipv4:127.0.0.1:8001: ...` when a connection broke.
_OURS = re.compile(rf"(?:^|[\s,;:'\"])({'|'.join(Code)}): (?!ipv[46]:|unix:)(.*)", re.DOTALL)
# The message of grpc.aio for a call that ended just as a read started.
_ENDED = "Internal error from Core"
# What Triton says of a name that its repository does not have, by a status of its own choice.
_UNKNOWN = re.compile(r"unknown model: '([^']*)' is not found")
# What Triton says of calls that the server's operator has closed.
_RESTRICTED = "This protocol is restricted"
# gRPC's words for a port of another protocol, and for a peer that hung up before it answered.
_NO_GRPC = "Failed parsing HTTP/2"
_HUNG_UP = ("Connection reset by peer", "Socket closed", "Server disconnected")
_STATUS = {
    "UNIMPLEMENTED": Code.UNSUPPORTED,
    "FAILED_PRECONDITION": Code.UNAVAILABLE,
    "RESOURCE_EXHAUSTED": Code.UNAVAILABLE,
    "OUT_OF_RANGE": Code.INVALID_ARGUMENT,
}
HTTP_CODES = {
    400: Code.INVALID_ARGUMENT,
    404: Code.NOT_FOUND,
    409: Code.ALREADY_EXISTS,
    422: Code.INVALID_ARGUMENT,
    429: Code.UNAVAILABLE,
    503: Code.UNAVAILABLE,
}
"""What statuses of OpenAI's protocol are in the contract."""
# What a server is that a client expects, by its protocol: Triton's, but for one.
_EXPECTED = {"OpenAI": "a server of OpenAI's protocol"}


class RequestTimeoutError(TimeoutError):
    """A request did not end within the client's `timeout_s`; it is cancelled on the server."""


def error_from_text(text: str, status: str = "INTERNAL") -> ContractError:
    """Parse an error message; `status`, gRPC's name, decides if the text has no code."""
    found = _OURS.search(text)
    if found:
        return ContractError(found[2].strip(), Code(found[1]))
    if unknown := unknown_model(text):
        return unknown
    code = Code(status) if status in Code.__members__ else _STATUS.get(status, Code.INTERNAL)
    return ContractError(text.strip() or status, code)


def unknown_model(text: str) -> ContractError | None:
    """Return the error for a model that Triton says it does not have; None if it says another."""
    found = _UNKNOWN.search(text)
    return found and ContractError(
        f"the server has no model {found[1]!r:.64}: `slipstream models` lists deployments",
        Code.NOT_FOUND,
    )


def no_server(address: str, reason: str, protocol: str) -> ContractError:
    """Return the error for `address`, where nothing answers in `protocol`: gRPC, HTTP, OpenAI."""
    hint = ", as at a port with TLS, which clients here do not speak" if reason in _HUNG_UP else ""
    return ContractError(
        f"no server answers at {address} ({reason}{hint}): is it running (`slipstream serve` "
        f"starts one), and is this its {protocol} port?",
        Code.UNAVAILABLE,
    )


def other_server(address: str, protocol: str, found: str = "") -> ContractError:
    """Return the error for `address`, which answers otherwise; `found` says what with."""
    expected = _EXPECTED.get(protocol, f"Triton's {protocol}")
    return ContractError(
        f"what answers at {address} is not {expected}{found}: which is its {protocol} "
        "port? `slipstream serve` prints it",
        Code.UNAVAILABLE,
    )


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
        if _NO_GRPC in details:
            return other_server(url, "gRPC")
        reason = re.sub(r" \(\d+\)$|\]$", "", details.rpartition(": ")[2].rpartition("recvmsg:")[2])
        return no_server(url, reason or "no reason given", "gRPC")
    return error_from_text(details, status.name)


def error_from_sending(url: str, is_late: bool) -> ContractError | RequestTimeoutError:
    """Return the error of a call that ended before its request was written; `is_late` as above."""
    if is_late:
        return RequestTimeoutError(f"no complete answer from {url} in time")
    return ContractError(f"the connection to {url} ended with the request", Code.UNAVAILABLE)


def words_of(body: bytes) -> str:
    """Return the words of an error of OpenAI's protocol, as servers write it; "": none.

    An object `error` with a `message`, either of them alone, or a text.
    """
    try:
        found = json.loads(body)
    except ValueError:
        return ""
    error = found.get("error", found) if isinstance(found, dict) else found
    words = error.get("message", error) if isinstance(error, dict) else error
    return words if isinstance(words, str) else clip(words)
