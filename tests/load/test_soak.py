"""A small soak on a real tritonserver, and what it would find."""

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from slipstream_serve.server import server_directory

NAMES = ("crashes", "serving", "soak_plan", "soak_watch", "soak_storm", "soak_timed", "soak")


@pytest.mark.triton
@pytest.mark.rest
def test_150_requests_of_which_a_third_leaves(load, tmp_path):
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    args = argparse.Namespace(requests=150, cancels=50, seed=0)
    result = load.soak.run(args, tmp_path / "log")
    if crashes := result["crashes of tritonserver itself"]:
        warnings.warn(f"tritonserver crashed: {crashes}", stacklevel=1)
    assert result["problems"] == []
    assert sum(result["ends"].values()) >= 150
    assert result["ends"]["complete"] >= 100
    assert result["ends"]["killed"] % load.soak_plan.CHILD_STREAMS == 0
    assert {"first", "middle", "deadline", "killed"} < result["ends"].keys()


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said", "end"),
    [
        (signal.SIGSEGV, "Signal (11) received.", r"Signal \(11\) received"),
        (signal.SIGSTOP, "Signal (6) received.", r"Signal \(6\) received"),
        (signal.SIGSTOP, "", "(did not answer|stood still) for 3.5 s"),
    ],
    ids=["ends", "does not end", "hangs"],
)
def test_a_server_that_crashes_is_told_and_its_requests_are_made_again(
    load, tmp_path, how, said, end
):
    args = argparse.Namespace(requests=400, cancels=100, seed=1)
    servers = []
    count = load.soak.count

    async def killed_once(server, books, accounts, items, seed):
        servers.append(server)
        if len(servers) == 1:

            def kill():
                server.log.write_text(said)
                os.kill(server.pid, how)

            asyncio.get_running_loop().call_later(8.0, kill)
        return await count(server, books, accounts, items, seed)

    load.soak.count = killed_once
    result = load.soak.run(args, tmp_path / "log")
    assert len(servers) == 2
    assert len(result["crashes of tritonserver itself"]) == 1
    assert re.search(end, result["crashes of tritonserver itself"][0])
    assert result["problems"] == []
    assert sum(result["ends"].values()) >= 400


@pytest.mark.triton
@pytest.mark.slow
def test_half_a_minute_at_80_percent_of_the_peak(load, tmp_path):
    args = argparse.Namespace(minutes=0.5, seed=0)
    result = load.soak.run_timed(args, tmp_path / "log")
    rows = result["rows"]
    assert (rows["lost"], rows["hung"], rows["wrong"], rows["leaked"]) == ("0", "0", "0", "0")
    equal, of, made, _ = rows["canary"].split()
    assert of == "of"
    assert int(equal) == int(made) > 5
    assert {"complete", "first", "middle", "end", "deadline"} <= result["ends"].keys()
    of_noise = ("first token: ", "a token: ")  # so short a run has few requests in a tenth
    assert [p for p in result["problems"] if not p.startswith(of_noise)] == []


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
    assert load.soak_storm.is_beginning({}, want)
    assert load.soak_storm.is_beginning({0: "ab"}, want)
    assert not load.soak_storm.is_beginning({0: "ac"}, want)
    assert not load.soak_storm.is_beginning({0: "abcd"}, want)
    assert not load.soak_storm.is_beginning({2: ""}, want)
    assert not load.soak_storm.is_beginning({0: (1, 3)}, {0: (1, 2, 3)})


def fds(sockets: int, eventfds: int = 2) -> Counter[str]:
    return Counter(socket=sockets, eventfd=eventfds)


OPENS = """
import os, select, socket
print(flush=True)
input()
kept = [socket.socket(), select.epoll(), open("/proc/self/status"), os.eventfd(0), os.pipe()]
print(flush=True)
input()
"""


def test_every_descriptor_is_counted_by_its_kind(load):
    """The process is one where nothing else opens any."""
    before, then = load.soak_watch.Process(), load.soak_watch.Process()
    command, pipe = [sys.executable, "-c", OPENS], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        for held in (before, then):
            assert process.stdout.readline() == b"\n"
            load.soak_watch._add(held, Path(f"/proc/{process.pid}"))
            process.stdin.write(b"\n")
            process.stdin.flush()
    assert then.fds - before.fds == Counter(socket=1, eventpoll=1, file=1, eventfd=1, pipe=2)


