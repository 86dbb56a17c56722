"""Which modules an adapter's configuration says that it changes, by the rules of PEFT.

PEFT leaves out, without a word, what a file has of other modules; here that is an error.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream_contract.errors import clip

from slipstream.models.adapters.patterns import Pattern, Whole
from slipstream.models.reader import Reader

_log = logging.getLogger(__name__)
_ALL = "all-linear"
_Names = frozenset[str] | Whole  # ends of names, or a regex of whole names


@dataclass(frozen=True, slots=True)
class Selection:
    """The modules that have terms; by default any may.

    targets: `target_modules`; None: any.
    excluded: `exclude_modules`; None: none is.
    layers: numbers of layers, if targets are ends of names; None: all.
    before_number: what the name before a layer's number ends in; empty: anything.
    """

    targets: _Names | None = None
    excluded: _Names | None = None
    layers: frozenset[int] | None = None
    before_number: tuple[Pattern, ...] = ()

    def left_out_by(self, module: str) -> str | None:
        """Return the key that leaves a module out; None: it is meant."""
        if self.excluded is not None and _has(self.excluded, module):
            return "exclude_modules"
        if self.targets is None:
            return None
        if not _has(self.targets, module):
            return "target_modules"
        is_by_end = not isinstance(self.targets, Whole) and module not in self.targets
        if self.layers is None or not is_by_end or self.layers & self._numbers_of(module):
            return None
        return "layers_to_transform"

    def _numbers_of(self, module: str) -> set[int]:
        """Return the numbers in a name that may be its layer's: PEFT takes the first one, and took
        the last one before 0.19.
        """
        parts = module.split(".")
        return {
            int(parts[place])
            for place in range(1, len(parts) - 1)
            if parts[place].isdecimal() and self._is_of_layers(".".join(parts[:place]))
        }

    def _is_of_layers(self, name: str) -> bool:
        if not self.before_number:
            return "." in name
        return any(pattern.matches(name) for pattern in self.before_number)


def _has(names: _Names, module: str) -> bool:
    if isinstance(names, Whole):
        return names.matches(module)
    parts = module.split(".")
    return any(".".join(parts[place:]) in names for place in range(len(parts)))


ANY = Selection()


def read_selection(config: Reader) -> Selection:
    """Read which modules are meant; raises `CheckpointError` (file, key, value).

    A regex whose search is not bounded (`patterns.py`) is not held against the modules.
    """
    targets = _names(config, "target_modules")
    return Selection(
        None if isinstance(targets, frozenset) and _ALL in targets else targets,
        _names(config, "exclude_modules") or None,
        _layers(config),
        _before_number(config),
    )


def _texts(config: Reader, key: str) -> Sequence[str] | None:
    value = config.get(key)
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise config.refusal(key, "is neither a text nor a list of texts")
    return texts


def _names(config: Reader, key: str) -> _Names | None:
    value, texts = config.get(key), _texts(config, key)
    if texts is None or not isinstance(value, str) or value in ("", _ALL):
        return None if texts is None else frozenset(filter(None, texts))
    try:
        return Whole(value)
    except ValueError as error:
        _log.warning("%s", config.refusal(key, f"is not looked at: {error}"))
        return None


def _layers(config: Reader) -> frozenset[int] | None:
    value = config.get("layers_to_transform")
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(number) is int for number in numbers):
        raise config.refusal("layers_to_transform", "is neither a number nor a list of numbers")
    return frozenset(numbers) or None


def _before_number(config: Reader) -> tuple[Pattern, ...]:
    found: list[Pattern] = []
    for text in filter(None, _texts(config, "layers_pattern") or ()):
        try:
            found.append(Pattern(text))
        except ValueError as error:
            raise config.refusal("layers_pattern", f"has {clip(text)}, {error}") from None
    return tuple(found)
