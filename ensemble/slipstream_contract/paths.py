"""Paths in processes whose file names are ASCII to Python, as Triton's Python stubs are.

The stub's interpreter takes neither the locale nor PYTHONUTF8, so a path of other letters cannot be
given to the system as the text that it is. Its bytes can, as `os.fsdecode` writes them: letters
beyond ASCII become halves of surrogate pairs. Elsewhere nothing changes.
"""

import os
from pathlib import Path

_ESCAPES = "surrogateescape"


def local_path(text: str) -> Path:
    """Return the path that a text in UTF-8 names, as this process can use it."""
    return Path(os.fsdecode(text.encode("utf-8", _ESCAPES)))


def text_of(path: Path) -> str:
    """Return the text of a path, for other processes."""
    return os.fsencode(path).decode("utf-8", _ESCAPES)
