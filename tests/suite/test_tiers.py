"""What runs when: each test in one tier, long properties in both, and what was repeated is said."""

import json
from pathlib import Path

import pytest
from fixtures import crashes, durations, tiers

TESTS = """
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

def test_plain(): pass

@pytest.mark.rest
def test_product(): pass

@pytest.mark.slow
@pytest.mark.rest
def test_of_minutes(): pass

@pytest.mark.gpu
def test_on_a_gpu(): pass

@pytest.mark.parametrize("n", [
    pytest.param(0, marks=pytest.mark.slow, id="a"),
    pytest.param(1, id="b"),
    pytest.param(2, marks=pytest.mark.rest, id="c"),
])
def test_of_named(n): pass

@pytest.mark.parametrize("n", [pytest.param({0}, marks=pytest.mark.slow), {1}])
def test_of_numbered(n): pass

@pytest.mark.parametrize("n", [pytest.param(0, marks=pytest.mark.slow)], ids=["a"])
def test_of_none(n): pass

drawn = 0

@settings(max_examples=123, database=None)
@given(st.integers())
def test_property(n):
    global drawn
    drawn += 1

@settings(max_examples=7)
@given(st.integers())
def test_small_property(n): pass

def test_how_many():
    print(f"drawn {drawn}")

class Machine(RuleBasedStateMachine):
    @rule()
    def step(self): pass

TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=124)

def test_how_many_of_a_machine():
    print(f"machine {TestMachine.settings.max_examples}")
"""
TESTS_FOLDER = Path(__file__).parents[1]
MARKERS = "[pytest]\nmarkers =\n  gpu: g\n  slow: s\n  rest: r\n"
BOTH = {"test_property", "runTest"}
QUICK = {"test_plain", "test_small_property", "test_how_many", "test_how_many_of_a_machine"}
QUICK |= {"test_of_named[b]", "test_of_numbered[n1]"}
REST = {"test_product", "test_of_named[c]"}
ELSEWHERE = {"test_of_minutes", "test_on_a_gpu", "test_of_named[a]", "test_of_numbered[n0]"}
ELSEWHERE |= {"test_of_none[a]"}


def run(pytester: pytest.Pytester, *args: str) -> tuple[set[str], str]:
    """Names of the tests that passed, and the output."""
    pytester.makeini(MARKERS)
    plugins = ("-p", "fixtures.tiers", "-p", "no:cacheprovider")
    result = pytester.runpytest_inprocess(*plugins, "-v", "-s", *args)
    assert result.ret == 0
    lines = result.outlines
    passed = {line.split("::")[-1].split()[0] for line in lines if "::" in line}
    return passed, result.stdout.str()


