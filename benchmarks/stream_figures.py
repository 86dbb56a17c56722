"""Figures of streams of a paced source, and what they are to reach.

A token's delay is from its making in the source to its hand-over to the server: the return of the
bridge's `send()`, and in the ensemble the end of the `execute()` of `postprocessing` that made its
text, where the last of our code has done with it. The client's delay goes on until its process has
the response.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from paced_engine import expected_bytes
from stream_clients import Received

SHARES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)  # percentiles that the picture shows
_NS = 1_000_000_000
_MB_GROWN = 32  # between the second and the last quarter of a row


@dataclass(frozen=True)
class Journal:
    """What the source has made: the time of every step, and of each seed its first step."""

    made_ns: np.ndarray
    first: dict[int, int]
    submitted_ns: dict[int, int]  # when the source was asked


@dataclass(frozen=True)
class Handed:
    """The hand-overs of one stream, in order."""

    times_ns: np.ndarray
    counts: np.ndarray  # tokens of each


def read_journal(path: Path) -> Journal:
    """The source's journal."""
    rows = [line.split() for line in path.read_text().splitlines()]
    begun = [
        (step, *map(int, word.split(":"))) for step, row in enumerate(rows) for word in row[1:]
    ]
    return Journal(
        np.array([int(row[0]) for row in rows], np.int64),
        {seed: step for step, seed, _ in begun},
        {seed: submitted_ns for _, seed, submitted_ns in begun},
    )


def read_handovers(directory: Path, model: str) -> dict[int, Handed]:
    """What a model's processes have noted, by seed, in the order of time."""
    files = [np.fromfile(path, np.int64) for path in directory.glob(f"{model}-*")]
    rows = np.concatenate(files).reshape(-1, 3)
    if not len(rows):
        return {}
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    seeds, begins = np.unique(rows[:, 0], return_index=True)
    parts = np.split(rows, begins[1:])
    return {
        int(seed): Handed(part[:, 1], part[:, 2]) for seed, part in zip(seeds, parts, strict=True)
    }


def fault(stream: Received, handed: Handed | None, max_tokens: int) -> str:
    """What is wrong with a stream: an error, another text than the one made, a wrong count."""
    if stream.error:
        return f"stream {stream.seed}: {stream.error}"
    text, wanted = stream.text, expected_bytes(stream.seed, max_tokens)
    if text != wanted:
        pairs = zip(text, wanted, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(wanted)))
        return f"stream {stream.seed}: {len(text)} of {max_tokens} tokens, the first {same} right"
    counts = [int(stream.counts.sum()), int(handed.counts.sum()) if handed else 0]
    if counts != [max_tokens] * 2:
        return f"stream {stream.seed}: {counts[0]} tokens by its responses, {counts[1]} handed over"
    return ""


def figures(
    slots: list[list[Received]], journal: Journal, handovers: Mapping[int, Handed]
) -> dict[str, Any]:
    """Delays and rates of streams that are right, within the window in which every slot has one.

    The streams of a slot followed one another.
    """
    streams = [stream for slot in slots for stream in slot]
    begin = max(journal.first[slot[0].seed] for slot in slots)
    end = min(journal.first[slot[-1].seed] + len(slot[-1].text) for slot in slots)
    if end - begin < 4:
        raise ValueError(f"{len(slots)} streams never ran all together long enough")
    opened_ns, closed_ns = journal.made_ns[begin], journal.made_ns[end - 1]
    made, delays, delays_client, num_responses = [], [], [], 0
    for stream in streams:
        handed = handovers[stream.seed]
        steps = np.arange(len(stream.text)) + journal.first[stream.seed]
        inside = (steps >= begin) & (steps < end)
        made.append(steps[inside])
        for times, counts, found in (
            (handed.times_ns, handed.counts, delays),
            (stream.times_ns, stream.counts, delays_client),
        ):
            found.append((np.repeat(times, counts) - journal.made_ns[steps])[inside] / 1e6)
        is_inside = (handed.times_ns > opened_ns) & (handed.times_ns <= closed_ns)
        num_responses += int(np.sum(is_inside & (handed.counts > 0)))
    steps, delay = np.concatenate(made), np.concatenate(delays)
    num_handed = int(np.sum(journal.made_ns[steps] + delay * 1e6 <= closed_ns))
    seconds = float(closed_ns - opened_ns) / _NS
    quarters = [float(np.median(part)) for part in _parts(delay, steps - begin, end - begin)]
    return {
        "seconds": round(seconds, 2),
        "made_tok_s": round(int(np.sum(steps > begin)) / seconds),
        "tok_s": round(num_handed / seconds),
        "resp_s": round(num_responses / seconds),
        "tok_resp": round(num_handed / max(1, num_responses), 2),
        **_percentiles("", delay),
        **_percentiles("client_", np.concatenate(delays_client)),
        "max_ms": round(float(delay.max()), 2),
        **first_figures(streams, journal, handovers),
        "shares_ms": [round(float(value), 3) for value in np.percentile(delay, SHARES)],
        "quarters_ms": [round(quarter, 2) for quarter in quarters],  # medians, in order
        "is_growing": quarters == sorted(quarters) and quarters[-1] > 1.5 * quarters[0] + 5,
    }


