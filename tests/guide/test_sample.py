"""A fixed sample of schemas such as applications send, with values that are of them and are not."""

import json
from functools import cache
from pathlib import Path

import pytest
from fixtures.guide.real import compiler, follows, guide, ids_of
from fixtures.guide.schemas import is_valid, random_text
from fixtures.tiers import quick_of
from slipstream.guide.interface import GuideError

PATH = Path(__file__).parents[1] / "fixtures/guide/sample.jsonl"
SAMPLE = {case["name"]: case for case in map(json.loads, PATH.read_text().splitlines())}
REFUSED = {
    "refused_contains": "contains",
    "refused_unique_texts": "uniqueItems",
    "refused_lookahead": "look-ahead",
    "refused_unevaluated": "unevaluatedProperties",
}


@cache
def refusals() -> dict[str, str]:
    """Return why each schema of the sample is refused, of those that are."""
    found = {}
    for name, case in SAMPLE.items():
        try:
            compiler().compile(guide("json_schema", json.dumps(case["schema"])))
        except GuideError as error:
            found[name] = str(error)
    return found


def test_nearly_all_are_accepted_and_refusals_name_the_keyword():
    assert len(SAMPLE) >= 100
    assert len(refusals()) <= 0.05 * len(SAMPLE)
    assert refusals().keys() == REFUSED.keys()
    for name, keyword in REFUSED.items():
        assert keyword in refusals()[name]


@pytest.mark.parametrize("name", quick_of(list(SAMPLE), list(SAMPLE)[::8]))
def test_values_of_a_schema_are_allowed_and_no_others(name):
    case = SAMPLE[name]
    for test in case["tests"]:
        assert is_valid(test["data"], case["schema"]) == test["valid"]
        if name not in REFUSED:
            wanted = guide("json_schema", json.dumps(case["schema"]))
            _, is_allowed = follows(wanted, ids_of(json.dumps(test["data"])))
            assert is_allowed == test["valid"], test["data"]


@pytest.mark.parametrize("name", quick_of(list(SAMPLE), list(SAMPLE)[3::16]))
def test_random_outputs_are_valid(name):
    if name in REFUSED:
        return
    schema = SAMPLE[name]["schema"]
    for seed in range(3):
        text = random_text(schema, seed, most=120)
        if text is not None:
            assert is_valid(json.loads(text), schema), text
