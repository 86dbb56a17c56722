"""Chores in idle turns of the engine's loop: requests come first, and lose nothing by them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.engine.house import House, build
from slipstream import wire
from slipstream.engine.chores import QUIET_NS, Chores
from slipstream.launch import UNUSED


class AcceleratorError(RuntimeError):
    """A CUDA error that stays, by the name that torch gives it."""


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    yield from build(tmp_path, 40)


def give_chores(house: House, pieces: Iterator[None]) -> list[int]:
    """Give the loop chores whose clock is the one item that is returned."""
    now = [0]
    house.loop._chores = Chores(pieces, lambda: now[0])
    return now


def test_a_request_stops_the_chores_and_they_go_on(house: House) -> None:
    ran: list[bool] = []

    def pieces() -> Iterator[None]:
        while True:
            ran.append(house.engine.has_work)
            yield

    bridge = house.bridge()
    now = give_chores(house, pieces())
    for _ in range(3):
        house.loop.turn(0)
    assert ran == []  # it is not quiet for long enough
    now[0] += QUIET_NS
    for count in range(1, 4):
        house.loop.turn(1000)  # at once
        assert len(ran) == count
    bridge.complete(1, [1, 2, 3])
    num_ran = len(ran)
    for _ in range(3):
        house.loop.turn(0)
    assert len(ran) == num_ran
    now[0] += QUIET_NS
    house.loop.turn(0)
    assert len(ran) == num_ran + 1
    assert not any(ran)


def test_a_fault_of_a_piece_harms_no_request(house: House) -> None:
    def pieces() -> Iterator[None]:
        yield
        raise ValueError("a piece fails")

    bridge = house.bridge()
    now = give_chores(house, pieces())
    now[0] += QUIET_NS
    for _ in range(3):
        house.loop.turn(0)
    bridge.complete(1, [1, 2, 3])
    assert house.loop._chores.wait_ms(1000) == 1000


def test_a_device_that_fails_in_a_piece_ends_the_loop(house: House) -> None:
    def pieces() -> Iterator[None]:
        yield
        raise AcceleratorError("illegal address")

    give_chores(house, pieces())[0] += QUIET_NS
    assert house.loop.run() == 1


def test_the_end_of_the_process_within_a_piece_keeps_what_was_found(house: House) -> None:
    kept: list[int] = []

    def pieces() -> Iterator[None]:
        found = []
        try:
            for number in range(100):
                found.append(number)
                if number == 2:
                    raise SystemExit(0)  # as by SIGTERM
                yield
        finally:
            kept.extend(found)

    give_chores(house, pieces())[0] += QUIET_NS
    with pytest.raises(SystemExit):
        house.loop.run()
    assert kept == [0, 1, 2]


def test_models_that_are_unloaded_end_the_chores_too(house: House) -> None:
    kept: list[int] = []

    def pieces() -> Iterator[None]:
        found = []
        try:
            while True:
                found.append(len(found))
                yield
        finally:
            kept.extend(found)

    bridge = house.bridge()
    give_chores(house, pieces())[0] += QUIET_NS
    for _ in range(3):
        house.loop.turn(0)
    bridge.say(wire.Bye())
    assert house.loop.run() == UNUSED
    assert kept[:3] == [0, 1, 2]
