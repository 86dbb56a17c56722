"""Guided sequences in the engine: each token by definition, whatever else happens to the sequence.

The definition: the masked sample of every output. With the toy grammar and the counting model that
is `expected`; with the default model, what another run with all masks gives.
"""

import json
import time
from collections.abc import Iterator

import pytest
from fixtures.engine.counting import CountingRunner
from fixtures.engine.drafting import RandomDrafts
from fixtures.engine.hashed import VOCAB_SIZE
from fixtures.guide.real import GuidedEngine, follows, guide, ids_of, run
from fixtures.guide.toy import END, ToyCompiler, expected
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.drafts import Speculation
from slipstream.core.guided import Guided
from slipstream.core.sequence import Sequence
from slipstream.core.window import AttentionWindow
from slipstream.engine.scheduler import Limits
from slipstream.guide import workers
from slipstream.guide.interface import GuideError
from slipstream_contract.errors import ContractError
from slipstream_contract.log_probs import LogProbs

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def toy(
    num_blocks: int = 64, speculation: Speculation | None = None, **slow: dict[str, float]
) -> GuidedEngine:
    compiler = ToyCompiler(slow.get("masks", {}), slow.get("guides", {}))
    runner = CountingRunner(num_blocks, 4)
    engine = GuidedEngine(runner, lambda: compiler, Limits(8, 64), speculation)
    engine.compiler = compiler
    return engine


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "x", "y", "z:5", "w:9"]),
            st.lists(st.integers(0, 9), min_size=1, max_size=9),
            st.integers(1, 20),
            st.integers(1, 2),
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
    for seed, (text, prompt, most, n) in enumerate(asked):
        wanted = guide("regex", text) if text else None
        sampling = {"temperature": 1.0, "seed": seed, "n": n, "max_tokens": most}
        if seed % 3 == 2:
            sampling |= {"top_k": 5}  # every token has its mask
        numbers.append(engine.submit(prompt, wanted, **{**sampling, "end_ids": (END,)}))
    engine.drain(engine.engine.check_integrity)
    for seed, (number, (text, prompt, most, n)) in enumerate(zip(numbers, asked, strict=True)):
        for index in range(n):
            got = engine.outputs.get((number, index), [])
            assert engine.ends[number, index].finished.error is None
            if text:
                assert got == expected(text, prompt, seed, most, index)


class GuidedDrafts(RandomDrafts):
    """Drafts of what a guided sequence will have, some of them wrong, legal or not."""

    def propose(
        self, decodes: list[Sequence], max_drafts: int
    ) -> Iterator[tuple[Sequence, list[int]]]:
        for sequence, drafts in super().propose(decodes, max_drafts):
            if sequence.sampling.guide is not None and self._random.random() < 0.8:
                text, seed, most = sequence.sampling.guide.text, sequence.sampling.seed, 20
                right = expected(text, sequence.prompt.tolist(), seed, most, sequence.index)
                drafts = right[len(sequence.outputs) :][: len(drafts)]
                if drafts and self._random.random() < 0.3:
                    drafts[-1] = self._random.randrange(VOCAB_SIZE)
            yield sequence, drafts


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["", "x", "y:9"]), min_size=1, max_size=6), st.integers(0, 99))
def test_drafts_change_no_guided_token(texts, seed):
    """Right ones, wrong ones and illegal ones, beside sequences that need all masks."""
    drafts = GuidedDrafts(AttentionWindow(), seed)
    drafts.most = 4
    engine = toy(40, drafts)
    numbers = []
    for i, text in enumerate(texts):
        wanted = guide("regex", text) if text else None
        filters = {"top_k": 5} if i % 3 == 2 else {}
        sampling = {"temperature": 1.0, "seed": i, "max_tokens": 20, **filters}
        numbers.append(engine.submit([1, i], wanted, **sampling, end_ids=(END,)))
    engine.drain(engine.engine.check_integrity)
    for i, (number, text) in enumerate(zip(numbers, texts, strict=True)):
        assert engine.ends[number, 0].finished.error is None
        if text:
            assert engine.outputs.get((number, 0), []) == expected(text, [1, i], i, 20)


