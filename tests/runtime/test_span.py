"""Ranks on several hosts: what the environment says, who is refused, and bytes that arrive."""

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
from fixtures.ports import held_port
from slipstream_runtime import spanned
from slipstream_runtime.ranks import RankMemory, num_bytes
from slipstream_runtime.rendezvous import (
    KEY_VARIABLE,
    Answer,
    Gate,
    Hello,
    Place,
    RendezvousError,
    _receive,
    _send,
    connect,
    join,
    place_of,
)
from slipstream_runtime.span import VARIABLE, Host, Inlet, Peers, exported, place_here, read

TORCHRUN = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234", "RANK": "1", "WORLD_SIZE": "2"}
NODES = {"MASTER_ADDR": "leader", "NODE_RANK": "1", "NNODES": "2"}
HELD = {"TORCHELASTIC_USE_AGENT_STORE": "True"}


def test_the_environment_says_which_ranks_a_host_has():
    assert place_of(TORCHRUN, 2) == Place(1, 1, 2, "127.0.0.1", 1234)
    assert place_of(NODES, 8) == Place(4, 4, 8, "leader", 29500)
    assert place_of({}, 2) is None
    assert place_of(TORCHRUN, 1) is None  # one rank needs no other host
    assert place_of(NODES | {"NNODES": "1"}, 2) is None
    assert place_of(TORCHRUN | HELD, 2) == Place(1, 1, 2, "127.0.0.1", 1235)
    assert place_of(TORCHRUN | HELD | {"SLIPSTREAM_RANK_PORT": "7"}, 2).port == 7


def exported_by(counts: list[int], own: int, address: str = "127.0.0.1") -> dict[str, str]:
    """What the ranks of a host get, where each host has so many."""
    firsts = [sum(counts[:at]) for at in range(len(counts))]
    hosts = [Host("", address, 1, *each) for each in zip(firsts, counts, strict=True)]
    return exported(Peers("", firsts[own], hosts))


def test_a_rank_has_a_number_on_its_host():
    assert place_here(3, {}) == (3, None)
    assert place_here(3, exported_by([2, 2], 1)) == (1, 2)
    assert place_here(3, exported_by([1] * 4, 3)) == (0, 1)
    local = {"LOCAL_RANK": "1"}  # an agent of one rank, as torchrun starts them beside each other
    assert place_here(3, exported_by([1] * 4, 3) | local) == (1, 1)
    assert place_here(3, exported_by([2, 2], 1) | local) == (1, 2)
    assert place_here(1, exported_by([1, 1], 1) | NODES | local) == (0, 1)


@pytest.mark.parametrize(
    ("changed", "size", "words"),
    [
        ({"RANK": "x"}, 2, "RANK is 'x', not a whole number"),
        ({"WORLD_SIZE": "3"}, 2, "WORLD_SIZE is 3, but the model has 2 ranks"),
        ({"RANK": "2"}, 2, "RANK 2 of WORLD_SIZE 2"),
        ({"NNODES": "3", "NODE_RANK": "0"}, 4, "NODE_RANK 0 of NNODES 3"),
        ({"MASTER_PORT": "65536"}, 2, "MASTER_PORT is 65536, not a port from 1 to 65535"),
        (HELD | {"MASTER_PORT": "65535"}, 2, "MASTER_PORT, which torchrun has, and 1 is 65536"),
        ({"SLIPSTREAM_RANK_PORT": "0"}, 2, "SLIPSTREAM_RANK_PORT is 0, not a port"),
    ],
)
def test_an_impossible_environment_is_refused_by_the_variable(changed, size, words):
    with pytest.raises(RendezvousError, match=words):
        place_of(TORCHRUN | changed, size)


class Hosts:
    """Two hosts of one rank each, as their agents; they meet at once."""

    def __init__(self, version="1", other="1", size=2):
        self.closing = contextlib.ExitStack()
        self.place = Place(0, 1, 2, "127.0.0.1", self.closing.enter_context(held_port()))
        self.descriptors = [RankMemory.create(2) for _ in range(2)]
        memories = [RankMemory(each, 2) for each in self.descriptors]
        self.inlets = [Inlet("127.0.0.1", each.apply, num_bytes(2)) for each in memories]
        self.gate = Gate(self.place, version)
        self.found: list[object] = []
        thread = threading.Thread(target=self._join, args=(other, size))
        thread.start()
        try:
            self.peers = self.gate.gather(self.inlets[0].port, lambda: False)
        finally:
            thread.join()

    def _join(self, version: str, size: int) -> None:
        place = self.place._replace(first=1, size=size)
        self.link = connect(place, 60)
        try:
            self.member = join(place, self.link, self.inlets[1].port, version)
        except RendezvousError as error:
            self.found.append(str(error))

    def memory(self, rank: int, monkeypatch) -> RankMemory:
        peers = self.peers if rank == 0 else self.member.peers
        self.inlets[1 - rank].open(peers.token)
        for name, value in exported(peers).items():
            monkeypatch.setenv(name, value)
        assert place_here(rank, exported(peers)) == (0, 1)
        made = RankMemory(self.descriptors[rank], 2, rank)
        monkeypatch.delenv(VARIABLE)
        return made

    def close(self) -> None:
        self.gate.close()
        self.link.close()
        for inlet in self.inlets:
            inlet.close()
        self.closing.close()