def first_figures(
    streams: list[Received], journal: Journal, handovers: Mapping[int, Handed]
) -> dict[str, float]:
    """Summarise first tokens: delay, what it and the way to the source add, the client's wait."""
    delays, added, waits = [], [], []
    for stream in streams:
        handed = handovers[stream.seed]
        delay_ns = handed.times_ns[0] - journal.made_ns[journal.first[stream.seed]]
        delays.append(delay_ns / 1e6)
        added.append((delay_ns + journal.submitted_ns[stream.seed] - stream.opened_ns) / 1e6)
        waits.append((stream.times_ns[0] - stream.opened_ns) / 1e6)
    return {
        **_percentiles("first_", delays),
        **_percentiles("added_", added),
        **_percentiles("open_", waits),
    }


def _parts(delay: np.ndarray, steps: np.ndarray, num_steps: int) -> list[np.ndarray]:
    """Delays by the quarter of the window in which their tokens were made."""
    quarter = steps * 4 // num_steps
    return [delay[quarter == number] for number in range(4)]


def _percentiles(name: str, values_ms: Any) -> dict[str, float]:
    return {f"{name}p{p}_ms": round(float(np.percentile(values_ms, p)), 2) for p in (50, 99)}


def num_kept(streams: Sequence[Received], times_ns: Sequence[int]) -> np.ndarray:
    """Responses at those times that had come on streams which had not ended: int64 (T).

    The server keeps every response of a gRPC stream until the stream ends (Triton before 25.03).
    """
    came_ns = np.sort(np.concatenate([stream.times_ns for stream in streams]))
    by_end = sorted(streams, key=lambda stream: int(stream.times_ns[-1]))
    ends_ns = np.array([stream.times_ns[-1] for stream in by_end])
    gone = np.cumsum([0, *(len(stream.times_ns) for stream in by_end)])
    num_ended = np.searchsorted(ends_ns, times_ns, "right")
    return np.asarray(np.searchsorted(came_ns, times_ns, "right") - gone[num_ended])


def memory(
    samples: list[dict[str, float]], kept: np.ndarray, judged: Sequence[str]
) -> dict[str, Any]:
    """Megabytes of the server and of all stubs, in the mean of each quarter of a row.

    What is `judged` must not grow. A server that answers faster, because less is put together, has
    more responses to keep (`kept`, at each sample): what they take, measured where the row begins
    and there were none yet, is no growth. Memory that was once needed is not given back, so the
    most that was kept so far counts.
    """
    parts = [part for part in np.array_split(np.arange(len(samples)), 4) if len(part)]
    most = np.maximum.accumulate(kept) / 1e3
    found: dict[str, Any] = {"kept_thousands": [round(float(most[p].mean()), 1) for p in parts]}
    is_growing = False
    for name in ("server", "stubs"):
        values = np.array([sample[name] for sample in samples])
        quarters = [float(values[part].mean()) for part in parts]
        found[f"{name}_mb"] = [round(quarter, 1) for quarter in quarters]
        if name in judged and len(parts) == 4:
            more = most[parts[-1]].mean() - most[parts[1]].mean()
            each_mb = (quarters[1] - values[0]) / max(most[parts[1]].mean() - most[0], 1.0)
            explained = more * each_mb if name == "server" else 0.0
            is_rising = quarters == sorted(quarters)
            is_growing |= is_rising and quarters[-1] - quarters[1] - explained > _MB_GROWN
    return found | {"is_memory_growing": bool(is_growing)}


# --- goals ---------------------------------------------------------------------------------------

_ONE = "1x250"
_MANY_CORES = 16
_GOALS: dict[tuple[str, bool], dict[str, tuple[float, float]]] = {
    # (streams x rate, has many cores): figure -> most, fused and composed
    (_ONE, False): {"p99_ms": (1.2, 2), "added_p50_ms": (3, 4)},
    (_ONE, True): {"p99_ms": (1.2, 2), "added_p50_ms": (3, 4)},
    ("256x100", True): {"p50_ms": (7, 30), "p99_ms": (18, 50)},
    ("512x100", True): {"p99_ms": (30, 80), "is_growing": (0, 0), "is_memory_growing": (0, 0)},
    ("256x100", False): {"p99_ms": (80, 180), "is_growing": (0, 0), "is_memory_growing": (0, 0)},
    ("1024x25", False): {"is_growing": (0, 0), "is_memory_growing": (0, 0)},
}
ROWS = {False: ("1x250", "64x100", "256x100", "1024x25"), True: ("1x250", "256x100", "512x100")}
"""Streams x tokens a second of each, by whether there are many cores."""


def has_many_cores(cores: int) -> bool:
    """Whether the goals of the large machine hold."""
    return cores >= _MANY_CORES


def judge(row: dict[str, Any], cores: int) -> list[dict[str, Any]]:
    """The goals of a row: figure, what it may be at most, whether that was reached."""
    key = (f"{row['streams']}x{row['rate']}", has_many_cores(cores))
    index = 0 if row["wiring"] == "fused" else 1
    return [
        {"figure": figure, "goal": most[index], "is_reached": bool(row[figure] <= most[index])}
        for figure, most in _GOALS.get(key, {}).items()
    ]
