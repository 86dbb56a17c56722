"""Typed look-ups in a JSON object of a checkpoint. No torch."""

import math
from collections.abc import Mapping

from slipstream_contract.errors import clip

from slipstream.errors import CheckpointError


def words(text: str) -> frozenset[str]:
    """Names, written with spaces between them."""
    return frozenset(text.split())


class Reader:
    """Typed look-ups in one JSON object that name file, key and value when they refuse."""

    def __init__(self, data: Mapping[str, object], where: str, prefix: str = "") -> None:
        self.data = data
        self._where = where
        self._prefix = prefix

    def refusal(self, key: str, why: str) -> CheckpointError:
        """The error that names file, key and value."""
        is_name = key.isidentifier() and len(key) <= 64
        name, value = key if is_name else clip(key), clip(self.data.get(key))
        return CheckpointError(f"{self._where}: {self._prefix}{name} = {value} {why}")

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.data.get(key) is not None

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise CheckpointError(f"{self._where}: {self._prefix}{key} is missing")
        if type(value) is not int or value < 1:
            raise self.refusal(key, "is not a whole number >= 1")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise CheckpointError(f"{self._where}: {self._prefix}{key} is missing")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(float(str(value))) or float(str(value)) <= 0:
            raise self.refusal(key, "is not a number > 0")
        return float(str(value))

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(key, "is neither true nor false")
        return value

    def child(self, key: str) -> "Reader":
        """The object under a key; none or null reads as empty."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(key, "is not an object")
        return Reader(value or {}, self._where, f"{self._prefix}{key}.")
