"""Which blocks the cache has, published over ZeroMQ, as a subscriber of vLLM's events reads it."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from fixtures.engine.client import Client
from fixtures.engine.counting import CountingRunner
from fixtures.engine.hashed import Words
from fixtures.engine.listening import AllBlocksCleared, RouterView
from fixtures.ports import held_port
from slipstream.config import EngineConfig
from slipstream.core import block_events
from slipstream.engine import kv_events
from slipstream.engine.adapters import AdapterStore
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.errors import ConfigError
from slipstream_contract.sampling import SamplingParams

SIZE = 4
GREEDY = SamplingParams(max_tokens=2, temperature=0.0)
PROMPT = [1, 2, 3, 0, 1, 2, 3, 3, 0]
END = b"\xff" * 8


class House:
    """An engine that publishes, and what a router knows of it."""

    def __init__(self, rank: int = 0, topic: str = "", max_len: int = 64) -> None:
        with held_port() as port, held_port() as replay_port:
            self.ports = port, replay_port
            runner = CountingRunner(max_len // SIZE, SIZE, max_len)
            self.store = AdapterStore(runner.held)
            self.engine = Engine(Limits(8, 64), runner, Words(), adapters=self.store)
            self.client = Client(self.engine)
            config = EngineConfig(
                checkpoint="",
                kv_events=f"{port - rank},{replay_port - rank}" + (f"+{rank}" if rank else ""),
                kv_events_topic=topic,
            )
            publisher = kv_events.publish(config, "counting", self.engine.prefixes)
            assert publisher is not None
            self.publisher = publisher
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = RouterView(SIZE)

    def connect(self, kind: int, port: int) -> zmq.Socket[bytes]:
        made = self.context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.connect(f"tcp://127.0.0.1:{port}")
        return made

    def ask(self, *prompts: list[int], salt: str = "") -> None:
        for prompt in prompts:
            self.client.submit(prompt, GREEDY, salt=salt)
        self.client.drain()

    def ask_with(self, name: str, content: int) -> None:
        self.store.load(name, str(content))
        self.client.adapter, self.client.content = name, content
        self.ask(PROMPT)

    def ask_until_heard(self, subscriber: zmq.Socket[bytes]) -> None:
        """Ask new prompts until a subscription has arrived; what came before is missed."""
        self.router.is_partial = True
        while not subscriber.poll(50):
            number = len(self.client.streams)
            self.ask([number % 7, number // 7 % 7, number // 49, *PROMPT])

    def settle(self) -> None:
        """Wait until everything is taken: it is sent before the next replay."""
        while self.publisher.events._events:
            time.sleep(0.001)

    def replay(
        self, first: int = 0, client: zmq.Socket[bytes] | None = None
    ) -> list[tuple[int, bytes]]:
        self.settle()
        client = client or self.connect(zmq.DEALER, self.ports[1])
        client.send_multipart([b"", first.to_bytes(8, "big")])
        batches = []
        while client.poll(20_000):
            empty, number, payload = client.recv_multipart()
            assert not empty
            if number == END:
                assert not payload
                return batches
            batches.append((int.from_bytes(number, "big"), payload))
        raise AssertionError("no end")

    def learn(self) -> None:
        """Take all that was published, as a router that comes late."""
        self.router = RouterView(SIZE)
        for _, payload in self.replay():
            self.router.take(payload)


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.publisher.close()
    house.context.destroy(0)


def test_a_subscriber_follows_the_cache(house: House) -> None:
    subscriber = house.connect(zmq.SUB, house.ports[0])
    subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@")
    before, numbers = time.time(), []
    house.ask_until_heard(subscriber)
    house.router.is_partial = False  # a replay tells what was missed
    for first in range(20):
        house.ask([first % 7, *PROMPT, first // 7, *PROMPT])
        last = house.replay()[-1][0]
        while not numbers or numbers[-1] < last:
            assert subscriber.poll(20_000)
            topic, number, payload = subscriber.recv_multipart()
            assert topic == f"kv@{socket.gethostname()}@counting".encode()
            if not numbers:
                for _, earlier in house.replay()[: int.from_bytes(number, "big")]:
                    house.router.take(earlier)
            numbers.append(int.from_bytes(number, "big"))
            batch = house.router.take(payload)
            assert before - 1 < batch.ts < time.time() + 1
            assert batch.data_parallel_rank == 0
    assert numbers == [*range(numbers[0], numbers[-1] + 1)]
    digests = house.engine.prefixes.digests()
    assert house.router.places["GPU"] == {int.from_bytes(each[8:], "big") for each in digests}
    house.ask(PROMPT)
    house.learn()
    assert (None, tuple(PROMPT[:4])) in house.router.known
    assert (None, tuple(PROMPT[:8])) in house.router.known


def test_adapters_have_their_names_and_salted_prompts_stay_here(house: House) -> None:
    house.ask(PROMPT, salt="tenant")
    house.learn()
    assert house.router.known == set()
    house.ask(PROMPT)
    house.ask_with("a", 1)
    house.ask_with("b", 2)
    house.learn()
    assert house.router.known == {
        (name, tuple(PROMPT[:end])) for name in (None, "a", "b") for end in (4, 8)
    }


def test_a_replay_is_what_is_kept_from_a_number_on(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.ask(PROMPT)
    whole = house.replay()
    assert [number for number, _ in whole] == [*range(len(whole))]
    assert [*map(type, RouterView(SIZE).take(whole[0][1]).events)] == [AllBlocksCleared]
    assert house.replay(1) == whole[1:]
    assert house.replay(10**6) == []
    client = house.connect(zmq.DEALER, house.ports[1])
    for frames in ([b"", b"1"], [b"x", bytes(8)], [bytes(8)], [b"", bytes(8), b""], [b""]):
        client.send_multipart(frames)
    assert house.replay(client=client) == whole
    assert not client.poll(50)
    monkeypatch.setattr(kv_events, "_MAX_KEPT", 1)
    house.ask([3, 3, 3, *PROMPT])
    house.settle()
    [(number, _)] = house.replay()
    assert number >= len(whole)


def test_what_nobody_took_in_time_is_a_gap_and_voids_what_was_told(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.ask(PROMPT)
    first = house.replay()
    events = house.publisher.events
    monkeypatch.setattr(events, "take", lambda most: [])
    monkeypatch.setattr(block_events, "_MOST", 4)
    for number in range(40):
        house.ask([number % 7, number // 7, *PROMPT, *PROMPT])
    assert len(events._events) <= 4
    monkeypatch.delattr(events, "take")
    later = house.replay(len(first))
    assert later[0][0] == len(first) + 1
    assert isinstance(RouterView(SIZE).take(later[0][1]).events[0], AllBlocksCleared)
    house.router = RouterView(SIZE)
    for _, payload in first:
        house.router.take(payload)
    known = {int.from_bytes(each[8:], "big") for each in house.engine.prefixes.digests()}
    for _, payload in later:
        house.router.take(payload)
    assert house.router.places["GPU"] <= known


def test_a_subscriber_that_does_not_read_makes_nobody_wait_and_sees_gaps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_events, "_MAX_UNSENT", 2)
    house = House()
    try:
        subscriber = house.context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.RCVHWM, 1)
        subscriber.setsockopt(zmq.RCVBUF, 1 << 14)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.connect(f"tcp://127.0.0.1:{house.ports[0]}")
        house.ask_until_heard(subscriber)
        ids = bytes(4 * SIZE)
        for number in range(200):
            for block in range(1000):
                digest = (1 + number * 1000 + block).to_bytes(16, "big")
                house.publisher.events.store("GPU", digest, b"", ids * 20, "")
            if not number % 20:
                house.settle()
        whole = dict(house.replay())
        assert [*whole] == [*range(len(whole))]
        got = {}
        while subscriber.poll(500):
            _, number, payload = subscriber.recv_multipart()
            got[int.from_bytes(number, "big")] = payload
        assert 0 < len(got) < len(whole) - 10
        assert got.items() <= whole.items()
    finally:
        house.publisher.close()
        house.context.destroy(0)


def test_blocks_that_follow_each_other_in_one_place_are_one_event() -> None:
    digests = [bytes([number]) * 16 for number in range(6)]
    names = ("", "", "", "a", "a")
    media = ("GPU", "GPU", "CPU", "CPU", "CPU")
    events = [
        block_events.Stored(medium, digests[i + 1], digests[i], bytes(4 * SIZE), name)
        for i, (medium, name) in enumerate(zip(media, names, strict=True))
    ]
    router = RouterView(SIZE)
    batch = router.take(kv_events.encode(events, SIZE, 0))
    found = [(len(each.block_hashes), each.medium, each.lora_name) for each in batch.events]
    assert found == [(2, "GPU", None), (1, "CPU", None), (2, "CPU", "a")]


def test_replicas_have_ports_ranks_and_topics() -> None:
    house = House(rank=1, topic="kv@10.0.0.7:9000@m")
    try:
        subscriber = house.connect(zmq.SUB, house.ports[0])
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@10.0.0.7")
        house.ask_until_heard(subscriber)
        topic, _, payload = subscriber.recv_multipart()
        assert topic == b"kv@10.0.0.7:9000@m"
        assert house.router.take(payload).data_parallel_rank == 1
    finally:
        house.publisher.close()
        house.context.destroy(0)


def test_nothing_is_published_unless_asked_for() -> None:
    engine = Engine(Limits(8, 64), CountingRunner(16, SIZE, 64), Words())
    assert kv_events.publish(EngineConfig(checkpoint=""), "counting", engine.prefixes) is None
    client = Client(engine)
    client.submit(PROMPT, GREEDY)
    client.drain()
    assert engine.prefixes.events is None
    assert "kv events" not in {thread.name for thread in threading.enumerate()}


def test_a_port_that_is_taken_is_named(house: House) -> None:
    index = Engine(Limits(8, 64), CountingRunner(16, SIZE, 64), Words()).prefixes
    config = EngineConfig(checkpoint="", kv_events=f"tcp://127.0.0.1:{house.ports[0]}")
    with pytest.raises(ConfigError, match=f"kv_events = 'tcp://127.0.0.1:{house.ports[0]}' cannot"):
        kv_events.publish(config, "counting", index)
    assert index.events is None
