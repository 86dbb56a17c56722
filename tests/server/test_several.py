"""Two engines in one real server, beside models of other backends: neither disturbs the other."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.server.metrics_page import Page, settled, wait_for_page
from fixtures.server.serve_process import Serve, short_directory
from fixtures.server.several import FOUR_TIMES, write_several
from fixtures.server.support import (
    CONTEXT,
    PROMPT,
    Client,
    RequestError,
    lasting,
    serving,
    text,
)
from fixtures.waiting import wait_for
from slipstream_client.cli import main
from slipstream_runtime.processes import is_running
from slipstream_serve.server import server_directory
from slipstream_serve.triton import Endpoints, TritonServer
from tritonclient.utils import InferenceServerException

pytestmark = [pytest.mark.triton, pytest.mark.rest, pytest.mark.beside]

SOME = {"text_input": PROMPT, "max_tokens": 1000, "stream": True, "end_id": -1}
EACH = ("", "chat_")


@pytest.fixture(scope="module")
def several(tmp_path_factory) -> Path:
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    return write_several(tmp_path_factory.mktemp("several") / "models")


@pytest.fixture(scope="module")
def two(several, tmp_path_factory) -> Iterator[Client]:
    with serving(several, tmp_path_factory.mktemp("log") / "server.log", True) as client:
        yield client


def health(client: Client, prefix: str = "") -> dict:
    for _ in range(20):
        status, body = client.post(f"{prefix}slipstream_health/infer", {"inputs": []}, 60)
        if status == 200:
            return json.loads(json.loads(body)["outputs"][0]["data"][0])
        time.sleep(0.5)
    raise AssertionError(body)


class Background:
    """A stream in a thread of its own."""

    def __init__(self, client: Client, model: str, **inputs: object) -> None:
        self.responses: list[dict] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(client, model, inputs))
        self._thread.start()

    def wait_for(self, count: int) -> None:
        begin = time.monotonic()
        while len(self.responses) < count:
            assert self._error is None, self._error
            assert time.monotonic() - begin < 120
            time.sleep(0.01)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def text(self) -> str:
        self._thread.join(120)
        assert self._error is None, self._error
        return text(self.responses)

    def _run(self, client: Client, model: str, inputs: dict) -> None:
        try:
            for response in client.iterate(model, **inputs):
                self.responses.append(response)
        except Exception as error:
            self._error = error


def test_each_engine_serves_and_so_do_the_models_of_others(two):
    expected = two.generate("ensemble", text_input=PROMPT, max_tokens=24)["text_output"]
    for prefix, ensemble in zip(EACH, ("ensemble", "chat"), strict=True):
        for model in (ensemble, f"{prefix}tensorrt_llm_bls"):
            answer = two.generate(model, text_input=PROMPT, max_tokens=24)
            assert answer["text_output"] == expected
        given = {"text_input": PROMPT, "parameters": {"max_tokens": 24, "temperature": 0}}
        assert two.generate(f"{prefix}vllm_model", **given)["text_output"] == expected
    status, body = two.post("theirs/infer", FOUR_TIMES)
    assert (status, json.loads(body)["outputs"][0]["data"]) == (200, [20])


def test_health_tells_the_engines_apart(two, capsys):
    plain, chat = health(two), health(two, "chat_")
    assert plain["engine_pid"] != chat["engine_pid"]
    assert (plain["kv_blocks_total"], chat["kv_blocks_total"]) == (3584, 7168)  # of 32, of 16
    assert (plain["about"]["deployment"], chat["about"]["deployment"]) == ("ensemble", "chat")
    assert (plain["about"]["memory_share"], chat["about"]["memory_share"]) == (0.75, 0.25)
    port = str(two.server.endpoints.grpc_port)
    for model, pid in (("ensemble", plain["engine_pid"]), ("chat_vllm_model", chat["engine_pid"])):
        command = ["health", "--json", "--timeout", "20", "--grpc-port", port, "--model", model]
        assert main(command) == 0
        assert json.loads(capsys.readouterr().out)["engine_pid"] == pid
    assert main(["health", "--timeout", "20", "--grpc-port", port, "--model", "code"]) == 1
    assert "no model of code is loaded" in capsys.readouterr().err


def test_metrics_tell_the_engines_apart(two):
    url = two.server.endpoints.metrics
    before = settled(url, lambda page: len(page.labels("slipstream_steps_total")) == 2)
    assert sorted(map(str, before.labels("slipstream_steps_total"))) == ["{'engine': 'chat'}", "{}"]
    chat = before.get("slipstream_output_tokens_total", engine="chat")
    plain = before.get("slipstream_output_tokens_total") - chat
    two.stream("chat", **SOME | {"max_tokens": 50})
    wanted = chat + 50
    total = "slipstream_output_tokens_total"
    page = wait_for_page(url, lambda p: p.get(total, engine="chat") >= wanted)
    assert page.get(total) == wanted + plain
    models = {labels["model"] for labels in page.labels("vllm:num_requests_running")}
    assert models == {"vllm_model", "chat_vllm_model"}
    models = {labels["model"] for labels in page.labels("nv_trt_llm_general_metrics")}
    assert models == {"tensorrt_llm", "chat_tensorrt_llm"}


def test_the_list_of_models(two, several, capsys):
    port = str(two.server.endpoints.grpc_port)
    command = ["models", "--model-repository", str(several), "--timeout", "20", "--grpc-port", port]
    assert main([*command, "--json"]) == 0
    chat, plain = json.loads(capsys.readouterr().out)
    assert (chat["name"], plain["name"]) == ("chat", "ensemble")
    assert (chat["architecture"], chat["dtype"], chat["context"]) == (
        "LlamaForCausalLM",
        "float32",
        CONTEXT,
    )
    assert (chat["share"], plain["share"]) == (0.25, 0.75)
    assert chat["engine"] == "cpu, 0 running, 0 waiting"
    assert chat["checkpoint"] == plain["checkpoint"]
    assert main([*command, "--unload", "chat"]) == 1  # closed to clients
    capsys.readouterr()
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("name      model        checkpoint")


@pytest.mark.parametrize("killed", EACH)
def test_a_crash_of_one_engine_touches_no_stream_of_the_other(two, killed):
    names = ("ensemble", "chat") if killed else ("chat", "ensemble")
    expected = text(two.stream(names[0], **SOME))
    pid = health(two, killed)["engine_pid"]
    stream, doomed = (
        Background(two, names[0], **SOME),
        Background(two, names[1], **lasting(names[1])),
    )
    stream.wait_for(1)
    doomed.wait_for(1)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(AssertionError, match="engine"):
        doomed.text()
    assert stream.text() == expected
    assert health(two, killed)["engine_pid"] != pid
    assert text(two.stream(names[1], **SOME)) == expected


# --- loaded and unloaded -------------------------------------------------------------------------


@pytest.fixture
def serve(several, tmp_path) -> Iterator[Serve]:
    """`slipstream serve` with open model control, and one deployment loaded."""
    with short_directory() as scratch:
        serve = Serve(several, scratch, "--model-control", "explicit", "--load", "ensemble")
        try:
            serve.wait_ready()
            yield serve
        finally:
            assert serve.end(signal.SIGTERM) < 120
        serve.assert_gone()


def client_of(serve: Serve, repository: Path) -> Client:
    server = TritonServer(repository, Endpoints(*serve.ports), serve.scratch / "unused")
    server.stop()  # only its addresses are wanted
    return Client(server)


def control(several: Path, serve: Serve, capsys, *options: str) -> list[dict]:
    command = ["models", "--json", "--model-repository", str(several), "--timeout", "20"]
    assert main([*command, "--grpc-port", str(serve.ports[1]), *options]) == 0
    return json.loads(capsys.readouterr().out)


def engines(serve: Serve) -> list[str]:
    return [line for line in serve.processes() if "slipstream.engine.process" in line]


def is_served(client: Client, model: str) -> bool:
    """Whether it is now; a connection to a server that has ended fails once more."""
    with contextlib.suppress(RequestError, InferenceServerException):
        return bool(client.stream(model, **SOME | {"max_tokens": 1}))
    return False


def test_models_go_and_come_while_others_stream(serve, several, capsys):
    client = client_of(serve, several)
    assert control(several, serve, capsys)[0]["engine"] == "not loaded"
    assert len(engines(serve)) == 1
    expected = text(client.stream("ensemble", **SOME))
    stream = Background(client, "ensemble", **SOME)
    stream.wait_for(1)
    rows = control(several, serve, capsys, "--load", "chat")
    assert rows[0]["engine"].startswith("cpu, 0 running")
    assert stream.text() == expected
    assert text(client.stream("chat", **SOME)) == expected
    first = rows[0]["engine_pid"]
    stream = Background(client, "ensemble", **SOME)
    stream.wait_for(1)
    assert control(several, serve, capsys, "--unload", "chat")[0]["engine"] == "not loaded"
    wait_for(lambda: not is_running(first))
    assert len(engines(serve)) == 1
    assert stream.text() == expected
    page = Page(f"http://127.0.0.1:{serve.ports[2]}/metrics")  # no gauge is left, to look stale
    assert {"engine": "chat"} not in page.labels("slipstream_metrics_update_time_seconds")
    assert {"engine": "chat"} not in page.labels("slipstream_running_sequences")
    again = control(several, serve, capsys, "--load", "chat")[0]["engine_pid"]
    assert again != first
    assert text(client.stream("chat", **SOME)) == expected
    assert len(engines(serve)) == 2
    status, _ = client.post("doubled/infer", FOUR_TIMES)
    assert status != 200  # it was never loaded


def test_a_repair_brings_back_what_was_loaded_and_no_more(serve, several, capsys):
    client = client_of(serve, several)
    control(several, serve, capsys, "--load", "chat")
    control(several, serve, capsys, "--unload", "ensemble")
    wait_for(lambda: len(engines(serve)) == 1)
    time.sleep(3)  # what was unloaded is not taken for dead
    expected = text(client.stream("chat", **SOME))
    os.kill(serve.pid("chat_preprocessing_0_0"), signal.SIGKILL)
    line = serve.wait_line("repair 1")
    assert "chat_preprocessing" in line
    assert text(client.stream("chat", **SOME)) == expected
    os.kill(serve.pid("bin/tritonserver"), signal.SIGKILL)
    serve.wait_line("repair 2")
    wait_for(lambda: is_served(client, "chat"))
    assert text(client.stream("chat", **SOME)) == expected
    states = [row["engine"] for row in control(several, serve, capsys)]
    assert states[1] == "not loaded"
    url = f"http://127.0.0.1:{serve.ports[2]}/metrics"
    page = wait_for_page(url, lambda page: "slipstream_repairs" in page.names)
    counts = {
        what: page.get("slipstream_repairs", engine="chat", what=what)
        for what in ("model", "server")
    }
    assert counts == {"model": 1, "server": 1}


def test_an_engine_that_cannot_fit_is_refused_with_the_figures(serve, several, capsys):
    path = several / "chat_tensorrt_llm" / "1" / "model.json"
    kept = path.read_text()
    settings = json.loads(kept)
    settings["engine"]["memory_share"] = 1e-6
    path.write_text(json.dumps(settings))
    try:
        command = ["models", "--model-repository", str(several), "--load", "chat"]
        assert main([*command, "--grpc-port", str(serve.ports[1])]) == 1
        error = capsys.readouterr().err
        assert "memory_share = 1e-06 is 0.00 GB of" in error
        assert "but the weights need 0.0" in error
    finally:
        path.write_text(kept)
    control(several, serve, capsys, "--load", "chat")
