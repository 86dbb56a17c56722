"""Report the progress of an installation in packages and megabytes, from pip's output.

On a terminal one line is rewritten; elsewhere a line follows every few seconds. Standard library
only: this file runs before anything is installed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

TERMINAL_S = 0.5
LINES_S = 5.0  # between two lines if the output is not a terminal


@dataclass
class Packages:
    """The state of an installation by pip's output so far."""

    num_found: int = 0
    num_installing: int = 0  # 0: pip still finds and fetches
    now: str = ""
    names: set[str] = field(default_factory=set)

    def read(self, line: str) -> None:
        """Parse a line of pip's output."""
        words = line.split()
        if line.startswith(("Collecting ", "Requirement already satisfied: ")):
            name = re.split(r"[<>=!~;\[( ]", line.split(": ")[-1].removeprefix("Collecting "))[0]
            self.names.add(name.lower().replace("_", "-"))
            self.num_found = len(self.names)
        elif words[:1] in (["Downloading"], ["Using"]) and words[-1].endswith(")"):
            file = next((word for word in words[1:] if "." in word), words[-1])
            name = file.rsplit("/", 1)[-1].split("-")[0]
            self.now = f"{name} {' '.join(words[-2:])}"
        elif line.startswith("Installing collected packages: "):
            self.num_installing = len(line.partition(": ")[2].split(","))

    def status(self, num_bytes: int, num_installed: int) -> str:
        """Return the progress after `num_bytes` fetched and `num_installed` packages in place."""
        if self.num_installing:
            return f"installing {self.num_installing} packages, {num_installed} in place"
        now = f", now {self.now}" if self.now else ""
        found = f"{self.num_found} package{'s' * (self.num_found != 1)} found"
        return f"{found}, {num_bytes / 1e6:.0f} MB fetched{now}"


class Printer:
    """Print a status at intervals: over the last one on a terminal, else as a line."""

    def __init__(self, stream: TextIO, interval_s: float | None = None) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._interval_s = interval_s or (TERMINAL_S if self._is_terminal else LINES_S)
        self._began = self._last = time.monotonic()

    def show(self, status: Callable[[], str]) -> None:
        """Print the status if the interval has passed."""
        now = time.monotonic()
        if now - self._last < self._interval_s:
            return
        self._last = now
        line = f"slipstream: {now - self._began:4.0f} s: {status()}"
        columns = shutil.get_terminal_size().columns - 1
        text = f"\r{line[:columns]}\x1b[K" if self._is_terminal else f"{line}\n"
        print(text, end="", file=self._stream, flush=True)

    def clear(self) -> None:
        """Remove the rewritten line from a terminal."""
        if self._is_terminal:
            print("\r\x1b[K", end="", file=self._stream, flush=True)


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder while others write and remove them."""
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_size
    return total


def follow(
    command: Sequence[str],
    printer: Printer,
    status: Callable[[], str],
    *,
    read: Callable[[str], object] = len,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> tuple[int, str]:
    """Run a command in `folder` and print its status; return its exit code and its stderr.

    `read` takes each line of its output, from a thread.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            env=environment,
            cwd=folder,
        )

        def listen() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                read(line.strip())

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
                printer.show(status)
        finally:
            printer.clear()
            if process.poll() is None:
                process.terminate()
                process.wait()
        listener.join()
        errors.seek(0)
        return process.returncode, errors.read()


def num_packages(venv: Path) -> int:
    """Return the number of packages in an environment."""
    return sum(1 for _ in venv.glob("lib/python3*/site-packages/*.dist-info"))


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"slipstream: {text}", flush=True)
