"""What a block launches, to be launched again for another that is alike.

What the block allocated is kept until all others are through, and stands for what they would have
allocated: launches of a stream come one after the other. A block has a recording only if noted
launches (`tape.py`) and operators of torch that may be called again (`operators.py`) are all that
computes in it, and if each address that they get is known: of the block's own tensors, of its
cache, of the residual sum and what is still to be added to it, of the step's inputs, of memory that
lasts, or of what was made in the block itself.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

from torch import Tensor

from slipstream.fuse.alike import ALIGNED, extent_of
from slipstream.fuse.operators import Call, Operators, Place
from slipstream.kernels.elementwise.eight_bits import Unscaled
from slipstream.kernels.elementwise.scales import Scales
from slipstream.kernels.runtime import tape
from slipstream.kernels.runtime.kernel import TensorMap
from slipstream.kernels.runtime.op import KernelError
from slipstream.layers.attention import AttentionInputs
from slipstream.layers.decoder import AnyBlock
from slipstream.layers.residual import Residual

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
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % ALIGNED


def state_of(residual: Residual) -> State | None:
    """Return the state of a sum; None: something else is to be added to it.

    Memory that lasts has its address in the layout: launches may pass it as such, too.
    """
    values, addend = residual.take()
    tensors: tuple[Tensor | None, ...] = (values,)
    if addend is not None:
        residual.add_later(addend)
        if not isinstance(addend, Unscaled):
            return None
        tensors = values, addend.product, *addend.scales
    layouts = [x if x is None else (*layout_of(x), tape.lasting_at(x.data_ptr())) for x in tensors]
    return State(tensors, tuple(layouts))


class _Memory:
    """Which source an address is of: the number of a tensor, or `_KEPT`."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}  # by source
        self._exact: dict[int, int] = {}
        self._ranges: list[tuple[int, int, int]] = []

    def add(self, tensor: Tensor | None, source: int) -> None:
        """Add a tensor's elements; the first that has an address has it."""
        if tensor is None or tensor.numel() == 0:
            return
        self.tensors[source] = tensor
        begin = tensor.data_ptr()
        self._exact.setdefault(begin, source)
        self._ranges.append((begin, begin + extent_of(tensor), source))

    def find(self, address: int) -> tuple[int, int] | None:
        """Return the source of an address, and how far behind its first byte it is."""
        if (source := self._exact.get(address)) is not None:
            return source, 0
        for begin, end, source in self._ranges:
            if begin <= address < end:
                return source, address - begin
        return None


class _Sources(NamedTuple):
    """Tensors of a block: its own, its cache, the state before it, and then what its operators
    made, as they make it.
    """

    tensors: list[Tensor | None]
    addresses: list[int]

    @classmethod
    def of(cls, own: Own, cache: Tensor, state: State) -> "_Sources":
        """Return what is there before the block runs."""
        of_state = [0 if tensor is None else tensor.data_ptr() for tensor in state.tensors]
        given = [*own.addresses, cache.data_ptr(), *of_state]
        return cls([*own.tensors, cache, *state.tensors], given)

    def add(self, tensors: list[Tensor]) -> None:
        """Add what an operator made."""
        self.tensors.extend(tensors)
        self.addresses.extend(tensor.data_ptr() for tensor in tensors)


class _Line(Protocol):
    """A launch or a call."""

    @property
    def uses(self) -> set[int]:
        """The sources that it is given."""

    @property
    def passed(self) -> list[int]:
        """The addresses that it was given."""

    def again(self, sources: _Sources) -> None:
        """Do it with the tensors of a block."""


class _Launch(NamedTuple):
    """A launch, and which of its values and maps depend on the block."""

    launch: tape.Noted
    values: list[tuple[int, int, int]]  # place, source, bytes behind its first
    maps: list[tuple[int, int, int, Callable[[int], TensorMap]]]

    @property
    def uses(self) -> set[int]:
        return {each[1] for each in self.values} | {each[1] for each in self.maps}

    @property
    def passed(self) -> list[int]:
        maps = [each.of for each in self.launch.maps.values()]
        return [self.launch.values[place] for place in self.launch.addresses_at] + maps

    def again(self, sources: _Sources) -> None:
        launch, addresses = self.launch, sources.addresses
        for place, source, behind in self.values:
            launch.values[place] = addresses[source] + behind
        for place, source, behind, moved in self.maps:
            launch.maps[place] = moved(addresses[source] + behind)
        if status := launch.again(launch.values, launch.maps):
            raise KernelError(f"{launch.name}, once more: CUDA error {status}")