def test_each_test_runs_in_one_tier_and_long_properties_in_both(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    quick, output = run(pytester, "--tier", "quick")
    assert quick == QUICK | BOTH
    assert f"drawn {tiers.QUICK_EXAMPLES}\n" in output
    assert f"machine {tiers.QUICK_EXAMPLES}\n" in output
    rest, _ = run(pytester, "--tier", "rest")
    assert rest == REST | BOTH
    every, output = run(pytester)
    assert every == QUICK | REST | ELSEWHERE | BOTH
    assert "drawn 123\n" in output


def test_files_of_gpu_tests_are_not_read(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_gpu_broken="import no_such_package", test_x="def test_plain(): pass")
    assert run(pytester, "--tier", "quick")[0] == {"test_plain"}


@pytest.mark.parametrize("has_gpu", [False, True])
def test_gpu_tests_are_skipped_where_there_is_no_gpu(
    has_gpu: bool, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture
        def memory():
            print("allocated")

        @pytest.mark.gpu
        def test_on_a_gpu(memory): pass
        """
    )
    monkeypatch.setattr(tiers, "_has_gpu", lambda: has_gpu)
    _, output = run(pytester)
    assert ("allocated" in output) == has_gpu
    assert ("SKIPPED" in output) != has_gpu


def test_a_server_that_crashes_by_itself_is_counted(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        """
        from fixtures import crashes
        runs = 0

        def test_twice(tmp_path):
            global runs
            runs += 1
            log = tmp_path / f"log{runs}"
            log.write_text("Signal (11) received")  # of an earlier server: it does not count
            crashes.watch(log)
            assert not log.exists()
            log.write_text("ok" if runs == 3 else "Signal (11) received.")
            assert runs == 3

        def test_after_it(): pass
        """
    )
    monkeypatch.setattr(crashes, "_started", [])
    result = pytester.runpytest_inprocess("-p", "fixtures.crashes")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        [
            "*tritonserver crashed by itself: 2 repeats*",
            "*::test_twice: 2, after Signal (11) received; Signal (11) received",
        ]
    )


def test_durations_are_of_each_file_and_each_long_test(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = pytester.path / "durations.json"
    rest = {"total": [1, 2.0, 3.0]}
    known = {"total": [2, 9.0, 9.0], "test_other.py": [1, 4.0, 5.0], "test_gone.py": [1, 5.0, 4.0]}
    file.write_text(json.dumps({"rest": rest, "quick": known}))
    monkeypatch.setattr(durations, "FILE", file)
    monkeypatch.setattr(durations, "SINGLE_S", 0.1)
    pytester.makepyfile(
        """
        import subprocess, sys, time
        def test_short(): pass
        def test_busy():
            code = "import time\\nwhile time.process_time() < 0.3: pass"
            subprocess.run([sys.executable, "-c", code], check=True)
        """
    )
    name = "test_durations_are_of_each_file_and_each_long_test.py"
    pytester.makepyfile(test_other="def test_other(): pass")
    options = ("-p", "fixtures.tiers", "-p", "fixtures.durations", "--record-durations")
    for part in (("-k", "busy"), (f"{name}::test_busy",)):
        assert pytester.runpytest_inprocess(*options, *part).ret == pytest.ExitCode.USAGE_ERROR
    pytester.runpytest_inprocess(*options, "--tier", "quick", name)
    tiers = json.loads(file.read_text())
    assert tiers["rest"] == rest
    short = tiers["quick"].pop(f"{name}::test_short", None)  # long where the machine is very busy
    assert short is None or max(short[1:]) >= 0.1
    assert set(tiers["quick"]) == {"total", name, f"{name}::test_busy", "test_other.py"}
    assert tiers["quick"]["test_other.py"] == known["test_other.py"]
    assert tiers["quick"]["total"][0] == 3
    number, clock_s, processors_s = tiers["quick"][name]
    assert number == 2
    assert min(clock_s, processors_s) >= 0.2  # the kernel counts in hundredths


def test_the_longest_files_come_first_in_their_own_order() -> None:
    rows = {"total": [9, 9.0, 9.0], "a.py": [1, 3.0, 9.0], "b.py": [1, 7.0, 1.0]}
    names = ["a.py::one", "b.py::two", "new.py::last", "a.py::first", "b.py::K::one"]
    order = [names[i] for i in durations.longest_first(names, rows)]
    assert order == ["new.py::last", "b.py::two", "b.py::K::one", "a.py::one", "a.py::first"]


def test_workers_take_the_longest_file_first(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single worker has all files, in the order of durations, not of names or numbers."""
    for name in ("test_a", "test_b", "test_c"):
        pytester.makepyfile(**{name: "def test_one(): pass\ndef test_two(): pass"})
    seconds = {"test_a.py": 1.0, "test_b.py": 3.0, "test_c.py": 2.0}
    rows = {name: [2, took, took] for name, took in seconds.items()}
    (pytester.path / "durations.json").write_text(json.dumps({"quick": rows}))
    pytester.makeconftest(
        "from pathlib import Path\nfrom fixtures import durations\n"
        "durations.FILE = Path(__file__).with_name('durations.json')"
    )
    monkeypatch.setenv("PYTHONPATH", str(TESTS_FOLDER))
    plugins = ("-p", "fixtures.tiers", "-p", "fixtures.durations", "-p", "no:cacheprovider")
    workers = ("-n1", "--dist", "loadfile", "--no-loadscope-reorder", "--tier", "quick", "-v")
    lines = pytester.runpytest_subprocess(*plugins, *workers).outlines
    ran = [line.split()[-1].partition("::")[0] for line in lines if " PASSED test_" in line]
    assert ran == ["test_b.py"] * 2 + ["test_c.py"] * 2 + ["test_a.py"] * 2
