"""Drafts in the engine: tokens and endings are those without drafts, in fewer steps."""

import random

import pytest
from fixtures.engine.checks import check
from fixtures.engine.client import Client, Stream
from fixtures.engine.counting import CountingRunner
from fixtures.engine.drafting import RandomDrafts
from fixtures.engine.hashed import VOCAB_SIZE, Words
from slipstream.core.window import AttentionWindow
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream_contract.sampling import SamplingParams

FULL = AttentionWindow()


def client_of(
    most: int, right: float, num_blocks: int = 64, max_in_flight: int = 2
) -> tuple[Client, RandomDrafts, CountingRunner]:
    runner = CountingRunner(num_blocks, 2, max_in_flight=max_in_flight)
    drafts = RandomDrafts(FULL)
    drafts.most, drafts.right = most, right
    engine = Engine(Limits(8, 64, max_num_rows=32), runner, Words(), speculation=drafts)
    return Client(engine), drafts, runner


@pytest.mark.parametrize("right", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("num_blocks", [20, 200])
def test_tokens_are_those_without_drafts(right: float, num_blocks: int) -> None:
    client, drafts, runner = client_of(5, right, num_blocks)
    rng = random.Random(7)
    asked = []
    for i in range(24):
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 24),
            min_tokens=rng.choice([0, 4]),
            temperature=rng.choice([0.0, 1.0]),
            seed=i,
            n=rng.choice([1, 3]),
            end_ids=(rng.randrange(VOCAB_SIZE),),
            stop_words=((b"ab", b"ca") if i % 2 else ()),
            bad_words=((1, 2), (3,), (rng.randrange(VOCAB_SIZE), 5)),
            log_probs=True,
        )
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12))]
        asked.append((client.submit(prompt, sampling), prompt, sampling))
    client.drain()
    for number, prompt, sampling in asked:
        check(client, number, prompt, sampling)
    assert drafts.num_drafts > 0
    assert (drafts.num_right > 0) == (right > 0)
    assert any(0 < b.num_drafts < b.num_decodes < len(b.rows) for b in runner.batches)
    num_outputs = sum(_num_outputs(stream) for stream in client.streams.values())
    assert client.engine._telemetry.counters["output_tokens"] == num_outputs


def _num_outputs(stream: Stream) -> int:
    """Return how many tokens of a stream were sampled, those cut by a stop word included."""
    assert stream.last is not None
    assert stream.last.finished is not None
    return stream.last.finished.num_output_tokens


def test_right_drafts_save_steps() -> None:
    """Prompt and one step in flight with it make a token each; a step with 4 right drafts 5."""
    client, drafts, runner = client_of(4, 1.0)
    drafts.most = 4
    drafts._random = _Most()
    client.submit([1, 2, 3], SamplingParams(max_tokens=21, temperature=0.0))
    client.drain()
    assert [len(batch.rows) for batch in runner.batches] == [1, 1, 5, 5, 5, 4]
    assert (drafts.num_drafts, drafts.num_right, drafts.num_wrong) == (15, 15, 0)


class _Most(random.Random):
    """Always the most drafts, always right."""

    def randint(self, a: int, b: int) -> int:
        return b

    def random(self) -> float:
        return 0.0


def test_blocks_of_rejected_drafts_go_back() -> None:
    client, drafts, runner = client_of(8, 0.0)
    drafts._random = _Most()
    drafts._random.random = lambda: 0.5  # type: ignore[method-assign]
    client.submit([1, 2, 3], SamplingParams(max_tokens=20, temperature=0.0))
    cache = client.engine._scheduler.cache
    client.step()
    client.step()
    client.step()
    (sequence,) = client.engine._scheduler.running.values()
    assert len(runner.batches[-1].rows) > 4
    if not runner.in_flight:
        assert sequence.cache.capacity - sequence.num_tokens < cache.block_size
    client.drain()
    assert drafts.num_right == 0
