"""Count the starts of an engine that failed one after another, in a file beside its log.

The supervisor writes it, and every process that has to say why there is no engine reads it.
"""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

RESTARTED = "the engine is not running; it is being restarted"  # what is said where none failed
_MAX_WORDS = 300  # characters of what an engine said


@dataclass(frozen=True, slots=True)
class FailedStarts:
    """The engines in a row that ended before they had served for some seconds."""

    count: int  # at least 1
    code: int  # the exit code of the last one; below 0: the signal that killed it
    said: str  # by the last one, in one line

    def __str__(self) -> str:
        """Say it as the continuation of a sentence about the engine."""
        how = f"exit code {self.code}" if self.code >= 0 else f"signal {-self.code}"
        if self.count == 1:
            return f"its last start failed with {how}: {self.said}"
        return f"its last {self.count} starts failed, the last one with {how}: {self.said}"


def read(file: Path) -> FailedStarts | None:
    """Return what the file counts; None if the last start succeeded, or nothing is known."""
    try:
        count, code, said = json.loads(file.read_bytes())
        return FailedStarts(int(count), int(code), str(said))
    except (OSError, ValueError, TypeError):
        return None


def note(file: Path, code: int, said: str) -> None:
    """Count one more, atomically; without room for it no process sees the count."""
    before = read(file)
    count = 1 if before is None else before.count + 1
    draft = file.with_suffix(".draft")
    with contextlib.suppress(OSError):
        draft.write_text(json.dumps([count, code, said[:_MAX_WORDS]]))
        draft.rename(file)
