"""Beams that follow a guide: the same as by definition, whatever runs beside them."""

import ctypes

import pytest
import torch
from fixtures.engine.beams import expected_beams, text_of
from fixtures.engine.checks import check, greedy
from fixtures.engine.client import Client
from fixtures.engine.counting import CountingRunner
from fixtures.engine.hashed import MAX_LEN, VOCAB_SIZE, Words
from fixtures.guide.real import CHECKPOINT, GuidedEngine, compiler, guide, ids_of
from fixtures.guide.real import END as REAL_END
from fixtures.guide.real import VOCAB_SIZE as REAL_SIZE
from fixtures.guide.toy import END, ToyCompiler
from fixtures.tiers import quick_of
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.wire import FinishReason
from slipstream_contract.beams import REACHABLE, Beams
from slipstream_contract.guide import Guide
from slipstream_contract.sampling import SamplingParams
from transformers import AutoModelForCausalLM


def make(num_blocks: int, **slow: float) -> Client:
    runner = CountingRunner(num_blocks, 2)
    compiler = ToyCompiler(slow, {})
    make_compiler = lambda: compiler  # noqa: E731
    return Client(Engine(Limits(8, 64), runner, Words(), guide_compiler=make_compiler))


def check_beams(client: Client, number: int, prompt: list[int], sampling: SamplingParams) -> None:
    found = expected_beams(prompt, sampling, MAX_LEN)
    answers = client.streams[number, 0].beams
    assert [(text_of(a.token_ids, a.drop_bytes), a.reason) for a in answers] == [
        (each.text, each.reason) for each in found
    ]
    assert [a.cum_log_prob for a in answers] == pytest.approx([f.cum_log_prob for f in found])


@st.composite
def searches(draw: st.DrawFn) -> SamplingParams:
    """Draw guided searches, searches, and plain requests."""
    width, most = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    if width == 1:
        return greedy(most)
    beams = Beams(
        width=width,
        length_penalty=draw(st.sampled_from([0.0, 1.0, -0.5])),
        early_stopping=draw(st.sampled_from([0, 1, 2])),
        diversity_rate=draw(st.sampled_from([0.0, 0.0, 0.7])),
    )
    text = draw(st.sampled_from(["", "x", "y", "z:3", "w:5", "v:1"]))
    ends = draw(st.sampled_from([(END,), (END, 7), ()]))
    return greedy(
        most,
        n=draw(st.integers(1, width)),
        beams=beams,
        guide=guide("regex", text) if text else None,
        end_ids=ends,
        min_tokens=min(most, draw(st.sampled_from([0, 0, 2, 6]))),
    )


prompts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(prompts, searches()), min_size=1, max_size=5),
    st.integers(40, 80),
    st.integers(0, 3),
)
def test_guided_beams_are_those_by_definition(asked, num_blocks, late_every) -> None:
    """Beside other requests, with preemption and late rows."""
    client = make(num_blocks)
    client.engine._runner.late_every = late_every and 2 + late_every
    numbers = [client.submit(prompt, sampling) for prompt, sampling in asked]
    client.drain()
    for number, (prompt, sampling) in zip(numbers, asked, strict=True):
        (check_beams if sampling.beams else check)(client, number, prompt, sampling)


def guided(text: str, most: int = 9) -> SamplingParams:
    return greedy(most, n=3, beams=Beams(width=3), guide=guide("regex", text), end_ids=(END,))


def test_preempted_groups_follow_their_guides() -> None:
    client = make(100)
    asked = {client.submit([i, 2], s): ([i, 2], s) for i, s in enumerate([guided("x")] * 2)}
    for at in range(120):
        running = list(client.engine._scheduler.running.values())
        if at % 5 == 4 and running and running[at % len(running)].num_preemptions < 3:
            client.engine._scheduler._running.preempt(running[at % len(running)])
        client.step()
    client.drain()
    for number, (prompt, sampling) in asked.items():
        check_beams(client, number, prompt, sampling)


