"""Windows and sinks: which blocks leave, how few stay, and that no token ever misses one."""

import pytest
from fixtures.engine.client import Client
from fixtures.engine.counting import CountingRunner
from fixtures.engine.hashed import VOCAB_SIZE, Words, expected, seen_by
from fixtures.engine.machine import Machine, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from slipstream.core.window import AttentionWindow
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream_contract.errors import ContractError
from slipstream_contract.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=200, temperature=0.0)


@st.composite
def windows(draw: st.DrawFn, num_ahead: int) -> AttentionWindow:
    size = draw(st.integers(2, 12))
    has_gaps = draw(st.booleans())
    num_sinks = draw(st.integers(0, size - 2)) if has_gaps else 0
    is_chunked = not has_gaps and draw(st.booleans())
    some = draw(tables(has_gaps))
    return AttentionWindow(size, num_sinks, num_ahead, has_gaps, *some, is_chunked)


@st.composite
def tables(draw: st.DrawFn, is_one: bool = False) -> tuple[int, int]:
    """Draw the number of tables, and how many of them have full attention."""
    num_tables = 1 if is_one else draw(st.sampled_from([1, 1, 2, 3, 4]))
    return num_tables, draw(st.integers(min(1, num_tables - 1), num_tables - 1))


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 9), st.integers(0, 60))
def test_what_is_outside_a_window(data: st.DataObject, block_size: int, num_tokens: int) -> None:
    """Whole blocks that no later token sees; all but what `max_local_blocks` allows for."""
    window = data.draw(windows(data.draw(st.integers(1, 20))))
    forgotten = window.outside(num_tokens, block_size)
    later = range(num_tokens, num_tokens + window.size + 1)
    needed = {i // block_size for position in later for i in seen_by(position, window)}
    assert needed.isdisjoint(forgotten)
    num_all = -(-(num_tokens + window.num_ahead) // block_size)
    num_held = num_all - len(forgotten)
    assert num_held <= (window.max_local_blocks(block_size) or 0)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 2), st.integers(0, 12))
def test_what_a_window_shows_is_found_again(
    data: st.DataObject, block_size: int, max_in_flight: int, num_spare: int
) -> None:
    """Turns of few conversations, beside each other, in a pool so small that they evict."""
    num_tokens = data.draw(st.integers(1, 12))
    size = data.draw(st.integers(2, 8))
    some, is_chunked = data.draw(tables()), data.draw(st.booleans())
    window = AttentionWindow(size, 0, max_in_flight * num_tokens, False, *some, is_chunked)
    num_blocks = window.blocks_for(-(-48 // block_size), block_size, 1) + num_spare
    runner = CountingRunner(num_blocks, block_size, 48, max_in_flight, window)
    client = Client(Engine(Limits(3, num_tokens), runner, Words()))
    asked: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(2, 8))):
        base = data.draw(st.integers(0, 1))
        length = data.draw(st.integers(1, 40))
        prompt = [(base + 1) * i % VOCAB_SIZE for i in range(length)]
        sampling = SamplingParams(max_tokens=data.draw(st.integers(1, 6)), temperature=0.0)
        asked[client.submit(prompt, sampling)] = prompt
        for _ in range(data.draw(st.integers(0, 20))):
            client.step()
            runner.poison(client.engine._scheduler.cache._blocks._empty)
    client.drain()
    assert client.engine.num_steps == len(runner.batches), "a step was refused, and undone"
    for number, prompt in asked.items():
        outputs = client.streams[number, 0].token_ids
        sampling = SamplingParams(max_tokens=len(outputs), temperature=0.0)
        text, _ = expected(prompt, sampling, 0, 48, window)
        assert client.streams[number, 0].text == text


def test_a_window_of_a_prompt_is_enough() -> None:
    """The last 6 of 32 tokens stay cached; the next turn needs no others."""
    window = AttentionWindow(6, num_ahead=4)
    runner = CountingRunner(7, 2, 48, 1, window)
    client = Client(Engine(Limits(1, 4), runner, Words()))
    prompt = list(range(32))
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    first = client.submit(prompt, sampling)
    client.drain()
    second = client.submit([*prompt, *client.streams[first, 0].token_ids, 7], sampling)
    runner.batches.clear()
    client.drain()
    assert runner.batches[0].num_tokens == 2  # the last answer's last token, and the new one
    perf = client.streams[second, 0].last.finished.perf
    assert perf.kv_reused_blocks == 3
    with pytest.raises(ContractError, match=r"it needs 4 blocks, the KV cache has 3 \(6 tokens\)"):
        Client(Engine(Limits(1, 4), CountingRunner(3, 2, 48, 1, window), Words())).submit(
            prompt, sampling
        )


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("num_sinks", [0, 3])
def test_tables_with_gaps_get_shorter(num_sinks: int, max_in_flight: int) -> None:
    """The runner gets the shorter table with a token still in flight; blocks are used again."""
    window = AttentionWindow(8, num_sinks, max_in_flight * 5, has_gaps=True)
    num_blocks = 2 * (window.max_local_blocks(2) or 0)
    runner = CountingRunner(num_blocks, 2, 1000, max_in_flight, window)
    client = Client(Engine(Limits(2, 5), runner, Words()))
    prompts = {client.submit(list(range(n)), GREEDY): list(range(n)) for n in (3, 40)}
    client.drain()
    assert client.engine.num_steps == len(runner.batches), "a step was refused, and undone"
    in_flight = [row for batch in runner.batches for row in batch.rows if row.source >= 0]
    assert any(row.gap > 100 for row in in_flight) == (max_in_flight > 1)
    for number, prompt in prompts.items():
        text, _ = expected(prompt, GREEDY, 0, 1000, window)
        assert client.streams[number, 0].text == text


class Windowed(Machine):
    """The machine of `test_machine`, for sequences that see a part of themselves."""

    @initialize(
        data=st.data(),
        block_size=st.integers(1, 4),
        num_blocks=st.integers(0, 10),
        num_seqs=st.integers(1, 6),
        num_tokens=st.integers(1, 30),
        max_in_flight=st.integers(1, 2),
        long_prompt_tokens=st.sampled_from([1024, 12]),
        is_reused=st.booleans(),
        seed=seeds,
    )
    def begin(
        self,
        data: st.DataObject,
        block_size: int,
        num_blocks: int,
        num_seqs: int,
        num_tokens: int,
        max_in_flight: int,
        long_prompt_tokens: int,
        is_reused: bool,
        seed: int,
    ) -> None:
        window = data.draw(windows(max_in_flight * num_tokens))
        sizes = (block_size, num_blocks, num_seqs, num_tokens, 8, 120, max_in_flight)
        super().begin(*sizes, long_prompt_tokens, is_reused, window, seed=seed)


TestWindowed = Windowed.TestCase
TestWindowed.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