def test_matcher_and_tokens_stay_in_step():
    engine = toy(30)
    for seed in range(6):
        sampling = {"temperature": 1.0, "seed": seed, "max_tokens": 20, "end_ids": (END,)}
        engine.submit([1, seed], guide("regex", "x"), **sampling)

    def check() -> None:
        for request in engine.engine._requests.values():
            for sequence in request.sequences:
                if sequence.guide is not None and sequence.outputs:
                    assert sequence.guide.matcher.taken == sequence.outputs

    engine.drain(check)


def test_a_step_that_fails_leaves_the_matcher_where_it_was():
    engine = toy()
    number = engine.submit(
        [1], guide("regex", "x:9"), temperature=1.0, seed=1, max_tokens=20, end_ids=(END,)
    )
    for _ in range(50):
        engine.step()
        if engine.outputs.get((number, 0)):
            break
    engine.engine._runner.error = ValueError("planted")
    engine.drain()
    assert engine.outputs[number, 0] == expected("x:9", [1], 1, 20)


def test_a_mask_that_fails_while_a_failed_step_is_searched_stops_nobody():
    """The half that is tried waits for a mask, which ends in an error instead."""
    engine = toy()
    number = engine.submit([1], guide("regex", "breaks"), temperature=1.0, top_k=3, seed=1)
    plain = engine.submit([1], None, temperature=1.0, seed=1, max_tokens=9)
    while not engine.outputs.get((number, 0)):
        engine.step()
        time.sleep(0.01)  # the mask is not late
    engine.compiler.slow_masks["breaks"] = 0.05
    engine.engine._runner.late_error = ValueError("planted")
    schedule, num_calls = engine.engine._scheduler.schedule, 0

    def bounded(*arguments: object) -> object:
        nonlocal num_calls
        num_calls += 1
        assert num_calls < 1000, "no progress"
        return schedule(*arguments)

    engine.engine._scheduler.schedule = bounded
    engine.drain()
    error = engine.ends[number, 0].finished.error
    assert error == "the guide cannot be followed further: too many states"
    assert len(engine.outputs[plain, 0]) == 9


def test_a_row_without_a_mask_is_validated_though_the_guide_turned_fast():
    """The masks of another sequence are fast again, while a row runs that has none."""
    num_turned = 0
    for seed in range(20):
        engine = toy()
        sampling = {"temperature": 1.0, "seed": seed, "max_tokens": 20, "end_ids": (END,)}
        number = engine.submit([1], guide("regex", "x"), **sampling)
        while engine.engine.has_work:
            engine.step()
            for request in engine.engine._requests.values():
                guided = request.sequences[0].guide
                is_bare = guided is not None and not guided.needs_mask
                num_turned += is_bare
                for _ in range(8 if guided is not None else 0):
                    guided.pace.note(is_bare)
        assert engine.ends[number, 0].finished.error is None
        assert engine.outputs[number, 0] == expected("x", [1], seed, 20)
    assert num_turned


@pytest.mark.parametrize("top_k", [0, 5])
def test_an_end_of_the_grammar_waits_for_the_least_number_of_tokens(top_k):
    """The request names no end; the grammar has one after every third token."""
    for seed in range(20):
        engine = toy()
        sampling = {"temperature": 1.0, "seed": seed, "top_k": top_k, "end_ids": ()}
        asked = guide("regex", "x"), guide("regex", "x:5")
        number = engine.submit([1], asked[0], **sampling, min_tokens=12, max_tokens=20)
        short = engine.submit([1], asked[1], **sampling, min_tokens=12, max_tokens=20)
        engine.drain()
        assert len(engine.outputs[number, 0]) >= 12
        assert len(engine.outputs[short, 0]) == 5
        assert engine.reason(short) == "stop"


def test_bans_beside_values_name_tokens_of_the_vocabulary_alone():
    """A mask has more bits than there are tokens; the runner checks what rows ban."""
    engine = toy()
    values = LogProbs(generation_logits=True)
    number = engine.submit([1], guide("regex", "x:9"), max_tokens=9, values=values)
    engine.drain()
    assert engine.outputs[number, 0] == expected("x:9", [1], 0, 9)