def test_growth_of_any_count_is_seen(load):
    watch = load.soak_watch
    before = watch.Held({"engine": watch.Process(4, fds(14), 100.0)}, 6, 6.0)
    assert watch.growth(before, before) == []
    smaller = watch.Held({"engine": watch.Process(3, fds(13), 900.0)}, 5, 5.0)
    assert watch.growth(before, smaller) == []
    larger = watch.Held({"engine": watch.Process(5, fds(15), 100.0), "x": watch.Process()}, 7, 6.5)
    assert watch.growth(before, larger) == [
        "engine: threads 4 -> 5",
        "engine: socket 14 -> 15",
        "x: new",
        "/dev/shm: files 6 -> 7",
        "/dev/shm: MiB 6.0 -> 6.5",
    ]
    assert "5" in watch.table(before, larger)
    pools = [
        watch.Held({"tritonserver": watch.Process(n, fds(n, n), 1.0)}) for n in (239, 255, 256)
    ]
    assert watch.growth(pools[0], pools[1]) == []
    assert watch.growth(pools[0], pools[2]) == [
        "tritonserver: threads 239 -> 256",
        "tritonserver: eventfd 239 -> 256",
        "tritonserver: socket 239 -> 256",
    ]


def test_a_slope_is_of_all_servers_and_not_of_their_beginnings(load):
    watch = load.soak_watch
    memory = watch.Memory()
    for base in (100.0, 300.0):
        memory.begin_server()
        for number in range(301):
            warm_up = -50.0 if number < 100 else 0.0
            size = base + warm_up + number / 60  # MiB, each 10 s and 40 requests
            held = watch.Held({"engine": watch.Process(4, fds(14), size)})
            memory.add(7.0 + 10.0 * number, 40 * number, held)
    memory.begin_server()
    for number in range(60):  # not ten minutes: all of it is warm-up
        memory.add(
            10.0 * number, number, watch.Held({"engine": watch.Process(4, fds(14), number * 9)})
        )
    (slope,) = memory.slopes().values()
    assert slope.mib_h == pytest.approx(6.0)
    assert slope.kib_request == pytest.approx(1024 / 60 / 40)


def test_servers_that_lived_briefly_have_no_slope(load):
    memory = load.soak_watch.Memory()
    assert memory.slopes() == {}
    memory.begin_server()
    for number in range(120):  # ten seconds less than 20 minutes
        held = load.soak_watch.Held({"engine": load.soak_watch.Process(4, fds(14), 5.0 * number)})
        memory.add(10.0 * number, number, held)
    assert memory.slopes() == {}


def samples_of(load, memory, seconds: int, rate: int, mib: Callable[[float], float]) -> None:
    """A server that answers so many requests a second; its engine's MiB by its age in seconds."""
    memory.begin_server()
    for age in range(0, seconds + 1, 5):
        held = load.soak_watch.Held({"engine": load.soak_watch.Process(4, fds(14), mib(age))})
        memory.add(7.0 + age, rate * age, held)


def test_a_busy_server_is_judged_after_minutes(load):
    """400 requests a second: 50 s are its warm-up, if that is more than a third of its time."""
    memory = load.soak_watch.Memory()
    samples_of(load, memory, 95, 400, lambda age: 9.0 * age)  # not as long again
    assert memory.slopes() == {}
    samples_of(load, memory, 100, 400, lambda age: min(age, 50) + age / 60)
    samples_of(load, memory, 210, 400, lambda age: min(age, 70) + age / 60)
    (slope,) = memory.slopes().values()
    assert slope.mib_h == pytest.approx(60.0)
    assert slope.kib_request == pytest.approx(1024 / 60 / 400)


@pytest.mark.parametrize(("kib", "is_problem"), [(0.4, False), (0.6, True)])
def test_a_busy_process_may_grow_by_half_a_kib_a_request(load, kib: float, is_problem: bool):
    timed = load.soak_timed.Timed(load.soak_storm.Books(None), 600.0, 0)
    samples_of(load, timed.memory, 300, 400, lambda age: 400 * age * kib / 1024)
    problems = timed.result([])["problems"]
    assert [p.split(" ")[0] for p in problems] == (["engine"] if is_problem else [])


