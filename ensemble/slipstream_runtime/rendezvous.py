"""Have the hosts of one engine find each other, by torchrun's environment variables.

The agent of rank 0 listens at MASTER_ADDR:MASTER_PORT, and nowhere else. The others connect, name
themselves, and get the addresses of all. The connection then stays: its end is the end of a host.
With SLIPSTREAM_RANK_KEY, the same on all hosts, both sides prove that they know it. What ranks send
each other is not encrypted: the network has to be theirs.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from slipstream_runtime.span import TOKEN_BYTES, Host, Peers, host_name, read

KEY_VARIABLE = "SLIPSTREAM_RANK_KEY"
PORT_VARIABLE = "SLIPSTREAM_RANK_PORT"
_PORT = 29500  # torchrun's
_HELD = "TORCHELASTIC_USE_AGENT_STORE"  # torchrun itself listens at MASTER_PORT
_MAX_MESSAGE = 1 << 16
_ANSWER_S = 5.0
_RETRY_S = 0.2


class RendezvousError(RuntimeError):
    """Hosts that cannot serve together: names the host, its ranks, and what differs."""


class Place(NamedTuple):
    """The part of the ranks that a host has."""

    first: int
    num: int
    size: int  # of all
    address: str  # MASTER_ADDR
    port: int


class Hello(msgspec.Struct, frozen=True):
    """The first message of a host."""

    version: str
    size: int
    first: int
    count: int
    name: str
    inlet: int  # port
    nonce: str
    proof: str


class Answer(msgspec.Struct, frozen=True):
    """The answer: all hosts, or why not."""

    peers: Peers | None
    refusal: str
    proof: str


class Ended(msgspec.Struct, frozen=True):
    """The last message of a host: which rank has ended, and how."""

    rank: int
    code: int


def place_of(environment: Mapping[str, str], size: int) -> Place | None:
    """Return the part of `size` ranks that these variables give this process; None: all of them.

    RANK and WORLD_SIZE: one rank, as torchrun has it; NODE_RANK and NNODES: as many as other hosts.
    Raises `RendezvousError` that names the variable.
    """
    address = environment.get("MASTER_ADDR", "")
    each, all_of_them = ("RANK", "WORLD_SIZE")
    if "NNODES" in environment and "NODE_RANK" in environment:
        each, all_of_them = ("NODE_RANK", "NNODES")
    if size == 1 or not address or each not in environment or all_of_them not in environment:
        return None
    number, count = _whole(environment, each), _whole(environment, all_of_them)
    if count == 1:
        return None
    if each == "RANK" and count != size:
        raise RendezvousError(f"WORLD_SIZE is {count}, but the model has {size} ranks")
    if size % count or number >= count:
        raise RendezvousError(
            f"{each} {number} of {all_of_them} {count} has no part of {size} ranks"
        )
    part = size // count
    return Place(number * part, part, size, address, _port_of(environment))


def _port_of(environment: Mapping[str, str]) -> int:
    """Return where rank 0 listens: at MASTER_PORT, or behind it where torchrun has that itself."""
    if PORT_VARIABLE in environment:
        name, port = PORT_VARIABLE, _whole(environment, PORT_VARIABLE)
    else:
        name, port = "MASTER_PORT", _PORT
        if "MASTER_PORT" in environment:
            port = _whole(environment, "MASTER_PORT")
        if environment.get(_HELD) == "True":
            name, port = "MASTER_PORT, which torchrun has, and 1", port + 1
    if not 0 < port < 1 << 16:
        raise RendezvousError(f"{name} is {port}, not a port from 1 to 65535")
    return port


def _whole(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdecimal():
        raise RendezvousError(f"{name} is {text[:64]!r}, not a whole number")
    return int(text)


def _proof(*parts: str) -> str:
    key = os.environ.get(KEY_VARIABLE, "").encode()
    return hmac.new(key, "\n".join(parts).encode(), hashlib.sha256).hexdigest() if key else ""


def _send(link: socket.socket, message: msgspec.Struct) -> None:
    data = msgspec.json.encode(message)
    link.sendall(len(data).to_bytes(4, "little") + data)


def _receive(link: socket.socket) -> bytes:
    size = int.from_bytes(read(link, 4), "little")
    if size > _MAX_MESSAGE:
        raise ConnectionError(f"a message of {size} bytes")
    return read(link, size)


class Gate:
    """The agent of rank 0: takes the other hosts, one connection each."""

    def __init__(self, place: Place, version: str) -> None:
        """Listen. Raises OSError if MASTER_ADDR is not of this host, or the port is taken."""
        self._place, self._version = place, version
        try:
            found = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)[0]
            self.address = str(found[4][0])
            self._listener = socket.create_server((self.address, place.port), family=found[0])
        except OSError as error:
            where = f"MASTER_ADDR {place.address}, port {place.port}"
            reason = error.strerror or str(error)
            raise OSError(error.errno, f"rank 0 cannot listen at {where}: {reason}") from error
        self._listener.settimeout(_RETRY_S)
        self.links: list[tuple[Host, socket.socket]] = []
        self.peers: Peers | None = None

    def gather(self, inlet: int, is_over: Callable[[], bool]) -> Peers | None:
        """Wait for all hosts, and tell them of each other; None if `is_over` first.

        Raises `RendezvousError` if a host is not of the same version or size.
        """
        place = self._place
        own = Host(host_name(), self.address, inlet, place.first, place.num)
        while sum(host.count for host, _ in self.links) < place.size - place.num:
            if is_over():
                return None
            self._discard_gone()
            try:
                link, (address, *_) = self._listener.accept()
            except TimeoutError:
                continue
            with contextlib.suppress(OSError, msgspec.DecodeError):
                self._take(link, str(address))
        token = secrets.token_hex(TOKEN_BYTES)
        hosts = [own, *sorted((host for host, _ in self.links), key=lambda host: host.first)]
        for host, link in self.links:
            peers = Peers(token, host.first, hosts)
            with contextlib.suppress(OSError):  # it is gone: `ended` says so
                _send(link, Answer(peers, "", _proof("answer", token)))
        self.peers = Peers(token, own.first, hosts)
        return self.peers

    def _take(self, link: socket.socket, address: str) -> None:
        """Take a host, or refuse it."""
        link.settimeout(_ANSWER_S)
        nonce = secrets.token_hex(16)
        link.sendall(nonce.encode())
        hello = msgspec.json.decode(_receive(link), type=Hello)
        if not hmac.compare_digest(hello.proof, _proof("hello", nonce, hello.nonce)):
            _send(link, Answer(None, f"{KEY_VARIABLE} is another one than on rank 0", ""))
            link.close()
            return
        who = f"rank {hello.first} on {hello.name[:64]}"
        refusal = ""
        if hello.version != self._version:
            refusal = (
                f"{who} has another version than rank 0: {hello.version[:64]}, not {self._version}"
            )
        elif hello.size != self._place.size:
            refusal = f"{who} has another number of ranks: {hello.size}, not {self._place.size}"
        elif not 0 < hello.first <= self._place.size - hello.count:
            refusal = f"{who}: no such ranks among {self._place.size}"
        self._discard_gone()
        for host, old in list(self.links):
            if host.first < hello.first + hello.count and hello.first < host.first + host.count:
                if host.name != hello.name:
                    refusal = refusal or f"{who} is also on {host.name}"
                else:  # it has started anew
                    old.close()
                    self.links.remove((host, old))
        if refusal:
            _send(link, Answer(None, refusal, ""))
            link.close()
            raise RendezvousError(refusal)
        self.links.append((Host(hello.name, address, hello.inlet, hello.first, hello.count), link))

    def _discard_gone(self) -> None:
        """Discard hosts that have ended while they waited: others may come for their ranks."""
        for host, link in list(self.links):
            if select.select([link], [], [], 0)[0]:  # one that waits sends nothing
                link.close()
                self.links.remove((host, link))

    def ended(self) -> tuple[str, int] | None:
        """Return what has ended, and its exit code, if a host's connection has."""
        for host, link in self.links:
            if select.select([link], [], [], 0)[0]:
                try:
                    last = msgspec.json.decode(_receive(link), type=Ended)
                except (OSError, msgspec.DecodeError):
                    ranks = f"ranks {host.first} to {host.first + host.count - 1}"
                    return f"host {host.name} ({ranks}) is gone", 1
                return f"rank {last.rank} on {host.name} ended with code {last.code}", last.code
        return None

    def report(self, code: int) -> None:
        """Report how rank 0 has ended."""
        for _, link in self.links:
            with contextlib.suppress(OSError):
                _send(link, Ended(0, code))

    def close(self) -> None:
        """End all connections: the other hosts end their ranks."""
        for _, link in self.links:
            link.close()
        self._listener.close()


