"""The simulated open load: recorded steps are met, nothing is lost, the stand-in keeps rules."""

import json
import sys
from collections import Counter
from dataclasses import replace

import pytest
from fixtures.benchmarks import Instant
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.engine.scheduler import Limits
from slipstream_serve.server import repository_root

FOLDER = repository_root() / "benchmarks"
NAMES = (
    *("shapes", "workloads", "limits", "step_times", "traces", "recorded_load", "simulated"),
    *("tails", "open_load", "open_rows", "rows", "driving"),
)


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


@pytest.mark.parametrize("name", ["decode-bs200", "decode-bs256", "long-context"])
def test_a_row_of_decodes_has_full_steps(bench, name):
    """However slowly prompts come beside decodes, half of an output's steps are decodes of all."""
    load = bench.rows.ROWS[name].workload()
    arrivals = tuple(bench.traces.Arrival(0.0, len(p), load.max_tokens) for p in load.prompts)
    trace = bench.traces.Trace("at-once", 1.0, 0, arrivals)
    limits = Limits(max_num_batched_tokens=bench.rows.BUDGET)
    times = replace(bench.step_times.times_of("8b", "H200"), first_ms=0.0)
    answers = bench.simulated.slipstream(trace, times, limits)
    events = sorted(Counter(moment for each in answers.times for moment in each).items())
    run = bench.driving.Run(events, answers.seconds, len(arrivals), 0)
    assert len(run.gaps_ms) > load.max_tokens / 2


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


@pytest.mark.rest
def test_the_command_prints_and_keeps_all_traces(bench, tmp_path, capsys, monkeypatch):
    output = tmp_path / "tails.json"
    options = ["--loads", "0.7", "--traces", "2", "--seed", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["tails.py", *options])
    assert bench.tails.main() == 0
    (case,) = json.loads(output.read_text())["cases"]
    assert len(case["traces"]) == 2
    assert set(case["ratios"]) == set(bench.tails.FIGURES)
    assert capsys.readouterr().out.count("vllm 4096") == 2


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["poisson", "recorded"])
def test_the_policy_reaches_its_goals_over_recorded_steps(bench, kind):
    """Medians of seven traces, beside the best settings of the stand-in."""
    tails = bench.tails
    for load in (0.5, 0.9):
        case = tails.Case("H100", "8b", load)
        found = tails.measure(case, [kind], [*range(7)], Limits(256, 2048))
        for name, goal in tails.GOALS.items():
            assert found["ratios"][name] <= goal + 0.02, (load, name)


def test_a_piece_of_the_recorded_hour_comes_at_the_rate(bench):
    one, same, other = (bench.tails.drawn("recorded", 20.0, seed) for seed in (5, 5, 6))
    assert one == same
    assert one.arrivals != other.arrivals
    assert len(one.arrivals) == 300
    dues = [each.due_s for each in one.arrivals]
    assert (dues[0], dues[-1]) == (0.0, pytest.approx(299 / 20.0))
    assert dues == sorted(dues)
    assert {each.due_s for each in bench.tails.closed_of("recorded").arrivals} == {0.0}


def test_an_open_load_is_offered_when_it_is_due(bench):
    load = bench.open_load.shortened(bench.traces.trace("poisson", 200.0, 1, 20), 50)
    answers = bench.open_load.run(Instant(), load)
    for each, times in zip(load.arrivals, answers.times, strict=True):
        assert len(times) == each.num_output
        assert times[0] >= each.due_s


def test_ratios_are_over_the_best_setting(bench):
    ours, one, two = (dict.fromkeys(bench.traces.FIGURES, value) for value in (10.0, 20.0, 40.0))
    one["first p99"], two["between p50"] = 50.0, 5.0
    found = {"slipstream": ours, "vllm 2048": one, "vllm 8192": two}
    ratios = bench.open_rows.ratios(found)
    assert ratios["first p50"] == 0.5
    assert ratios["first p99"] == 0.25
    assert ratios["between p50"] == 2.0  # of the setting with the best first p99
    result = {"shape": "x", "peak": 1.0, "rows": {"open-50": found | {"ratios": ratios}}}
    result["sides"] = {"slipstream": {"loads": {"0.5": [ours]}}}
    assert bench.open_rows.show(result).count("open-50") == 4
    assert "slipstream   1" in bench.open_rows.show(result)
    assert bench.open_rows.ratios({"slipstream": ours}) == {}


@pytest.mark.rest
def test_two_trees_are_compared_by_a_real_engine(bench, monkeypatch, capfd):
    root = str(repository_root())
    options = ["--shapes", "tiny", "--count", "4", "--shorten", "60", "--turns", "1"]
    monkeypatch.setattr(sys, "argv", ["open_load.py", "compare", root, root, *options])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert bench.open_load.main() == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["peaks"]["tiny"] > 0


@pytest.mark.parametrize("has_graphs", [False, True])
def test_a_host_that_launches_slowly_spoils_no_tail(bench, monkeypatch, has_graphs):
    times, simulated = bench.step_times.times_of("8b", "H200"), bench.simulated
    if not has_graphs:
        monkeypatch.setattr(simulated.SimulatedRunner, "buckets", None)
    tails = []
    for eager_ms in (0.0, bench.step_times.EAGER_MS):
        trace, own = bench.traces.trace("poisson", 18.6, 11, 120), replace(times, eager_ms=eager_ms)
        tails.append(simulated.slipstream(trace, own, Limits(256, 2048, 4096)).figures())
    assert tails[1]["first p99"] <= 1.15 * tails[0]["first p99"]
    assert tails[1]["between p99"] <= 1.15 * tails[0]["between p99"]


def test_a_step_takes_as_long_as_its_graph(bench, monkeypatch):
    """Time 9 decodes, for which there is no graph of their own, and a prompt beside them."""
    simulated, times = bench.simulated, bench.step_times.times_of("8b")
    load = bench.traces.at_once(count=9)
    arrivals = [replace(each, num_input=20, num_output=30) for each in load.arrivals]
    late = replace(arrivals[0], due_s=0.05, num_input=70)
    load = replace(load, arrivals=(*arrivals, late))
    found = []
    for buckets in (simulated.SimulatedRunner.buckets, None):
        monkeypatch.setattr(simulated.SimulatedRunner, "buckets", buckets)
        answers = simulated.slipstream(load, replace(times, eager_ms=0.0), Limits(256, 2048))
        found.append({(rows, chunks): took for _, took, rows, chunks in answers.steps})
    padded, plain = found
    assert padded[9, 0] == pytest.approx(plain[9, 0] + (times.rest_ms(16) - times.rest_ms(9)) / 1e3)
    (step,) = [each for each in padded if each[0] and each[1]]
    assert step == (9, 70)
    assert padded[step] == pytest.approx(
        plain[step] + (times.rest_ms(32 + 96) - times.rest_ms(79)) / 1e3, rel=0.01
    )
