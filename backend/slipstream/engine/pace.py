"""How many tokens of a long prompt a step has beside decodes: those that take as long as they do.

Every running stream gets its next token from every step, so what else a step computes delays them
all. A short prompt does so for a step or two; a long one, cut as the whole budget allows, would for
many in a row. Beside decodes its chunks are cut so that a step takes less than twice the time of
the decodes alone: the streams halve their speed for a while, instead of standing still. Where
several long prompts wait for that, each is given as much: it is no single one any more that
disturbs the others, and the fewer tokens a step has, the less a device computes in its time.

Both times are measured, so the same rule fits any model and device: what a step of decodes takes,
as the median of the last few, and what a token of a prompt takes, likewise, from steps with so many
of them that nothing else counts. Small steps do not tell: their fixed cost would be taken for that
of their tokens, and the chunks that the rule has cut would shrink further for nothing.
"""

from collections import deque
from collections.abc import Callable
from statistics import median

_FIRST = 256  # tokens, until both times are known
_MIN = 8  # and chunks are multiples of it
_MANY = 256  # tokens in chunks, from which their time can be told
_SHARE = 0.75  # of the decodes' time, that chunks may take: the rest is for what is not measured
_NUM_SAMPLES = 7
_PROBE_EVERY = 32  # so many steps that were cut, one is of decodes alone, to see what they take now


class Pace:
    """Told of every step when it begins and ends, in the same order; `clock` is in ns."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._begun: deque[tuple[int, int, int]] = deque()  # (time, decodes, tokens of chunks)
        self._ended_ns = 0  # the last step
        self._decodes_ns: deque[int] = deque(maxlen=_NUM_SAMPLES)
        self._token_ns: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._num_cut = 0

    def begin(self, num_decodes: int, num_chunk_tokens: int) -> None:
        """A step is about to be launched."""
        self._begun.append((self._clock(), num_decodes, num_chunk_tokens))

    def end(self) -> None:
        """The oldest one has ended. It ran since it began, or since the one before it ended."""
        began_ns, num_decodes, num_tokens = self._begun.popleft()
        now_ns = self._clock()
        took_ns = now_ns - max(began_ns, self._ended_ns)
        self._ended_ns = now_ns
        if not num_tokens:
            self._decodes_ns.append(took_ns)
        elif num_tokens >= _MANY:
            decodes_ns = median(self._decodes_ns) if num_decodes and self._decodes_ns else 0
            self._token_ns.append(max(took_ns - decodes_ns, took_ns / 2) / num_tokens)

    def forget(self) -> None:
        """All that began and has not ended is void."""
        self._begun.clear()
        self._ended_ns = self._clock()

    def take(self, num_long: int) -> int:
        """Tokens of so many long prompts that the next step may have beside its decodes."""
        self._num_cut += 1
        if self._num_cut % _PROBE_EVERY == 0:
            return 0
        if not self._decodes_ns or not self._token_ns:
            return num_long * _FIRST
        num_tokens = _SHARE * median(self._decodes_ns) / max(median(self._token_ns), 1.0)
        return num_long * max(_MIN, int(num_tokens) // _MIN * _MIN)
