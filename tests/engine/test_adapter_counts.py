"""Counts by adapter: of what has ended, once each, and of no more names than are kept."""

from slipstream import wire
from slipstream.engine.adapter_counts import AdapterCounts
from slipstream.wire import AdapterCount, FinishReason
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

A, B = b"one", b"two"


class Requests:
    """Requests that have not ended, and counts of their adapters."""

    def __init__(self, most: int = 8) -> None:
        self.open: set[tuple[bytes, int]] = set()
        self.counts = AdapterCounts(lambda *key: key in self.open, most)

    def start(self, bridge: bytes, number: int, adapter: str) -> None:
        self.open.add((bridge, number))
        message = wire.Submit(
            number, pack([1, 2]), SamplingParams(max_tokens=1), 0, adapter=adapter
        )
        self.counts.start(bridge, message)

    def step(self, bridge: bytes, *ends: tuple[int, int, int], closes: bool = True) -> None:
        """Send the ends of sequences: number, index, tokens; of prompts of seven tokens."""
        tokens = []
        for number, index, count in ends:
            ended = wire.Finished(FinishReason.LENGTH, 7, count, wire.Perf(*[0] * 7))
            tokens += [wire.Tokens(number, index, [5], [], finished=ended)]
            if closes:
                self.open.discard((bridge, number))
        self.counts.take({bridge: [wire.Tokens(ends[0][0], 0, [4], []), *tokens]}, [])


def test_prompts_count_once_and_answers_by_sequence() -> None:
    """Several sequences of a request end in one step, or in several; numbers are a connection's."""
    requests = Requests()
    requests.start(A, 1, "sql")
    requests.start(B, 1, "chat")
    requests.start(A, 2, "sql")
    requests.start(A, 3, "")
    requests.step(A, (1, 0, 4), closes=False)
    requests.step(A, (1, 1, 5), (2, 0, 6), (2, 1, 1), (3, 0, 9))
    requests.step(B, (1, 0, 3))
    requests.step(A, (1, 0, 50), (3, 0, 50))  # numbers of none that is open
    assert requests.counts.all() == [AdapterCount("chat", 1, 7, 3), AdapterCount("sql", 2, 14, 16)]
    assert not requests.counts._open


def test_what_is_refused_or_disconnected_counts_as_a_request_alone() -> None:
    requests = Requests()
    requests.start(A, 1, "sql")
    requests.start(A, 2, "sql")
    requests.start(B, 1, "sql")
    requests.counts.take({}, [(A, wire.Rejected(1, "INTERNAL", "no"))])
    requests.counts.leave(B)
    assert list(requests.counts._open) == [(A, 2)]
    assert requests.counts.all() == [AdapterCount("sql", 3, 0, 0)]


def test_names_used_longest_ago_go_first() -> None:
    requests = Requests(most=2)
    for number, name in enumerate(("a", "b", "a", "c")):
        requests.start(A, number, name)
    requests.step(A, (0, 0, 1), (1, 0, 1), (2, 0, 1), (3, 0, 1))
    assert requests.counts.all() == [AdapterCount("a", 2, 14, 2), AdapterCount("c", 1, 7, 1)]
