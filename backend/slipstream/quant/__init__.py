"""Schemes in which weights are kept: one module each, named as `quantization` names it.

A scheme reads a layer's weights, packs them and multiplies with them; `scheme.py` is its
interface. It knows nothing of the stages around a product. No torch is imported before a scheme is
named.
"""

import functools
import pkgutil
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.quant.scheme import MatrixSource, Scheme

# Modules of the package that are no schemes.
_HELPERS = {"forms", "matrix", "parts", "rounding", "row_forms", "scheme", "units"}
_registered: "dict[str, Scheme]" = {}  # beside the modules


@functools.cache
def _modules() -> frozenset[str]:
    """Find the modules of this package that are schemes."""
    return frozenset(module.name for module in pkgutil.iter_modules(__path__)) - _HELPERS


def names() -> tuple[str, ...]:
    """List all schemes: `auto`, the checkpoint's own; `none`, the model's dtype; the others."""
    first = ("auto", "none")
    return (*first, *sorted((_modules() | _registered.keys()) - set(first)))


def register(scheme: "Scheme") -> None:
    """Add a scheme that is no module of this package."""
    _registered[scheme.name] = scheme


def unregister(name: str) -> None:
    """Take out a scheme that was registered."""
    del _registered[name]


def named(name: str) -> "Scheme":
    """Return one of `names()`."""
    assert name in names(), f"{name} is not one of {', '.join(names())}"
    return _registered.get(name) or _of_module(name)


@functools.cache
def _of_module(name: str) -> "Scheme":
    scheme: Scheme = import_module(f"{__name__}.{name}").SCHEME
    return scheme


def scheme_of(w: "MatrixSource", matrices: Sequence[str], default: str) -> "Scheme":
    """Return the scheme in which the checkpoint stores these matrices; `default` if it says none.

    `default` is what the operator chose: weights of 16 and 32 bits can be packed by any.
    """
    schemes = (named(name) for name in names())
    return next((each for each in schemes if each.detects(w, matrices)), named(default))
