"""Carry what ranks write in their shared memory to the ranks of other hosts, by TCP.

Each host has memory of its own, of the same layout (`ranks.py`). Each part of it has one writer.
A rank sends the bytes that it has written, and then the word that publishes them, to the agent of
each other host, which writes them there in that order. An agent is the process that started the
ranks of a host: `launch.py` for rank 0, `slipstream rank` elsewhere. So meetings, messages, signs
of life and failures are those of one host; only sums of many bytes take longer.
"""

import contextlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

VARIABLE = "SLIPSTREAM_SPAN"
_LOOPBACK = "127.0.0.1"
TOKEN_BYTES = 32
_HEAD = struct.Struct("<III")  # word, value, parts
_PART = struct.Struct("<QI")  # begin, bytes
_MAX_PARTS, _MAX_BYTES = 64, 1 << 26
_TIMEOUT_S = 4.0  # of a send: beyond, the other host takes nothing any more

Parts = Sequence[tuple[int, bytes]]


class Host(msgspec.Struct, frozen=True):
    """The agent of a host, as others reach it."""

    name: str
    address: str
    port: int
    first: int  # its first rank
    count: int


class Peers(msgspec.Struct, frozen=True):
    """All hosts of an engine; ranks get it by the environment."""

    token: str  # which connections begin with, in hexadecimal
    own: int  # the first rank of this host
    hosts: list[Host]

    def host_of(self, rank: int) -> Host | None:
        """Return the host of a rank."""
        return next((h for h in self.hosts if h.first <= rank < h.first + h.count), None)

    def name(self, rank: int) -> str:
        """Return a rank, and where it is."""
        host = self.host_of(rank)
        return f"rank {rank}" if host is None else f"rank {rank} on {host.name}"


@dataclass
class Span:
    """The connections of one rank to the agents of other hosts."""

    peers: Peers | None = None
    links: list[tuple[Host, socket.socket]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Span":
        """Connect to all other hosts that the environment names. Raises OSError."""
        peers = _peers(environment)
        if peers is None:
            return NO_SPAN
        span = cls(peers)
        for host in peers.hosts:
            if host.first != peers.own:
                link = socket.create_connection((host.address, host.port), _TIMEOUT_S)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link.sendall(bytes.fromhex(peers.token))
                span.links.append((host, link))
        return span

    def send(self, parts: Parts, word: int, value: int) -> None:
        """Send bytes and the word behind them to all hosts. Raises OSError with the host's name."""
        if not self.links:
            return
        frame = [_HEAD.pack(word, value, len(parts))]
        for begin, data in parts:
            frame += [_PART.pack(begin, len(data)), data]
        whole = b"".join(frame)
        with self._lock:
            for host, link in self.links:
                try:
                    link.sendall(whole)
                except OSError as error:
                    ranks = f"ranks {host.first} to {host.first + host.count - 1}"
                    raise OSError(f"host {host.name} ({ranks}) is lost: {error}") from error

    def address(self, rank: int) -> str:
        """Return the address of a rank's host; loopback where there is only one."""
        host = None if self.peers is None else self.peers.host_of(rank)
        return _LOOPBACK if host is None else host.address

    def name(self, rank: int) -> str:
        """Return a rank, and where it is."""
        return f"rank {rank}" if self.peers is None else self.peers.name(rank)


NO_SPAN = Span()


class Inlet:
    """The agent's side: writes what ranks of other hosts send; one thread a connection.

    Args:
        address: on which to listen, never all of the host's.
        apply: writes parts and the word behind them.
        limit: of the memory, in bytes.
    """

    def __init__(self, address: str, apply: Callable[[Parts, int, int], None], limit: int) -> None:
        self._token = b""
        self._is_open = threading.Event()
        self._apply, self._limit = apply, limit
        self._listener = socket.create_server((address, 0), family=family_of(address))
        self.port = int(self._listener.getsockname()[1])
        self._links: list[socket.socket] = []
        threading.Thread(target=self._accept, name="inlet", daemon=True).start()

    def open(self, token: str) -> None:
        """Take connections that begin with this token; those that came before have waited."""
        self._token = bytes.fromhex(token)
        self._is_open.set()

    def close(self) -> None:
        """Take nothing any more."""
        for link in (self._listener, *self._links):
            with contextlib.suppress(OSError):  # it is closed already
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            self._links.append(link)
            threading.Thread(target=self._serve, args=(link,), name="inlet", daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with link:
            try:
                given = read(link, TOKEN_BYTES)
                is_open = self._is_open.wait(_TIMEOUT_S)
                if not is_open or not secrets.compare_digest(given, self._token):
                    return
                while True:
                    word, value, count = _HEAD.unpack(read(link, _HEAD.size))
                    parts = [self._part(link) for _ in range(min(count, _MAX_PARTS))]
                    if word >= self._limit // 4:
                        return
                    self._apply(parts, word, value)
            except (OSError, ValueError):
                return  # the control connection says why

    def _part(self, link: socket.socket) -> tuple[int, bytes]:
        begin, size = _PART.unpack(read(link, _PART.size))
        if size > _MAX_BYTES or begin + size > self._limit:
            raise ValueError("outside of the memory")
        return begin, read(link, size)


def read(link: socket.socket, size: int) -> bytes:
    """Return exactly so many bytes. Raises OSError if the connection ends before."""
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        count = link.recv_into(view[at:])
        if not count:
            raise ConnectionError("the connection has ended")
        at += count
    return bytes(data)


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of an address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def host_name() -> str:
    """Return this host's name, by which errors call it."""
    return os.environ.get("SLIPSTREAM_HOST") or socket.gethostname()


def place_here(rank: int, environment: Mapping[str, str]) -> tuple[int, int | None]:
    """Return a rank's number on its host, and how many its agent has; None: all ranks.

    Where torchrun starts several agents of one rank on a host, LOCAL_RANK is the number.
    """
    peers = _peers(environment)
    if peers is None:
        return rank, None
    host = peers.host_of(rank)
    assert host is not None, "ranks are started by their hosts"
    local = environment.get("LOCAL_RANK", "")
    by_nodes = "NNODES" in environment and "NODE_RANK" in environment
    if host.count == 1 and local.isdecimal() and not by_nodes:
        return int(local), 1
    return rank - host.first, host.count


def address_here(environment: Mapping[str, str]) -> str | None:
    """Return the address by which other hosts reach this one; None: there are none."""
    peers = _peers(environment)
    host = None if peers is None else peers.host_of(peers.own)
    return None if host is None else host.address


def _peers(environment: Mapping[str, str]) -> Peers | None:
    text = environment.get(VARIABLE)
    return msgspec.json.decode(text, type=Peers) if text else None


def exported(peers: Peers) -> dict[str, str]:
    """Return the variables that ranks of a host need."""
    return {VARIABLE: msgspec.json.encode(peers).decode()}


def names(hosts: Iterable[Host]) -> str:
    """Return hosts with their ranks, for a log."""
    return ", ".join(f"{h.name} (ranks {h.first} to {h.first + h.count - 1})" for h in hosts)
