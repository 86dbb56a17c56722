"""Warnings that a process logs once, however often their cause comes back."""

import logging

_said: set[object] = set()


def warn_once(log: logging.Logger, line: str, about: object = None) -> None:
    """Log a line, unless it was said before, or another of the same thing (`about`)."""
    key = line if about is None else about
    if key not in _said:
        _said.add(key)
        log.warning("%s", line)
