"""Measure what a sequence's first token waits for."""

from dataclasses import dataclass


@dataclass(slots=True)
class FirstWait:
    """Totals of the engine's steps before a sequence's first one, and its own part since, in ns.

    `launched_ns` and `begin_ns` are of that step, by the scheduler's clock.
    """

    launched_ns: int
    begin_ns: int
    streams_ns: float
    chunks_ns: float
    host_ns: float
    own_ns: float = 0.0
    parts_s: dict[str, float] | None = None  # what its first token waited for, once it is there
