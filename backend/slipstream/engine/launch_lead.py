"""Say how long before the end of a step the next one must be decided.

A step is launched while the one before it runs, so that the device never waits for the host. Early
is as good as late for the device, but not for requests: one that comes before the decision is in
the next step, one that comes just after waits for a whole step more. Under open load that is the
largest part of what a first token waits for. So the loop listens for requests until the launch is
due: the earliest end of the step in flight (`PrefillBudget.earliest_end_ns`) less the host's usual
time from the decision to the launch, with a margin. Where steps are shorter than that, it launches
at once.
"""

from collections import deque
from collections.abc import Callable
from statistics import median

_NUM_SAMPLES = 16
_LEAD = 1.5  # times the host's usual time
_MARGIN_NS = 1_500_000


class LaunchLead:
    """The host's time from the decision of a step to its launch; `clock` is in ns."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._took_ns: deque[int] = deque(maxlen=_NUM_SAMPLES)

    def launch_took(self, took_ns: int) -> None:
        """Note the host's time for a step, from its decision on."""
        self._took_ns.append(took_ns)

    def slack_ns(self, end_ns: float) -> float:
        """Return how long the next decision can wait if the step in flight ends at `end_ns`."""
        if not self._took_ns:
            return 0.0
        lead_ns = _LEAD * median(self._took_ns) + _MARGIN_NS
        return max(0.0, end_ns - lead_ns - self._clock())
