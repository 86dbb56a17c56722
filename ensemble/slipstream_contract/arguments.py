"""Values of command lines that several commands take: types of argparse, which name the limits."""

import argparse
import math

MOST_SECONDS = 86_400.0  # a day
_MOST_PORT = 65_535


def port(text: str) -> int:
    """Read a port to connect to, or to listen on."""
    return _whole(text, 1, _MOST_PORT)


def port_or_zero(text: str) -> int:
    """Read a port; 0 means none, or any that is free."""
    return _whole(text, 0, _MOST_PORT)


def count(text: str) -> int:
    """Read a whole number above zero."""
    return _whole(text, 1, None)


def count_or_zero(text: str) -> int:
    """Read a whole number that is not below zero."""
    return _whole(text, 0, None)


def seconds(text: str) -> float:
    """Read a time, which may be 0."""
    return _seconds(text, is_above=False)


def patience(text: str) -> float:
    """Read a time above 0."""
    return _seconds(text, is_above=True)


def _whole(text: str, least: int, most: int | None) -> int:
    digits = text.removeprefix("-")
    value = int(text) if digits.isascii() and digits.isdecimal() else None
    if value is None or value < least or (most is not None and value > most):
        limit = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {limit}")
    return value


def _seconds(text: str, is_above: bool) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MOST_SECONDS or (is_above and not value):
        least = "above 0" if is_above else "from 0"
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds {least} to {MOST_SECONDS:.0f}"
        )
    return value