class _View(NamedTuple):
    """A tensor that is a source, or lies in one."""

    place: Place
    source: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    behind: int  # elements behind the first of the source
    is_whole: bool

    def of(self, sources: _Sources) -> Tensor:
        """Return the same part of a block's tensor."""
        tensor = sources.tensors[self.source]
        assert tensor is not None, "it has been there"
        if self.is_whole:
            return tensor
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.behind)


class _Operator(NamedTuple):
    """A call of an operator, and which of its tensors depend on the block."""

    call: Call
    views: list[_View]
    passed: list[int]

    @property
    def uses(self) -> set[int]:
        return {each.source for each in self.views}

    def again(self, sources: _Sources) -> None:
        for each in self.views:
            holder, key = each.place
            holder[key] = each.of(sources)
        sources.add(self.call.again())
        for each in self.views:  # which keep no other block's tensors in memory
            holder, key = each.place
            holder[key] = None


@dataclass(frozen=True, slots=True)
class Recording:
    """What a block launches.

    Args:
        lines: in order.
        after: tensors of the state behind the block, or numbers of the block's own.
        keeps: what must stay in memory.
    """

    lines: list[_Line]
    after: list[Tensor | int | None]
    keeps: list[object]

    def repeat(self, own: Own, cache: Tensor, state: State, residual: Residual) -> State:
        """Launch what another block launches, with its tensors, behind `state` of the residual;
        return the state behind it, which lies in memory like that.
        """
        sources = _Sources.of(own, cache, state)
        for line in self.lines:
            line.again(sources)
        residual.take()
        found = [own.tensors[x] if isinstance(x, int) else x for x in self.after]
        if found:
            product, rows, columns, bias = found
            assert product is not None, "it is to be added"
            assert rows is not None, "it lacks its scales"
            assert columns is not None, "it lacks its scales"
            residual.add_later(Unscaled(product, Scales(rows, columns, bias)))
        return State((state.tensors[0], *found), state.layouts)


def record(
    block: AnyBlock,
    own: Own,
    before: State,
    residual: Residual,
    inputs: AttentionInputs,
    cache: Tensor,
) -> Recording | None:
    """Apply a block, and return its launches; None: blocks that are alike may launch others."""
    with tape.noting() as launches, Operators(launches) as operators:
        block(residual, inputs, cache)
    after = state_of(residual)
    if operators.has_unknown or not launches or after is None or after.layouts != before.layouts:
        return None
    if after.tensors[0] is not before.tensors[0]:
        return None
    kept = [*_tensors_of(inputs), *operators.made, *tape.lasting()]
    memory = _memory_of(_Sources.of(own, cache, before), len(own.tensors), kept, operators.calls)
    lines = None if memory is None else _lines(launches, operators.calls, memory)
    if memory is None or lines is None:
        return None
    left = [_behind(tensor, own, memory) for tensor in after.tensors[1:]]
    if not all(is_known for is_known, _ in left):
        return None
    if not _takes_turns(lines, before, after, len(own.tensors) + 1):
        return None
    return Recording(lines, [each for _, each in left], [operators.made, before, inputs])


def _memory_of(
    sources: _Sources, num_own: int, kept: Sequence[Tensor], calls: Sequence[Call]
) -> _Memory | None:
    """Return whose the memory is that a block saw; None: the state before it has tensors of its own
    in it, so that what is passed may be either.
    """
    memory = _Memory()
    for source, tensor in enumerate(sources.tensors):
        is_foreign = source >= num_own and tensor is not None and tensor.numel() > 0
        if is_foreign and memory.find(sources.addresses[source]) is not None:
            return None
        memory.add(tensor, source)
    for tensor in kept:
        memory.add(tensor, _KEPT)
    made = [tensor for call in calls for tensor in call.made]
    for source, tensor in enumerate(made, len(sources.tensors)):
        memory.add(tensor, source)
    return memory