def test_a_slow_mask_delays_its_own_stream_only():
    """The slow one gets a token every 50 ms; the other does not wait for any of them."""
    engine = toy(masks={"slow": 0.05})
    sampling = {"temperature": 1.0, "seed": 1, "top_k": 5, "end_ids": ()}
    slow = engine.submit([1], guide("regex", "slow:6"), **{**sampling, "max_tokens": 6})
    engine.compiler.slow_masks["slow:6"] = 0.05
    plain = engine.submit([2], None, temperature=1.0, seed=2, max_tokens=30)
    started, ended = time.monotonic(), {}

    def note() -> None:
        for number, _ in engine.ends:
            ended.setdefault(number, time.monotonic() - started)

    engine.drain(note)
    assert engine.outputs[slow, 0] == expected("slow:6", [1], 1, 6)
    assert ended[plain] < ended[slow]
    assert ended[slow] > 0.2


def test_a_slow_guide_holds_nobody_up_and_is_compiled_once():
    engine = toy(guides={"x:5": 0.2})
    sampling = {"temperature": 1.0, "seed": 1, "max_tokens": 9, "end_ids": (END,)}
    slow = [engine.submit([1], guide("regex", "x:5"), **sampling) for _ in range(3)]
    plain = engine.submit([2], None, **sampling)
    order: list[int] = []
    engine.drain(lambda: order.extend(n for n, _ in engine.ends if n not in order))
    assert order[0] == plain
    assert {tuple(engine.outputs[number, 0]) for number in slow} == {
        tuple(expected("x:5", [1], 1, 9))
    }
    assert engine.compiler.num_compiled == 1


def test_a_refused_guide_is_refused_and_remembered():
    engine = toy()
    for _ in range(2):
        number = engine.submit([1], guide("regex", "bad"), n=2, temperature=1.0)
        plain = engine.submit([1], None, temperature=1.0, seed=1, max_tokens=3)
        engine.drain()
        rejected = engine.rejected[number]
        assert rejected.message == "the guide is refused: keyword `bad`"
        assert rejected.code == "INVALID_ARGUMENT"
        assert len(engine.outputs[plain, 0]) == 3
    assert engine.compiler.num_compiled == 1


def test_a_guide_that_takes_too_long_names_the_bound(monkeypatch):
    engine = toy(guides={"x": 0.3})
    monkeypatch.setattr(workers, "MAX_COMPILE_S", 0.1)
    number = engine.submit([1], guide("regex", "x"))
    engine.drain()
    assert engine.rejected[number].message.endswith("it took more than 0.1 s to compile")


def test_a_machine_that_stands_still_refuses_no_guide(monkeypatch):
    engine = toy()
    engine.compiler.halt_s = 0.3
    monkeypatch.setattr(workers, "MAX_COMPILE_S", 0.1)
    number = engine.submit([1], guide("regex", "x:5"), max_tokens=9)
    engine.drain()
    assert len(engine.outputs[number, 0]) == 5


def test_a_cancel_while_the_guide_is_compiled_or_the_mask_made():
    engine = toy(guides={"x": 0.1}, masks={"x": 0.1})
    number = engine.submit([1], guide("regex", "x"), n=2, temperature=1.0, top_k=3)
    engine.step()
    assert engine.engine.cancel(b"b", number)
    engine.drain()
    number = engine.submit([1], guide("regex", "x"), n=2, temperature=1.0, top_k=3, seed=1)
    while not engine.outputs.get((number, 0)):
        engine.step()
    assert engine.engine.cancel(b"b", number)
    engine.drain()
    time.sleep(0.15)  # the thread ends its mask
    assert engine.reason(number) == "cancelled"


