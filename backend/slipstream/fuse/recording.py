"""The launches of a block, to be made again for another that is alike.

What the block allocated is kept until all others are through, and stands for what they would have
allocated: launches of a stream come one after the other. A block has a recording only if nothing
but noted launches (`tape.py`) computes in it, and if each address that it passes is known: of its
own tensors, of its cache, of the residual sum and what is still to be added to it, of the step's
inputs, or of what it allocated itself.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.kernels.elementwise.eight_bits import Unscaled
from slipstream.kernels.elementwise.scales import Scales
from slipstream.kernels.runtime import tape
from slipstream.kernels.runtime.kernel import TensorMap
from slipstream.kernels.runtime.op import KernelError
from slipstream.layers.attention import AttentionInputs
from slipstream.layers.decoder import AnyBlock
from slipstream.layers.residual import Residual

_ALLOCATE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_VIEW = set(  # which never copy, as a reshape may
    """view _unsafe_view _reshape_alias split split_with_sizes slice transpose t detach expand
    select alias as_strided unsqueeze squeeze permute""".split()  # noqa: SIM905
)
_KEPT = -1  # the source of an address that all blocks pass
_FIRST_ADDRESS = 1 << 32  # integers from here on may be addresses


class Own(NamedTuple):
    """The tensors of a block, in the order of its form."""

    tensors: list[Tensor]
    addresses: list[int]

    @classmethod
    def of(cls, tensors: list[Tensor]) -> "Own":
        """Look up the addresses, which stay."""
        return cls(tensors, [tensor.data_ptr() for tensor in tensors])


class State(NamedTuple):
    """A residual sum between two blocks, and of what is still to be added product and scales."""

    tensors: tuple[Tensor | None, ...]
    layouts: tuple[object, ...]


def layout_of(tensor: Tensor) -> tuple[object, ...]:
    """Return how a tensor lies in memory, but for its address."""
    return tensor.shape, tensor.stride(), tensor.dtype


def state_of(residual: Residual) -> State | None:
    """Return the state of a sum; None: something else is to be added to it."""
    values, addend = residual.take()
    tensors: tuple[Tensor | None, ...] = (values,)
    if addend is not None:
        residual.add_later(addend)
        if not isinstance(addend, Unscaled):
            return None
        tensors = values, addend.product, *addend.scales
    return State(tensors, tuple([None if x is None else layout_of(x) for x in tensors]))


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what is allocated meanwhile, and whether torch computes anything."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[Tensor] = []
        self.compute = False

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
        self.compute = True
        return function(*args, **kwargs)


class _Memory:
    """Which source an address is of: the number of a tensor, or `_KEPT`."""

    def __init__(self) -> None:
        self._exact: dict[int, int] = {}
        self._ranges: list[tuple[int, int, int]] = []

    def add(self, tensor: Tensor | None, source: int) -> None:
        """Add a tensor's elements; the first that has an address has it."""
        if tensor is None or tensor.numel() == 0:
            return
        begin = tensor.data_ptr()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        size = (1 + sum((n - 1) * step for n, step in steps)) * tensor.itemsize
        self._exact.setdefault(begin, source)
        self._ranges.append((begin, begin + size, source))

    def find(self, address: int) -> tuple[int, int] | None:
        """Return the source of an address, and how far behind its first byte it is."""
        if (source := self._exact.get(address)) is not None:
            return source, 0
        for begin, end, source in self._ranges:
            if begin <= address < end:
                return source, address - begin
        return None


class _Line(NamedTuple):
    """A launch, and which of its values and maps depend on the block."""

    launch: tape.Noted
    values: list[tuple[int, int, int]]  # place, source, bytes behind its first
    maps: list[tuple[int, int, int, Callable[[int], TensorMap]]]


