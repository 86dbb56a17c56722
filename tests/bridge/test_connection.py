import os
import queue
import secrets
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import zmq
from slipstream import __version__, wire
from slipstream.bridge.connection import Connection
from slipstream_contract.errors import ContractError
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

# A peer in a process of its own: answers everything, and echoes the prompt of a Submit as tokens.
_PEER = textwrap.dedent(
    """
    import sys, time, zmq
    from slipstream import wire
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(sys.argv[1])
    refuse = "refuse" in sys.argv
    while True:
        who, frame = socket.recv_multipart()
        match wire.decode_engine(frame):
            case wire.Hello():
                answer = wire.Refused("not you") if refuse else wire.Welcome(1, "v", "m", 42, 9, 99)
            case wire.Ping(number):
                answer = wire.Status(number, "m", 42, 1, 2, 3, 4, 0.5, 6, 7, [])
            case wire.Submit(request, ids) if "silent" in sys.argv:
                print(request, ids.tolist(), flush=True)
                continue
            case wire.Submit(request, ids):
                socket.send_multipart([who, b"garbage"])
                answer = wire.StepOutputs(1, 2, [wire.Tokens(request, 0, ids.tolist(), [])])
            case wire.Cancel(request):
                answer = wire.Rejected(request, "CANCELLED", "as you say")
            case wire.Bye():
                print("bye", flush=True)
                continue
        socket.send_multipart([who, wire.encode(answer)])
    """
)


