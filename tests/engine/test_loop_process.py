"""The engine as a process: it serves a checkpoint, and a start that fails says why in one line."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from socket import gethostname

import pytest
import zmq
from fixtures.engine.listening import RouterView
from fixtures.models.configs import SMALL_LLAMA
from fixtures.ports import held_port
from slipstream import __version__, wire
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

LONG = SamplingParams(max_tokens=30, temperature=0.0)


def checkpoint(folder: Path) -> Path:
    """A directory of a Llama so small that random weights will do; without a tokenizer."""
    (folder / "config.json").write_text(json.dumps(SMALL_LLAMA))
    return folder


def start(folder: Path, address: str = "", **config: object) -> subprocess.Popen[str]:
    path = folder / "engine.json"
    path.write_text(json.dumps({"checkpoint": ".", "load_format": "random", **config}))
    command = [sys.executable, "-m", "slipstream.engine.process", "--config", str(path)]
    command += ["--socket", address or f"ipc://{folder}/engine"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_the_process_serves_a_checkpoint_and_ends_when_told(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/engine"
    with held_port() as port:
        options = {"device": "cpu", "kv_cache_tokens": 1024, "kv_events": str(port)}
        process = start(checkpoint(tmp_path), address, **options)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        subscriber = context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.SUBSCRIBE, f"kv@{gethostname()}@".encode())
        subscribed = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        subscriber.connect(f"tcp://127.0.0.1:{port}")
        socket = context.socket(zmq.DEALER)
        socket.connect(address)
        socket.send(wire.encode(wire.Hello(wire.PROTOCOL, __version__, "test")))
        assert socket.poll(60_000), process.stderr
        assert subscribed.poll(60_000)  # what is published before is for nobody
        subscriber.disable_monitor()
        socket.send(wire.encode(wire.Submit(0, pack([1, 2, 3]), LONG, 1)))
        welcome = wire.decode_bridge(socket.recv())
        assert isinstance(welcome, wire.Welcome)
        assert (welcome.engine_pid, welcome.vocab_size) == (process.pid, 101)
        assert welcome.max_model_len == 128
        tokens: list[int] = []
        while socket.poll(60_000):
            outputs = wire.decode_bridge(socket.recv())
            assert isinstance(outputs, wire.StepOutputs)
            tokens += outputs.tokens[0].token_ids
            if outputs.tokens[0].finished is not None:
                break
        assert len(tokens) == LONG.max_tokens
        router = RouterView(32)
        while not router.known and subscriber.poll(60_000):
            router.take(subscriber.recv_multipart()[2])
        assert router.known == {(None, (1, 2, 3, *tokens[:29]))}
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        context.destroy(0)
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        pytest.param({"checkpoint": "absent"}, "absent", marks=pytest.mark.rest),
        ({"block_size": 33}, "block_size = 33"),
        pytest.param({"max_seqs": 3}, "max_seqs", marks=pytest.mark.rest),
        pytest.param({"device": "tpu"}, "device", marks=pytest.mark.rest),
    ],
)
def test_a_start_that_fails_is_one_line_and_code_2(
    tmp_path: Path, config: dict[str, object], words: str
) -> None:
    process = start(checkpoint(tmp_path), **config)
    _, text = process.communicate(timeout=120)
    assert process.returncode == 2
    assert len(text.splitlines()) == 1, text
    assert words in text


@pytest.mark.rest
def test_an_address_in_use_or_impossible_is_one_line(tmp_path: Path) -> None:
    process = start(checkpoint(tmp_path), "ipc:///nowhere/engine", device="cpu")
    _, text = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "nowhere" in text.splitlines()[-1]
    assert not os.path.exists("/nowhere")
