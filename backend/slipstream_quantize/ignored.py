"""Choose modules by name, by parts of it, or by a regular expression, as `--ignore` names them."""

import re
from collections.abc import Callable, Iterable, Sequence

from slipstream.errors import ConfigError
from slipstream.models.formats.format import is_part

_SHOWN = 8  # names in an error


def ignored(
    patterns: Sequence[str], groups: Iterable[Sequence[str]], unquantised: Sequence[str]
) -> list[str]:
    """Return the names of the matrices that stay as they are, as `named` finds them.

    Raises `ConfigError` where no matrix would be left, too.
    """
    groups = list(groups)
    found = named("--ignore", patterns, groups, unquantised)
    if found and {*found} == {name for group in groups for name in group}:
        raise ConfigError("--ignore: names all linear layers, so there is nothing to quantise")
    return found


def named(
    option: str,
    patterns: Sequence[str],
    groups: Iterable[Sequence[str]],
    unquantised: Sequence[str],
) -> list[str]:
    """Return the names of the matrices that `patterns` name.

    Args:
        option: its name, for errors.
        patterns: names of modules, or consecutive parts of them; behind `re:` regular expressions
            for the beginning of a name, as in compressed-tensors' `ignore`.
        groups: names of the matrices of blocks; those of a group are one GEMM or one mixture.
        unquantised: modules that no scheme changes, which may be named, too.

    Raises `ConfigError` for a pattern that names nothing or a part of a group.
    """
    every = [list(dict.fromkeys(group)) for group in groups]
    found: set[str] = set()
    for pattern in patterns:
        names = _matcher(option, pattern)
        own = {name for group in every for name in group if names(name)}
        if not own and not any(map(names, unquantised)):
            raise ConfigError(f"{option} {pattern}: names no linear layer; {_ends(every)}")
        found |= own
    for group in every:
        left = [name for name in group if name not in found]
        if left and len(left) < len(group):
            first = next(name for name in group if name in found)
            raise ConfigError(
                f"{option}: names {first} but not {left[0]}: both are of one GEMM or one mixture, "
                "so name all or none"
            )
    return [name for group in every for name in group if name in found]


def _matcher(option: str, pattern: str) -> Callable[[str], bool]:
    """Return the test of a name."""
    if not pattern.startswith("re:"):
        return lambda name: is_part(pattern, name)
    try:
        expression = re.compile(pattern[len("re:") :])
    except re.error as error:
        raise ConfigError(f"{option} {pattern}: no regular expression: {error}") from None
    return lambda name: expression.match(name) is not None


def _ends(groups: Iterable[Sequence[str]]) -> str:
    """Return what there is to name: the last parts of names."""
    ends = dict.fromkeys(".".join(name.split(".")[-2:]) for group in groups for name in group)
    more = ", ..." if len(ends) > _SHOWN else ""
    return f"there are {', '.join(list(ends)[:_SHOWN])}{more}"
