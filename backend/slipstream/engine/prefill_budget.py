"""How many tokens of a long prompt a step has beside decodes: those that take as long as they do.

Every running stream gets its next token from every step, so what else a step computes delays them
all. A short prompt does so for a step or two; a long one, cut as the whole budget allows, would for
many in a row. Beside decodes its chunks are cut so that a step takes less than twice the time of
the decodes alone: the streams halve their speed for a while, instead of standing still. Where
several long prompts wait for that, each is given as much: it is no single one any more that
disturbs the others, and the fewer tokens a step has, the less a device computes in its time.

Both times are measured, so the same rule fits any model and device: what a step of decodes takes,
as the median of the last few, and what a token of the cut chunks costs beyond that, of which one
of the highest of the last few counts. That cost includes whatever comes with a chunk besides its
tokens, and grows with the tokens before it. Chunks that are cut for it have to bear the same with
fewer tokens, so that each costs more again: where even the smallest costs too much, chunks would
shrink for nothing. So a token never counts for more than `_DEAREST` times what it costs in large
steps and, with many tokens before it, by the operations of its attention; and a prompt takes at
most so many times as many steps as it would by that cost.

Without that bound the rule finds its end by itself. A chunk of n tokens that takes g(n) is followed
by one of n * share / g(n): where g grows with n, but not faster than n, each step comes nearer to
the n with g(n) = share and none goes past it.
"""

from collections import deque
from collections.abc import Callable
from statistics import median

_FIRST = 64  # tokens, until both times are known
_MIN = 4  # and chunks are multiples of it
_MANY = 256  # tokens in chunks, from which on a step is a large one
_SHARE = 0.75  # of the decodes' time, that chunks may take: the rest is for what is not measured
_DEAREST = 2.0
_NUM_SAMPLES = 7
_HIGH = 3  # of these counts: the third highest
_PROBE_EVERY = 32  # so many steps that were cut, one is of decodes alone, to see what they take now


class Pace:
    """Told of every step when it begins and ends, in the same order.

    Args:
        clock: in ns.
        doubles_at: tokens before one with which it costs twice as much as with none; 0: never.
    """

    def __init__(self, clock: Callable[[], int], doubles_at: int = 0) -> None:
        self._clock = clock
        self._doubles_at = doubles_at
        # Of each step: time, decodes, tokens of chunks, and whether `take` has cut them.
        self._begun: deque[tuple[int, int, int, bool]] = deque()
        self._ended_ns = 0  # the last step
        self._decodes_ns: deque[int] = deque(maxlen=_NUM_SAMPLES)
        # What a token costs: in the largest steps there were, or those that are large; when cut.
        self._token_ns: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._cut_ns: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._largest = 0
        self._num_long = 0
        self._is_cut = False  # the next step
        self._num_cut = _PROBE_EVERY - 1  # the first one tells

    @property
    def token_ns(self) -> float | None:
        """What a token of a prompt takes in a large step; None: not known yet."""
        return median(self._token_ns) if self._token_ns else None

    def begin(self, num_decodes: int, num_chunk_tokens: int) -> None:
        """A step is about to be launched."""
        self._begun.append((self._clock(), num_decodes, num_chunk_tokens, self._is_cut))
        self._is_cut = False

    def end(self) -> None:
        """The oldest one has ended. It ran since it began, or since the one before it ended."""
        began_ns, num_decodes, num_tokens, is_cut = self._begun.popleft()
        now_ns = self._clock()
        took_ns = now_ns - max(began_ns, self._ended_ns)
        self._ended_ns = now_ns
        if not num_tokens:
            self._decodes_ns.append(took_ns)
            return
        decodes_ns = median(self._decodes_ns) if num_decodes and self._decodes_ns else 0
        if is_cut:
            self._cut_ns.append(max(took_ns - decodes_ns, took_ns / 8) / num_tokens)
        if num_tokens >= min(self._largest, _MANY):
            if self._largest < min(num_tokens, _MANY):
                self._token_ns.clear()
            self._largest = max(self._largest, num_tokens)
            self._token_ns.append(max(took_ns - decodes_ns, took_ns / 2) / num_tokens)

    def forget(self) -> None:
        """All that began and has not ended is void."""
        self._begun.clear()
        self._ended_ns = self._clock()

    def take(self, num_long: int, start: int = 0) -> int:
        """Tokens of so many long prompts that the next step may have beside its decodes; the first
        of them has `start` tokens before those.
        """
        self._is_cut = True
        self._num_cut += 1
        if num_long != self._num_long:  # what comes with a chunk is shared by others now
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