@dataclass(frozen=True, slots=True)
class Recording:
    """The launches of a block.

    Args:
        lines: in order.
        after: tensors of the state behind the block, or numbers of the block's own.
        keeps: what must stay in memory.
    """

    lines: list[_Line]
    after: list[Tensor | int | None]
    keeps: list[object]

    def repeat(self, own: Own, cache: Tensor, state: State, residual: Residual) -> None:
        """Launch what another block launches, with its tensors, behind `state` of the residual."""
        of_state = [0 if tensor is None else tensor.data_ptr() for tensor in state.tensors]
        sources = [*own.addresses, cache.data_ptr(), *of_state]
        for launch, values, maps in self.lines:
            for place, source, behind in values:
                launch.values[place] = sources[source] + behind
            for place, source, behind, moved in maps:
                launch.maps[place] = moved(sources[source] + behind)
            if status := launch.again(launch.values, launch.maps):
                raise KernelError(f"{launch.name}, once more: CUDA error {status}")
        residual.take()
        if self.after:
            found = [own.tensors[x] if isinstance(x, int) else x for x in self.after]
            product, rows, columns, bias = found
            assert product is not None, "it is to be added"
            assert rows is not None, "it lacks its scales"
            assert columns is not None, "it lacks its scales"
            residual.add_later(Unscaled(product, Scales(rows, columns, bias)))


def record(
    block: AnyBlock,
    own: Own,
    before: State,
    residual: Residual,
    inputs: AttentionInputs,
    cache: Tensor,
) -> Recording | None:
    """Apply a block, and return its launches; None: blocks that are alike may launch others."""
    with tape.noting() as launches, Operators() as operators:
        block(residual, inputs, cache)
    after = state_of(residual)
    if operators.compute or not launches or after is None or after.layouts != before.layouts:
        return None
    if after.tensors[0] is not before.tensors[0]:
        return None
    memory = _Memory()
    for source, tensor in enumerate((*own.tensors, cache, *before.tensors)):
        memory.add(tensor, source)
    for tensor in (*_tensors_of(inputs), *operators.made):
        memory.add(tensor, _KEPT)
    lines = [_line(launch, memory) for launch in launches]
    found = [line for line in lines if line is not None]
    left = [_behind(tensor, own, memory) for tensor in after.tensors[1:]]
    if len(found) < len(lines) or not all(is_known for is_known, _ in left):
        return None
    if not _takes_turns(found, before, after, len(own.tensors) + 1):
        return None
    return Recording(found, [each for _, each in left], [operators.made, before, inputs])


def _tensors_of(part: object) -> Iterator[Tensor]:
    """Yield the tensors of a step's inputs, and of what the backend has for all layers."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from _tensors_of(each)
    elif isinstance(part, AttentionInputs):
        for field in fields(part):
            yield from _tensors_of(getattr(part, field.name))


def _line(launch: tape.Noted, memory: _Memory) -> _Line | None:
    """Find which values of a launch depend on the block; None: one is not known."""
    values, maps = [], []
    for place, value in enumerate(launch.values):
        is_address = place in launch.addresses_at
        if not value or not (is_address or _may_be_address(value)):
            continue
        found = memory.find(value)
        if is_address and found is None:
            return None
        if found is not None and found[0] != _KEPT:
            if not is_address:
                return None
            values.append((place, *found))
    for place, tensor_map in launch.maps.items():
        found = memory.find(tensor_map.of)
        if found is None or tensor_map.moved is None:
            return None
        if found[0] != _KEPT:
            maps.append((place, *found, tensor_map.moved))
    return _Line(launch, values, maps)


def _may_be_address(value: object) -> bool:
    return isinstance(value, int) and value >= _FIRST_ADDRESS


def _behind(tensor: Tensor | None, own: Own, memory: _Memory) -> tuple[bool, Tensor | int | None]:
    """Return whether a tensor of the state behind a block is known, and the tensor, or the number
    of the block's own.
    """
    if tensor is None:
        return True, None
    source, offset = memory.find(tensor.data_ptr()) or (len(own.tensors), 0)
    if source == _KEPT:
        return True, tensor
    is_own = source < len(own.tensors) and offset == 0
    return is_own and layout_of(own.tensors[source]) == layout_of(tensor), source


def _takes_turns(lines: Sequence[_Line], before: State, after: State, first: int) -> bool:
    """Return whether what was to be added is read before what is to be added next is written, which
    is in the same memory from the second block on. Sources of the state begin at `first`.
    """
    read = {first + i for i, x in enumerate(before.tensors) if i > 0 and x is not None}
    written = _Memory()
    for tensor in after.tensors[1:]:
        written.add(tensor, _KEPT)
    last, begin = -1, len(lines)
    for number, (launch, values, maps) in enumerate(lines):
        if read & {source for _, source, *_ in (*values, *maps)}:
            last = number
        passed = [launch.values[place] for place in launch.addresses_at]
        passed += [each.of for each in launch.maps.values()]
        if begin == len(lines) and any(written.find(address) for address in passed):
            begin = number
    return last < begin
