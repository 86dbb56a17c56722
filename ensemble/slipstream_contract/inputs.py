"""Typed look-ups in one request: tensors checked against their declaration, and request parameters.

A request parameter (gRPC `parameters`, or an unknown key of a JSON body) may stand for any scalar
input, under its own name, the ensemble's or an older one. Parameters of Triton itself are ignored,
all others are refused by name: a misspelt `temprature` must not pass in silence.
"""

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream_contract.declarations import DType, Model, Tensor
from slipstream_contract.errors import ContractError, clip
from slipstream_contract.ids import TokenIds
from slipstream_contract.limits import INT32_MAX

Array = NDArray[Any]

NUMPY: dict[DType, np.dtype[Any]] = {
    DType.BOOL: np.dtype(np.bool_),
    DType.UINT8: np.dtype(np.uint8),
    DType.UINT32: np.dtype(np.uint32),
    DType.UINT64: np.dtype(np.uint64),
    DType.INT32: np.dtype(np.int32),
    DType.INT64: np.dtype(np.int64),
    DType.FP16: np.dtype(np.float16),
    DType.FP32: np.dtype(np.float32),
    DType.STRING: np.dtype(np.object_),
}

TRITON_PARAMETERS = frozenset(
    {
        "id",
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "priority",
        "timeout",
        "binary_data_output",
        "binary_data_size",
        "classification",
        "traceparent",
        "tracestate",
        "authorization",
        "user-agent",
        "content-type",
    }
)
TRITON_PREFIXES = ("triton_", "triton-", "x-")  # x-: headers that the server forwards
_TRUE, _FALSE = ("true", "1"), ("false", "0")


def read_parameters(request: Any) -> dict[str, object]:
    """Return the parameters of Triton's request: strings, integers, floats, booleans, by name.

    Raises ContractError for what is no text.
    """
    try:
        text = request.parameters()
        request.request_id()
    except UnicodeDecodeError:
        raise ContractError("a request parameter or the request id is not valid UTF-8") from None
    return dict(json.loads(text)) if text else {}


def is_triton_parameter(name: str) -> bool:
    """Return whether the server or a proxy adds this parameter to a request, and no client."""
    return name.lower() in TRITON_PARAMETERS or name.lower().startswith(TRITON_PREFIXES)


# Names of other contracts, where the name that is alike in letters means something else.
_MEANT = {
    "logprobs": "return_log_probs",
    "top_logprobs": "return_log_probs",
    "logit_bias": "embedding_bias_words",
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
}


def refuse_parameter(name: str, known: Collection[str]) -> ContractError:
    """Return the error for a parameter that no model knows, with the nearest name there is."""
    written = name.lower().replace("-", "_")
    meant = _MEANT.get(written)
    longer = sorted(other for other in known if written and other.startswith(written))
    near = [meant] if meant in known else longer
    near = near or difflib.get_close_matches(written, list(known), n=1)
    hint = f"; do you mean {near[0]}?" if near else ""
    return ContractError(f"unknown request parameter {clip(name)}{hint}")


def refuse_others(parameters: Mapping[str, object], known: Collection[str]) -> None:
    """Raise ContractError for the first request parameter that is neither known nor Triton's."""
    for name in parameters:
        if name not in known and not is_triton_parameter(name):
            raise refuse_parameter(name, known)


