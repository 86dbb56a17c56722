"""The engine under random submits, cancels, steps, lost bridges, NaN rows and failing steps."""

import random

import pytest
from engine.counting import (
    VOCAB_SIZE,
    Client,
    CountingRunner,
    OutOfMemoryError,
    Words,
    expected,
)
from engine.test_engine import samplings
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from slipstream.core.window import Window
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import MAX_PREEMPTIONS, Limits
from slipstream.wire import FinishReason
from slipstream_contract.errors import ContractError
from slipstream_contract.retention import Retention, TokenRange
from slipstream_contract.sampling import SamplingParams

MAX_MODEL_LEN = 24
NO_WINDOW = Window()


# Beginnings that many have in common.
prompts = st.one_of(
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=MAX_MODEL_LEN - 1),
    st.lists(st.integers(0, 1), min_size=1, max_size=MAX_MODEL_LEN - 1),
    st.integers(1, MAX_MODEL_LEN - 1).map(lambda size: list(range(size))),
)
retentions = st.one_of(
    st.none(),
    st.builds(
        lambda start, size, priorities, duration_ms: Retention(
            (TokenRange(start, start + size, priorities[0], duration_ms),), priorities[1], 3
        ),
        st.integers(0, 9),
        st.integers(1, 9),
        st.tuples(st.integers(0, 100), st.integers(0, 100)),
        st.sampled_from([-1, 1, 5]),
    ),
)


