"""Limit the tokens of long prompts in a step that also decodes: the prefill budget.

Every running stream gets its next token from every step, so whatever else a step computes delays
all streams. A short prompt does so for a step or two; a long one, in chunks as large as the step
allows, would do so for many in a row. Beside decodes, its chunks are therefore cut so that a step
takes less than twice the time of the decodes alone: streams run at half their speed for a while,
instead of standing still. If several long prompts wait, each gets as much: no single one disturbs
the others then, and steps with fewer tokens would use the device worse.

Both times are measured, so the same rule fits any model and device: the time of a step of decodes
(median of the last few), and the time that a token of a cut chunk adds (one of the highest of the
last few). The latter includes fixed costs of a chunk, and grows with the context. A smaller chunk
has to bear the same fixed costs with fewer tokens, so each token costs more: where even the
smallest chunk costs too much, chunks would shrink without end. So a token never counts for more
than `_DEAREST` times its cost in large steps, adjusted for the operations of attention at its
context; a prompt takes at most that many times as many steps as it would at that cost.

Without that bound the rule converges by itself. After a chunk of n tokens that took g(n) comes one
of n * share / g(n): if g grows with n, but not faster than n, each step comes nearer to the n with
g(n) = share, and none overshoots it.
"""

from collections import deque
from collections.abc import Callable
from statistics import median

_FIRST = 64  # tokens, until both times are measured
_MIN = 4  # tokens; chunks are multiples of it
_MANY = 256  # tokens of chunks; a step with at least these is large
_SHARE = 0.75  # of the decodes' time, for chunks; the rest is for what is not measured
_DEAREST = 2.0
_NUM_SAMPLES = 7
_HIGH = 3  # the third highest sample counts
_PROBE_EVERY = 32  # of this many cut steps, one has decodes alone, to measure these


class PrefillBudget:
    """The prefill budget of one engine, from the measured times of its steps.

    Args:
        clock: time in ns.
        doubles_at: context in tokens at which a token costs twice as much as without; 0: none.
    """

    def __init__(self, clock: Callable[[], int], doubles_at: int = 0) -> None:
        self._clock = clock
        self._doubles_at = doubles_at
        # For each step in flight: start, decodes, tokens of chunks, whether `take` cut these.
        self._started: deque[tuple[int, int, int, bool]] = deque()
        self._ended_ns = 0  # end of the last step
        self._decodes_ns: deque[int] = deque(maxlen=_NUM_SAMPLES)
        # Cost of a token: in large steps, or the largest so far; and in steps that were cut.
        self._token_ns: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._cut_ns: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._largest = 0
        self._num_long = 0
        self._is_cut = False  # whether the next step is
        self._num_cut = _PROBE_EVERY - 1  # the first cut step measures decodes alone

    @property
    def token_ns(self) -> float | None:
        """Time in ns of a prompt token in a large step; None: not measured yet."""
        return median(self._token_ns) if self._token_ns else None

    def start_step(self, num_decodes: int, num_chunk_tokens: int) -> None:
        """Note that a step is about to be launched."""
        self._started.append((self._clock(), num_decodes, num_chunk_tokens, self._is_cut))
        self._is_cut = False

    def finish_step(self) -> int:
        """Note the end of the oldest step, which ran since its launch or the end before it.

        Returns how long it took, in ns.
        """
        started_ns, num_decodes, num_tokens, is_cut = self._started.popleft()
        now_ns = self._clock()
        took_ns = now_ns - max(started_ns, self._ended_ns)
        self._ended_ns = now_ns
        if not num_tokens:
            self._decodes_ns.append(took_ns)
            return took_ns
        decodes_ns = median(self._decodes_ns) if num_decodes and self._decodes_ns else 0
        if is_cut:
            self._cut_ns.append(max(took_ns - decodes_ns, took_ns / 8) / num_tokens)
        if num_tokens >= min(self._largest, _MANY):
            if self._largest < min(num_tokens, _MANY):
                self._token_ns.clear()
            self._largest = max(self._largest, num_tokens)
            self._token_ns.append(max(took_ns - decodes_ns, took_ns / 2) / num_tokens)
        return took_ns

    def discard_steps(self) -> None:
        """Discard all steps that were launched and have not ended."""
        self._started.clear()
        self._ended_ns = self._clock()

    def take(self, num_long: int, start: int = 0) -> int:
        """Return how many tokens of `num_long` long prompts the next step may compute.

        `start` is the number of tokens before the first prompt's next chunk.
        """
        self._is_cut = True
        self._num_cut += 1
        if num_long != self._num_long:  # fixed costs of a chunk are shared by another number now
            self._num_long = num_long
            self._cut_ns.clear()
        if self._num_cut % _PROBE_EVERY == 0:
            return 0
        if not self._decodes_ns or not self._token_ns:
            return num_long * _FIRST
        cost_ns = median(self._token_ns)
        if self._cut_ns:
            growth = 1 + start / self._doubles_at if self._doubles_at else 1
            cost_ns = min(sorted(self._cut_ns)[-_HIGH:][0], _DEAREST * growth * cost_ns)
        num_tokens = _SHARE * median(self._decodes_ns) / max(cost_ns, 1.0)
        return num_long * max(_MIN, int(num_tokens) // _MIN * _MIN)
