"""What `slipstream serve` shows of the engine's log while it starts; what the log says of load."""

import contextlib
import datetime
import io
import logging
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.server.support import (
    KV_CACHE_TOKENS,
    Client,
    RequestError,
    compose,
    lasting,
    long_checkpoint,
    serving,
)
from slipstream.config import EngineConfig
from slipstream.replicas.process import banner
from slipstream.wire import Welcome
from slipstream_serve.serve import _EngineLog

ENTRY = "2026-01-02 03:04:05,678 engine {level} {text}\n"
BANNER = "tiny (LlamaForCausalLM, float32, CPU): KV cache of 65,536 tokens, room for 32.0 sequences"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def of_router() -> str:
    sizes = {"vocab_size": 9, "max_model_len": 2048, "architecture": "LlamaForCausalLM"}
    welcome = Welcome(1, "1", "tiny", 1, **sizes, dtype="float32", device="cpu")
    return banner(EngineConfig(checkpoint="/x", replicas=3), welcome)


def test_the_banner_of_a_router_says_what_the_replicas_serve() -> None:
    assert of_router() == (
        "tiny (LlamaForCausalLM, float32, cpu): 3 replicas, sequences of 2,048 tokens"
    )


@pytest.mark.parametrize("shown", [BANNER, of_router()])
@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_the_banner_is_found_and_nothing_else_is_shown(
    tmp_path: Path, kind: type[io.StringIO], shown: str
) -> None:
    sink = kind()
    log = tmp_path / "engine.log"
    engine = _EngineLog(log, sink)
    engine.show()  # not there yet
    log.write_text(ENTRY.format(level="INFO", text="something else"))
    engine.show()
    text = ENTRY.format(level="INFO", text=shown)
    with log.open("a") as file:
        file.write(text[:40])
        file.flush()
        engine.show()  # half a line
        assert engine.banner == ""
        file.write(text[40:])
        file.write("slipstream engine: config.json: no such file\n")
        file.flush()
    engine.show()
    assert engine.banner == shown
    assert sink.getvalue() == ""


def test_bars_move_on_a_terminal_and_are_shown_once_in_a_file(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(b"\rweights:   0%|   |\rweights:  50%|#  |\rweights: 100%|###|\n")
    terminal, file = Terminal(), io.StringIO()
    _EngineLog(log, terminal).show()
    _EngineLog(log, file).show()
    assert "50%" in terminal.getvalue()
    assert file.getvalue() == "weights: 100%|###|\n"


def test_a_warning_is_shown_without_its_clock(tmp_path: Path) -> None:
    log, sink = tmp_path / "engine.log", io.StringIO()
    log.write_text(ENTRY.format(level="WARNING", text="the cache is small"))
    _EngineLog(log, sink).show()
    assert sink.getvalue() == "warning: the cache is small\n"


def test_the_pattern_is_that_of_the_engines_log() -> None:
    """The engine's own format, so that a change there is noticed here."""
    source = Path(__file__).parents[2] / "backend/slipstream/engine/process.py"
    template = "%(asctime)s engine %(levelname)s %(message)s"
    assert template in source.read_text()
    record = logging.LogRecord("x", logging.INFO, "", 0, BANNER, (), None)
    sink = io.StringIO()
    engine = _EngineLog(Path("unused"), sink)
    engine._show_piece(logging.Formatter(template).format(record) + "\n")
    assert engine.banner == BANNER


# --- a real server -------------------------------------------------------------------------------

STATUS = re.compile(
    r"^(\S+ \S+),\d+ engine INFO (\d+) running, (\d+) waiting, KV cache (\d+\.\d) % used, "
    r"(\d+\.\d) tok/s generated, (\d+\.\d) tok/s of prompts, "
    r"\d+\.\d % of prompts found in the cache, \d+ preemptions$",
    re.MULTILINE,
)


@pytest.fixture
def single(tmp_path: Path) -> Iterator[Client]:
    """A server that runs one sequence at a time, whose context no test fills."""
    options = ["--max-num-seqs", "1", "--kv-cache-tokens", str(KV_CACHE_TOKENS)]
    checkpoint = long_checkpoint(tmp_path / "checkpoint")
    repository = compose(checkpoint, tmp_path / "models", *options, "--dtype", "float32")
    with serving(repository, tmp_path / "log") as client:
        yield client


def statuses(client: Client, number: int) -> list[tuple[str, ...]]:
    """The lines of how the engine is doing, once there are so many."""
    deadline = time.monotonic() + 120
    while len(found := STATUS.findall(client.server.runtime.log.read_text())) < number:
        assert time.monotonic() < deadline, client.server.runtime.log.read_text()
        time.sleep(0.01)
    return found


@pytest.mark.triton
@pytest.mark.beside
@pytest.mark.rest
def test_every_ten_seconds_it_says_what_runs_waits_and_is_made(single: Client) -> None:
    """Three endless streams: one runs, two wait. The rate is tested in tests/engine."""

    def ask() -> None:
        with contextlib.suppress(RequestError):
            for _ in single.iterate("ensemble", **lasting("ensemble")):
                if ended.is_set():
                    return

    ended = threading.Event()
    threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    begin = time.monotonic()
    while (state := single.health())["running"] != 1 or state["waiting"] != 2:
        assert time.monotonic() - begin < 120, state
        time.sleep(0.02)
    # The next line may be of a period that began before, the one after it is not.
    num_lines = len(statuses(single, 0))
    first, second = statuses(single, num_lines + 2)[num_lines : num_lines + 2]
    ended.set()
    _, running, waiting, used, generated, prompts = second
    moments = [datetime.datetime.fromisoformat(line[0]) for line in (first, second)]
    assert (moments[1] - moments[0]).total_seconds() >= 9
    assert (int(running), int(waiting)) == (1, 2)
    assert 0 < float(used) <= 100
    assert float(generated) > 0
    assert float(prompts) == 0
