"""Requests as arrays, and strategies for arrays that nobody should send."""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from slipstream_contract.errors import Code, ContractError
from slipstream_contract.inputs import NUMPY
from slipstream_contract.tensors import DType, Model, Tensor


def strings(*items: str | bytes) -> Any:
    array = np.empty(len(items), object)
    array[:] = [item.encode() if isinstance(item, str) else item for item in items]
    return array


def array_of(tensor: Tensor, *values: Any) -> Any:
    """The values in the tensor's type, one dimension."""
    if tensor.dtype is DType.STRING:
        return strings(*values)
    return np.array(values, NUMPY[tensor.dtype])


def inputs_of(model: Model, **values: Any) -> dict[str, Any]:
    """Scalars and lists as the tensors of a model."""
    arrays = {}
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        arrays[name] = array_of(model.input(name), *items)
    return arrays


def served_or_refused(read: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What it returns, or the one error that it may raise."""
    try:
        outcome = read(*arguments, **named)
    except ContractError as error:
        outcome = error
        clear = error.code is Code.INVALID_ARGUMENT and 0 < len(error.message) < 500
        event("refused: " + error.message.partition(" ")[2][:18])
        if not clear:
            raise AssertionError(f"not a clear error: {error}") from None
    else:
        event("served")
    return outcome


objects = st.one_of(
    st.binary(max_size=4), st.text(max_size=4), st.integers(), st.none(), st.floats(), st.booleans()
)
shapes = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
dtypes = st.one_of(
    arrays.boolean_dtypes(),
    arrays.integer_dtypes(endianness="<"),
    arrays.unsigned_integer_dtypes(endianness="<"),
    arrays.floating_dtypes(endianness="<"),
)
any_array = st.one_of(
    st.builds(lambda dtype, shape: (dtype, shape), dtypes, shapes).flatmap(
        lambda pair: arrays.arrays(*pair)
    ),
    shapes.flatmap(lambda shape: arrays.arrays(np.dtype(object), shape, elements=objects)),
    objects,
)
scalars = st.one_of(
    st.integers(), st.floats(), st.booleans(), st.text(max_size=8), st.none(), st.just([1])
)


@st.composite
def arrays_of(draw: Any, tensor: Tensor, is_sensible: bool) -> Any:
    """Of the type and shape that are declared; the elements are small, or any that the type has."""
    dtype = NUMPY[tensor.dtype]
    shape = tuple(dim if dim >= 0 else draw(st.integers(0, 3)) for dim in tensor.dims)
    if shape == (1,) and draw(st.booleans()):
        shape = ()
    texts = st.text("ab\0é", min_size=1, max_size=4)
    sensible = {"O": texts, "b": st.booleans(), "f": st.floats(0, 1, width=16)}
    if is_sensible:
        elements = sensible.get(dtype.kind, st.integers(1, 3))
    else:
        elements = st.one_of(st.binary(max_size=4), texts) if dtype.kind == "O" else None
    return draw(arrays.arrays(dtype, shape, elements=elements))


@st.composite
def near_requests(draw: Any, model: Model, *required: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and request parameters of a model: sensible ones with at most a few faults."""
    served = [tensor.name for tensor in model.inputs if tensor.neutral is None]
    chosen = {*draw(st.lists(st.sampled_from(served), max_size=4)), *required}
    inputs = {name: draw(arrays_of(model.input(name), True)) for name in sorted(chosen)}
    if "input_ids" in inputs:
        inputs |= {"input_ids": np.arange(1, 4, dtype=np.int32)}
    parameters: dict[str, Any] = {}
    faults = st.sampled_from(["element", "array", "later", "missing", "key", "value"])
    for fault in draw(st.lists(faults)):
        name = draw(st.sampled_from(sorted(chosen)))
        match fault:
            case "element":
                inputs[name] = draw(arrays_of(model.input(name), False))
            case "array":
                inputs[name] = draw(any_array)
            case "later":
                other = draw(st.sampled_from([t.name for t in model.inputs]))
                inputs[other] = draw(arrays_of(model.input(other), False))
            case "missing":
                inputs.pop(name, None)
            case "key":
                parameters[draw(st.text(max_size=6))] = draw(scalars)
            case "value":
                parameters[draw(st.sampled_from([*served, "min_p", "id"]))] = draw(scalars)
    return inputs, parameters
