"""The best of several samples: chosen by the sum of their log probs, when all have ended."""

import pytest
from fixtures.engine.client import Client
from fixtures.engine.counting import CountingRunner
from fixtures.engine.hashed import Words
from msgspec.structs import replace
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.wire import FinishReason
from slipstream_contract.errors import ContractError
from slipstream_contract.sampling import SamplingParams


def make() -> tuple[Client, CountingRunner]:
    runner = CountingRunner(60, 4)
    return Client(Engine(Limits(8, 64), runner, Words())), runner


SAMPLED = SamplingParams(max_tokens=9, n=6, seed=3, end_ids=(1, 2, 5, 7, 9, 30, 31, 40))


@pytest.mark.parametrize("has_log_probs", [False, True])
def test_the_best_of_all_samples_are_returned(has_log_probs: bool) -> None:
    client, _ = make()
    every = client.submit([1, 2, 3], replace(SAMPLED, log_probs=True))
    some = client.submit([1, 2, 3], replace(SAMPLED, n=2, best_of=6, log_probs=has_log_probs))
    client.drain()
    streams = [client.streams[every, index] for index in range(6)]
    order = sorted(range(6), key=lambda i: (not streams[i].token_ids, -sum(streams[i].log_probs)))
    assert len({len(stream.token_ids) for stream in streams}) > 2, "nothing to choose"
    for place, index in enumerate(order[:2]):
        found = client.streams[some, place]
        assert found.token_ids == streams[index].token_ids
        assert found.log_probs == (streams[index].log_probs if has_log_probs else [])


def test_a_cancel_ends_all_samples() -> None:
    client, _ = make()
    number = client.submit([1, 2, 3], replace(SAMPLED, n=2, best_of=6, end_ids=(), max_tokens=30))
    for _ in range(5):
        client.step()
    client.engine.cancel(client.name, number)
    client.drain()
    for index in range(2):
        assert client.streams[number, index].reason is FinishReason.CANCELLED
        assert client.streams[number, index].token_ids


def test_the_first_error_ends_the_request() -> None:
    client, runner = make()
    number = client.submit([1, 2, 3], replace(SAMPLED, n=1, best_of=6))
    sequences = client.engine._requests[client.name, number].sequences
    runner.poisoned |= {sequence.id for sequence in sequences[2:]}
    while client.engine.has_work:
        client.step()
    assert client.streams[number, 0].reason is FinishReason.ERROR
    assert client.streams[number, 0].log_probs == []


def test_best_of_below_n_is_refused() -> None:
    client, _ = make()
    with pytest.raises(ContractError, match="best_of is 2, below n, which is 6"):
        client.submit([1], replace(SAMPLED, best_of=2))
