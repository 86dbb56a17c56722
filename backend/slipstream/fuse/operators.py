"""Operators of torch, seen as a block runs, to be called again with the tensors of another.

An operator may be called again if the host waits for none of its results and their shapes follow
from the shapes of what it is given.
"""

from collections.abc import Callable, Iterator, Sized
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ALLOCATE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_VIEW = set(  # which never copy, as a reshape may
    """view _unsafe_view _reshape_alias split split_with_sizes slice transpose t detach expand
    select alias as_strided unsqueeze squeeze permute""".split()  # noqa: SIM905
)
_CHANGE = {"add_", "mul_", "copy_", "zero_"}
_MAKE = set(  # tensors that are no views
    """zeros_like new_zeros clone _to_copy repeat cat add mul pow rsqrt clamp relu gelu silu sigmoid
    sum mean amax bmm mm addmm native_layer_norm""".split()  # noqa: SIM905
)


class Place(NamedTuple):
    """Where a call has a tensor: among its arguments, in a list of these, or by a name."""

    holder: Any  # a list or a dictionary
    key: Any

    @property
    def tensor(self) -> Tensor:
        """The tensor that is there."""
        found = self.holder[self.key]
        assert isinstance(found, Tensor), "places are of tensors"
        return found


class Call(NamedTuple):
    """An operator that computed.

    Args:
        position: launches that were noted before it.
        function: the operator.
        given, named: its arguments.
        changes: whether it changes tensors that are there, and makes none.
        made: the tensors that it made.
    """

    position: int
    function: Callable[..., Any]
    given: list[Any]
    named: dict[str, Any]
    changes: bool
    made: list[Tensor]

    def places(self) -> Iterator[Place]:
        """Yield the places of all tensors that it is given."""
        lists = [each for each in self.given if isinstance(each, list)]
        for holder in (self.given, *lists):
            yield from (Place(holder, i) for i, x in enumerate(holder) if isinstance(x, Tensor))
        yield from (Place(self.named, key) for key, x in self.named.items() if _is_tensor(x))

    def again(self) -> list[Tensor]:
        """Call it with what is in its places now; return what it makes."""
        found = self.function(*self.given, **self.named)
        return [] if self.changes else _tensors_of(found)


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what is allocated meanwhile, and which operators compute.

    Args:
        launches: what is noted meanwhile.
    """

    def __init__(self, launches: Sized = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._launches = launches
        self.made: list[Tensor] = []
        self.calls: list[Call] = []
        self.has_unknown = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say that nobody compiles steps: torch would import its compiler, which takes a second."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        if name in _VIEW:
            return function(*args, **kwargs)
        if name in _ALLOCATE:
            made = function(*args, **kwargs)
            self.made.append(made)
            return made
        with self:  # one that consists of others
            found = function.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        found = function(*args, **kwargs)
        changes = function._schema.is_mutable
        is_known = name in _MAKE or (changes and name in _CHANGE)
        if not is_known or _waits(args, kwargs):
            self.has_unknown = True
            return found
        given = [[*each] if isinstance(each, list | tuple) else each for each in args]
        made = [] if changes else _tensors_of(found)
        where = len(self._launches), function
        self.calls.append(Call(*where, given, dict(kwargs), changes, made))
        return found


def _waits(given: Any, named: dict[str, Any]) -> bool:
    """Whether an operator copies to another device, for which the host may wait."""
    device = named.get("device")
    return device is not None and device != given[0].device


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _tensors_of(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [*found]
