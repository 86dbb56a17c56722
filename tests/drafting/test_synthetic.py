"""Synthetic drafts: as many count as right as the rates say, and nothing but the text changes."""

import logging

import pytest
from fixtures.engine.client import Client
from fixtures.engine.counting import CountingRunner
from fixtures.engine.hashed import Words
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.config import EngineConfig
from slipstream.drafting.costs import StepTimes
from slipstream.drafting.speculator import Speculator
from slipstream.drafting.synthetic import SyntheticDrafts, rates_of
from slipstream.engine import drafter_choice
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.errors import ConfigError
from slipstream.runner.draft_plan import _check_synthetic
from slipstream.wire import FinishReason
from slipstream_contract.sampling import SamplingParams


class _Free(StepTimes):
    """Times of steps whose rows cost nothing."""

    def of(self, num_rows: int, has_drafts: bool) -> float:
        return 1000.0


def engine_of(rates: tuple[float, ...], most: int, num_blocks: int = 400) -> Client:
    drafts = SyntheticDrafts(rates)
    speculator = Speculator(drafts, most, _Free(), accepted=drafts)
    runner = CountingRunner(num_blocks, 4, max_model_len=2000)
    engine = Engine(Limits(8, 64, max_num_rows=64), runner, Words(), speculation=speculator)
    return Client(engine)


@pytest.mark.parametrize("rates", [(1.0,), (0.8, 0.5), (0.6,)])
def test_as_many_are_right_as_the_rates_say(rates: tuple[float, ...]) -> None:
    client = engine_of(rates, 3)
    for seed in range(5):
        sampling = SamplingParams(max_tokens=300, temperature=0.0, seed=seed)
        client.submit([1, 2, 3], sampling)
    client.drain()
    for stream in client.streams.values():
        assert (len(stream.token_ids), stream.reason) == (300, FinishReason.LENGTH)
    counters = client.engine._scheduler.draft_counts.counters
    first, second, third = (counters[f"accepted_at:{position}"] for position in "123")
    num_steps = counters["drafts:synthetic"]
    all_rates = [*rates, rates[-1], rates[-1]][:3]
    for accepted, before, rate in zip(
        (first, second, third), (num_steps, first, second), all_rates, strict=True
    ):
        assert accepted / before == pytest.approx(rate, abs=0.06)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.floats(0.5, 1.0), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(24, 80),
    st.lists(st.integers(1, 60), min_size=1, max_size=5),
)
def test_the_cache_holds_what_the_output_says(rates, most, num_blocks, lengths) -> None:
    """The sample behind the last token is that of a whole prompt of prompt and output."""
    client = engine_of(tuple(rates), most, num_blocks)
    asked = {}
    for seed, length in enumerate(lengths):
        sampling = SamplingParams(max_tokens=length, temperature=1.0, seed=seed, end_ids=(5,))
        asked[client.submit([seed, 1, 2], sampling)] = seed
        client.step()
    client.drain()
    client.engine.check_integrity()
    for number, seed in asked.items():
        text = [seed, 1, 2, *client.streams[number, 0].token_ids]
        again = client.submit(text, SamplingParams(max_tokens=1, temperature=0.0))
        client.drain()  # over blocks that the first request left
        plain = Client(Engine(Limits(8, 64), CountingRunner(200, 4, 2000), Words()))
        alone = plain.submit(text, SamplingParams(max_tokens=1, temperature=0.0))
        plain.drain()
        got, want = client.streams[again, 0].token_ids, plain.streams[alone, 0].token_ids
        assert got == want


def test_no_draft_breaks_what_a_request_asks_for() -> None:
    for options in (
        {"bad_words": ((3,),)},
        {"bias": ((3, 1.0),)},
        {"no_repeat_ngram_size": 3},
        {"log_probs": True},
        {"repetition_penalty": 1.5},
    ):
        client = engine_of((1.0,), 3)
        client.submit([1, 2, 3], SamplingParams(max_tokens=30, temperature=0.0, **options))
        client.drain()
        assert client.engine._scheduler.draft_counts.total("drafts") == 0
    client = engine_of((1.0,), 3)
    ends = tuple(range(1, 60))
    client.submit([1, 2, 3], SamplingParams(max_tokens=30, min_tokens=20, end_ids=ends))
    client.drain()
    assert client.engine._scheduler.draft_counts.total("accepted_tokens") > 0
    assert len(client.streams[0, 0].token_ids) >= 20


@pytest.mark.parametrize("text", ["", "a", "0.5,", "1.1", "-0.1,0.5", "nan", "0.5;0.6"])
def test_what_is_no_list_of_rates_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="synthetic_acceptance"):
        rates_of(text)


def test_the_configuration_says_what_it_is() -> None:
    def check(**options: object) -> None:
        _check_synthetic(EngineConfig(checkpoint="", **options))  # type: ignore[arg-type]

    check(speculation="synthetic", synthetic_acceptance="0.8,0.5")
    with pytest.raises(ConfigError, match="needs synthetic_acceptance"):
        check(speculation="synthetic")
    with pytest.raises(ConfigError, match="needs speculation = synthetic"):
        check(speculation="lookup", synthetic_acceptance="0.5")
    with pytest.raises(ConfigError, match="does not go with deterministic"):
        check(speculation="synthetic", synthetic_acceptance="0.5", deterministic=True)


def test_a_start_with_synthetic_drafts_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(checkpoint="", speculation="synthetic", synthetic_acceptance="0.5")
    with caplog.at_level(logging.WARNING):
        speculation, _ = drafter_choice.choose(config, 0)
    assert "texts mean nothing" in caplog.text
    assert speculation is not None
    assert speculation.accepted is not None
