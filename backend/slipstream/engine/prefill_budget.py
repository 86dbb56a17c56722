"""Limit the prompts in a step that also decodes: the prefill budget.

Every running stream gets its next token from every step, so whatever else a step computes delays
all streams. What a step may take is its **target**: a time that the operator sets, or `_STEP` times
what decodes alone take. Prompts get what is left of it. If a prompt has waited for more than
`_PATIENCE` times its own computation and a target, more come than a target has room for: then the
step may be as large as steps can be, which computes prompts at the least cost.

A step of more tokens of prompts than a graph has room for is launched kernel by kernel. Where that
takes the host longer than a target, as with small models, the step takes as long, whatever the
device does, and no token is sent meanwhile: then prompts get what a graph has room for. After many
such steps the next launch that is no graph may come, which measures the host again. Beside so many
decodes that no graph has both, nothing is bounded: every step is launched kernel by kernel.

If more is waiting than a target has room for, prompts get what the device computes in the same
time: a step is as large as its graph, or as whole tiles of GEMMs (`StepSizes`).

A **long** prompt, one that takes more than `_LONG` times the decodes or has more tokens than the
operator says, would fill many targets in a row. Its chunks are cut so that a step takes less than
twice the time of the decodes alone, however long it waits: streams run at half their speed for a
while, instead of standing still. If several long prompts wait, a step takes as much more for each:
no single one disturbs the others then, and steps with fewer tokens would use the device worse. The
earliest due gets it first.

All times are measured, so the same rule fits any model and device: the time of a step of decodes
(median of the last few), and the time that a token of a cut chunk adds (one of the highest of the
last few). The latter includes fixed costs of a chunk, and grows with the context. A smaller chunk
has to bear the same fixed costs with fewer tokens, so each token costs more: where even the
smallest chunk costs too much, chunks would shrink without end. So a token never counts for more
than `_DEAREST` times its cost in large steps, adjusted for the operations of attention at its
context; a prompt takes at most that many times as many steps as it would at that cost.

Without that bound the rule converges by itself. After a chunk of n tokens that took g(n) comes one
of n * share / g(n): if g grows with n, but not faster than n, each step comes nearer to the n with
g(n) = share, and none overshoots it. Two things make g grow faster, and both are counted:

- a graph computes all of its rows and a GEMM whole tiles, so that one token more may cost 64. So a
  cut chunk fills them, up to `_FILL` times its share or down to less, and its cost is that of all
  rows that were computed;
- beside few decodes the device waits for memory, and the first tokens are nearly free. So those
  beyond what was measured count for their cost in large steps at least.
"""

from collections import deque
from collections.abc import Callable
from statistics import median

from slipstream.core.step_sizes import StepSizes
from slipstream.engine.first_tokens import StepSpan

_STEP = 5.0  # decodes' times that a step may take, unless there is a target
_PATIENCE = 4.0
_LONG = 32.0  # decodes' times
_LONG_TOKENS = 1024  # the same, until both times are measured
_FIRST = 64  # tokens, until both times are measured
_MIN = 4  # tokens; chunks are multiples of it
_MANY = 256  # tokens of chunks; a step with at least these is large
_SHARE = 0.75  # of the decodes' time, for chunks; the rest is for what is not measured
_DEAREST = 2.0
_FILL = 1.2  # of `_SHARE`, for chunks that fill the rows of a step: less than the decodes' time
_NUM_SAMPLES = 7
_LAUNCH_EVERY = 128  # after so many steps that the host bounds, the next launch is not bounded
_HIGH = 3  # the third highest sample counts
_PROBE_EVERY = 32  # of this many cut steps, one has decodes alone, to measure these
_NOTHING_MEASURED_NS = 20_000.0  # of a token, until it is measured: prompts are in order by it
_EARLY = 0.9  # of the time that chunks take, by which a step may end early
_NO_BOUND = 1 << 62
_ANY = StepSizes()