def test_messages_meetings_and_failures_cross_hosts(monkeypatch):
    hosts = Hosts()
    first, second = (hosts.memory(rank, monkeypatch) for rank in range(2))
    big = bytes(range(256)) * 9000  # more than the ring holds

    def follow() -> None:
        for _ in range(3):
            hosts.found.append(second.receive())
        second.state(b"two")
        view = second.buffer(1, 1)
        view[:4] = b"here"
        second.wrote(1, 4)
        second.meet()
        hosts.found.append(bytes(second.buffer(0, 1)[:5]))
        second.fail()

    thread = threading.Thread(target=follow)
    thread.start()
    for message in (b"one", b"", big):
        first.send(message)
    first.state(b"one")
    first.buffer(0, 1)[:5] = b"there"
    first.wrote(1, 5)
    first.meet()
    assert first.facts() == [b"one", b"two"]
    assert bytes(first.buffer(1, 1)[:4]) == b"here"
    with pytest.raises(Exception, match=r"rank 1 on .* has failed"):
        first.meet()
    thread.join()
    assert hosts.found == [b"one", b"", big, b"there"]
    hosts.close()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"other": "2"}, "has another version than rank 0: 2, not 1"),
        ({"size": 4}, "has another number of ranks: 4, not 2"),
    ],
)
def test_a_host_that_differs_is_refused_by_name_on_both_sides(given, words, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_HOST", "host-b")
    with pytest.raises(RendezvousError, match=f"rank 1 on host-b {words}"):
        Hosts(**given)


def test_a_host_needs_the_key_and_a_connection_the_token(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    hosts = Hosts()
    assert hosts.peers is not None
    hosts.inlets[0].open(hosts.peers.token)
    with socket.create_connection(("127.0.0.1", hosts.inlets[0].port)) as link:
        link.settimeout(30)
        link.sendall(bytes(32) + b"\xff" * 12)
        with contextlib.suppress(ConnectionResetError):
            assert link.recv(1) == b""  # it is closed
    hosts.close()


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Rank 0's, of three."""
    with held_port() as port:
        gate = Gate(Place(0, 1, 3, "127.0.0.1", port), "1")
        yield gate
        gate.close()


def test_a_host_without_the_key_is_not_taken(gate, monkeypatch):
    is_over = threading.Event()
    thread = threading.Thread(target=gate.gather, args=(1, is_over.is_set))
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    thread.start()
    place = gate._place._replace(first=1)
    with connect(place, 60) as link:
        read(link, 32)
        hello = Hello("1", 3, 1, 1, "thief", 1, "nonce", "0" * 64)
        _send(link, hello)
        answer = msgspec.json.decode(_receive(link), type=Answer)
    assert answer.peers is None
    assert KEY_VARIABLE in answer.refusal
    is_over.set()
    thread.join()
    assert gate.links == []


def test_another_host_comes_for_the_ranks_of_one_that_was_gone_before_all_were_here(gate):
    hosts = queue.Queue()
    thread = threading.Thread(target=lambda: hosts.put(gate.gather(1, lambda: False).hosts))
    thread.start()

    def come(rank: int, name: str) -> socket.socket:
        link = connect(gate._place._replace(first=rank), 60)
        read(link, 32)
        _send(link, Hello("1", 3, rank, 1, name, 1, "nonce", ""))
        return link

    come(1, "lost").close()
    with come(1, "found"), come(2, "third"):
        names = [host.name for host in hosts.get(timeout=120)]
    thread.join()
    assert names[1:] == ["found", "third"]


def test_ranks_of_a_host_have_time_to_say_why_they_refuse(gate, tmp_path, monkeypatch):
    """What rank 0 says of itself may come first."""
    monkeypatch.setattr(spanned, "WORDS_S", 120.0)
    place = gate._place._replace(first=1, num=2)

    def refuse() -> None:
        gate.gather(1, lambda: False)
        gate.report(2)

    thread = threading.Thread(target=refuse)
    thread.start()
    script = f"sleep 0.5; echo why >> {tmp_path / 'said'}; exit 2"
    command = lambda rank, descriptor: ["sh", "-c", script]  # noqa: E731
    assert spanned.serve_host(place, "1", command, lambda: lambda: None, 60, 60, quiet=2) == 2
    thread.join()
    assert (tmp_path / "said").read_text() == "why\n" * 2


def test_a_port_that_another_has_is_named(gate):
    address, port = gate._place.address, gate._place.port
    words = f"rank 0 cannot listen at MASTER_ADDR {address}, port {port}: Address already in use"
    with pytest.raises(OSError, match=words):
        Gate(gate._place, "1")
