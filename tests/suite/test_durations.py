"""Both tiers keep their budgets of processor time, as they were last measured."""

import json

from fixtures.durations import FILE

# Of two processors: five minutes, beside two for lint, types, collection and what tests wait for.
QUICK_S = 560
# Seventeen minutes of two processors, of 37; what is tested alone waits more than it computes.
REST_S = 2000
SINGLE_S = 20  # a longer test is for the rest tier
MEASURE = "make test-durations measures"


def test_both_tiers_keep_their_budgets() -> None:
    tiers = json.loads(FILE.read_text())
    assert tiers["quick"]["total"][2] <= QUICK_S, MEASURE
    assert tiers["rest"]["total"][2] <= REST_S, MEASURE


def test_no_quick_test_is_long() -> None:
    quick = json.loads(FILE.read_text())["quick"]
    longer = {name: row for name, row in quick.items() if "::" in name and row[2] > SINGLE_S}
    assert longer == {}, MEASURE
