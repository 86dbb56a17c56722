"""Drafts of a client's own, and drafts that it asks for, through schema, bridge and engine."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fixtures.features.house import House
from fixtures.features.pairing import cases, refused
from fixtures.features.table import PROMPT, body_of
from fixtures.tiers import quick_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "speculation.md"
WARM = ("warm", "seed")
WRONG = 7  # a token that no answer here has


def ask(house: House, names: tuple[str, ...], **more: Any) -> tuple[list[int], dict[str, Any]]:
    """Return the output of `tensorrt_llm`, which may come in parts, and the last response."""
    body = body_of("tensorrt_llm", [*names, "perf_metrics"]) | {"request_output_len": 24} | more
    responses = house.ask("tensorrt_llm", body)
    return [i for each in responses for i in each["output_ids"].ravel().tolist()], responses[-1]


def figures(last: dict[str, Any]) -> tuple[int, int, float]:
    names = ("total_draft_tokens", "total_accepted_draft_tokens", "acceptance_rate")
    total, accepted, rate = (last[name].item() for name in names)
    return total, accepted, rate


CASES = [
    (names, num_right, others)
    for names in (("greedy",), WARM, (*WARM, "stream"), (*WARM, "stop_words"), ("n", *WARM))
    for num_right, others in ((24, 0), (0, 3), (5, 0), (5, 6), (24, 9), (23, 1))
]


@pytest.mark.parametrize("case", quick_of(CASES, CASES[::7]))
def test_the_answer_is_that_without_drafts(house: House, case) -> None:
    names, num_right, others = case
    own, plain = ask(house, names)
    assert figures(plain) == (0, 0, 0.0)
    right = ask(house, tuple(name for name in names if name not in ("stop_words", "n")))[0]
    drafts = [*right[:num_right], *[WRONG] * others]
    assert WRONG not in right
    answer, last = ask(house, names, draft_input_ids=drafts)
    assert answer == own
    total, accepted, rate = figures(last)
    assert total == len(drafts)
    assert rate == pytest.approx(accepted / total)
    if "n" not in names:  # the last response is of any sequence
        assert accepted == min(num_right, len(answer))
    assert house.engine._scheduler._verification.is_active is False


SETS = [
    tuple(name for name in names if name not in ("drafts", "n", "echo"))
    for names in cases("tensorrt_llm")
    if not any(refused("tensorrt_llm", "drafts", name) for name in names)
]


@pytest.mark.parametrize("names", quick_of(SETS, SETS[::5]), ids="-".join)
def test_right_drafts_change_nothing_beside_any_feature(house: House, names) -> None:
    own, _ = ask(house, names)
    answer, last = ask(house, names, draft_input_ids=own)
    assert answer == own
    if not {"num_drafts", "lookahead"} & {*names}:
        assert figures(last)[:2] == (len(own), len(own))


def test_logits_of_drafts_and_a_threshold_change_nothing(house: House) -> None:
    own, _ = ask(house, WARM)
    drafts = {"draft_input_ids": [own[0], WRONG]}
    logits = [[0.0] * 4095 + [99.0]] * 2
    for threshold in (0.0, 1.0):
        more = {"draft_logits": logits, "draft_acceptance_threshold": threshold}
        answer, last = ask(house, WARM, **drafts, **more)
        assert answer == own
        assert figures(last)[:2] == (2, 1)


@pytest.mark.parametrize("is_streaming", [False, True])
def test_an_engine_without_a_drafter_makes_the_drafts_that_are_asked_for(
    house: House, is_streaming
) -> None:
    prompt = PROMPT * 3
    body = {"text_input": prompt, "max_tokens": 60, "stream": is_streaming}
    body |= {"return_perf_metrics": True, "exclude_input_in_output": True}
    plain = house.ask("tensorrt_llm_bls", body)
    asked = house.ask("tensorrt_llm_bls", body | {"num_draft_tokens": 4, "use_draft_logits": True})
    texts = [b"".join(each["text_output"].ravel()[0] for each in told) for told in (plain, asked)]
    assert texts[0] == texts[1]
    assert figures(plain[-1]) == (0, 0, 0.0)
    total, accepted, _ = figures(asked[-1])
    assert total >= accepted > 0
    same = {"lookahead_window_size": 9, "lookahead_verification_set_size": 0}
    for ngram, has_any in ((5, True), (1, False)):
        told = house.ask("tensorrt_llm_bls", body | same | {"lookahead_ngram_size": ngram})
        assert (figures(told[-1])[0] > 0) == has_any
        assert b"".join(each["text_output"].ravel()[0] for each in told) == texts[0]


def test_every_request_of_the_page_works(house: House) -> None:
    found = re.findall(r"/v2/models/(\w+)/generate -d '(\{.*?\})'", PAGE.read_text(), re.S)
    assert len(found) == 2
    for model, written in found:
        [response] = house.ask(model, json.loads(written))
        assert response["total_draft_tokens"].item() >= 0
