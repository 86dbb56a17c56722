"""Two ranks through a real server: the same text as one, and a rank that dies under load."""

import os
import signal
import threading
from pathlib import Path

import pytest
from fixtures.server.support import (
    KV_CACHE_TOKENS,
    PROMPT,
    Client,
    compose,
    lasting,
    long_checkpoint,
    serving,
)
from fixtures.waiting import wait_for
from slipstream_serve.server import server_directory

pytestmark = [pytest.mark.triton, pytest.mark.slow]
OPTIONS = ("--dtype", "float32", "--kv-cache-tokens", str(KV_CACHE_TOKENS))
BODY = {"text_input": PROMPT, "max_tokens": 24, "temperature": 0.0}


def rank_of(client: Client) -> int:
    """The process of rank 1, a sister of the engine."""
    engine = client.health()["engine_pid"]
    parent = Path(f"/proc/{engine}/stat").read_text().rsplit(")", 1)[1].split()[1]
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if b"slipstream.engine.rank" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    raise AssertionError("no rank")


def test_the_same_text_and_a_rank_that_is_killed(client: Client, tmp_path: Path) -> None:
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    want = client.generate("ensemble", **BODY)["text_output"]
    repository = compose(
        long_checkpoint(tmp_path / "checkpoint"),
        tmp_path / "models",
        *OPTIONS,
        "--tensor-parallel",
        "2",
    )
    with serving(repository, tmp_path / "log") as ranked:
        events = ranked.events("ensemble", stream=True, **BODY)
        assert PROMPT + "".join(event["text_output"] for event in events) == want
        killed, engine = rank_of(ranked), ranked.health()["engine_pid"]
        answers: list[tuple[int, str]] = []
        load = [
            threading.Thread(
                target=lambda: answers.append(
                    ranked.post("ensemble/generate", lasting("ensemble") | {"stream": False})
                )
            )
            for _ in range(4)
        ]
        for thread in load:
            thread.start()
        ranked.wait_running(4)
        os.kill(killed, signal.SIGKILL)
        for thread in load:
            thread.join(120)
            assert not thread.is_alive()
        assert len(answers) == 4
        wait_for(lambda: ranked.post("ensemble/generate", BODY)[0] == 200, 120)
        assert ranked.generate("ensemble", **BODY)["text_output"] == want
        assert ranked.health()["engine_pid"] != engine
        assert rank_of(ranked) != killed
