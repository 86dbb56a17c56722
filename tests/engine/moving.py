"""Host memory for tests: two lists, and copies between them that end late."""

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any

from slipstream.kvcache.host import Direction


class LateMover:
    """A copy reads and writes only when it ends; until then its destination holds nothing."""

    block_bytes = 100
    max_pairs = 3

    def __init__(self, num_slots: int, device: list[Any], nothing: object = "nothing") -> None:
        self.num_slots = num_slots
        self.device = device
        self.host: list[Any] = [nothing] * num_slots
        self.rates: dict[Direction, float | None] = dict.fromkeys(Direction)
        self._nothing = nothing
        self._copies: dict[Direction, deque[list[tuple[int, int]]]] = {
            direction: deque() for direction in Direction
        }
        self._num_ended = dict.fromkeys(Direction, 0)

    def begin(self, direction: Direction, pairs: Sequence[tuple[int, int]]) -> None:
        assert 0 < len(pairs) <= self.max_pairs
        _, destination = self._sides(direction)
        for _, b in pairs:
            destination[b] = copy.copy(self._nothing)
        self._copies[direction].append(list(pairs))

    def end(self, direction: Direction) -> bool:
        """The oldest one of a direction does, if there is one."""
        if not self._copies[direction]:
            return False
        source, destination = self._sides(direction)
        for a, b in self._copies[direction].popleft():
            destination[b] = copy.copy(source[a])
        self._num_ended[direction] += 1
        return True

    def num_ended(self, direction: Direction) -> int:
        return self._num_ended[direction]

    def wait(self) -> None:
        for direction in Direction:
            self.end(direction)

    def rate(self, direction: Direction) -> float | None:
        return self.rates[direction]

    def _sides(self, direction: Direction) -> tuple[list[Any], list[Any]]:
        sides = (self.device, self.host)
        return sides if direction is Direction.OUT else sides[::-1]
