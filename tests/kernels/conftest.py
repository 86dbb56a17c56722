"""Numbers are the same in every run. `SLIPSTREAM_TEST_CASES=N` runs at most N cases of every test,
spread over all, `SLIPSTREAM_TEST_REPETITIONS=N` each kernel N times instead of 20: for slow tools.
"""

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def _the_same_numbers_every_time() -> None:
    """What is held to a bound must not be drawn anew by each run."""
    torch.manual_seed(0)


def spread(count: int, most: int) -> set[int]:
    """At most `most` of the numbers below `count`, the first and the last among them."""
    if most == 1:
        return {0}
    return {i * (count - 1) // (most - 1) for i in range(most)}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    most = int(os.environ.get("SLIPSTREAM_TEST_CASES", "0"))
    if not most:
        return
    here = os.path.dirname(__file__)
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if str(item.path).startswith(here):
            name = getattr(item, "originalname", item.name)
            cases.setdefault((str(item.path), name), []).append(item)
    left_out = {
        id(item)
        for group in cases.values()
        for i, item in enumerate(group)
        if i not in spread(len(group), most)
    }
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]