class Inputs:
    """Inputs and parameters of one request. Arrays come without the batch dimension.

    Args:
        model: whose inputs they are.
        arrays: by input name.
        parameters: the request's, already without Triton's own.
        names: parameter or older input name -> input name, beside the inputs' own names.
        labels: input name -> how errors call it, where that differs.
        own: request parameters that no input has.
        others: parameters that are read elsewhere, for the hint at a misspelt one.

    Raises ContractError for undeclared, misshapen, repeated and not yet supported inputs.
    """

    def __init__(
        self,
        model: Model,
        arrays: Mapping[str, Array],
        parameters: Mapping[str, object],
        names: Mapping[str, str],
        labels: Mapping[str, str],
        own: Collection[str] = (),
        others: Collection[str] = (),
    ) -> None:
        self._labels = labels
        self._own = own
        self._others = others
        self._tensors = model.inputs_by_name
        self._values: dict[str, object] = {}
        self._given: dict[str, str] = {}  # canonical name -> what the request calls it
        for name, given in arrays.items():
            tensor = self._tensors.get(name)
            if tensor is None:
                raise ContractError(f"{clip(name)} is not an input of {model.name}")
            array = _checked(tensor, given, self.label(name))
            refuse_later(tensor, array, self.label(name))
            self._put(names.get(name, name), name, array)
        for name, value in parameters.items():
            self._put_parameter(name, value, names)

    def label(self, name: str) -> str:
        """Return the name that errors give an input."""
        return self._labels.get(name, name)

    def has(self, name: str) -> bool:
        """Return whether the request gives it."""
        return name in self._values

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a whole number. Raises ContractError if it is missing without a default."""
        if default is not None and name not in self._values:
            return default
        return to_whole(self._called(name), self._scalar(name))

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number, perhaps not a finite one. Raises ContractError."""
        if default is not None and name not in self._values:
            return default
        return to_number(self._called(name), self._scalar(name))

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false. Raises ContractError."""
        if name not in self._values:
            return default
        return to_flag(self._called(name), self._scalar(name))

    def flag_or_none(self, name: str) -> bool | None:
        """Return true or false; None where it is not given. Raises ContractError."""
        return self.flag(name) if self.has(name) else None

    def put_flag(self, name: str, given_as: str, value: object) -> None:
        """Take a parameter for an input that may say the same. Raises ContractError if it differs.

        `value`: None if it is not given.
        """
        if value is None:
            return
        flag = to_flag(given_as, value)
        if self.flag(name, flag) != flag:
            raise ContractError(f"{given_as} is {flag}, but {self.label(name)} is {not flag}")
        self._values.setdefault(name, flag)
        self._given.setdefault(name, given_as)

    def value(self, name: str, default: object) -> object:
        """Return a request parameter as it came."""
        return self._values.get(name, default)

    def text(self, name: str) -> str:
        """Return a text. Raises ContractError if it is missing or is not UTF-8."""
        return decode(self._called(name), self._scalar(name))

    def texts(self, name: str) -> list[str]:
        """Return all texts of an input, none if it is not given. Raises ContractError."""
        array = self.array(name)
        if array is None:
            return []
        return [decode(f"{self.label(name)}[{i}]", item) for i, item in enumerate(array.tolist())]

    def array(self, name: str) -> Array | None:
        """Return the tensor as it came."""
        value = self._values.get(name)
        return value if isinstance(value, np.ndarray) else None

    def _called(self, name: str) -> str:
        return self.label(self._given.get(name, name))

    def _scalar(self, name: str) -> object:
        value = self._values.get(name)
        if value is None:
            raise ContractError(f"{self.label(name)} is missing")
        return value.reshape(-1)[0] if isinstance(value, np.ndarray) else value

    def _put(self, name: str, given_as: str, value: object) -> None:
        if name in self._values:
            first = self._given[name]
            both = f"{first} and {given_as}" if first != given_as else f"{first}, twice,"
            raise ContractError(f"{both} are given but mean the same; one is enough")
        self._values[name], self._given[name] = value, given_as

    def _put_parameter(self, name: str, value: object, names: Mapping[str, str]) -> None:
        canonical = names.get(name, name)
        tensor = self._tensors.get(canonical)
        if tensor is None and canonical in self._own:
            self._put(canonical, name, value)
            return
        if tensor is None:
            served = {each.name for each in self._tensors.values() if each.neutral is None}
            raise refuse_parameter(name, served | names.keys() | {*self._own, *self._others})
        if tensor.dims != (1,) or tensor.dtype is DType.STRING:
            raise ContractError(f"{name} is a request parameter here, but must be a tensor")
        if tensor.neutral is not None:
            cast = to_flag if tensor.dtype is DType.BOOL else to_number
            if cast(name, value) not in tensor.neutral:
                raise refuse_unsupported(name, value, tensor.neutral)
            return
        self._put(canonical, name, value)


def _checked(tensor: Tensor, array: object, label: str) -> Array:
    """Return the array if its type and shape are as declared; a scalar has no dimension or one."""
    if isinstance(array, np.generic):  # an element of a batch of scalars
        array = np.asarray(array)
    if not isinstance(array, np.ndarray):
        raise ContractError(f"{label} is {clip(array)}, not an array")
    wanted = NUMPY[tensor.dtype]
    if array.dtype.kind not in "OSU" if wanted.kind == "O" else array.dtype != wanted:
        raise ContractError(f"{label} has type {clip(str(array.dtype))}, not {tensor.dtype}")
    shape = array.shape or (1,) * (tensor.dims == (1,))
    fits = len(shape) == len(tensor.dims) and all(
        dim in (-1, size) for dim, size in zip(tensor.dims, shape, strict=False)
    )
    if not fits:
        raise ContractError(f"{label} has shape {clip(list(array.shape))}, not {list(tensor.dims)}")
    return array


def refuse_later(tensor: Tensor, array: Array, label: str) -> None:
    """Refuse an input of later work unless it has no effect. Raises ContractError."""
    if tensor.neutral is None or array.size == 0:
        return
    if tensor.dtype is DType.STRING:
        wrong = [item for item in array.reshape(-1).tolist() if item not in ("", b"")]
    else:
        wrong = array[~np.isin(array, np.array(tensor.neutral, array.dtype))].tolist()
    if wrong:
        raise refuse_unsupported(label, wrong[0], tensor.neutral)


def refuse_unsupported(name: str, value: object, served: Sequence[object]) -> ContractError:
    """Return the error for an input that is declared, not implemented, and has an effect."""
    only = [f"{each:g}" if isinstance(each, float) else str(each) for each in served if each != ""]
    limit = f"only {' or '.join(only)} is served" if only else "leave it out"
    return ContractError(f"{name} is not supported yet: it is {clip(value)}, {limit}")


# --- casts: tensors hold typed elements, parameters strings, numbers and booleans ----------------


def to_whole(field: str, value: object) -> int:
    """Return a whole number; a text of one counts. Raises ContractError."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and len(value) <= 32:
        try:
            return int(value)
        except ValueError:
            pass
    raise ContractError(f"{field} is {clip(value)}, not a whole number")


