"""The interface of a format, and how a configuration is checked against tensors."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import ClassVar, NamedTuple

from slipstream.models.formats.module import Module
from slipstream.models.reader import Reader, words
from slipstream.quant.matrix import QuantMatrix

# Names of a text model beside a tower: in files, in transformers since 4.52, in files of the class
# without a head, and by itself.
_TEXTS = ("language_model.model.", "model.language_model.", "language_model.", "model.")
_STAGES = words("quant_method quantization_status version quant_library producer kv_cache_scheme")
SIGNS = frozenset("*+?[](){}|^$\\")  # of regular expressions, which names do not have
_METHOD = "method"  # which newer GPTQModel writes beside quant_method


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
        self.named_blocks = Names(())  # where there are any, others may be as they are
        for key, value in config.data.items():
            is_known = key in self.keys or key in _STAGES
            is_known = is_known or (key == _METHOD and value in self.methods)
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
        named = self.named_blocks
        if named.names and not self.holds(module) and not named.has(module.name):
            return
        key = self.excludes(module.name)
        if self.holds(module) and key:
            why = f"leaves out {module.name}, whose tensors are quantised"
            raise self.config.refusal(key, why)
        is_plain = module.dtype("weight") in ("F64", "F32", "F16", "BF16")
        if is_plain and not self.holds(module) and not key:
            raise module.refusal(
                "weight",
                f"is {module.dtype('weight')}, but {self.config.title} quantises {module.name}",
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


def spellings(name: str) -> tuple[str, ...]:
    """Return the names of a module by which configurations may call it; its own is the first.

    Files of models that see images have the names of before transformers 4.52, and what is written
    beside them, as llm-compressor's `ignore`, those of the modules in memory.
    """
    for start in _TEXTS[:-1]:
        if name.startswith(start):
            rest = name.removeprefix(start)
            return (name, *(f"{each}{rest}" for each in _TEXTS if each != start))
    return (name,)


def compiled(config: Reader, key: str, pattern: str) -> re.Pattern[str]:
    """Return a regular expression of the file; raises `CheckpointError`."""
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        raise config.refusal(key, f"has {pattern[:64]!r}, which is no regular expression") from None


def parts_of(name: str) -> Iterator[str]:
    """Yield a module's name and all runs of its parts, for each of its `spellings`."""
    for each in spellings(name):
        parts = each.split(".")
        for count in range(len(parts), 0, -1):
            for start in range(len(parts) - count + 1):
                yield ".".join(parts[start : start + count])


class Names:
    """Modules that a configuration names: by runs of parts of their names, or by what begins them.

    Args:
        names: whole names, or such parts, as `is_part` takes them.
        expressions: for the beginning of a name.
    """

    def __init__(self, names: Iterable[str], expressions: Iterable[re.Pattern[str]] = ()) -> None:
        self.names, self._expressions = frozenset(names), tuple(expressions)

    def has(self, module: str) -> bool:
        """Return whether one of them names the module, in any of its `spellings`."""
        if self.names and any(each in self.names for each in parts_of(module)):
            return True
        own = spellings(module)
        return any(found.match(each) for found in self._expressions for each in own)


def skipped(config: Reader, key: str) -> Names:
    """Return the modules of a list as transformers reads it: names, their parts, or expressions.

    An expression is of the beginning of a name, up to the end of a part. Raises `CheckpointError`.
    """
    names = listed(config, key)
    own = (each for each in names if SIGNS & {*each})
    return Names(names, [compiled(config, key, rf"(?:{each})(?:(?<=\.)|(?=\.|$))") for each in own])


def is_part(name: str, module: str) -> bool:
    """Whether a name is that of a module, or of one around it, or the last parts of its name."""
    return f".{name}." in f".{module}."
