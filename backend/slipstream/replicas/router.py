"""Serve requests by several engines, as one: what `EngineLoop` serves where there are replicas.

A request goes to one replica (`policy.py`) under a number of the router's own, which no other
request of any replica has. Its tokens come back in the connection's thread, get the bridge's number
again, and wait until the loop takes them (`step`). If an engine ends, requests of which it had sent
nothing go to another, once; the others get the error that they get from one engine alone.
"""

import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import msgspec
from slipstream_contract.errors import Code, ContractError
from slipstream_runtime.admission import Load
from slipstream_runtime.directory import Runtime

from slipstream import wire
from slipstream.core.prefix import PrefixIndex
from slipstream.engine.request_ids import RequestIds
from slipstream.replicas.adapters import RoutedAdapters
from slipstream.replicas.cached import PromptDigests, num_cached
from slipstream.replicas.placing import Place
from slipstream.replicas.policy import choose
from slipstream.replicas.replica import Replica
from slipstream.replicas.sums import Gatherer, sum_loads, sum_statuses

_log = logging.getLogger(__name__)

SILENT_S = 3.0  # engines answer once a second, between steps
_GONE = "the engine ended; try again"
_COMING = "the engines that have the adapter are being restarted, and load it again"
_FULL = ("max_waiting", "max_waiting_tokens")


@dataclass(slots=True, eq=False)
class Routed:
    """A request that has not ended.

    Attributes:
        bridge: identity of the connection that it came by.
        message: as it came, with the bridge's number.
        number: the router's, by which its replica knows it.
        num_new: tokens of its prompt that were not cached there; 0 once it answers.
        num_held: tokens that it holds there.
        num_open: sequences that have not ended.
        is_retried: it was sent to a second replica, as the first one's engine ended.
        full: numbers of replicas that refused it as full.
        cause: why it is being cancelled.
    """

    bridge: bytes
    message: wire.Submit
    number: int = 0
    replica: Replica | None = None
    num_new: int = 0
    num_held: int = 0
    num_open: int = 0
    has_answered: bool = False
    is_retried: bool = False
    cause: wire.CancelCause | None = None
    full: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    expected: list[bytes] = field(default_factory=list)  # what it will add to the cache there


