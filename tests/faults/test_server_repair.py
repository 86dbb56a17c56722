"""Processes of the server that die or hang: detection, repair, and harm to other requests."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from fixtures.faults.asking import Ask, asks, pieces
from fixtures.faults.bounds import assert_promised
from fixtures.faults.oracle import Oracle, Outcome
from fixtures.faults.planter import write_python
from fixtures.faults.supervised import Supervision, planted_server, supervised, wait_line
from fixtures.server.metrics_page import Page, wait_for_page
from fixtures.server.support import LONG, PROMPT, Client, RequestError, lasting
from slipstream_serve.pulse import MODEL_PERIOD_S
from slipstream_serve.server import server_directory
from slipstream_serve.supervise import OTHERS_S
from slipstream_serve.triton import kill

pytestmark = [pytest.mark.triton, pytest.mark.rest]

MODELS = ("ensemble", "tensorrt_llm_bls", "vllm_model")
STUBS = ("preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls", "vllm_model")
PROMISED_S = {"noticed": 5.0, "served again": 15.0}  # measured less than 4 (docs/faults.md)
PACE_S = 0.1  # so slow that all of a storm are there at once on any machine
TOLD_S = 5.0  # by `slipstream health`
# Of each time, whatever else the machine does.
NOTICED_S, REPAIRED_S = 60.0, 120.0
# What tritonserver itself says of a request that its process had, or that comes before the next.
STUB_SAYS = r"Stub process '\w+' is not healthy"


@pytest.fixture(scope="module")
def supervision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervision]:
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    folder = tmp_path_factory.mktemp("supervised")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_SERVER", str(planted_server(folder / "server")))
        patch.setenv("SLIPSTREAM_PYTHON", str(folder / "python"))
        (folder / "orders").mkdir()
        write_python(folder / "python", folder / "orders")
        with supervised(folder) as supervision:
            yield supervision


@pytest.fixture(scope="module")
def orders(client: Client) -> Path:
    """Return the folder for orders to the engine."""
    return client.server.repository.parent / "orders"


@pytest.fixture(scope="module")
def client(supervision: Supervision) -> Client:
    return Client(supervision._server)


def health(client: Client) -> tuple[int, dict[str, object], float]:
    """Exit code of `slipstream health`, what it said, and the seconds it took."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "slipstream_client.cli", "health", "--json"]
    command += ["--grpc-port", client.address.rpartition(":")[2]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, json.loads(done.stdout), time.monotonic() - begin


def assert_unhealthy(
    client: Client, record, *words: str, provoke: Callable[[], object] = lambda: None
) -> None:
    """That it is told, with these words; `provoke` comes before each question."""
    what = f"health after {' '.join(words)}"

    def ask() -> dict[str, float]:
        provoke()
        code, said, seconds = health(client)
        assert code == 1, said
        assert all(word in str(said["error"]) for word in words), said
        assert seconds < NOTICED_S
        return {what: seconds}

    assert_promised({what: TOLD_S}, ask, record)


def engine_pid(client: Client) -> int:
    return int(client.health()["engine_pid"])


def measure(lines: list[str], pattern: str, fault: Callable[[], object]) -> dict[str, float]:
    """How soon a fault was noticed, and how soon the line of its repair said that it is mended."""
    lines.clear()
    begin = time.monotonic()
    fault()
    line = wait_line(lines, pattern)
    mended_s = time.monotonic() - begin
    assert mended_s < REPAIRED_S
    repair = re.search(r"repair \d+, ([\d.]+) s", line)
    assert repair is not None, line
    return dict(zip(PROMISED_S, (mended_s - float(repair[1]), mended_s), strict=True))


def wait_served(client: Client, timeout_s: float) -> None:
    """Until every model answers again."""
    begin = time.monotonic()
    for model in MODELS:
        while True:
            try:
                client.generate(model, text_input=PROMPT, **short(model))
                break
            except (RequestError, OSError, ValueError):
                assert time.monotonic() - begin < timeout_s
                time.sleep(0.05)


def short(model: str) -> dict[str, object]:
    if model == "vllm_model":
        return {"sampling_parameters": '{"max_tokens": 2, "temperature": 0}'}
    return {"max_tokens": 2}


# --- under an orchestrator: slipstream health -----------------------------------------------------


@pytest.mark.parametrize("who", ["engine", pytest.param("server", marks=pytest.mark.slow)])
def test_health_tells_of_what_stands_still(client: Client, record_property, who: str) -> None:
    assert health(client)[0] == 0
    stopped, words = {
        "engine": (engine_pid(client), "the engine did not answer"),
        "server": (client.server.pid, "in time"),
    }[who]
    os.kill(stopped, signal.SIGSTOP)
    try:
        assert_unhealthy(client, record_property, words)
    finally:
        os.kill(stopped, signal.SIGCONT)
    wait_served(client, 120)
    code, said, _ = health(client)
    assert code == 0, said


@pytest.mark.slow
def test_health_tells_of_what_is_dead(
    client: Client, supervision: Supervision, record_property
) -> None:
    def end_engine() -> None:
        wait_served(client, 120)
        os.kill(engine_pid(client), signal.SIGKILL)
        time.sleep(0.3)  # it has a request until its socket is closed

    words = "UNAVAILABLE: the engine"
    assert_unhealthy(client, record_property, words, provoke=end_engine)
    wait_served(client, 120)
    for model in (*STUBS, "slipstream_health"):
        kill([client.stub(model)])
        assert_unhealthy(client, record_property, model)
        client.server.control("unload", model, 30)
        client.server.control("load", model, 30)
        if model in STUBS[:3]:
            client.server.control("load", "ensemble", 30)
    code, said, _ = health(client)
    assert code == 0, said
    # The server keeps requests of dead processes, and with them the rest of their models.
    os.kill(client.server.pid, signal.SIGKILL)
    with supervision.on() as lines:
        wait_line(lines, "started tritonserver again")


@pytest.mark.slow
def test_a_loaded_server_is_a_healthy_one(client: Client) -> None:
    """More requests than fit: an idle engine would be asked for a token, this one must not be."""
    request = {"text_input": PROMPT * 12, "max_tokens": 60, "end_id": -1, "stream": True}
    threads = [
        threading.Thread(target=client.events, args=(MODELS[i % 2],), kwargs=request, daemon=True)
        for i in range(80)
    ]
    for thread in threads:
        thread.start()
    begin = time.monotonic()
    while not client.health()["waiting"]:
        assert time.monotonic() - begin < 120
    code, said, _ = health(client)
    assert code == 0, said
    assert "token_s" not in said
    for thread in threads:
        thread.join(120)
    client.wait_idle(120)


# --- under slipstream serve -----------------------------------------------------------------------


def kill_idle(
    client: Client, supervision: Supervision, lines: list[str], model: str
) -> dict[str, float]:
    *_, old = client.stubs(model)
    supervision.wait_unasked(model)
    # Without its pid, where the supervisor had not looked again since the last repair.
    pattern = rf"the process of model {model}( \(pid {old}\))? ended"
    times = measure(lines, pattern, lambda: os.kill(old, signal.SIGKILL))
    (line,) = lines
    assert f"loaded {model}" in line
    assert ("ensemble" in line) == (model in STUBS[:3])
    assert old not in client.stubs(model)
    return times


def test_a_process_that_dies_idle_is_replaced_and_nobody_notices(
    client: Client, supervision: Supervision, record_property
) -> None:
    pid, server = engine_pid(client), client.server.pid
    with supervision.on() as lines:
        for model in (*STUBS, "slipstream_health"):
            assert_promised(
                PROMISED_S,
                lambda model=model: kill_idle(client, supervision, lines, model),
                lambda what, seconds, model=model: record_property(f"{model} {what}", seconds),
            )
        wait_served(client, 120)
    assert (engine_pid(client), client.server.pid) == (pid, server), lines

    def is_told(page: Page) -> bool:
        name = "slipstream_repairs"
        return name in page.names and page.get(name) == supervision.num_repairs

    page = wait_for_page(client.server.endpoints.metrics, is_told)
    assert page.get("slipstream_repairs", what="model") >= len(STUBS) + 1


def test_nobody_asks_a_dead_process_while_its_repair_waits(
    client: Client, supervision: Supervision
) -> None:
    """The model's other process would never end, and the server would be restarted for it."""
    assert len(client.stubs("postprocessing")) > 1
    server, killed = client.server.pid, client.stub("postprocessing")
    os.kill(killed, signal.SIGKILL)
    time.sleep(3 * MODEL_PERIOD_S)  # each second question, and so one at least, would have been its
    with supervision.on() as lines:
        wait_line(lines, "the process of model postprocessing ended; loaded postprocessing")
    assert client.server.pid == server, lines
    wait_served(client, 120)


def test_who_is_asked_of_another_model_is_not_harmed(
    client: Client, supervision: Supervision, orders: Path
) -> None:
    """Requests of the dead process end with an error too, though Triton itself never ends them.

    Nor is who was given to the model's other process, which goes on while new ones are loaded.
    """
    oracle = Oracle(client, orders)
    questions = asks(12, max_tokens=200)
    oracle.learn(questions)
    oracle.plant("pace", seconds=PACE_S)
    pid = engine_pid(client)
    with supervision.on() as lines, oracle.storm(questions, running=12):
        killed_s = time.monotonic()
        os.kill(client.stub("tensorrt_llm_bls"), signal.SIGKILL)
        oracle.plant("heal")
        found = wait_line(lines, r"repair \d+,")  # a probe may have been in its hands too
        told = re.search(r"loaded tensorrt_llm_bls again, (\d) requests hang", found)
        assert told, found
        assert 1 <= int(told[1]) <= 7, found
        client.generate("tensorrt_llm_bls", text_input=PROMPT, max_tokens=2)
        wait_line(lines, "started tritonserver again", timeout_s=120.0)
    ours = [each for each in oracle.outcomes if each.ask.model == "tensorrt_llm_bls"]
    assert sum(each.error is not None for each in ours) >= int(told[1]) - 1  # a probe may be one
    check_repaired(oracle, {"tensorrt_llm_bls"}, killed_s)
    assert engine_pid(client) == pid


def check_repaired(oracle: Oracle, concerned: set[str], killed_s: float) -> None:
    """Requests of those models may be lost, others only if they took very long."""

    def may_fail(outcome: Outcome) -> bool:
        return outcome.ask.model in concerned or outcome.ended_s - killed_s > OTHERS_S

    for outcome in oracle.outcomes:
        assert outcome.has_ended, outcome
        assert outcome.ended_s - killed_s < REPAIRED_S, outcome
        assert not outcome.is_closed or outcome.ask.model in concerned, outcome
    problems = oracle.judge(may_fail, said=STUB_SAYS, may_close=True)
    assert problems == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "concerned"),
    [
        ("preprocessing", set()),  # all have left it
        ("tensorrt_llm", {"ensemble", "tensorrt_llm"}),
        ("postprocessing", {"ensemble"}),
    ],
)
def test_a_stage_that_dies_at_work(
    client: Client, supervision: Supervision, orders: Path, model: str, concerned: set[str]
) -> None:
    oracle = Oracle(client, orders)
    questions = asks(10, max_tokens=100)
    oracle.learn(questions)
    oracle.plant("pace", seconds=PACE_S)
    pid, num_stubs = engine_pid(client), len(client.stubs(model))
    with supervision.on() as lines, oracle.storm(questions, running=10):
        killed_s = time.monotonic()
        os.kill(client.stub(model), signal.SIGKILL)
        oracle.plant("heal")
        wait_line(lines, f"process of model {model} ")
        if model == "tensorrt_llm":  # of the stages, another process may have had all the work
            wait_line(lines, "started tritonserver again")
    assert len(client.stubs(model)) == num_stubs  # with the server or without: nothing is left
    wait_served(client, 120)
    check_repaired(oracle, concerned, killed_s)
    assert engine_pid(client) == pid


