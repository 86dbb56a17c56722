"""Forced drafts: guided answers are those without, by definition, in fewer steps."""

import json

import pytest
from fixtures.engine.counting import CountingRunner
from fixtures.engine.eager import Eager
from fixtures.guide.real import (
    CHECKPOINT,
    VOCAB_SIZE,
    GuidedEngine,
    compiler,
    guide,
    vocabulary,
)
from fixtures.guide.toy import END, ToyCompiler, expected
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.guided import Guided
from slipstream.drafting.forced import WithForced
from slipstream.engine.scheduler import Limits
from slipstream.guide.llguidance import Compiler
from slipstream_contract.sampling import SamplingParams


def toy(num_blocks: int = 64, **options: object) -> GuidedEngine:
    compiler = ToyCompiler({}, {})
    runner = CountingRunner(num_blocks, 4)
    limits = Limits(8, 64, max_num_rows=40)
    return GuidedEngine(runner, lambda: compiler, limits, Eager(WithForced(None), 5), **options)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "f", "fx", "fz:5", "fw:9", "x"]),
            st.lists(st.integers(0, 9), min_size=1, max_size=9),
            st.integers(1, 20),
            st.integers(1, 2),
            st.sampled_from([{}, {"top_k": 5}, {"log_probs": True}]),
        ),
        min_size=1,
        max_size=9,
    ),
    st.integers(14, 60),
    st.booleans(),
)
def test_each_token_is_the_masked_sample(asked, num_blocks, has_late):
    """Beside plain requests, with preemption, late rows, several answers and filters."""
    engine = toy(num_blocks)
    engine.engine._runner.late_every = 3 if has_late else 0
    numbers = []
    for seed, (text, prompt, most, n, options) in enumerate(asked):
        wanted = guide("regex", text) if text else None
        sampling = {"temperature": 1.0, "seed": seed, "n": n, "max_tokens": most, **options}
        numbers.append(engine.submit(prompt, wanted, **{**sampling, "end_ids": (END,)}))
    engine.drain(engine.engine.check_integrity)
    for seed, (number, (text, prompt, most, n, _)) in enumerate(zip(numbers, asked, strict=True)):
        for index in range(n):
            got = engine.outputs.get((number, index), [])
            assert engine.ends[number, index].finished.error is None
            if text:
                assert got == expected(text, prompt, seed, most, index)


def test_forced_tokens_come_several_a_step():
    for options in ({}, {"top_k": 5}):
        engine = toy()
        sampling = {"temperature": 1.0, "seed": 1, "max_tokens": 24, "end_ids": (END,)}
        number = engine.submit([1], guide("regex", "f:24"), **sampling, **options)
        engine.drain()
        assert engine.outputs[number, 0] == expected("f:24", [1], 1, 24)
        counters = engine.engine._scheduler.draft_counts.counters
        assert counters["accepted_tokens:forced"] == counters["drafted_tokens:forced"] > 5
        assert engine.engine.num_steps <= 24 - counters["accepted_tokens:forced"] + 3


LIMITS = Limits(16, 512, max_num_rows=16)
SCHEMA = (
    '{"type": "object", "properties": {"a_long_name_of_a_property": {"type": "integer", '
    '"maximum": 99}, "another_long_name": {"enum": ["first value", "second value"]}}, "required": '
    '["a_long_name_of_a_property", "another_long_name"], "additionalProperties": false}'
)


def test_real_masks_of_forced_rows_are_the_right_ones():
    for sampling in ({}, {"temperature": 0.8, "seed": 3}, {"log_probs": True}):
        plain = GuidedEngine(limits=LIMITS)
        drafted = GuidedEngine(limits=LIMITS, speculation=Eager(WithForced(None), 8))
        for engine in (plain, drafted):
            wanted = guide("json_schema", SCHEMA)
            engine.submit("A person:", wanted, max_tokens=60, **sampling)
            engine.drain()
        assert plain.outputs == drafted.outputs
        assert plain.log_probs[1, 0] == pytest.approx(drafted.log_probs[1, 0], abs=1e-5)
        counters = drafted.engine._scheduler.draft_counts.counters
        assert counters["accepted_tokens:forced"] == counters["drafted_tokens:forced"] > 5
        assert drafted.engine.num_steps < plain.engine.num_steps - 5


def test_another_spelling_of_a_forced_text_is_not_legal():
    """No mask allows it, so it must be refused where it was sampled without one."""
    text = b"it is not known to anybody"
    template = compiler().compile(guide("regex", text.decode()))
    guided = Guided(template, SamplingParams(max_tokens=9, temperature=0.0), compiler().end_ids)
    num_others, place = 0, 0
    while guided.forced:
        right = guided.forced[0]
        for token_id in range(VOCAB_SIZE):
            raw = vocabulary().raw(token_id)
            if token_id != right and raw and text.startswith(raw, place):
                num_others += guided.matcher.copy().take(token_id)
                assert not guided.take(token_id)
        assert guided.take(right)
        place += len(vocabulary().raw(right))
        guided.look_ahead()
    assert num_others > 5


@pytest.mark.parametrize("end", [b"\n", b" ", b"self", b'"'])
def test_a_checkpoint_that_ends_by_a_token_of_text(end: bytes) -> None:
    """The token ends nothing before the text may end; a text that needs it ends with an error."""
    ids = [i for i in range(VOCAB_SIZE) if vocabulary().raw(i) == end]
    text = (CHECKPOINT / "tokenizer.json").read_text()
    own = Compiler(text, VOCAB_SIZE, ids, vocabulary().raw)
    for drafts in (None, Eager(WithForced(None), 8)):
        engine = GuidedEngine(make=lambda: own, limits=LIMITS, speculation=drafts)
        for sampling in ({}, {"log_probs": True}, {"temperature": 0.9, "seed": 1}):
            wanted = guide("json_schema", SCHEMA, is_compact=end == b'"')
            engine.submit("A person:", wanted, end_ids=tuple(ids), **sampling)
        engine.drain()
        assert len(engine.ends) == 3
        for key, ended in engine.ends.items():
            if end == b'"':
                assert "is one that ends a text" in ended.finished.error
            else:
                assert ended.finished.error is None
                assert json.loads(engine.text(*key))["another_long_name"].endswith(" value")