class Member:
    """The agent of any other host."""

    def __init__(self, place: Place, link: socket.socket, peers: Peers) -> None:
        self.place, self.link, self.peers = place, link, peers

    def code(self, wait_s: float) -> int | None:
        """Return how rank 0 has ended, if it does within `wait_s`; 1: its host is gone."""
        if not select.select([self.link], [], [], wait_s)[0]:
            return None
        self.link.settimeout(_ANSWER_S)
        try:
            return msgspec.json.decode(_receive(self.link), type=Ended).code
        except (OSError, msgspec.DecodeError):
            return 1

    def end(self, rank: int, code: int) -> None:
        """Report that a rank has ended."""
        with contextlib.suppress(OSError):
            _send(self.link, Ended(rank, code))


def connect(place: Place, limit_s: float) -> socket.socket:
    """Connect to the agent of rank 0, which may start later. Raises `RendezvousError`."""
    start_s = time.monotonic()
    while True:
        try:
            return socket.create_connection((place.address, place.port), _ANSWER_S)
        except OSError as error:
            if time.monotonic() - start_s > limit_s:
                where = f"{place.address}:{place.port}"
                raise RendezvousError(f"rank 0 cannot be reached at {where}: {error}") from error
        time.sleep(_RETRY_S)


def join(place: Place, link: socket.socket, inlet: int, version: str) -> Member:
    """Name this host, and wait for the others. Raises `RendezvousError`, or OSError."""
    nonce, own = read(link, 32).decode("ascii", "replace"), secrets.token_hex(16)
    proof = _proof("hello", nonce, own)
    _send(link, Hello(version, place.size, place.first, place.num, host_name(), inlet, own, proof))
    link.settimeout(None)
    try:
        answer = msgspec.json.decode(_receive(link), type=Answer)
    except msgspec.DecodeError as error:
        raise RendezvousError(f"what listens at {place.address} is no rank 0: {error}") from error
    if answer.peers is None:
        raise RendezvousError(answer.refusal)
    if not hmac.compare_digest(answer.proof, _proof("answer", answer.peers.token)):
        raise RendezvousError(f"rank 0 at {place.address} does not know {KEY_VARIABLE}")
    return Member(place, link, answer.peers)
