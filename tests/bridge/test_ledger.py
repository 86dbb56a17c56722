"""Frames lost or repeated on the wire, either way: which requests end, and which must not."""

import random

import msgspec
import pytest
from slipstream import wire
from slipstream.bridge.ledger import Ledger
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

REASON = wire.FinishReason.LENGTH
PERF = wire.Perf(0, 0, 0, 0, 0, 0, 0)


class Engine:
    """Sends each sequence the numbers 0, 1, 2 ... in messages of any size."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.running: dict[tuple[int, int], list[int]] = {}  # how many were told, and in all

    def submit(self, message: wire.Submit) -> None:
        for index in range(message.sampling.n):
            key = (message.request, index)
            self.running.setdefault(key, [0, message.sampling.max_tokens])

    def requests(self) -> list[int]:
        return sorted({request for request, _ in self.running})

    def step(self) -> wire.StepOutputs:
        tokens = []
        for (request, index), (start, num) in list(self.running.items()):
            end = min(num, start + self.rng.randrange(3))
            if end == start < num:
                continue
            finished = None
            if end == num and (end == start or self.rng.random() < 0.5):
                finished = wire.Finished(REASON, 1, num, PERF)
                del self.running[request, index]
            elif end == start:
                continue
            else:
                self.running[request, index][0] = end
            ids = list(range(start, end))
            tokens.append(wire.Tokens(request, index, ids, [], 0, finished, start))
        return wire.StepOutputs(0, 0, tokens)


def spoil(rng: random.Random, message: object, chance: float) -> list[object]:
    """Return the message as it arrives: once, twice or never."""
    draw = rng.random()
    return [] if draw < chance else [message] * (1 + (draw < 2 * chance))


@pytest.mark.parametrize("chance", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("seed", range(20))
def test_every_request_is_whole_or_missed(seed: int, chance: float) -> None:
    rng = random.Random(seed)
    ledger, engine = Ledger(), Engine(rng)
    got: dict[tuple[int, int], list[int]] = {}
    ended: set[tuple[int, int]] = set()
    missed: set[int] = set()
    asked = {number: rng.randint(1, 3) for number in range(30)}
    lengths = {number: rng.randint(1, 9) for number in asked}
    queue = list(asked)
    for turn in range(400):
        if queue and rng.random() < 0.3:
            number = queue.pop()
            sampling = SamplingParams(max_tokens=lengths[number], n=asked[number])
            message = wire.Submit(number, pack([1]), sampling, 0)
            ledger.add(message)
            for each in spoil(rng, message, chance):
                engine.submit(each)
        for outputs in spoil(rng, engine.step(), chance):
            right, lost = ledger.take(outputs)
            assert not lost & missed
            missed |= lost
            for tokens in right:
                key = (tokens.request, tokens.index)
                assert key not in ended, "told after the end"
                got.setdefault(key, []).extend(tokens.token_ids)
                if tokens.finished is not None:
                    ended.add(key)
        if turn % 7 == 0:
            ledger.note_ping(turn)
            answer = wire.Status(turn, "", 1, 1, 1, 0, 0, 0.0, 0, 0, [])
            answer = msgspec.structs.replace(answer, requests=engine.requests())
            for each in spoil(rng, answer, chance):
                lost, strays = ledger.compare(each)
                assert not lost & missed
                missed |= lost
                for stray in strays:
                    for key in [key for key in engine.running if key[0] == stray]:
                        del engine.running[key]
    for number, num in asked.items():
        whole = [(number, i) in ended for i in range(num)]
        assert all(whole) or number in missed, "lost in silence"
        for index in range(num):
            tokens = got.get((number, index), [])
            assert tokens == list(range(len(tokens))), "a hole, or twice the same"
            if (number, index) in ended:
                assert len(tokens) == lengths[number]
    assert not ledger._num_received
    assert not engine.running
    if not chance:
        assert not missed


def test_a_status_without_a_ping_is_ignored() -> None:
    ledger = Ledger()
    ledger.add(wire.Submit(1, pack([1]), SamplingParams(max_tokens=1), 0))
    status = wire.Status(9, "", 1, 1, 1, 0, 0, 0.0, 0, 0, [], requests=[])
    assert ledger.compare(status) == (set(), set())
    ledger.note_ping(9)
    ledger.add(wire.Submit(2, pack([1]), SamplingParams(max_tokens=1), 0))  # after the question
    assert ledger.compare(status) == ({1}, set())
    assert ledger.compare(status) == (set(), set())  # repeated
    ledger.note_ping(10)
    status = msgspec.structs.replace(status, number=10, requests=[2, 77])
    assert ledger.compare(status) == (set(), {77})