def to_number(field: str, value: object) -> float:
    """Return a number; a text of one counts, true and false do not. Raises ContractError."""
    if isinstance(value, int | float | np.number | str) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    raise ContractError(f"{field} is {clip(value)}, not a number")


def to_flag(field: str, value: object) -> bool:
    """Return true or false; the texts "true", "false", "1", "0" count. Raises ContractError."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    text = str(value).lower() if isinstance(value, str | int) else ""
    if text not in _TRUE + _FALSE:
        raise ContractError(f"{field} is {clip(value)}, neither true nor false")
    return text in _TRUE


def decode(field: str, value: object) -> str:
    """Return a text from UTF-8; NUL characters are as good as others. Raises ContractError."""
    try:
        if isinstance(value, bytes | np.bytes_):
            return value.decode()
        if isinstance(value, str):
            value.encode()  # no lone surrogates
            return str(value)
    except UnicodeError as error:
        at = getattr(error, "start", 0)
        raise ContractError(f"{field} is not valid UTF-8 at byte {at}: {clip(value)}") from None
    raise ContractError(f"{field} is {clip(value)}, not a text")


def token_ids(field: str, array: Array) -> TokenIds:
    """Return the ids of an int32 array, none of them negative. Raises ContractError."""
    if array.size and int(array.min()) < 0:
        at = int(array.argmin())
        raise ContractError(
            f"{field}[{at}] is {int(array[at])}, not a token id from 0 to {INT32_MAX}"
        )
    return TokenIds("i", array.tobytes())
