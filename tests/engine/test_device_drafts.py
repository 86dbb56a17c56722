"""Drafts of the device through the engine: tokens, log probs and endings are those without."""

import time
from pathlib import Path

import pytest
from fixtures.models.checkpoints import Asker, make_model, make_runner, random_prompts, save
from fixtures.models.drafters import EveryDraft, save_eagle3, save_medusa
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from slipstream.drafting.speculator import Speculator
from slipstream.engine.device_drafts import DeviceDrafts, Wakefulness
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream_contract.drafts import Drafts
from slipstream_contract.sampling import SamplingParams

LIMITS = Limits(6, 64, max_num_rows=16)
SAMPLINGS = [
    SamplingParams(max_tokens=14, temperature=0.0, log_probs=True),
    SamplingParams(max_tokens=14, temperature=0.9, top_k=30, seed=5, log_probs=True),
    SamplingParams(max_tokens=11, temperature=0.7, seed=6, repetition_penalty=1.2),
    SamplingParams(max_tokens=12, temperature=1.0, seed=7, n=2, min_tokens=3, end_ids=(3,)),
    SamplingParams(max_tokens=9, temperature=0.0, bad_words=((4, 5), (7,))),
    SamplingParams(max_tokens=1, temperature=0.0),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama", num_hidden_layers=3), tmp_path_factory.mktemp("target"))


def answers(
    directory: Path, given: dict[int, tuple[int, ...]] | None = None, **overrides: object
) -> tuple[dict, EveryDraft | None]:
    """Return all answers; `given` are drafts of clients, by the number of the request."""
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 64} | overrides
    runner = make_runner(directory, **settings)
    asker, speculation = Asker(runner, LIMITS), None
    if overrides.get("speculation"):
        device = DeviceDrafts("draft", 3)
        speculation = EveryDraft(device)
        asker.engine = Engine(LIMITS, runner, None, speculation=speculation, device_drafts=device)
    asked = zip(random_prompts([30, 1, 90, 8, 16, 40]), SAMPLINGS, strict=True)
    for number, (prompt, sampling) in enumerate(asked):
        drafts = None if given is None else Drafts(token_ids=given[number])
        asker.submit(prompt, replace(sampling, drafts=drafts))
        asker.step()
    asker.drain()
    return asker.answers, speculation


@pytest.mark.parametrize("kind", ["draft", "medusa", "eagle3"])
@pytest.mark.parametrize("tokens", [8192, 200])  # of the cache: with 200 some are preempted
def test_answers_are_those_without(kind, tokens, target, tmp_path) -> None:
    draft = target  # always right
    if kind == "medusa":
        save_medusa(draft := tmp_path)
    elif kind == "eagle3":
        save_eagle3(draft := tmp_path)
    expected, _ = answers(target, kv_cache_tokens=tokens)
    engine = {"kv_cache_tokens": tokens, "speculation": kind, "draft_checkpoint": str(draft)}
    found, speculation = answers(target, num_draft_tokens=3, **engine)
    check(found, expected)
    assert speculation is not None
    assert speculation.num_drafted > 20
    is_right = kind == "draft" and tokens == 8192
    assert not is_right or speculation.num_accepted > 0.8 * speculation.num_drafted
    first = [expected[key].token_ids for key in sorted(expected) if key[1] == 0]
    given = {number: (*token_ids[:5], 1, 2) for number, token_ids in enumerate(first)}
    found, speculation = answers(target, given, num_draft_tokens=3, **engine)
    check(found, expected)
    assert speculation is not None
    assert not is_right or speculation.num_accepted > 0.8 * speculation.num_drafted > 0


def check(found: dict, expected: dict) -> None:
    assert [(a.token_ids, a.reason) for a in found.values()] == [
        (a.token_ids, a.reason) for a in expected.values()
    ]
    for a, b in zip(found.values(), expected.values(), strict=True):
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)


def judge(wakefulness: Wakefulness, are_right: list[bool]) -> None:
    """Ask in a step, if drafts are to be judged, and what became of its drafts."""
    if are_right:
        wakefulness.ask(len(are_right))
    for is_right in are_right:
        wakefulness.judge(is_right)


@settings(max_examples=15)
@given(
    num_rows=st.integers(1, 64),
    most=st.integers(1, 16),
    right=st.sampled_from([0.0, 0.1, 0.25]),
    rng=st.randoms(use_true_random=False),
)
def test_a_drafter_that_is_wrong_is_asked_for_little(num_rows, most, right, rng) -> None:
    wakefulness, asked = Wakefulness(), []
    for _ in range(20_000):
        asked.append(wakefulness.count(most, num_rows, is_on=False))
        judge(wakefulness, [rng.random() < right for _ in range(num_rows)] if asked[-1] else [])
    assert sum(map(bool, asked)) < 0.03 * len(asked)
    assert sum(map(bool, asked[-8000:])) < 0.02 * 8000
    assert asked.index(0) <= 100