class Peer:
    def __init__(self, address: str, *arguments: str) -> None:
        command = [sys.executable, "-c", _PEER, address, *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Ear:
    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.forgotten: set[int] = set()

    def take(self, outputs: wire.StepOutputs) -> None:
        self._hear(outputs)

    def reject(self, rejected: wire.Rejected) -> None:
        self._hear(rejected)

    def lose_messages(self, requests) -> None:
        self._hear(("missed", set(requests)))

    def lose_engine(self, kept) -> None:
        self._hear("lost" if not kept else ("lost but", set(kept)))

    def is_waiting_for(self, request: int) -> bool:
        return request not in self.forgotten

    def _hear(self, what: object) -> None:
        self.heard.put(what)

    def wait(self) -> object:
        """Return the next message that it received."""
        return self.heard.get(timeout=120)


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/{secrets.token_hex(4)}.sock"


@pytest.fixture
def link(address):
    """Yield a connection, its listener and the peers to start; end what still runs."""
    peers: list[Peer] = []
    asked: list[float] = []
    ear = Ear()
    connection = Connection(address, "test", ear, lambda: asked.append(time.monotonic()))

    def start(*arguments: str) -> Peer:
        peers.append(Peer(address, *arguments))
        return peers[-1]

    connection.asked = asked  # type: ignore[attr-defined]
    yield connection, ear, start
    connection.close()
    for peer in peers:
        peer.kill()


def test_a_request_goes_out_and_its_tokens_come_back_past_a_broken_frame(link):
    connection, ear, start = link
    start()
    welcome = connection.wait_welcome(180)
    assert welcome is not None
    assert (welcome.model, welcome.vocab_size) == ("m", 9)
    connection.send(wire.Submit(5, pack([1, 2, 3]), SamplingParams(max_tokens=1), 0))
    assert ear.wait() == wire.StepOutputs(1, 2, [wire.Tokens(5, 0, [1, 2, 3], [])])
    assert connection.num_dropped == 1
    connection.send(wire.Cancel(5))
    assert ear.wait() == wire.Rejected(5, "CANCELLED", "as you say")
    assert connection.request_status(30).kv_blocks_total == 2


def test_requests_without_a_token_are_submitted_to_the_next_engine_once(link):
    connection, ear, start = link
    peer = start("silent")
    assert connection.wait_welcome(180)
    for number in (5, 6, 7):
        connection.send(wire.Submit(number, pack([number]), SamplingParams(max_tokens=1), 0))
    said = [peer.process.stdout.readline() for _ in range(3)]
    assert said == [b"5 [5]\n", b"6 [6]\n", b"7 [7]\n"]
    peer.kill()
    assert ear.wait() == ("lost but", {5, 6, 7})
    ear.forgotten = {6}  # cancelled meanwhile
    peer = start("silent")
    said = [peer.process.stdout.readline() for _ in range(2)]
    assert said == [b"5 [5]\n", b"7 [7]\n"]
    connection.send(wire.Submit(8, pack([8]), SamplingParams(max_tokens=1), 0))
    assert peer.process.stdout.readline() == b"8 [8]\n"
    peer.kill()
    assert ear.wait() == ("lost but", {8})  # the others may be what ended it


def test_requests_with_a_token_are_not_submitted_again(link):
    connection, ear, start = link
    peer = start()
    assert connection.wait_welcome(180)
    connection.send(wire.Submit(5, pack([1, 2, 3]), SamplingParams(max_tokens=9), 0))
    assert isinstance(ear.wait(), wire.StepOutputs)
    peer.kill()
    assert ear.wait() == "lost"


def test_requests_do_not_wait_for_ever_for_the_next_engine(link, monkeypatch):
    monkeypatch.setattr("slipstream.bridge.connection._KEEP_S", 0.5)
    connection, ear, start = link
    peer = start("silent")
    assert connection.wait_welcome(180)
    connection.send(wire.Submit(5, pack([1]), SamplingParams(max_tokens=9), 0))
    peer.process.stdout.readline()
    peer.kill()
    assert ear.wait() == ("lost but", {5})
    assert ear.wait() == "lost"


def test_a_request_without_an_engine_is_refused_and_one_is_started(link):
    connection, _, _ = link
    assert connection.wait_welcome(0.3) is None
    with pytest.raises(ContractError, match="UNAVAILABLE: the engine is not running"):
        connection.send(wire.Cancel(1))
    assert connection.asked


def test_the_end_of_the_engine_is_noticed_at_once_and_the_next_one_is_found(link):
    connection, ear, start = link
    peer = start()
    assert connection.wait_welcome(180)
    begin = time.monotonic()
    peer.kill()
    assert ear.wait() == "lost"
    assert time.monotonic() - begin < 80  # pings alone would take 90 s to tell
    with pytest.raises(ContractError, match="UNAVAILABLE"):
        connection.send(wire.Cancel(1))
    start()
    assert connection.wait_welcome(180)
    connection.send(wire.Cancel(1))
    assert isinstance(ear.wait(), wire.Rejected)


def test_an_engine_that_stands_still_does_not_answer_in_time(link):
    connection, _, start = link
    peer = start()
    assert connection.wait_welcome(180)
    peer.process.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(ContractError, match="UNAVAILABLE: the engine did not answer within"):
        connection.request_status(0.3)
    assert time.monotonic() - begin < 120
    peer.process.send_signal(signal.SIGCONT)
    assert connection.request_status(30).running == 3


def test_a_refusal_reaches_the_caller(link):
    connection, _, start = link
    start("refuse")
    with pytest.raises(ContractError, match="UNAVAILABLE: not you"):
        connection.wait_welcome(180)


def test_bye_is_said(address):
    peer = Peer(address)
    connection = Connection(address, "test", Ear(), lambda: None)
    assert connection.wait_welcome(180)
    connection.close()
    assert peer.process.stdout.readline() == b"bye\n"
    peer.kill()


def test_hello_carries_protocol_version_name_and_process(address):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(address)
        connection = Connection(address, "ensemble", Ear(), lambda: None)
        assert router.poll(120_000)
        _, frame = router.recv_multipart()
        hello = wire.Hello(wire.PROTOCOL, __version__, "ensemble", os.getpid())
        assert wire.decode_engine(frame) == hello
        connection.close()


class SlowEar(Ear):
    """An engine that takes 50 ms for a step, until the test speeds it up."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0
        self.may_hurry = threading.Event()

    def take(self, outputs: wire.StepOutputs) -> None:
        self.num_steps += 1
        self.may_hurry.wait(0.05)


def test_what_is_sent_does_not_wait_until_nothing_comes(address):
    """Under load there is always more to hear; requests sent meanwhile left in bursts of hundreds,
    each after the engine had run dry."""
    num_steps = 400
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(address)
        ear = SlowEar()
        connection = Connection(address, "m", ear, lambda: None)
        who, _ = router.recv_multipart()
        router.send_multipart([who, wire.encode(wire.Welcome(1, "v", "m", 42, 9, 99))])
        assert connection.wait_welcome(30) is not None
        for step in range(num_steps):
            router.send_multipart([who, wire.encode(wire.StepOutputs(step, 2, []))])
        connection.send(wire.Submit(1, pack([1]), SamplingParams(max_tokens=1), 0))
        while True:
            assert router.poll(120_000)
            message = wire.decode_engine(router.recv_multipart()[1])
            if isinstance(message, wire.Submit):
                break
        heard = ear.num_steps
        ear.may_hurry.set()
        connection.close()
    assert heard < num_steps // 2


def test_an_answer_is_heard_though_somebody_sends_just_as_it_comes(link, monkeypatch):
    """A send sees what has come, and the descriptor does not signal that to the thread again.

    Nor does the thread look by itself here.
    """
    monkeypatch.setattr("slipstream.bridge.connection._POLL_MS", 600_000)
    monkeypatch.setattr("slipstream.bridge.connection._PING_S", 600.0)
    connection, _, start = link
    start("silent")
    assert connection.wait_welcome(180)
    is_over = threading.Event()

    def send() -> None:
        for request in range(1, 2000):
            connection.send(wire.Submit(request, pack([1]), SamplingParams(max_tokens=1), 0))
            if is_over.wait(0.0002):
                return

    sender = threading.Thread(target=send)
    sender.start()
    try:
        for _ in range(300):
            if not sender.is_alive():
                break
            connection.request_status(120)  # raises if nobody heard the answer
    finally:
        is_over.set()
        sender.join()


def test_no_descriptor_is_left(address):
    peer, count = Peer(address), 8
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(count):
        connection = Connection(address, "test", Ear(), lambda: None)
        assert connection.wait_welcome(180)
        connection.close()
    begin = time.monotonic()
    # Threads of other tests may open a few, but not one for each connection.
    while len(os.listdir("/proc/self/fd")) >= before + count:
        assert time.monotonic() - begin < 120
        time.sleep(0.05)
    peer.kill()


def test_adapters_are_known_from_the_moment_that_the_engine_is(address):
    """A list that came after `Welcome` had a name called unknown in between."""
    known: list[object] = []
    info = wire.AdapterInfo("one", "/one", 4, 8, "00")
    welcome = wire.Welcome(1, "v", "m", 42, 9, 99, adapters=[info])

    class Looking(threading.Condition):
        def notify_all(self) -> None:
            known.append(connection.adapters)
            super().notify_all()

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(address)
        connection = Connection(address, "m", Ear(), lambda: None)
        connection._changed = Looking()
        assert connection.adapters is None
        who, _ = router.recv_multipart()
        router.send_multipart([who, wire.encode(welcome)])
        assert connection.wait_welcome(30) == welcome
        connection.close()
    assert known == [{"one": info}]
    assert connection.adapters is None