def test_tenths_are_of_the_time_and_not_of_the_requests(load):
    timed, took = load.soak_timed, load.soak_storm.Took
    slow = [took(t, t + 0.5, t + 1.5, 11) for t in (0.0, 0.5)]
    middle = [took(5.0, 9.0, 19.0, 11)] * 500
    quick = [took(t, t + 0.1, t + 0.3, 5) for t in (9.5, 10.0)]
    figures = timed.tenth_figures([*slow, *middle, *quick])
    assert figures["first token"] == pytest.approx([500.0, 4000.0, 100.0])
    assert figures["a token"] == pytest.approx([100.0, 1000.0, 50.0])


def test_a_canary_that_gets_no_answer_is_not_one_that_gets_the_right_one(load):
    """Nor is another request's wrong answer the canary's."""

    class Storm:
        def __init__(self, books) -> None:
            self.books = books
            self.endings = iter([True, False, True])

        async def make(self, ask) -> bool:
            self.books.num_wrong += 1  # somebody else's
            if (is_right := next(self.endings, None)) is None:
                raise load.soak_storm.ServerLostError
            return is_right

    async def sing() -> None:
        await timed._sing(Storm(timed.books), asyncio.Event())

    timed = load.soak_timed.Timed(load.soak_storm.Books(None), 600.0, 0)
    timed._end_s = time.monotonic() + 60
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load.soak_timed, "CANARY_S", 0.0)
        asyncio.run(sing())
    assert (timed.num_canaries, timed.num_canaries_wrong) == (3, 1)


def test_a_load_follows_a_peak_that_falls_and_none_that_rises(load):
    """A server under more load would seem to become slower."""
    timed = load.soak_timed.Timed(load.soak_storm.Books(None), 600.0, 0)
    offered = []
    for peaks in ([40.0, 30.0, 50.0], [60.0], [70.0], [20.0], [25.0], [90.0]):
        timed.peaks += peaks
        offered.append(timed.offer())
    assert offered == pytest.approx([32.0, 32.0, 32.0, 16.0, 16.0, 16.0])
    assert timed.offered == offered
    assert timed.result([])["problems"] == []
    timed.peaks += [19.0, 18.0]
    assert [p.split(":")[0] for p in timed.result([])["problems"]] == ["peak"]


def test_a_run_that_is_interrupted_ends_its_turn(load):
    async def sit() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, timed.stop)
        task = asyncio.create_task(timed._note_lateness(asyncio.Event()))
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(task, 10)

    timed = load.soak_timed.Timed(load.soak_storm.Books(None), 600.0, 0)
    timed._end_s = time.monotonic() + 600
    asyncio.run(sit())
    assert timed._run_s >= timed._seconds


@pytest.mark.parametrize("late_s", [0.0, 0.1], ids=["in time", "late"])
def test_a_run_that_is_interrupted_before_its_peak_has_one(load, late_s):
    class Storm:
        async def run(self, items) -> list:
            for _ in items:
                await asyncio.sleep(late_s)  # longer than a peak is measured: a loaded machine
                timed.books.ends["complete"] += 1
            return []

        async def drain(self) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load.soak_timed, "_PEAK_S", 0.05)
        timed = load.soak_timed.Timed(load.soak_storm.Books(None), 600.0, 0)
    timed.stop()
    asyncio.run(timed._measure_peaks(Storm()))
    assert len(timed.peaks) == 3
    assert min(timed.peaks) > 0
    assert timed.books.ends.total() == 0


def test_what_a_timed_run_must_not_show_is_a_problem(load):
    storm = load.soak_storm
    timed = load.soak_timed.Timed(storm.Books(None), 600.0, 0)
    assert timed.result([])["problems"] == []
    books = timed.books
    books.took += [storm.Took(t, t + t / 100, t + 2, 5) for t in range(1, 101)]
    timed.grown = ["engine: threads 4 -> 5"]
    timed.memory.begin_server()
    for number in range(12):
        sizes = {"engine": 20.0 * number, "tritonserver": 20.0 * number, "stub": 1.0}
        processes = {name: load.soak_watch.Process(1, fds(1), size) for name, size in sizes.items()}
        timed.memory.add(120.0 * number, 200 * number, load.soak_watch.Held(processes))
    problems = timed.result([])["problems"]
    assert len(problems) == 4
    for words in ("engine: threads", "first token: ", "engine grows", "tritonserver grows"):
        assert any(problem.startswith(words) for problem in problems), problems
