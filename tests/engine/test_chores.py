"""Work for idle times: when a piece runs, and what a fault of it costs."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from slipstream.engine.chores import QUIET_NS, Chores

_MS = 1_000_000


class CUDADriverError(RuntimeError):
    """As CuPy names it."""


class IdleTurns(RuleBasedStateMachine):
    """Turns of a loop, with and without work, against a plain model of when a piece may run."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.quiet_since = 0
        self.num_ran = self.expected = 0
        self.fails = self.is_closed = self.was_closed = False
        self.chores = Chores(self.pieces(), lambda: self.now)

    def pieces(self) -> Iterator[None]:
        try:
            for _ in range(12):
                self.num_ran += 1
                if self.fails:
                    raise ValueError("a piece fails")
                yield
        finally:
            self.was_closed = True

    @rule(ms=st.integers(0, 3 * QUIET_NS // _MS))
    def time_passes(self, ms: int) -> None:
        self.now += ms * _MS

    @rule()
    def turn_with_work(self) -> None:
        self.chores.put_off()
        self.quiet_since = self.now

    @rule(idle_ms=st.integers(0, 1000))
    def idle_turn(self, idle_ms: int) -> None:
        left_ns = self.quiet_since + QUIET_NS - self.now
        wait_ms = self.chores.wait_ms(idle_ms)
        assert 0 <= wait_ms <= idle_ms
        if left_ns > 0:
            assert wait_ms == min(idle_ms, -(-left_ns // _MS)) or self.is_over
        else:
            assert wait_ms == (idle_ms if self.is_over else 0)
        may_run = left_ns <= 0 and not self.is_over and self.expected < 12
        before = self.num_ran
        self.chores.run()
        assert self.num_ran - before == may_run
        self.expected += may_run

    @precondition(lambda self: not self.is_over)
    @rule()
    def next_piece_fails(self) -> None:
        self.fails = True

    @rule()
    def close(self) -> None:
        self.chores.close()
        self.is_closed = True

    @property
    def is_over(self) -> bool:
        return self.is_closed or self.was_closed

    @invariant()
    def all_that_began_is_closed(self) -> None:
        assert self.num_ran == self.expected
        assert self.chores.fatal is None
        if self.is_closed and self.num_ran:
            assert self.was_closed


TestIdleTurns = IdleTurns.TestCase
TestIdleTurns.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def failing(error: Exception) -> Iterator[None]:
    yield
    raise error


@pytest.mark.parametrize("error", [RuntimeError("odd"), CUDADriverError("illegal address")])
def test_a_fault_ends_the_chores_and_is_logged(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0]
    chores = Chores(failing(error), lambda: now[0])
    now[0] = QUIET_NS
    with caplog.at_level(logging.ERROR):
        for _ in range(4):
            chores.run()
    assert len(caplog.records) == 1
    assert str(error) in caplog.text
    assert chores.wait_ms(1000) == 1000
    assert chores.fatal is (error if isinstance(error, CUDADriverError) else None)


def test_what_cannot_be_kept_ends_no_process(caplog: pytest.LogCaptureFixture) -> None:
    def pieces() -> Iterator[None]:
        try:
            yield
        finally:
            raise OSError("the disk is full")

    chores = Chores(pieces(), lambda: QUIET_NS)
    chores._starts_ns = 0
    chores.run()
    chores.close()
    assert "the disk is full" in caplog.text


def test_plain_iterators_are_chores_too() -> None:
    now = [0]
    chores = Chores(iter([None, None]), lambda: now[0])
    now[0] = QUIET_NS
    for _ in range(2):
        chores.run()
        assert chores.wait_ms(7) == 0
    chores.run()
    assert chores.wait_ms(7) == 7
    chores.close()


def test_pieces_that_wait_for_others_are_put_off() -> None:
    now, ran = [0], list[str]()

    def pieces() -> Iterator[float | None]:
        for name, pause_s in (("first", None), ("second", 0.5), ("third", None)):
            ran.append(name)
            yield pause_s

    chores = Chores(pieces(), lambda: now[0])
    now[0] += QUIET_NS
    chores.run()
    assert chores.wait_ms(1000) == 0
    chores.run()
    assert chores.wait_ms(1000) == 500
    now[0] += 500 * _MS - 1
    chores.run()
    assert ran == ["first", "second"]
    now[0] += 1
    chores.run()
    assert ran == ["first", "second", "third"]
    assert chores.wait_ms(1000) == 0