def test_a_slow_guide_delays_its_own_group_alone() -> None:
    client = make(100, **{"slow:6": 0.02})
    slow = client.submit([1], guided("slow:6"))
    plain = client.submit([2], sampling := greedy(20))
    while client.streams[plain, 0].last is None:
        client.step()
    assert client.streams[slow, 0].last is None
    client.drain()
    check(client, plain, [2], sampling)
    check_beams(client, slow, [1], guided("slow:6"))


def test_a_guide_that_breaks_ends_its_group_alone() -> None:
    client = make(100)
    bad, good = client.submit([1], guided("breaks")), client.submit([2], guided("x"))
    client.drain()
    last = client.streams[bad, 0].last.finished
    assert last.reason is FinishReason.ERROR
    assert last.error == "the guide cannot be followed further: too many states"
    check_beams(client, good, [2], guided("x"))


def test_a_cancelled_group_returns_its_beams_as_they_stand() -> None:
    client = make(100, x=0.01)
    number = client.submit([1], guided("x", 20))
    while not any(client.engine._requests[client.name, number].sequences[0].outputs):
        client.step()
    client.engine.cancel(client.name, number)
    client.drain()
    assert client.streams[number, 0].reason is FinishReason.CANCELLED
    assert len(client.streams[number, 0].beams) == 3


_TEXTS = [
    ("def read(", guide("regex", "[a-z]{2,6}"), 12),
    ("class A:\n    ", guide("choice", '["yes", "no", "never", "nothing"]'), 12),
    ("x = ", guide("json", '{"type": "integer", "minimum": 3, "maximum": 4711}'), 12),
    ("import ", guide("regex", "(os|sys|re), (json|math)"), 12),
    ("return ", guide("regex", "[a-z]+( [a-z]+)*"), 6),  # to the most tokens
]


@pytest.mark.parametrize("case", quick_of(_TEXTS, _TEXTS[:2]))
@pytest.mark.parametrize("width", quick_of([2, 3, 5], [3]))
def test_guided_beams_are_those_of_transformers(case: tuple[str, Guide, int], width: int) -> None:
    """With a function of allowed tokens, and log probs of these alone."""
    prompt, wanted, most = case
    engine = GuidedEngine()
    beams = Beams(width=width, length_penalty=1.0, early_stopping=REACHABLE)
    number = engine.submit(prompt, wanted, max_tokens=most, n=width, beams=beams)
    engine.drain()
    ours = engine.ends[number, 0].beams
    ids = ids_of(prompt)

    def allowed(_: int, tokens: torch.Tensor) -> list[int]:
        matcher = compiler().compile(wanted).matcher.copy()
        for token_id in tokens.tolist()[len(ids) :]:
            if not matcher.take(token_id):
                return [REAL_END]  # behind the end
        mask = (ctypes.c_ubyte * compiler().num_mask_bytes)()
        assert compiler().fill_all([matcher], ctypes.addressof(mask)) == [""]
        return [i for i in range(REAL_SIZE) if mask[i // 8] >> i % 8 & 1]

    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    theirs = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=most,
        length_penalty=1.0,
        early_stopping=False,
        do_sample=False,
        eos_token_id=REAL_END,
        pad_token_id=REAL_END,
        prefix_allowed_tokens_fn=allowed,
        renormalize_logits=True,
        return_dict_in_generate=True,
        output_scores=True,
    )
    pairs = zip(theirs.sequences.tolist(), theirs.sequences_scores.tolist(), strict=True)
    found = [(row, value) for row, value in pairs if value > -1e8]  # the guide may leave fewer
    for answer, (row, value) in zip(ours, found, strict=True):
        tokens = [*answer.token_ids, REAL_END] if answer.reason == "end" else answer.token_ids
        assert answer.cum_log_prob / len(tokens) == pytest.approx(value, abs=2e-3)
        assert row[len(ids) :][: len(answer.token_ids)] == answer.token_ids
