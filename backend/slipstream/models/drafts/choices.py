"""Read `medusa_choices` and `eagle_choices`: the candidates of a step, as TensorRT-LLM writes them.

A choice is a path of ranks: `{0, 0, 1}` is the second likeliest token behind the likeliest two. All
that is drafted here is a chain of likeliest tokens: `{0}, {0, 0}, {0, 0, 0}`. No torch.
"""

import re

from slipstream.errors import ConfigError

_MOST = 4096  # characters


def chain_length(field: str, text: str) -> int:
    """Return how many drafts the choices of a chain ask for; raises `ConfigError` for a tree."""
    if len(text) > _MOST:
        raise ConfigError(f"{field} has {len(text)} characters, more than {_MOST}")
    bare = re.sub(r"\s", "", text)
    bare = bare[1:-1] if bare.startswith("{{") and bare.endswith("}}") else bare
    if not re.fullmatch(r"\{\d+(,\d+)*\}(,\{\d+(,\d+)*\})*", bare):
        raise ConfigError(f"{field} = {text[:64]!r} is not a list like {{0}}, {{0, 0}}")
    paths = [tuple(map(int, path.split(","))) for path in re.findall(r"\{([^}]*)\}", bare)]
    longest = max(map(len, paths))
    if sorted(set(paths)) != [(0,) * length for length in range(1, longest + 1)]:
        raise ConfigError(
            f"{field} = {text[:64]!r} is a tree; only a chain is drafted: {{0}}, {{0, 0}}, ..."
        )
    return longest
