"""Look up typed values in a JSON object of a checkpoint. No torch."""

import math
from collections.abc import Mapping, Sequence

from slipstream_contract.errors import clip

from slipstream.errors import CheckpointError

_MOST = 64  # characters of a key in a message


def words(text: str) -> frozenset[str]:
    """Split names that are separated by spaces."""
    return frozenset(text.split())


class Reader:
    """Typed look-ups in a JSON object, whose errors name file, key and value."""

    def __init__(self, data: Mapping[str, object], where: str, prefix: str = "") -> None:
        self.data = data
        self.ignored: list[str] = []  # keys that change nothing, with those of children
        self.defaults: Mapping[str, object] = {}  # values of keys that the object does not have
        self.names: dict[str, str] = {}  # keys that the object calls by another name
        self._where = where
        self._prefix = prefix

    def refusal(self, key: str, why: str) -> CheckpointError:
        """Return an error that names file, key and value, with the reason `why`."""
        own = self.names.get(key, key)
        name = own if own.isidentifier() and len(own) <= _MOST else clip(own)
        value = clip(self.get(key))
        source = "" if key in self.data or key not in self.defaults else " by default"
        return CheckpointError(f"{self._where}: {self._prefix}{name} = {value}{source} {why}")

    @property
    def title(self) -> str:
        """Name the object: by its key, and by its file where that is not config.json."""
        file, key = self._where.rpartition("/")[2], self._prefix.rstrip(".")
        if file == "config.json" and key:
            return key
        return f"{key} of {file}" if key else file

    def get(self, key: str) -> object:
        """Return the JSON value, else the default, else None."""
        return self.data.get(key, self.defaults.get(key))

    def has(self, key: str) -> bool:
        """Return whether the key has a value that is not null."""
        return self.get(key) is not None

    def whole(self, key: str, default: int | None = None, most: int | None = None) -> int:
        """Return a whole number from 1 to `most`; raises `CheckpointError` for anything else."""
        value = self._value(key, default)
        if type(value) is not int or value < 1:
            raise self.refusal(key, "is not a whole number >= 1")
        if most is not None and value > most:
            raise self.refusal(key, f"is above {most}")
        return value

    def positive(self, key: str, default: float | None = None, most: float = math.inf) -> float:
        """Return a finite number > 0, up to `most`; raises `CheckpointError` for anything else."""
        value = self._value(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(float(str(value))) or float(str(value)) <= 0:
            raise self.refusal(key, "is not a number > 0")
        if float(str(value)) > most:
            raise self.refusal(key, f"is above {most:g}")
        return float(str(value))

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean; raises `CheckpointError` for anything else."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "is neither true nor false")
        return value

    def names_of(self, key: str, count: int, known: Sequence[str]) -> list[str] | None:
        """Return a list of `count` of the names `known`, or None where the key is missing."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, list) and len(value) == count:
            found = [each for each in value if isinstance(each, str) and each in known]
            if len(found) == count:
                return found
        raise self.refusal(key, f"is not a list of {count} of {' and '.join(known)}")

    def wholes(self, key: str) -> list[int] | None:
        """Return a list of whole numbers >= 0, or None where the key is missing."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
            raise self.refusal(key, "is not a list of whole numbers >= 0")
        return value

    def refuse_unless(self, key: str, value: object) -> None:
        """Raise `CheckpointError` if the key has another value than this one, the one there is."""
        if self.has(key) and self.get(key) != value:
            raise self.refusal(key, f"is not implemented; {clip(value)} is")

    def child(self, key: str) -> "Reader":
        """Return a reader of the object under a key; missing or null reads as empty."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(key, "is not an object")
        child = Reader(value or {}, self._where, f"{self._prefix}{key}.")
        child.ignored = self.ignored
        return child

    def ignore(self, key: str) -> None:
        """Record that the key changes nothing."""
        self.ignored.append(f"{self._prefix}{key if key.isidentifier() else clip(key)}"[:_MOST])

    def _value(self, key: str, default: object) -> object:
        """Return the value; raises `CheckpointError` if it is missing without a default."""
        value = self.get(key)
        if value is None and default is None and key not in self.data:
            name = self.names.get(key, key)
            raise CheckpointError(f"{self._where}: {self._prefix}{name} is missing")
        return default if value is None else value
