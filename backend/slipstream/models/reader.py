"""Typed look-ups in a JSON object of a checkpoint. No torch."""

import math
from collections.abc import Mapping

from slipstream_contract.errors import clip

from slipstream.errors import CheckpointError

_MOST = 64  # characters of a key in a message


def words(text: str) -> frozenset[str]:
    """Names, written with spaces between them."""
    return frozenset(text.split())


class Reader:
    """Typed look-ups in one JSON object that name file, key and value when they refuse."""

    def __init__(self, data: Mapping[str, object], where: str, prefix: str = "") -> None:
        self.data = data
        self.ignored: list[str] = []  # keys that change nothing, of children too
        self.defaults: Mapping[str, object] = {}  # of keys that the object does not have
        self._where = where
        self._prefix = prefix

    def refusal(self, key: str, why: str) -> CheckpointError:
        """The error that names file, key and value."""
        is_name = key.isidentifier() and len(key) <= _MOST
        name, value = key if is_name else clip(key), clip(self.get(key))
        source = "" if key in self.data or key not in self.defaults else " by default"
        return CheckpointError(f"{self._where}: {self._prefix}{name} = {value}{source} {why}")

    def get(self, key: str) -> object:
        """The value as JSON has it, or the default; None for neither."""
        return self.data.get(key, self.defaults.get(key))

    def has(self, key: str) -> bool:
        """Whether the key has a value that is not null."""
        return self.get(key) is not None

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self._value(key, default)
        if type(value) is not int or value < 1:
            raise self.refusal(key, "is not a whole number >= 1")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._value(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(float(str(value))) or float(str(value)) <= 0:
            raise self.refusal(key, "is not a number > 0")
        return float(str(value))

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "is neither true nor false")
        return value

    def child(self, key: str) -> "Reader":
        """The object under a key; none or null reads as empty."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(key, "is not an object")
        child = Reader(value or {}, self._where, f"{self._prefix}{key}.")
        child.ignored = self.ignored
        return child

    def ignore(self, key: str) -> None:
        """Note that the key changes nothing."""
        self.ignored.append(f"{self._prefix}{key if key.isidentifier() else clip(key)}"[:_MOST])

    def _value(self, key: str, default: object) -> object:
        """Raises `CheckpointError` for a key that is not there and has no default."""
        value = self.get(key)
        if value is None and default is None and key not in self.data:
            raise CheckpointError(f"{self._where}: {self._prefix}{key} is missing")
        return default if value is None else value
