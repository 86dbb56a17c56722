"""A tritonserver with a supervisor in this process, which a test can call off and back."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from server.support import CHECKPOINT, compose, start
from slipstream_serve.pulse import MODEL_PERIOD_S, QUESTIONS
from slipstream_serve.server import server_directory
from slipstream_serve.supervise import Fault, Repairer
from slipstream_serve.triton import TritonServer


class _Over(BaseException):
    """The supervisor's way out of a test."""


class Supervision(Repairer):
    """A supervisor in a thread of its own, that looks only while `on()`.

    One thread for as long as the server lives: a server dies with the thread that started it.
    """

    def __init__(self, server: TritonServer) -> None:
        self.lines: list[str] = []
        super().__init__(server, lambda: server.wait_ready(60), self._take)
        self._is_on = self._was_on = self._is_over = self._is_repairing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @contextmanager
    def on(self) -> Iterator[list[str]]:
        """What it says from now on. What a repair leaves for later is done before this ends."""
        self.lines.clear()
        self._pauses.clear()
        self._is_on = True
        try:
            while not self._was_on:
                assert self._thread.is_alive()
                time.sleep(0.01)
            yield self.lines
            self._wait_settled()
        finally:
            self._is_on = False

    def wait_unasked(self, model: str, timeout_s: float = 60.0) -> None:
        """Until its last question to the model is answered, and the next one is not due soon."""
        begin = time.monotonic()
        pulse = self._pulses[model]
        while model in QUESTIONS and pulse.silence_s() > MODEL_PERIOD_S / 2:
            assert time.monotonic() - begin < timeout_s
            time.sleep(0.01)

    def close(self) -> None:
        """End its thread, and with it a server that it has started."""
        self._is_over = True
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _wait_settled(self, timeout_s: float = 60.0) -> None:
        begin = time.monotonic()
        while self._restart_s or self._leaving or self._is_repairing:
            assert self._thread.is_alive()
            assert time.monotonic() - begin < timeout_s, (self._restart_s, self._leaving)
            time.sleep(0.05)

    def _run(self) -> None:
        with suppress(_Over):
            self.run()

    def _take(self, line: str) -> None:
        self.lines.append(line)

    def _repair(self, fault: Fault, found_s: float) -> None:
        self._is_repairing = True
        super()._repair(fault, found_s)
        self._is_repairing = False

    def _find(self, now_s: float) -> Fault | None:
        if self._is_over:
            raise _Over
        if self._is_on and not self._was_on:
            self._look_again()
        self._was_on = self._is_on
        return super()._find(now_s) if self._is_on else None


@contextmanager
def supervised(folder: Path) -> Iterator[Supervision]:
    """A server and its supervisor, until both have ended."""
    server = serve(folder, "--kv-cache-tokens", "8192")
    supervision = Supervision(server)
    try:
        yield supervision
    finally:
        supervision.close()
        server.stop()


def serve(folder: Path, *options: str) -> TritonServer:
    """A server on the default checkpoint that is ready and has no supervisor yet."""
    repository = compose(CHECKPOINT, folder / "models", "--dtype", "float32", *options)
    return start(repository, folder / "log", is_supervised=True)


def planted_server(directory: Path) -> Path:
    """The installed server, by links; preprocessing can be made to hang, postprocessing to die."""
    planted = {
        "slipstream_preprocessing": "hanging_preprocessing.py",
        "slipstream_postprocessing": "dying_postprocessing.py",
    }
    installed, backends = server_directory(), directory / "backends"
    backends.mkdir(parents=True)
    for entry in [*installed.iterdir(), *(installed / "backends").iterdir()]:
        if entry.name not in ("backends", *planted):
            (directory / entry.relative_to(installed)).symlink_to(entry.resolve())
    for backend, script in planted.items():
        (backends / backend).mkdir()
        (backends / backend / "model.py").symlink_to(Path(__file__).with_name(script))
    return directory


def wait_line(lines: list[str], pattern: str, timeout_s: float = 90.0) -> str:
    """The first of the lines in which the pattern is found, now or later."""
    begin = time.monotonic()
    while True:
        for line in list(lines):
            if re.search(pattern, line):
                return line
        assert time.monotonic() - begin < timeout_s, (pattern, lines)
        time.sleep(0.02)