class Machine(RuleBasedStateMachine):
    """Every sequence ends once; unless something was done to it, with the defined tokens."""

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(0, 10),
        num_seqs=st.integers(1, 6),
        num_tokens=st.integers(1, 30),
        max_waiting=st.integers(1, 8),
        max_waiting_tokens=st.integers(1, 120),
        max_in_flight=st.integers(1, 2),
        long_prompt_tokens=st.sampled_from([1024, 12, 2]),
        is_reused=st.sampled_from([True, True, True, False]),
    )
    def begin(
        self,
        block_size: int,
        num_blocks: int,
        num_seqs: int,
        num_tokens: int,
        max_waiting: int,
        max_waiting_tokens: int,
        max_in_flight: int,
        long_prompt_tokens: int,
        is_reused: bool,
        window: Window = NO_WINDOW,
    ) -> None:
        least = -(-MAX_MODEL_LEN // block_size)
        num_blocks += window.blocks_for(least, block_size, 1)
        self.runner = CountingRunner(num_blocks, block_size, MAX_MODEL_LEN, max_in_flight, window)
        self.runner.max_tokens = num_tokens
        self.max_waiting, self.max_waiting_tokens = max_waiting, max_waiting_tokens
        bounds = (max_waiting, max_waiting_tokens, long_prompt_tokens, is_reused)
        limits = Limits(num_seqs, num_tokens, *bounds)
        self.now_ns = 1_000_000_000
        self.engine = Engine(limits, self.runner, Words(), clock=lambda: self.now_ns)
        self.client = Client(self.engine)
        self.asked: dict[int, tuple[list[int], SamplingParams]] = {}
        self.cancelled: set[int] = set()
        self.deadlines: dict[int, int] = {}
        self.may_fail: set[int] = set()  # requests in flight when something was broken on purpose

    def in_flight(self) -> set[int]:
        return {number for _, number in self.engine._requests}

    @rule(
        prompt=prompts,
        sampling=samplings(),
        priority=st.integers(0, 9),
        timeout_ms=st.sampled_from([0, 0, 1, 2, 4, 8, 16]),
        salt=st.sampled_from(["", "", "", "tenant"]),
        retention=retentions,
    )
    def submit(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        priority: int,
        timeout_ms: int,
        salt: str,
        retention: Retention | None,
    ) -> None:
        waiting = self.engine._scheduler.waiting
        has_room = waiting.num_tokens + len(prompt) <= self.max_waiting_tokens
        if waiting.num_requests == self.max_waiting or (waiting.num_requests and not has_room):
            with pytest.raises(ContractError, match="UNAVAILABLE"):
                self.client.submit(prompt, sampling)
            return
        cache = {"salt": salt, "retention": retention}
        deadline_ns = self.now_ns + timeout_ms * 1_000_000 if timeout_ms else 0
        number = self.client.submit(prompt, sampling, priority, deadline_ns, **cache)
        self.asked[number] = (prompt, sampling)
        if deadline_ns:
            self.deadlines[number] = deadline_ns

    @precondition(lambda self: self.asked)
    @rule(
        choice=st.integers(0, 99),
        question=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3),
        sampling=samplings(),
    )
    def next_turn(self, choice: int, question: list[int], sampling: SamplingParams) -> None:
        """Ask on, after what one of them has been told so far."""
        number = sorted(self.asked)[choice % len(self.asked)]
        told = self.client.streams[number, 0].token_ids
        prompt = [*self.asked[number][0], *told, *question][: MAX_MODEL_LEN - 1]
        self.submit(prompt, sampling, 5, 0, "", None)

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.now_ns += 1_000_000
            self.client.step()
            over = {number for number, at_ns in self.deadlines.items() if at_ns <= self.now_ns}
            assert not over & self.in_flight(), "over time and not ended"

    @precondition(lambda self: self.in_flight())
    @rule(choice=st.integers(0, 99))
    def cancel(self, choice: int) -> None:
        flying = sorted(self.in_flight())
        number = flying[choice % len(flying)]
        assert self.engine.cancel(self.client.name, number)
        self.cancelled.add(number)

    @rule()
    def cancel_the_unknown(self) -> None:
        assert not self.engine.cancel(b"stranger", 0)
        assert not self.engine.cancel(self.client.name, 10**6)

    @precondition(lambda self: self.in_flight())
    @rule(is_late=st.booleans(), is_short_of_memory=st.booleans())
    def fail_once(self, is_late: bool, is_short_of_memory: bool) -> None:
        """Nobody's fault: nobody may notice, but who fails for the second time and alone."""
        if self.engine._trial or self.runner.memory < 1 << 30:
            self.may_fail |= self.in_flight()
        error = OutOfMemoryError() if is_short_of_memory else ValueError("planted")
        if is_late:
            self.runner.late_error = error
        else:
            self.runner.error = error
        self.step(1)
        self.runner.error = self.runner.late_error = None

    @precondition(lambda self: self.in_flight())
    @rule(choice=st.integers(0, 99), is_late=st.booleans())
    def break_one(self, choice: int, is_late: bool) -> None:
        """Every step that it is in fails."""
        requests = sorted(self.engine._requests.items())
        (_, number), request = requests[choice % len(requests)]
        self.may_fail.add(number)
        ids = {random.Random(choice).choice(request.sequences).id}
        self.runner.breaks_late = is_late
        self.runner.broken |= ids

    @rule(limit=st.sampled_from([1, 3, 1 << 30]))
    def shrink_memory(self, limit: int) -> None:
        """Steps of more tokens fail, and are made smaller until they do not."""
        self.runner.memory = limit

    @precondition(lambda self: self.in_flight())
    @rule(choice=st.integers(0, 99))
    def preempt(self, choice: int) -> None:
        running = list(self.engine._scheduler._running.values())
        if running and (victim := running[choice % len(running)]).num_preemptions < MAX_PREEMPTIONS:
            self.engine._scheduler._preempt(victim)

    @precondition(lambda self: self.in_flight())
    @rule(choice=st.integers(0, 99))
    def poison(self, choice: int) -> None:
        requests = sorted(self.engine._requests.items())
        (_, number), request = requests[choice % len(requests)]
        self.may_fail.add(number)
        self.runner.poisoned.add(random.Random(choice).choice(request.sequences).id)

    @rule()
    def drop_all(self) -> None:
        self.cancelled |= self.in_flight()
        self.engine.drop_bridge(self.client.name)

    @invariant()
    def is_sound(self) -> None:
        self.engine.check_integrity()
        assert self.engine.fatal is None
        self.engine._failed.clear()  # it is not the device
        for request in self.engine._requests.values():
            assert all(s.num_preemptions <= MAX_PREEMPTIONS for s in request.sequences)

    def teardown(self) -> None:
        self.client.drain()
        for (number, index), stream in self.client.streams.items():
            prompt, sampling = self.asked[number]
            text, reason = expected(prompt, sampling, index, MAX_MODEL_LEN, self.runner.window)
            if stream.reason is FinishReason.CANCELLED:
                assert number in self.cancelled
            elif stream.reason is FinishReason.DEADLINE:
                assert self.deadlines[number] <= self.now_ns
            elif stream.reason is FinishReason.ERROR:
                assert number in self.may_fail
            else:
                assert (stream.text, stream.reason) == (text, reason)
                continue
            assert not sampling.include_stop or text.startswith(stream.text)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