class Router:
    """The replicas, and all requests. The loop's thread calls it, but for `Owner`'s methods."""

    def __init__(self, runtime: Runtime, places: Sequence[Place], server_pid: int) -> None:
        """Start to connect to all; returns at once."""
        since_s = time.time()
        self.fatal: Exception | None = None  # a router has no device
        self.num_steps = 0  # of all engines, as far as they brought tokens
        self.prefixes = PrefixIndex(1)  # of no block: nobody asks a router
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable: `step` has tokens
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._routed: dict[int, Routed] = {}  # by the router's number
        self._by_bridge: dict[tuple[bytes, int], Routed] = {}
        self._request_ids: RequestIds[Routed] = RequestIds()
        self._tasks: dict[int, int] = {}  # a client's adapter -> the replica that has its weights
        self._outbox: dict[bytes, list[wire.Tokens]] = {}
        self._rejected: list[tuple[bytes, wire.Rejected]] = []
        self._num_received = self._num_received_tokens = 0
        self.replicas: list[Replica] = []
        key = secrets.token_bytes(32)
        for number, place in enumerate(places):
            self.replicas.append(Replica(number, runtime, place, server_pid, key, self))
        self.adapters = RoutedAdapters(self.replicas)
        self._gatherer = Gatherer(self.replicas, since_s)

    def look(self) -> None:
        """Learn what engines have counted before the first request comes."""
        self._gatherer.look()

    def close(self, ends_replicas: bool = False) -> None:
        """End all connections; the engines end as unused, and starting ones if `ends_replicas`."""
        self._gatherer.close()
        for replica in self.replicas:
            replica.connection.close()
            if ends_replicas:
                replica.starter.stop()

    # --- what the loop calls -------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether there are requests that have not ended, or tokens to take."""
        return bool(self._routed or self._outbox or self._rejected)

    @property
    def answers(self) -> bool:
        """Whether a replica is there, and has answered a moment ago."""
        return any(each.is_up() and each.silent_s() < SILENT_S for each in self.replicas)

    def has_request(self, bridge: bytes, request: int) -> bool:
        """Return whether that request of a bridge has not ended."""
        return (bridge, request) in self._by_bridge

    def submit(self, bridge: bytes, message: wire.Submit) -> None:
        """Send a request to a replica. Raises ContractError if there is none."""
        with self._lock:
            self._num_received += 1
            self._num_received_tokens += len(message.token_ids)
            self._request_ids.refuse_duplicate(bridge, message.model, message.request_id)
            routed = Routed(bridge, message, num_open=message.num_streams)
            self._send(routed)
            self._by_bridge[bridge, message.request] = routed
            self._request_ids.add(routed)

    def cancel(
        self,
        bridge: bytes,
        request: int,
        cause: wire.CancelCause = wire.CancelCause.CLIENT,
        noticed_ns: int = 0,
    ) -> bool:
        """Have a request ended by its replica; return False if there is none such."""
        with self._lock:
            routed = self._by_bridge.get((bridge, request))
            if routed is None:
                return False
            routed.cause = cause
            cancel = wire.Cancel(routed.number, cause, noticed_ns or time.monotonic_ns())
            try:
                assert routed.replica is not None, "it was sent"
                routed.replica.connection.send(cancel)
            except ContractError:  # it waits for the next engine
                self._refuse(routed, Code.UNAVAILABLE, _GONE)
            return True

    def cancel_bridge(self, bridge: bytes) -> int:
        """Cancel and remove all requests of a bridge that is gone; return how many there were."""
        with self._lock:
            gone = [number for owner, number in self._by_bridge if owner == bridge]
            for number in gone:
                routed = self._by_bridge[bridge, number]
                self.cancel(bridge, number, wire.CancelCause.BRIDGE)
                self._end(routed)
            self._outbox.pop(bridge, None)
            return len(gone)

    def requests_of(self, bridge: bytes) -> list[int]:
        """Return the numbers of a bridge's requests whose end it has not been sent.

        An end that `step` or `take_rejected` has not taken yet comes after the answer to a `Ping`.
        """
        with self._lock:
            found = {number for owner, number in self._by_bridge if owner == bridge}
            found |= {tokens.request for tokens in self._outbox.get(bridge, ())}
            found |= {rejected.request for owner, rejected in self._rejected if owner == bridge}
            return list(found)

    def slack_ns(self) -> float:
        """Return 0: tokens are sent on at once."""
        return 0.0

    def step(self) -> dict[bytes, list[wire.Tokens]]:
        """Return the tokens that have come, for each bridge."""
        with self._lock:
            outbox, self._outbox = self._outbox, {}
            self.num_steps += bool(outbox)
            return outbox

    def take_rejected(self) -> list[tuple[bytes, wire.Rejected]]:
        """Return requests, by bridge, that no replica serves."""
        with self._lock:
            rejected, self._rejected = self._rejected, []
            return rejected

    def load(self) -> Load:
        """Return how much is waiting, and how much may wait, in all replicas."""
        load = sum_loads([each.load() for each in self.replicas])
        return load._replace(
            num_received=self._num_received, num_received_tokens=self._num_received_tokens
        )

    def status(self, number: int = 0, bridges: Iterable[str] = ()) -> wire.Status:
        """Return the answer to a `Ping`: sums over replicas as of their last answers."""
        found = [each.connection.status for each in self.replicas if each.is_up()]
        return msgspec.structs.replace(
            sum_statuses([each for each in found if each is not None]),
            number=number,
            engine_pid=os.getpid(),
            bridges=list(bridges),
            replicas=[each.state() for each in self.replicas],
        )

    def figures(self, num_dropped: int = 0) -> wire.Figures:
        """Return all metrics, summed; those of the last look at the replicas."""
        return self._gatherer.take(num_dropped)

    # --- sending -------------------------------------------------------------------------------

    def _send(self, routed: Routed, among: Mapping[int, Replica] | None = None) -> None:
        """Choose a replica, of all or `among` some, and send a request there.

        Raises ContractError if there is none.
        """
        replicas = self.replicas if among is None else among.values()
        open_to = {each.number: each for each in replicas if each.is_up()}
        while True:
            found = self._choose(routed, open_to)
            if found is None:
                raise ContractError(
                    self.replicas[0].starter.outage(), Code.UNAVAILABLE, "engine_down"
                )
            replica, num_known, prompt = found
            number = next(self._numbers)
            try:
                replica.connection.send(msgspec.structs.replace(routed.message, request=number))
            except ContractError:  # it has ended this moment
                del open_to[replica.number]
                continue
            num_prompt = len(routed.message.token_ids)
            routed.number, routed.replica = number, replica
            routed.num_new, routed.num_held = max(1, num_prompt - num_known), num_prompt
            replica.num_queued += routed.num_new
            replica.num_held += routed.num_held
            replica.num_sent += 1
            self._routed[number] = routed
            if prompt is not None:
                routed.expected = replica.cached.expect(prompt)
            return

    def _choose(
        self, routed: Routed, replicas: dict[int, Replica]
    ) -> tuple[Replica, int, PromptDigests | None] | None:
        """Return the replica for a request, how much of its prompt that one has cached, and the
        prompt's digests; None: they are not known here.
        """
        message = routed.message
        num_prompt = len(message.token_ids)
        task = None if message.task is None else message.task.task_id
        if task is not None and (had := replicas.get(self._tasks.get(task, -1))) is not None:
            return had, 0, None  # the others have no such adapter
        digest = b""
        if message.adapter:
            digests = {n: each.adapter_digest(message.adapter) for n, each in replicas.items()}
            able = {n: each for n, each in replicas.items() if digests[n] is not None}
            if not able and replicas and self.adapters.has(message.adapter):
                raise ContractError(_COMING, Code.UNAVAILABLE, "engine_down")
            replicas = able or replicas
            digest = next((found for found in digests.values() if found is not None), b"")
        known, prompt = dict[int, int](), None
        if task is None and message.table is None:
            prompt = PromptDigests(message.token_ids.tobytes(), message.cache_salt, digest)
            known = num_cached({n: each.cached for n, each in replicas.items()}, prompt)
        views = {n: each.view(known.get(n, 0), num_prompt) for n, each in replicas.items()}
        chosen = choose(views, num_prompt)
        if chosen is None:
            return None
        if task is not None:
            self._tasks[task] = chosen
        return replicas[chosen], known.get(chosen, 0), prompt

    # --- `Owner`, in the connections' threads --------------------------------------------------

    def take(self, replica: Replica, outputs: wire.StepOutputs) -> None:
        """Put tokens, with the bridges' own numbers, where `step` takes them."""
        with self._lock:
            for tokens in outputs.tokens:
                routed = self._routed.get(tokens.request)
                if routed is None or routed.replica is not replica:
                    continue  # its bridge is gone
                self._count(routed, replica, tokens)
                own = msgspec.structs.replace(tokens, request=routed.message.request)
                self._outbox.setdefault(routed.bridge, []).append(own)
                if routed.num_open == 0:
                    self._end(routed)
        os.eventfd_write(self.wake, 1)

    def _count(self, routed: Routed, replica: Replica, tokens: wire.Tokens) -> None:
        """Count new tokens, the first ones and the last ones of a sequence."""
        routed.num_held += len(tokens.token_ids)
        replica.num_held += len(tokens.token_ids)
        if not routed.has_answered:
            routed.has_answered = True
            replica.num_queued -= routed.num_new
            replica.num_streams += routed.num_open
            routed.num_new = 0
            replica.cached.settle(routed.expected)
            routed.expected = []
        if tokens.finished is not None and tokens.index not in routed.ended:
            routed.ended.add(tokens.index)
            routed.num_open -= 1
            replica.num_streams -= 1

    def reject(self, replica: Replica, rejected: wire.Rejected) -> None:
        """Pass on that a replica refuses a request, unless it is full and another has room.

        What a replica has published is older than what was sent there since.
        """
        with self._lock:
            routed = self._routed.get(rejected.request)
            if routed is None:
                return
            routed.full.add(replica.number)
            is_full = rejected.reason in _FULL and routed.cause is None
            if not (is_full and routed.message.task is None and self._move_on(routed)):
                self._refuse(routed, rejected.code, rejected.message, rejected.reason)
        os.eventfd_write(self.wake, 1)

    def _move_on(self, routed: Routed) -> bool:
        """Send a request to a replica that has not refused it; return False if all are full."""
        message, before, full = routed.message, routed.number, routed.replica
        open_to = {
            each.number: each
            for each in self.replicas
            if each.number not in routed.full
            and not (message.adapter and each.adapter_digest(message.adapter) is None)
            and not each.view(0, len(message.token_ids)).is_full
        }
        counted = routed.num_new, routed.num_held, routed.expected
        try:
            self._send(routed, open_to)
        except ContractError:
            return False
        assert full is not None, "it has answered"
        del self._routed[before]
        _discount(full, *counted)
        return True

    def lose_messages(self, replica: Replica, requests: Iterable[int]) -> None:
        """Forget requests of which a message was lost: their bridges miss them at their next look.

        A bridge compares its requests with the `Status` of the router once a second.
        """
        with self._lock:
            for number in requests:
                if (routed := self._routed.get(number)) is not None:
                    self._end(routed)

    def lose_engine(self, replica: Replica, kept: Set[int]) -> None:
        """Send requests `kept` to another replica, if there is one; refuse the others."""
        with self._lock:
            mine = [each for each in self._routed.values() if each.replica is replica]
            had_engine = replica.reset()
            self._tasks = {t: n for t, n in self._tasks.items() if n != replica.number}
            num_moved = 0
            for routed in mine:
                if routed.number in kept and not routed.is_retried and routed.cause is None:
                    routed.is_retried = True
                    num_moved += self._move(routed)
                else:
                    routed.replica = None  # which counts nothing any more
                    self._refuse(routed, Code.UNAVAILABLE, _GONE)
            if mine or had_engine:
                _log.warning(
                    "replica %d is gone: of %d requests %d go to others",
                    *(replica.number, len(mine), num_moved),
                )
        os.eventfd_write(self.wake, 1)

    def _move(self, routed: Routed) -> bool:
        """Send a request to another replica; if none is up, it waits for its own to come back."""
        before = routed.number
        try:
            self._send(routed)
        except ContractError:
            assert routed.replica is not None, "it was sent"
            routed.replica.num_queued += routed.num_new
            routed.replica.num_held += routed.num_held
            return False
        del self._routed[before]
        return True

    def is_waiting_for(self, request: int) -> bool:
        """Return whether a request of that number has not ended; takes no lock."""
        return request in self._routed

    def greet(self, replica: Replica) -> None:
        """Give an engine that has just come the adapters that others were given."""
        key = replica.cached.key
        for each in self.replicas:
            each.connection.prefix_key = key  # the next to start is to have the same
        self.adapters.catch_up(replica)
        os.eventfd_write(self.wake, 1)

    # --- ends ----------------------------------------------------------------------------------

    def _refuse(self, routed: Routed, code: str, message: str, reason: str = "") -> None:
        rejected = wire.Rejected(routed.message.request, code, message, reason)
        self._rejected.append((routed.bridge, rejected))
        self._end(routed)

    def _end(self, routed: Routed) -> None:
        """Remove a request, and what it counts for at its replica."""
        if self._routed.pop(routed.number, None) is None:
            return
        del self._by_bridge[routed.bridge, routed.message.request]
        self._request_ids.remove(routed)
        replica = routed.replica
        if replica is not None:
            _discount(replica, routed.num_new, routed.num_held, routed.expected)
            if routed.has_answered:
                replica.num_streams -= routed.num_open

    def check_integrity(self) -> None:
        """Assert that counts agree with the requests that there are; for tests."""
        with self._lock:
            assert set(map(id, self._routed.values())) == set(map(id, self._by_bridge.values()))
            for replica in self.replicas:
                mine = [each for each in self._routed.values() if each.replica is replica]
                assert replica.num_queued == sum(each.num_new for each in mine)
                assert replica.num_held == sum(each.num_held for each in mine)
                streams = sum(each.num_open for each in mine if each.has_answered)
                assert replica.num_streams == streams


def _discount(replica: Replica, num_new: int, num_held: int, expected: list[bytes]) -> None:
    """Take what a request counted for from its replica."""
    replica.num_queued -= num_new
    replica.num_held -= num_held
    replica.cached.settle(expected)
