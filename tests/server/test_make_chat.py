"""`make chat` itself: a real model answers in a terminal, and its end leaves nothing behind."""

import json
import os
import re
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from fixtures import crashes
from fixtures.server.serve_process import environment, living
from fixtures.server.terminal import Terminal
from slipstream_serve.chat_model import ChatModelError, fetch
from slipstream_serve.server import server_directory
from slipstream_serve.triton import Endpoints

ROOT = Path(__file__).parents[2]
START_S, ANSWER_S, END_S = 240, 120, 60
pytestmark = [
    pytest.mark.triton,
    pytest.mark.beside,
    pytest.mark.rest,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not server_directory().is_dir(), reason="no tritonserver: make install"),
]


@pytest.fixture(scope="module", autouse=True)
def file() -> Path:
    try:
        return fetch(ROOT / ".slipstream" / "chat")
    except ChatModelError as error:
        pytest.skip(str(error))


def free_ports() -> dict[str, int]:
    free = Endpoints.free()
    # A crash of the server itself, as without a core to run on, fails a test that is repeated then.
    crashes.watch(server_directory().parent / "logs" / f"tritonserver-{free.http_port}.log")
    return {
        "HTTP_PORT": free.http_port,
        "GRPC_PORT": free.grpc_port,
        "METRICS_PORT": free.metrics_port,
        "OPENAI_PORT": Endpoints.free().http_port,
    }


def command(ports: dict[str, int]) -> list[str]:
    return ["make", "chat", *(f"{name}={port}" for name, port in ports.items())]


def ask(url: str, text: str) -> str:
    body = {"model": "SmolLM2-135M-Instruct", "messages": [{"role": "user", "content": text}]}
    data = json.dumps(body | {"temperature": 0, "max_tokens": 32}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, headers)
    with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


def assert_gone(scratch: Path) -> None:
    mark = f"SLIPSTREAM_RUNTIME_DIR={scratch}/".encode()
    assert [line for pid, line in living() if mark in environment(pid)] == []


def test_a_conversation(scratch: Path) -> None:
    ports = free_ports()
    terminal = Terminal(command(ports), ROOT, {"TMPDIR": str(scratch)})
    shown = terminal.wait("> ", START_S)
    page = f"http://127.0.0.1:{ports['OPENAI_PORT']}"
    assert page in shown
    assert re.search(r"ready in [\d.]+ s: SmolLM2-135M-Instruct \(LlamaForCausalLM", shown)
    terminal.type("What is the capital of France?\n")
    terminal.wait("Paris", ANSWER_S)
    terminal.wait("> ", ANSWER_S)
    with urllib.request.urlopen(f"{page}/") as reply:
        assert b"<html" in reply.read()
    assert "Paris" in ask(page, "What is the capital of France?")
    terminal.type("Write a long poem about the sea.\n")
    terminal.wait("sea.\r\n", ANSWER_S)  # what was typed, shown by the terminal
    terminal.wait(" ", ANSWER_S)
    terminal.type("\x03")  # cancels the answer alone
    terminal.wait("> ", ANSWER_S)
    terminal.type("What is the capital of Italy?\n")
    terminal.wait("Italy?\r\n", ANSWER_S)
    # Any answer: what the model says depends on how much of the poem it had written.
    assert len(terminal.wait("\r\n> ", ANSWER_S).split()) > 1
    terminal.type("/exit\n")
    terminal.wait("ending ...", END_S)
    terminal.exit_code(END_S)
    assert_gone(scratch)


@pytest.mark.slow
def test_ctrl_c_at_the_prompt_ends_it(scratch: Path) -> None:
    terminal = Terminal(command(free_ports()), ROOT, {"TMPDIR": str(scratch)})
    terminal.wait("> ", START_S)
    time.sleep(0.5)  # Python's input() misses a signal that comes just as it starts to wait
    terminal.type("\x03")
    terminal.wait("ending ...", END_S)
    assert terminal.exit_code(END_S) in (0, 2, -2, 130)  # make itself ends by Ctrl-C
    assert "Traceback" not in terminal.shown
    assert_gone(scratch)


def test_without_a_terminal_it_serves_and_says_how_to_chat(scratch: Path) -> None:
    process = subprocess.Popen(
        command(free_ports()),
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "slipstream chat --template" in line)
        done = subprocess.run(
            line.split(), input="What is the capital of France?\n", capture_output=True, text=True
        )
        assert "Paris" in done.stdout
    finally:
        os.killpg(process.pid, 15)
        process.wait(END_S)
    assert_gone(scratch)