def test_a_grammar_that_breaks_a_bound_ends_its_own_sequence():
    engine = toy()
    number = engine.submit([1], guide("regex", "breaks"), temperature=1.0, top_k=3, seed=1)
    plain = engine.submit([1], None, temperature=1.0, seed=1, max_tokens=9)
    engine.drain()
    error = engine.ends[number, 0].finished.error
    assert error == "the guide cannot be followed further: too many states"
    assert len(engine.outputs[plain, 0]) == 9


def test_without_a_tokenizer_or_with_a_bad_one_guides_are_refused():
    def fail() -> ToyCompiler:
        raise GuideError("guided output is off for this checkpoint: token 3")

    engine = GuidedEngine(CountingRunner(64, 4), fail, Limits(8, 64))
    number = engine.submit([1], guide("json"))
    engine.drain()
    assert engine.rejected[number].message.endswith("off for this checkpoint: token 3")
    without = GuidedEngine(CountingRunner(64, 4), None, Limits(8, 64))
    with pytest.raises(ContractError, match=r"guided output .* needs a tokenizer.json"):
        without.submit([1], guide("json"))


# --- the default model ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_the_default_model_writes_valid_json(seed):
    wanted = guide("json_schema", json.dumps(PERSON))
    text, reason = run("A person: ", wanted, temperature=1.0, seed=seed)
    assert reason == "stop"
    value = json.loads(text)
    assert set(value) >= {"name", "age"}


def test_unmasked_samples_are_those_of_all_masks():
    """`top_k` of the whole vocabulary leaves nothing out, but asks for every mask."""
    wanted = guide("regex", "[a-z]{3}, [0-9]{2}\\.")
    for sampling in ({"temperature": 0.7, "seed": 5}, {"temperature": 1.0, "seed": 6}):
        plain = run("x = ", wanted, **sampling)
        assert plain == run("x = ", wanted, **sampling, top_k=4095)
        assert plain[1] == "stop"


def test_ends():
    assert run("A", guide("regex", "[a-c]{5}"), min_tokens=50) == ("aaaaa", "stop")
    assert run("A", guide("choice", '["yes", "no"]'), end_ids=())[1] == "stop"
    text, reason = run("A", guide("regex", "[0-9]+"), max_tokens=3)
    assert (len(text) > 2, reason) == (True, "length")
    text, reason = run("A", guide("regex", 'a"xyz"b'), stop_words=(b"y",))
    assert (text, reason) == ('a"xy', "stop")
    end = ids_of("a")[0]  # an end of the request's own, which the grammar has in a text, too
    assert run("A", guide("regex", "b[a-c]"), end_ids=(end,), temperature=0.0)[1] in "stop end"


def test_bans_and_a_guide_that_leave_nothing_name_both():
    engine = GuidedEngine()
    banned = tuple((token_id,) for token_id in ids_of("q"))
    number = engine.submit("A", guide("regex", "q"), bad_words=banned)
    engine.drain()
    error = engine.ends[number, 0].finished.error
    assert error.startswith("no token is left: bad_words and the guide together ban all ")


PARTS = st.sampled_from(["[a-f]", "[0-9]+", "(x|yy)", "z?", "\\.", "( [a-c]){1,2}", "é"])


@settings(max_examples=8, deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=5), st.integers(0, 99))
def test_every_output_follows_a_random_expression(parts, seed):
    wanted = guide("regex", "".join(parts))
    engine = GuidedEngine()
    number = engine.submit("A", wanted, temperature=1.5, seed=seed, max_tokens=24)
    engine.drain()
    is_legal, is_whole = follows(wanted, engine.outputs.get((number, 0), []))
    assert is_legal
    assert is_whole or engine.reason(number) == "length"


def test_a_token_that_its_mask_allows_is_never_the_requests_fault(monkeypatch) -> None:
    """A library that contradicts itself ends the answer as a fault of the engine, not a refusal."""
    engine = GuidedEngine()
    engine.submit("A person:", guide("json_schema", json.dumps(PERSON)), log_probs=True)
    monkeypatch.setattr(Guided, "take", lambda self, token_id: False)
    engine.drain()
    (ended,) = engine.ends.values()
    assert "which its mask allows" in ended.finished.error
    assert not ended.finished.is_refusal