class PrefillBudget:
    """The prefill budget of one engine, from the measured times of its steps.

    Args:
        clock: time in ns.
        doubles_at: context in tokens at which a token costs twice as much as without; 0: none.
        target_ns: what a step with decodes may take; 0: by what decodes take.
        long_tokens: a prompt with more is long; None: by what it takes.
        sizes: of steps that leave no rows idle.
    """

    def __init__(
        self,
        clock: Callable[[], int],
        doubles_at: int = 0,
        target_ns: int = 0,
        long_tokens: int | None = None,
        sizes: StepSizes = _ANY,
    ) -> None:
        self._clock = clock
        self._doubles_at = doubles_at
        self._fixed_target_ns = target_ns
        self._long_tokens = long_tokens
        self._sizes = sizes
        self._bounds_next = False  # whether the host bounds the next step's prompts
        self._num_bounded = 0  # steps since a launch was measured
        self._launch_ns: deque[int] = deque(maxlen=_NUM_SAMPLES)  # of steps that are no graphs
        # For each step in flight: start, decodes, tokens of chunks, whether `take` cut these.
        self._started: deque[tuple[int, int, int, bool]] = deque()
        self._ended_ns = 0  # end of the last step
        self._decodes_ns: deque[int] = deque(maxlen=_NUM_SAMPLES)
        self._num_decodes: deque[int] = deque(maxlen=_NUM_SAMPLES)  # of the same steps
        # Cost of a token: in large steps, or the largest so far; and in steps that were cut.
        self._token_ns: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._cut: deque[tuple[float, int]] = deque(maxlen=_NUM_SAMPLES)  # and of how many
        self._large: deque[tuple[int, int]] = deque(maxlen=_NUM_SAMPLES)  # tokens, time of a step
        self._largest = 0
        self._num_long = 0
        self._is_cut = False  # whether the next step is
        self._num_cut = _PROBE_EVERY - 1  # the first cut step measures decodes alone

    # --- what is measured ----------------------------------------------------------------------

    @property
    def token_ns(self) -> float | None:
        """Time in ns of a prompt token in a large step; None: not measured yet."""
        return median(self._token_ns) if self._token_ns else None

    @property
    def _is_measured(self) -> bool:
        return bool(self._decodes_ns) and bool(self._token_ns)

    def work_ns(self, num_tokens: int) -> float:
        """Return the time that so many tokens of a prompt take in large steps, in ns."""
        return num_tokens * (self.token_ns or _NOTHING_MEASURED_NS)

    @property
    def longest_ns(self) -> float:
        """Time in ns of the longest prompt that is not long."""
        if self._long_tokens is not None or not self._is_measured:
            return self.work_ns(self._long_tokens or _LONG_TOKENS)
        return _LONG * median(self._decodes_ns)

    def is_long(self, num_tokens: int) -> bool:
        """Return whether a prompt of so many tokens is long."""
        if self._long_tokens is not None:
            return num_tokens > self._long_tokens
        return self.work_ns(num_tokens) > self.longest_ns

    def earliest_end_ns(self) -> float:
        """Return when the steps in flight can have ended, by the clock; 0: not known.

        A step takes at least as long as one with fewer tokens did, and at least its tokens' part of
        what one with more did. Of the last decodes the least counts, of the last large steps one of
        the highest, with a margin.
        """
        if not self._started or not self._decodes_ns:
            return 0.0
        end_ns = float(max(self._started[0][0], self._ended_ns))
        for _, num_decodes, num_tokens, _ in self._started:
            of_decodes = [
                took_ns * min(1.0, num_decodes / number)
                for took_ns, number in zip(self._decodes_ns, self._num_decodes, strict=True)
            ]
            total = num_decodes + num_tokens
            of_large = [took_ns * min(1.0, total / number) for number, took_ns in self._large]
            least_ns = min(of_decodes)
            if num_tokens >= _MANY and of_large:
                least_ns = max(least_ns, _EARLY * sorted(of_large)[-_HIGH:][0])
            end_ns += least_ns
        return end_ns

    def _is_bounded(self, num_decodes: int, limit_ns: float) -> bool:
        """Return whether the next step has a graph because no other is launched within a limit."""
        is_slow = len(self._launch_ns) == _NUM_SAMPLES and min(self._launch_ns) > limit_ns
        if not is_slow or self._num_bounded >= _LAUNCH_EVERY:
            return False
        has_graph = bool(self._sizes.beside(num_decodes))
        self._bounds_next |= has_graph
        return has_graph

    # --- steps ---------------------------------------------------------------------------------

    def start_step(self, num_decodes: int, num_chunk_tokens: int) -> None:
        """Note that a step is about to be launched."""
        self._started.append((self._clock(), num_decodes, num_chunk_tokens, self._is_cut))
        self._num_bounded += self._bounds_next
        self._is_cut = self._bounds_next = False

    def launch_took(self, took_ns: int) -> None:
        """Note the host's time for the step that started last, from its decision to its launch."""
        _, num_decodes, num_tokens, _ = self._started[-1]
        if not num_tokens or not self._sizes.graphs:
            return
        if self._sizes.graph_of(num_decodes, num_tokens) is None:
            self._launch_ns.append(took_ns)
            self._num_bounded = 0

    def finish_step(self, ago_ns: int = 0) -> StepSpan:
        """Note the end of the oldest step, `ago_ns` ago; it ran since its launch or the end before
        it, whichever was later.
        """
        started_ns, num_decodes, num_tokens, is_cut = self._started.popleft()
        now_ns = self._clock() - ago_ns
        begin_ns = min(max(started_ns, self._ended_ns), now_ns)
        took_ns = now_ns - begin_ns
        self._ended_ns = now_ns
        if not num_tokens:
            self._decodes_ns.append(took_ns)
            self._num_decodes.append(num_decodes)
            return StepSpan(started_ns, begin_ns, now_ns, took_ns)
        decodes_ns = median(self._decodes_ns) if num_decodes and self._decodes_ns else 0
        if is_cut:
            # Rows that were idle cost as much: the step took what one without any takes.
            is_whole = self._sizes.whole(num_decodes, num_tokens) > 0
            computed = self._sizes.filled(num_decodes, num_tokens) if is_whole else num_tokens
            self._cut.append((max(took_ns - decodes_ns, took_ns / 8) / computed, computed))
        if num_tokens >= _MANY:
            self._large.append((num_decodes + num_tokens, took_ns))
        if num_tokens >= min(self._largest, _MANY):
            if self._largest < min(num_tokens, _MANY):
                self._token_ns.clear()
            self._largest = max(self._largest, num_tokens)
            self._token_ns.append(max(took_ns - decodes_ns, took_ns / 2) / num_tokens)
        return StepSpan(started_ns, begin_ns, now_ns, decodes_ns)

    def discard_steps(self) -> None:
        """Discard all steps that were launched and have not ended."""
        self._started.clear()
        self._ended_ns = self._clock()

    # --- what prompts get ----------------------------------------------------------------------

    @property
    def target_ns(self) -> float:
        """Time in ns that a step with decodes may take while no prompt is overdue."""
        if self._fixed_target_ns or not self._decodes_ns:
            return float(self._fixed_target_ns)
        return _STEP * median(self._decodes_ns)

    def is_overdue(self, queued_ns: int, work_ns: float) -> bool:
        """Return whether a prompt that takes `work_ns` in all has waited for too long."""
        return self._clock() - queued_ns > _PATIENCE * (work_ns + self.target_ns)

    def room(self, num_decodes: int) -> int:
        """Return how many tokens of prompts have room in a step beside so many decodes."""
        if not self._is_measured:
            return _NO_BOUND
        left_ns = self.target_ns - median(self._decodes_ns)
        room = max(_MIN, int(left_ns / max(1.0, self.work_ns(1))))
        if not self._is_bounded(num_decodes, self.target_ns):
            return room
        return min(room, self._sizes.beside(num_decodes)[-1])

    def filled(self, num_decodes: int, num_tokens: int) -> int:
        """Return the most tokens of prompts that take a step no longer than so many of them."""
        return self._sizes.filled(num_decodes, num_tokens)

    def take(self, num_decodes: int, num_long: int, start: int = 0) -> int:
        """Return how many tokens of `num_long` long prompts a step beside decodes may compute.

        `start` is the number of tokens before the first prompt's next chunk.
        """
        self._is_cut = True
        self._num_cut += 1
        if num_long != self._num_long:  # fixed costs of a chunk are shared by another number now
            self._num_long = num_long
            self._cut.clear()
        if self._num_cut % _PROBE_EVERY == 0:
            return 0
        if not self._is_measured:
            return num_long * _FIRST
        decodes_ns = median(self._decodes_ns)
        share_ns = _SHARE * num_long * decodes_ns
        growth = 1 + start / self._doubles_at if self._doubles_at else 1
        large_ns = max(1.0, growth * median(self._token_ns))
        each = int(self._worth(share_ns, growth) / num_long)
        num_tokens, most = num_long * max(_MIN, each // _MIN * _MIN), _NO_BOUND
        if self._is_bounded(num_decodes, decodes_ns + share_ns):
            most = self._sizes.beside(num_decodes)[-1]
        num_tokens = min(num_tokens, most)
        filled = min(most, self._sizes.filled(num_decodes, num_tokens))
        room = int(self._worth(_FILL * share_ns, growth))
        whole = self._sizes.whole(num_decodes, min(filled, room))
        return whole if whole * _DEAREST * large_ns >= share_ns else num_tokens

    def _worth(self, share_ns: float, growth: float) -> float:
        """Return the tokens that take `share_ns`, by what they took in the last cut steps.

        Where decodes wait for memory, the first tokens beside them cost less than a token costs in
        large steps. More of them than were measured do not, and they cost no more
        than what a large step takes by all of its rows. `growth` is by the attention to tokens
        before them.
        """
        large_ns = max(1.0, growth * median(self._token_ns))
        if not self._cut:
            return share_ns / large_ns
        cost_ns, computed = sorted(self._cut)[-_HIGH:][0]
        cost_ns = min(cost_ns, _DEAREST * large_ns)
        worth = share_ns / max(1.0, cost_ns)
        rows_ns = [took_ns / number for number, took_ns in self._large]  # more than one more takes
        more_ns = max(large_ns, min(_DEAREST * large_ns, growth * min(rows_ns, default=0.0)))
        if worth <= computed or cost_ns >= more_ns:
            return worth
        return computed + (share_ns - computed * cost_ns) / more_ns