@given(num_rows=st.integers(1, 64), most=st.integers(1, 16), num_wrong=st.integers(0, 10**4))
def test_a_drafter_that_turns_right_is_heard_again(num_rows, most, num_wrong) -> None:
    wakefulness = Wakefulness()

    def step(is_right: bool) -> int:
        count = wakefulness.count(most, num_rows, is_on=False)
        judge(wakefulness, [is_right] * num_rows if count else [])
        return count

    for _ in range(num_wrong):
        step(is_right=False)
    counts = [step(is_right=True) for _ in range(4096 + 200)]
    assert max(counts) == most
    assert wakefulness.count(most, num_rows, is_on=True) == most


@given(num_judged=st.integers(12, 64), late=st.integers(0, 3))
def test_behind_a_wrong_drafter_one_step_asks_and_sleeps(num_judged, late) -> None:
    wakefulness = Wakefulness()
    judge(wakefulness, [False] * num_judged)
    for _ in range(128):
        assert wakefulness.count(4, 1, is_on=False) == 0
    for _ in range(1000):  # nobody is able to ask: it waits for who is
        assert wakefulness.count(4, 1, is_on=False) == 1
    wakefulness.ask(1)
    for _ in range(late):  # the verdict comes steps later
        assert wakefulness.count(4, 1, is_on=False) == 0
    wakefulness.judge(is_right=True)
    assert wakefulness.count(4, 1, is_on=False) == 1


def test_what_does_not_pay_for_many_rows_is_tried_again_for_few() -> None:
    wakefulness = Wakefulness()
    while wakefulness.count(4, 40, is_on=False):
        judge(wakefulness, [True] * 40)
    assert wakefulness.count(4, 21, is_on=False) == 0
    assert wakefulness.count(4, 20, is_on=False) > 0


@pytest.mark.parametrize("kind", ["medusa", "draft"])
def test_chains_are_made_where_they_are_of_use(kind, target, tmp_path) -> None:
    draft = target
    if kind == "medusa":
        save_medusa(draft := tmp_path)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_tokens": 2048}
    runner = make_runner(
        target, speculation=kind, draft_checkpoint=str(draft), num_draft_tokens=3, **settings
    )
    drafter, made = runner._drafting.drafter, []
    logits = drafter.logits

    def counted(number, token_ids):
        made.append(number)
        return logits(number, token_ids)

    drafter.logits = counted
    device = DeviceDrafts(kind, 3, has_cache=kind != "medusa")
    asker, speculation = Asker(runner, LIMITS), Speculator(device, 3)
    asker.engine = Engine(LIMITS, runner, None, speculation=speculation, device_drafts=device)
    for prompt in random_prompts([5, 9]):
        asker.submit(prompt, SamplingParams(max_tokens=150, temperature=0.0))
    asker.drain()
    num_steps = asker.engine.num_steps
    if kind == "medusa":
        assert set(made) <= {0}, "chains of which the first draft is never right"
        assert 0 < len(made) < 0.3 * num_steps
    else:
        assert max(made) == 2


def test_the_time_of_a_step_without_drafts_is_without_that_of_the_drafter(target, tmp_path) -> None:
    save_medusa(tmp_path)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_tokens": 2048}
    runner = make_runner(
        target, speculation="medusa", draft_checkpoint=str(tmp_path), num_draft_tokens=3, **settings
    )
    logits, noted = runner._drafting.drafter.logits, []

    def slow(number, token_ids):
        time.sleep(0.1)
        return logits(number, token_ids)

    runner._drafting.drafter.logits = slow
    device = DeviceDrafts("medusa", 3, has_cache=False)
    asker, speculation = Asker(runner, LIMITS), Speculator(device, 3)
    speculation.step_took = lambda batch, took_ns: noted.append(
        (any(row.num_drafts for row in batch.rows), took_ns)
    )
    asker.engine = Engine(LIMITS, runner, None, speculation=speculation, device_drafts=device)
    asker.submit([5, 6, 7], SamplingParams(max_tokens=12, temperature=0.0))
    asker.drain()
    of_drafting = [took_ns for asks, took_ns in noted if asks]
    assert len(of_drafting) > 5
    assert 0 < min(of_drafting) < 0.1e9, "most of them last some ms beside the drafter's 100"
