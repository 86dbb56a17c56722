"""Measure what a step takes by its rows, to know what more rows of it cost.

Steps of decodes read the same weights whatever their rows, so a few rows more often cost next to
nothing. How many is measured while the engine runs: a moving mean of the time of steps, by the
number of their rows, apart for steps with and without drafts. The former include the time in which
the device waits for the host, as a step with drafts is made after the one before it has ended.
"""

from bisect import bisect_left

_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1 << 20)
_SHARE = 0.2  # of a new time in a mean


class StepTimes:
    """Times of steps in ns; what was not measured is estimated from fewer rows, or unknown."""

    def __init__(self) -> None:
        """Start with no measurement."""
        self._means: tuple[dict[int, float], dict[int, float]] = ({}, {})  # plain, with drafts

    def add(self, num_rows: int, has_drafts: bool, took_ns: float) -> None:
        """Add the time of a step."""
        means, bucket = self._means[has_drafts], bisect_left(_BUCKETS, num_rows)
        old = means.get(bucket)
        if old is None and has_drafts and (guess := self.of(num_rows, True)) is not None:
            means[bucket] = min(took_ns, 2 * guess)
        elif old is None:
            means[bucket] = took_ns
        else:  # a pause of the host says nothing of rows
            means[bucket] = old + _SHARE * (min(took_ns, 2 * old) - old)

    def release_drafts(self) -> None:
        """Discard the times of steps with drafts."""
        self._means[True].clear()

    def of(self, num_rows: int, has_drafts: bool) -> float | None:
        """Return the time of a step; None: no step of as few rows was measured.

        That of a step with drafts which was never measured is on the line through the two largest
        steps that have fewer rows, with or without drafts. So it is tried if it should pay, and
        then known.
        """
        bucket = bisect_left(_BUCKETS, num_rows)
        found = self._means[has_drafts].get(bucket)
        if found is not None or not has_drafts:
            return found
        both = [item for means in self._means for item in means.items()]
        fewer = sorted(item for item in both if item[0] < bucket)
        if not fewer:
            return self._means[False].get(bucket)
        last, took_ns = fewer[-1]
        before = [(known, mean) for known, mean in fewer if known < last]
        if not before:
            return took_ns
        rise = (took_ns - before[-1][1]) / (_BUCKETS[last] - _BUCKETS[before[-1][0]])
        return took_ns + max(0.0, rise) * (_BUCKETS[bucket] - _BUCKETS[last])
