"""Arguments of an operation as one struct, shared by its oracle and its launcher."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
C = TypeVar("C")
R = TypeVar("R")


def flattened(struct: Callable[P, C]) -> Callable[[Callable[[C], R]], Callable[P, R]]:
    """Make a function of one struct a function of the struct's fields (decorator).

    Callers pass fields by position or by name, with the struct's defaults; names, order and
    defaults are written once.
    """

    def decorate(body: Callable[[C], R]) -> Callable[P, R]:
        @functools.wraps(body)
        def of_fields(*args: P.args, **kwargs: P.kwargs) -> R:
            return body(struct(*args, **kwargs))

        return of_fields

    return decorate
