"""The interface of a format, and how a configuration is checked against tensors."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from slipstream.models.formats.module import Module
from slipstream.models.reader import Reader, words
from slipstream.quant.matrix import QuantMatrix

_STAGES = words("quant_method quantization_status version quant_library producer kv_cache_scheme")


class Row(NamedTuple):
    """A line of the table of formats in docs/quantization.md."""

    name: str
    tensors: str
    becomes: str


class Format(ABC):
    """A way in which a checkpoint stores quantised matrices.

    Args:
        config: its quantization_config.
    """

    methods: ClassVar[tuple[str, ...]]  # values of quant_method
    title: ClassVar[str]
    rows: ClassVar[tuple[Row, ...]]
    keys: ClassVar[frozenset[str]]  # that are read or change nothing

    def __init__(self, config: Reader) -> None:
        self.config = config
        for key, value in config.data.items():
            is_known = key in self.keys or key in _STAGES
            if not is_known and value not in (None, False, {}, [], ""):
                raise config.refusal(key, f"is not implemented for {self.title}")

    @abstractmethod
    def holds(self, module: Module) -> bool:
        """Whether the tensors of a matrix are of this format."""

    @abstractmethod
    def excludes(self, name: str) -> str:
        """Return the key by which the configuration leaves out a module; empty: it does not."""

    @abstractmethod
    def load(self, module: Module, outputs: int, inputs: int) -> QuantMatrix:
        """Read a matrix; raises `CheckpointError` if tensors are wrong or contradict `config`."""

    def units(self, module: Module, outputs: int, inputs: int) -> tuple[int, int] | None:
        """Return the rows and inputs at whose multiples a window of a matrix can begin.

        None: it is read whole.
        """
        return None

    def check(self, module: Module) -> None:
        """Raise `CheckpointError` if a matrix is quantised and should not be, or the other way."""
        key = self.excludes(module.name)
        if self.holds(module) and key:
            why = f"leaves out {module.name}, whose tensors are quantised"
            raise self.config.refusal(key, why)
        is_plain = module.dtype("weight") in ("F64", "F32", "F16", "BF16")
        if is_plain and not self.holds(module) and not key:
            raise module.refusal(
                "weight",
                f"is {module.dtype('weight')}, but quantization_config quantises {module.name}",
            )


def listed(config: Reader, key: str) -> list[str]:
    """Return a list of texts; null is empty. Raises `CheckpointError` for anything else."""
    value = config.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise config.refusal(key, "is not a list of names")
    return value


def listed_by_turns(config: Reader, key: str) -> list[str]:
    """Return a list of texts, or of lists of texts, as one; raises `CheckpointError`."""
    value = config.get(key)
    turns = value if isinstance(value, list) else [] if value is None else [value]
    every = [each for turn in turns for each in (turn if isinstance(turn, list) else [turn])]
    found = [each for each in every if isinstance(each, str)]
    if isinstance(value, list | None) and len(found) == len(every):
        return found
    raise config.refusal(key, "is not a list of names, nor of lists of names")


def names_in_block(parts: Sequence[str], name: str) -> bool:
    """Return whether a module is among the `parts` of blocks; none are listed: all are."""
    return not parts or any(is_part(each, name) for each in parts)


def matches(config: Reader, key: str, pattern: str, name: str) -> bool:
    """Whether a regular expression of the file matches the beginning of a name."""
    try:
        return re.match(pattern, name) is not None
    except re.error:
        raise config.refusal(key, f"has {pattern[:64]!r}, which is no regular expression") from None


def is_part(name: str, module: str) -> bool:
    """Whether a name is that of a module, or of one around it, or the last parts of its name."""
    return f".{name}." in f".{module}."
