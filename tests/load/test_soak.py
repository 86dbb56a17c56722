"""A small soak on a real tritonserver, and what it would find."""

import argparse
import importlib
import sys
import warnings
from types import SimpleNamespace

import pytest
from slipstream_compose.server import repository_root, server_directory

# A race in Triton's own gRPC front end, until 25.03: a cancel that meets the last response of its
# request can end the whole server (triton-inference-server/server, pull request 8078). It takes
# thousands of cancels to see it.
_CRASH = "Signal (11) received"
NAMES = ("serving", "soak_plan", "soak_watch", "soak")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """The scripts as modules; they import each other by their plain names, as they are run."""
    monkeypatch.syspath_prepend(str(repository_root() / "load"))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    for name in NAMES:
        sys.modules.pop(name)


@pytest.mark.triton
def test_150_requests_of_which_a_third_leaves(load, tmp_path):
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    args = argparse.Namespace(requests=150, cancels=50, seed=0)
    log = tmp_path / "log"
    result = load.soak.run(args, log)
    if _CRASH in log.read_text():
        warnings.warn("tritonserver crashed; once more", stacklevel=1)
        result = load.soak.run(args, log)
    assert result["problems"] == []
    assert sum(result["ends"].values()) == 150
    assert result["ends"]["complete"] >= 100
    assert result["ends"]["killed"] == load.soak_plan.CHILD_STREAMS
    assert {"first", "middle", "deadline"} < result["ends"].keys()


@pytest.mark.parametrize(("requests", "cancels"), [(1, 0), (7, 7), (150, 50), (2000, 666)])
def test_a_plan_has_as_many_requests_and_cancels_as_asked_for(load, requests, cancels):
    plan = load.soak_plan
    items = plan.draw(requests, cancels, seed=3)
    asks = [item for item in items if isinstance(item, plan.Ask)]
    killed = plan.CHILD_STREAMS * (len(items) - len(asks))
    assert len(asks) + killed == requests
    assert sum(bool(ask.leaving) for ask in asks) + killed == cancels
    assert items == plan.draw(requests, cancels, seed=3)


def test_a_wrong_token_in_an_answer_and_in_a_beginning_is_seen(load):
    want = {0: "abc", 1: ""}
    assert load.soak.is_beginning({}, want)
    assert load.soak.is_beginning({0: "ab"}, want)
    assert not load.soak.is_beginning({0: "ac"}, want)
    assert not load.soak.is_beginning({0: "abcd"}, want)
    assert not load.soak.is_beginning({2: ""}, want)
    assert not load.soak.is_beginning({0: (1, 3)}, {0: (1, 2, 3)})


def test_growth_of_any_count_is_seen(load):
    watch = load.soak_watch
    before = watch.Held({"engine": watch.Process(4, 14, 100.0)}, 6, 6.0)
    assert watch.growth(before, before) == []
    smaller = watch.Held({"engine": watch.Process(3, 13, 900.0)}, 5, 5.0)
    assert watch.growth(before, smaller) == []
    larger = watch.Held({"engine": watch.Process(5, 15, 100.0), "x": watch.Process()}, 7, 6.5)
    assert watch.growth(before, larger) == [
        "engine: threads 4 -> 5",
        "engine: fds 14 -> 15",
        "x: new",
        "/dev/shm: files 6 -> 7",
        "/dev/shm: MiB 6.0 -> 6.5",
    ]
    assert "5" in watch.table(before, larger)
