"""The simulated open load: recorded steps are met, nothing is lost, the stand-in keeps rules."""

import importlib
import json
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.engine.scheduler import Limits
from slipstream_serve.server import repository_root

FOLDER = repository_root() / "benchmarks"
NAMES = ("shapes", "workloads", "limits", "step_times", "traces", "simulated", "tails")


@pytest.fixture(scope="module")
def bench():
    """The scripts as modules; they import each other by their plain names, as they are run."""
    sys.path.insert(0, str(FOLDER))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    sys.path.remove(str(FOLDER))
    for name in NAMES:
        sys.modules.pop(name)


@pytest.mark.parametrize("card", ["H100", "H200"])
@pytest.mark.parametrize(("engine", "side"), [("slipstream", "ours"), ("vllm", "peer")])
def test_recorded_steps_are_met(bench, card, engine, side):
    table = json.loads((FOLDER / f"results/step-{card.lower()}.json").read_text())
    recorded = {row["row"]: row[side] for row in table["rows"]}
    times = bench.step_times.times_of("8b", card, engine)
    for n, context in ((1, 256), (32, 256), (128, 256), (256, 192)):
        assert times.step_ms(n, n * context, []) == pytest.approx(recorded[f"decode-bs{n}"])
    long = times.step_ms(16, 16 * 16_384, [])
    assert long == pytest.approx(recorded["long-context"], rel=0.01)
    prompts = times.step_ms(0, 0, [(0, 2048), (0, 2048)])
    assert 4096 / prompts * 1e3 == pytest.approx(recorded["prefill"], rel=0.01)


def test_mixed_steps_are_near_the_measured_ones(bench):
    times = bench.step_times.times_of("8b", "H200")
    assert times.step_ms(255, 255 * 704, [(0, 576)]) == pytest.approx(22.9, rel=0.05)
    assert times.step_ms(255, 255 * 704, [(0, 2048)]) == pytest.approx(57.0, rel=0.05)


@pytest.mark.parametrize("shape", ["1b", "8b", "14b"])
def test_more_work_never_takes_less(bench, shape):
    times = bench.step_times.times_of(shape)
    sizes = [times.step_ms(n, 100 * n, []) for n in range(1, 257)]
    assert sizes == sorted(sizes)
    chunks = [times.step_ms(32, 3200, [(0, n)]) for n in range(1, 4096, 7)]
    assert chunks == sorted(chunks)


def test_a_trace_is_its_seed(bench):
    for kind in bench.traces.KINDS:
        one, same, other = (bench.traces.trace(kind, 20.0, seed, 80) for seed in (5, 5, 6))
        assert one == same
        assert one.arrivals != other.arrivals
        dues = [each.due_s for each in one.arrivals]
        assert dues == sorted(dues)
        assert sum(each.is_long for each in one.arrivals) == 2 * (kind == "long")


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.data())
def test_every_request_gets_its_tokens_in_order_and_steps_keep_the_budget(bench, data):
    kind = data.draw(st.sampled_from(bench.traces.KINDS))
    seed, budget = data.draw(st.integers(0, 999)), data.draw(st.sampled_from([512, 2048]))
    load = bench.traces.trace(kind, data.draw(st.sampled_from([4.0, 30.0])), seed, 24)
    times = bench.step_times.times_of("8b")
    for answers in (
        bench.simulated.slipstream(load, times, Limits(256, budget)),
        bench.simulated.first_come(load, times, budget),
    ):
        for each, came in zip(load.arrivals, answers.times, strict=True):
            assert len(came) == each.num_output
            assert came[0] > each.due_s
            assert came == sorted(came)
        assert all(decodes + chunks <= budget for _, _, decodes, chunks in answers.steps)
        num_tokens = sum(chunks for *_, chunks in answers.steps)
        # A prompt of one token, or with one left, is no chunk.
        asked = sum(each.num_input for each in load.arrivals)
        assert asked - len(load.arrivals) <= num_tokens <= asked
        ends = [start + took for start, took, *_ in answers.steps]
        starts = [start for start, *_ in answers.steps]
        assert all(end <= start + 1e-9 for end, start in zip(ends, starts[1:], strict=False))


def test_the_stand_in_takes_prompts_in_their_order(bench):
    load = bench.traces.trace("bursts", 200.0, 3, 40)
    answers = bench.simulated.first_come(load, bench.step_times.times_of("8b"), 512)
    first = [came[0] for came in answers.times]
    assert first == sorted(first)


def test_the_command_prints_and_keeps_all_traces(bench, tmp_path, capsys, monkeypatch):
    output = tmp_path / "tails.json"
    options = ["--loads", "0.7", "--traces", "2", "--seed", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["tails.py", *options])
    assert bench.tails.main() == 0
    (case,) = json.loads(output.read_text())["cases"]
    assert len(case["traces"]) == 2
    assert set(case["ratios"]) == set(bench.tails.FIGURES)
    assert capsys.readouterr().out.count("vllm 4096") == 2