@pytest.mark.parametrize("is_watched", [False, True])
def test_an_acknowledgement_that_dies_with_its_process_is_an_error(
    client: Client, supervision: Supervision, *, is_watched: bool
) -> None:
    """The server has all of the response by then, so of itself it says nothing."""
    ask = Ask("ensemble", PROMPT, 1, max_tokens=LONG, is_http=is_watched, end_id=-1)

    def lose() -> None:
        answer = pieces(client, ask, 60)
        next(answer)
        (client.server.repository / "postprocessing" / "die").touch()
        with pytest.raises(RequestError, match=r"UNAVAILABLE: .* postprocessing"):
            list(answer)

    if not is_watched:
        lose()
    with supervision.on() as lines:
        if is_watched:
            lose()
        wait_line(lines, r"repair \d+,")
        wait_served(client, 120)
    client.wait_idle(120)


@pytest.mark.slow
def test_a_server_that_is_dead_or_stands_still_is_started_again(
    client: Client, supervision: Supervision, record_property
) -> None:
    pid = engine_pid(client)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        with supervision.on() as lines:
            stream = client.iterate("ensemble", **lasting("ensemble"))
            next(stream)
            begin = time.monotonic()
            os.kill(client.server.pid, number)
            with pytest.raises(RequestError):
                list(stream)
            record_property(f"{number.name}: client told", time.monotonic() - begin)
            assert time.monotonic() - begin < NOTICED_S
            wait_line(lines, "started tritonserver again")
            record_property(f"{number.name}: repaired", time.monotonic() - begin)
            assert time.monotonic() - begin < REPAIRED_S
            wait_served(client, 120)
    assert engine_pid(client) == pid
    client.wait_idle(120)


