"""What `slipstream serve` shows of the engine's log while it starts."""

import io
import logging
from pathlib import Path

import pytest
from slipstream_compose.serve import _EngineLog

ENTRY = "2026-01-02 03:04:05,678 engine {level} {text}\n"
BANNER = "tiny (LlamaForCausalLM, float32, CPU): KV cache of 65,536 tokens, room for 32.0 sequences"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("sink", [io.StringIO(), Terminal()])
def test_the_banner_is_found_and_nothing_else_is_shown(tmp_path: Path, sink: io.StringIO) -> None:
    log = tmp_path / "engine.log"
    engine = _EngineLog(log, sink)
    engine.show()  # not there yet
    log.write_text(ENTRY.format(level="INFO", text="something else"))
    engine.show()
    text = ENTRY.format(level="INFO", text=BANNER)
    with log.open("a") as file:
        file.write(text[:40])
        file.flush()
        engine.show()  # half a line
        assert engine.banner == ""
        file.write(text[40:])
        file.write("slipstream engine: config.json: no such file\n")
        file.flush()
    engine.show()
    assert engine.banner == BANNER
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
    source = Path(__file__).parents[2] / "backend/slipstream/engine/loop.py"
    template = "%(asctime)s engine %(levelname)s %(message)s"
    assert template in source.read_text()
    record = logging.LogRecord("x", logging.INFO, "", 0, BANNER, (), None)
    sink = io.StringIO()
    engine = _EngineLog(Path("unused"), sink)
    engine._show_piece(logging.Formatter(template).format(record) + "\n")
    assert engine.banner == BANNER
