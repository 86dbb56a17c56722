"""Loads that were recorded: when requests came, and how long they were.

A file is CSV, packed or not, with the columns `ContextTokens` and `GeneratedTokens`, and with `ms`
or, as Azure publishes its traces, `TIMESTAMP`. `recorded/README.md` says what is here.
"""

import csv
import gzip
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from traces import Arrival

CHATS = Path(__file__).parent / "recorded" / "azure-2023-chats.csv.gz"
_APART_S = 1.7  # between a request and its copy


def read(path: Path = CHATS) -> list[Arrival]:
    """Return the requests of a file in their order, the first at 0 s. Raises ValueError."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    rows = csv.DictReader(text.splitlines())
    try:
        found = [_arrival(row) for row in rows]
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: line {rows.line_num} is no request: {error!r}") from error
    if not found:
        raise ValueError(f"{path} has no requests")
    found.sort(key=lambda each: each.due_s)
    return [replace(each, due_s=each.due_s - found[0].due_s) for each in found]


def _arrival(row: dict[str, str]) -> Arrival:
    """Return the request of a line; one without an answer's tokens has one."""
    if "ms" in row:
        due_s = float(row["ms"]) / 1e3
    else:
        due_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
    sizes = (int(row["ContextTokens"]), int(row["GeneratedTokens"]))
    return Arrival(due_s, *(max(1, each) for each in sizes))


def overlaid(arrivals: Sequence[Arrival], copies: int) -> list[Arrival]:
    """Return a load so many times as high, with the same course: copies, each a little later."""
    found = [
        replace(each, due_s=each.due_s + _APART_S * copy)
        for copy in range(copies)
        for each in arrivals
    ]
    return sorted(found, key=lambda each: each.due_s)


def at_rate(arrivals: Sequence[Arrival], rate: float, seconds: float) -> list[Arrival]:
    """Return the load at another rate, in requests a second: it goes faster, again and again."""
    mean = arrivals[-1].due_s / max(1, len(arrivals) - 1)
    faster = 1 / rate / mean
    return list(itertools.takewhile(lambda each: each.due_s < seconds, _again(arrivals, faster)))


def piece(arrivals: Sequence[Arrival], first: int, count: int, rate: float) -> list[Arrival]:
    """Return some of the requests at a mean rate, in requests a second; the first comes at 0 s."""
    found = arrivals[first : first + count]
    begin_s = found[0].due_s
    faster = (len(found) - 1) / rate / ((found[-1].due_s - begin_s) or 1.0)
    return [replace(each, due_s=(each.due_s - begin_s) * faster) for each in found]


def _again(arrivals: Sequence[Arrival], faster: float) -> Iterator[Arrival]:
    mean = arrivals[-1].due_s / max(1, len(arrivals) - 1)
    for turn in itertools.count():
        for each in arrivals:
            due_s = each.due_s + turn * (arrivals[-1].due_s + mean)
            yield replace(each, due_s=due_s * faster)