@pytest.mark.slow
def test_a_process_that_stands_still_is_replaced(
    client: Client, supervision: Supervision, record_property
) -> None:
    for model in ("postprocessing", "tensorrt_llm_bls"):
        with supervision.on() as lines:
            stub = client.stub(model)
            begin = time.monotonic()
            os.kill(stub, signal.SIGSTOP)
            wait_line(lines, r"repair \d+,")  # of the server, if the stub held what that waits for
            record_property(f"{model} stopped", time.monotonic() - begin)
            assert time.monotonic() - begin < REPAIRED_S
            wait_served(client, 120)


def ask_in_background(client: Client, text: str) -> threading.Thread:
    def ask() -> None:
        with suppress(RequestError, OSError, ValueError):
            client.generate("ensemble", text_input=text, max_tokens=2)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("HANG", "stood still at a request"),
        pytest.param("FREEZE", "did not move", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_hangs_is_replaced_and_one_that_is_busy_is_not(
    client: Client, supervision: Supervision, record_property, text: str, what: str
) -> None:
    with supervision.on() as lines:
        stubs = client.stubs("preprocessing")
        busy = ask_in_background(client, "SPIN")
        busy.join(120)
        assert lines == []
        assert client.stubs("preprocessing") == stubs
        hung = ask_in_background(client, text)
        begin = time.monotonic()
        line = wait_line(lines, r"repair \d+,")
        record_property("noticed and repaired", time.monotonic() - begin)
        said = [f"the process of model preprocessing (pid {stub}) {what} for 3 s" for stub in stubs]
        assert any(each in line for each in said), line
        assert time.monotonic() - begin < NOTICED_S
        hung.join(120)
        wait_served(client, 120)