def _lines(
    launches: Sequence[tape.Noted], calls: Sequence[Call], memory: _Memory
) -> list[_Line] | None:
    """Return launches and calls in their order; None: an address is not known."""
    lines: list[_Line | None] = []
    begin = 0
    for call in calls:
        lines += [_launch(launch, memory) for launch in launches[begin : call.position]]
        lines.append(_operator(call, memory))
        begin = call.position
    lines += [_launch(launch, memory) for launch in launches[begin:]]
    found = [line for line in lines if line is not None]
    return found if len(found) == len(lines) else None


def _tensors_of(part: object) -> Iterator[Tensor]:
    """Yield the tensors of a step's inputs, and of what the backend has for all layers."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from _tensors_of(each)
    elif isinstance(part, AttentionInputs):
        yield from part.backend.shared
        for field in fields(part):
            yield from _tensors_of(getattr(part, field.name))


def _launch(launch: tape.Noted, memory: _Memory) -> _Launch | None:
    """Find which values of a launch depend on the block; None: one is not known."""
    values, maps = [], []
    for place, value in enumerate(launch.values):
        is_address = place in launch.addresses_at
        if not value or not (is_address or _may_be_address(value)):
            continue
        found = memory.find(value)
        if found is None or not (is_address or found[0] == _KEPT):
            return None
        if found[0] != _KEPT:
            values.append((place, *found))
    for place, tensor_map in launch.maps.items():
        found = memory.find(tensor_map.of)
        if found is None or tensor_map.moved is None:
            return None
        if found[0] != _KEPT:
            maps.append((place, *found, tensor_map.moved))
    return _Launch(launch, values, maps)


def _operator(call: Call, memory: _Memory) -> _Operator | None:
    """Find which tensors of a call depend on the block; None: one is not known."""
    views, passed = [], []
    for place in call.places():
        tensor = place.tensor
        if tensor.numel() == 0:
            continue
        passed.append(tensor.data_ptr())
        found = memory.find(tensor.data_ptr())
        if found is None:
            return None
        source, behind = found
        if source == _KEPT:
            continue
        whole = memory.tensors[source]
        is_whole = behind == 0 and layout_of(whole) == layout_of(tensor)
        is_inside = behind + extent_of(tensor) <= extent_of(whole)
        if whole.dtype != tensor.dtype or not is_inside:
            return None
        sizes = tuple(tensor.shape), tensor.stride()
        views.append(_View(place, source, *sizes, behind // tensor.itemsize, is_whole))
    for each in views:
        each.place.holder[each.place.key] = None
    return _Operator(call._replace(made=[]), views, passed)


def _may_be_address(value: object) -> bool:
    return isinstance(value, int) and value >= _FIRST_ADDRESS


def _behind(tensor: Tensor | None, own: Own, memory: _Memory) -> tuple[bool, Tensor | int | None]:
    """Return whether a tensor of the state behind a block is known, and the tensor, or the number
    of the block's own.
    """
    if tensor is None or tape.lasting_at(tensor.data_ptr()):
        return True, tensor
    source, offset = memory.find(tensor.data_ptr()) or (len(own.tensors), 0)
    if source == _KEPT:
        return True, tensor
    is_own = source < len(own.tensors) and offset == 0
    return is_own and layout_of(own.tensors[source]) == layout_of(tensor), source


def _takes_turns(lines: Sequence[_Line], before: State, after: State, first: int) -> bool:
    """Return whether what was to be added is read before what is to be added next is written, which
    is in the same memory from the second block on. Sources of the state begin at `first`.
    """
    changed = [x for x in after.tensors[1:] if x is not None and not tape.lasting_at(x.data_ptr())]
    read = {
        first + i
        for i, x in enumerate(before.tensors)
        if i > 0 and x is not None and not tape.lasting_at(x.data_ptr())
    }
    written = _Memory()
    for tensor in changed:
        written.add(tensor, _KEPT)
    last, begin = -1, len(lines)
    for number, line in enumerate(lines):
        if read & line.uses:
            last = number
        if begin == len(lines) and any(written.find(address) for address in line.passed):
            begin = number
    return last < begin
