"""compressed-tensors, which llm-compressor and `slipstream quantize` write.

A group of modules has one scheme; what tensors a module has, says how it is packed.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.models.formats.format import Format, Names, Row, compiled, listed
from slipstream.models.formats.inputs import is_sorted, order_of
from slipstream.models.formats.module import (
    FLOATS,
    WORD,
    Module,
    check_numbers,
    num_groups,
    num_words,
    over_rows,
    unpack,
    without,
)
from slipstream.models.reader import Reader, words
from slipstream.quant.matrix import Kind, QuantMatrix, RowType, halves

_TENSORS = {  # the tensor of a format, and its dtype
    "pack-quantized": ("weight_packed", "I32"),
    "int-quantized": ("weight", "I8"),
    "float-quantized": ("weight", "F8_E4M3"),
    "nvfp4-pack-quantized": ("weight_packed", "U8"),
    "mxfp4-pack-quantized": ("weight_packed", "U8"),
}
FORMATS = (*_TENSORS, "naive-quantized", "mixed-precision", "dense")  # these may be any of them
_HARMLESS = words(
    "observer observer_kwargs dynamic actorder scale_dtype zp_dtype num_bits type symmetric "
    "strategy group_size block_structure"
)
_CLASS, _RE = "Linear", "re:"  # what names all modules; what is before a regular expression
_BYTES = ("U8", "F8_E8M0")  # of exponents


class GroupScheme(NamedTuple):
    """What a group says of its weights; `at` reads the object, for refusals.

    `row_type` says to what rows are to be rounded, a scale for each, and `kept_rows`, why they are
    not, though the group rounds them; `is_sorted`, whether inputs have groups by a `weight_g_idx`;
    `named_by`, the object that has the `format`.
    """

    at: Reader
    bits: int
    is_float: bool
    is_symmetric: bool
    strategy: str
    group: int | None
    block: tuple[int, int] | None
    row_type: RowType
    kept_rows: str
    is_sorted: bool
    named_by: Reader


class CompressedTensors(Format):
    """Reads the formats of `FORMATS`."""

    methods = ("compressed-tensors",)
    title = "compressed-tensors"
    rows = (
        Row("pack-quantized", "`weight_packed` i32, 2 to 8 bits, groups or rows, zeros", "W4, W8"),
        Row("int-quantized, naive-quantized", "`weight` i8", "W8"),
        Row(
            "float-quantized",
            "`weight` e4m3; tensor, rows, blocks; rows too where there are `input_activations`",
            "F8",
        ),
        Row("nvfp4-pack-quantized", "`weight_packed` u8, e4m3 scales by 16", "F4"),
        Row("mxfp4-pack-quantized", "`weight_packed` u8, powers of two by 32", "F4"),
    )
    keys = words("config_groups format ignore global_compression_ratio targets sparsity_config")

    def __init__(self, config: Reader) -> None:
        super().__init__(config)
        if config.has("format") and config.get("format") not in FORMATS:
            raise config.refusal("format", f"is not one of {', '.join(FORMATS)}")
        sparsity = config.child("sparsity_config")
        if sparsity.data and sparsity.get("format") != "dense":
            raise sparsity.refusal("format", "is not implemented; dense is")
        self._ignored = self._named("ignore", listed(config, "ignore"))
        groups = config.child("config_groups")
        found = [self._group(groups.child(name)) for name in groups.data]
        # Those by class last.
        self._groups = sorted(found, key=lambda group: _CLASS in group[0].names)

    def _group(self, group: Reader) -> tuple[Names, GroupScheme | None]:
        if group.has("format") and group.get("format") not in FORMATS:
            raise group.refusal("format", f"is not one of {', '.join(FORMATS)}")
        if group.child("output_activations").data:
            raise group.refusal("output_activations", "is not implemented")
        scheme = None
        if group.has("weights"):
            weights, activations = group.child("weights"), group.child("input_activations")
            named_by = group if group.has("format") else self.config
            scheme = self._scheme(weights, *_rows_of(activations, weights), named_by)
        return self._named("config_groups", listed(group, "targets")), scheme

    @staticmethod
    def _scheme(at: Reader, row_type: RowType, kept_rows: str, named_by: Reader) -> GroupScheme:
        for key, value in at.data.items():
            if key not in _HARMLESS and value not in (None, False, {}, [], ""):
                raise at.refusal(key, "is not implemented for weights")
        if at.data.get("dynamic") not in (None, False):
            raise at.refusal("dynamic", "is not false, but weights are quantised")
        is_float = at.data.get("type", "int") == "float"
        if at.data.get("type", "int") not in ("int", "float"):
            raise at.refusal("type", "is not int or float")
        block = at.data.get("block_structure")
        if isinstance(block, str):
            block = [int(each) for each in block.split("x") if each.isdecimal()]
        if block is not None and not (
            isinstance(block, list)
            and len(block) == 2
            and all(type(each) is int and each > 0 for each in block)
        ):
            raise at.refusal("block_structure", "is not two whole numbers")
        group = at.data.get("group_size")
        group = None if group in (None, -1) else at.whole("group_size")
        strategy = str(at.data.get("strategy") or ("group" if group else "tensor"))
        known = ("tensor", "channel", "group", "block", "tensor_group")
        if strategy not in known:
            raise at.refusal("strategy", f"is not one of {', '.join(known)}")
        bits, symmetric = at.whole("num_bits", 8, 8), at.flag("symmetric", default=True)
        sizes = None if block is None else (block[0], block[1])
        is_sorted = strategy == "group" and at.data.get("actorder") in (True, "group", "dynamic")
        numbers = (bits, is_float, symmetric, strategy, group, sizes)
        return GroupScheme(at, *numbers, row_type, kept_rows, is_sorted, named_by)

    def excludes(self, name: str) -> str:
        """Return `ignore` or `config_groups`, where they leave the module out."""
        if _CLASS in self._ignored.names or self._ignored.has(name):
            return "ignore"
        return "" if self._scheme_of(name) else "config_groups"

    def _named(self, key: str, patterns: list[str]) -> Names:
        """Return what names and, behind `re:`, regular expressions name."""
        own = [each.removeprefix(_RE) for each in patterns if each.startswith(_RE)]
        expressions = [compiled(self.config, key, each) for each in own]
        return Names((each for each in patterns if not each.startswith(_RE)), expressions)

    def _scheme_of(self, name: str) -> GroupScheme | None:
        """Return the scheme of the first group that names the module, those by class last."""
        for targets, scheme in self._groups:
            if _CLASS in targets.names or targets.has(name):
                return scheme
        return None

    def holds(self, module: Module) -> bool:
        """Whether there are packed weights, or weights with scales."""
        return module.has("weight_packed") or module.has("weight_scale")

    def units(self, module: Module, outputs: int, inputs: int) -> tuple[int, int]:
        """Return rows and inputs of whole blocks or groups, in whole words or bytes."""
        scheme = self._scheme_of(module.name)
        assert scheme is not None, "`check` refuses such"
        row, group = 1, _group_of(scheme, inputs, 32)
        if scheme.strategy == "block" and scheme.block is not None:
            row, group = scheme.block
        elif scheme.strategy not in ("group", "tensor_group"):
            group = 1
        if is_sorted(module, "weight_g_idx", inputs, group):
            group = 1
        is_dense = _is_dense(module, outputs, inputs, scheme.bits)
        word = WORD if is_dense else WORD // scheme.bits
        return math.lcm(row, WORD), math.lcm(group, word, 2)

    def load(self, module: Module, outputs: int, inputs: int) -> QuantMatrix:
        """Read it by its tensors, which its group must describe."""
        scheme = self._scheme_of(module.name)
        assert scheme is not None, "`check` refuses such"
        _check_format(module, scheme.named_by)
        module.drop_activations()
        if scheme.kept_rows:
            module.note(scheme.kept_rows)
        read: dict[str, Callable[[Module, GroupScheme, int, int], QuantMatrix]] = {
            "I8": _integers,
            "F8_E4M3": _e4m3,
        }
        if module.dtype("weight_packed") == "I32":
            return _packed(module, scheme, outputs, inputs)
        if module.has("weight_packed"):
            return _e2m1(module, scheme, outputs, inputs)
        if module.dtype("weight") not in read:
            known = "I8 or F8_E4M3, or there is a weight_packed"
            raise module.refusal("weight", f"is {module.dtype('weight') or 'missing'}, not {known}")
        return read[module.dtype("weight")](module, scheme, outputs, inputs)


def _rows_of(activations: Reader, weights: Reader) -> tuple[RowType, str]:
    """Return to what a group rounds its rows, and why those stay that are not rounded.

    Both types are symmetric, by rows or by tensors, static too: a scale for each row is at least as
    exact as one for all. e4m3 may be by groups of inputs beside weights in blocks, and beside e4m3
    by outputs or tensors by anything.
    """
    data = activations.data
    if not data:
        return "", ""
    bits, strategy = data.get("num_bits", 8), data.get("strategy") or "tensor"
    if data.get("type", "int") != "int":
        own, is_float = weights.data.get("strategy"), weights.data.get("type") == "float"
        strategies = ("token", "tensor", "group") if own == "block" else ("token", "tensor")
        is_taken = strategy in strategies or (is_float and own in (None, "tensor", "channel"))
        if is_taken and bits == 8:
            return "e4m3", ""
        return "", (
            f"rows in floats of {bits} bits by {strategy}: they are not rounded; e4m3 by token or "
            "tensor would be"
        )
    has_zeros = not activations.flag("symmetric", default=True)
    if bits == 8 and strategy in ("token", "tensor") and not has_zeros:
        return "int8", ""
    zeros = " with zeros" if has_zeros else ""
    return "", (
        f"rows in integers of {bits} bits by {strategy}{zeros}: they are not rounded; int8 by "
        "token without zeros would be"
    )


def _check_format(module: Module, named_by: Reader) -> None:
    """Raise `CheckpointError` if tensors are of another format than the one that is named."""
    part, dtype = _TENSORS.get(str(named_by.get("format")), ("", ""))
    if part and module.dtype(part) not in (dtype, ""):
        why = f"is not what {module.name}.{part} is: {module.dtype(part)}, not {dtype}"
        raise named_by.refusal("format", why)
    if part and not module.has(part):
        raise named_by.refusal("format", f"is not what {module.name} is, which has no {part}")


def _check(scheme: GroupScheme, module: Module, bits: tuple[int, ...], is_float: bool) -> None:
    """Raise `CheckpointError` if tensors are of other numbers than the group says."""
    if scheme.bits not in bits:
        raise scheme.at.refusal("num_bits", f"is not what the tensors of {module.name} have")
    if scheme.is_float != is_float:
        raise scheme.at.refusal("type", f"is not what the tensors of {module.name} have")


def _group_of(scheme: GroupScheme, inputs: int, default: int | None = None) -> int:
    """Return the inputs of a group."""
    if scheme.strategy in ("group", "tensor_group"):
        return scheme.group or default or inputs
    return inputs


def _scales(module: Module, scheme: GroupScheme, outputs: int, inputs: int) -> tuple[Tensor, int]:
    """Read scales of all groups of so many inputs, spread over rows; the inputs of a group."""
    if scheme.strategy == "block":
        if scheme.block is None:
            raise scheme.at.refusal("block_structure", "is missing for blocks")
        rows, group = scheme.block
        shape = (num_groups(outputs, rows), num_groups(inputs, group))
        return over_rows(module.take("weight_scale", FLOATS, shape), outputs, rows), group
    group = _group_of(scheme, inputs)
    shapes: list[tuple[int, ...]] = [(outputs, num_groups(inputs, group))]
    if scheme.strategy == "channel":
        shapes.append((outputs,))
    elif scheme.strategy == "tensor":
        shapes = [(1,), (), (1, 1)]
    return over_rows(module.take("weight_scale", FLOATS, *shapes), outputs), group


def _zeros(module: Module, scheme: GroupScheme, outputs: int, groups: int) -> Tensor | None:
    """Read zeros of packed weights, as the codes are, or of integers; None: there are none."""
    part, bits = "weight_zero_point", scheme.bits
    if scheme.is_symmetric and not module.has(part):
        return None
    if module.dtype(part) == "I32":
        packed = module.take(part, ("I32",), (num_words(outputs, bits), groups))
        zeros = unpack(packed.T, bits, outputs).T.int() - (1 << (bits - 1))
    else:
        shapes: list[tuple[int, ...]] = [(outputs, groups)]
        if scheme.strategy == "tensor":
            shapes = [(1,), (), (1, 1)]
        elif scheme.strategy == "channel":
            shapes.append((outputs,))
        zeros = over_rows(module.take(part, ("I8",), *shapes), outputs).int()
    if not scheme.is_symmetric:
        return zeros
    if not zeros.is_meta and bool(zeros.any()):
        raise scheme.at.refusal("symmetric", f"is not what {module.name}.{part} is: not all 0")
    module.note(f"{part}: all zero, as the scheme is symmetric")
    return None


def _check_shape(module: Module, outputs: int, inputs: int) -> None:
    """Raise `CheckpointError` if the shape that lies beside packed weights is another."""
    if module.has("weight_shape"):
        module.take("weight_shape", ("I64", "I32"), (2,))
        shape, whole = module.numbers("weight_shape").tolist(), module.whole(outputs, inputs)
        if tuple(shape) != whole:
            raise module.refusal("weight_shape", f"holds {shape}, not {list(whole)}")


def _is_dense(module: Module, outputs: int, inputs: int, bits: int) -> bool:
    """Return whether values straddle words, as the shape of the whole matrix says."""
    whole = module.whole(outputs, inputs)[1]
    return module.shape("weight_packed")[1:] == (num_words(whole, bits),)


def _packed(module: Module, scheme: GroupScheme, outputs: int, inputs: int) -> QuantMatrix:
    """Read pack-quantized: codes and zeros have half of their range added."""
    _check(scheme, module, (2, 3, 4, 5, 6, 7, 8), is_float=False)
    bits = scheme.bits
    dense, loose = ((outputs, num_words(inputs, bits, each)) for each in (True, False))
    words_ = module.take("weight_packed", ("I32",), dense, loose)
    _check_shape(module, outputs, inputs)
    is_dense = _is_dense(module, outputs, inputs, bits)
    used = WORD // bits * bits
    if not is_dense and used < WORD and not words_.is_meta and bool((words_ >> used).any()):
        raise scheme.at.refusal("num_bits", f"leaves bits of {module.name}.weight_packed over")
    codes = unpack(words_, bits, inputs, is_dense)
    return _of_integers(module, scheme, codes.int() - (1 << (bits - 1)), outputs, inputs)


def _integers(module: Module, scheme: GroupScheme, outputs: int, inputs: int) -> QuantMatrix:
    """Read int-quantized and naive-quantized."""
    _check(scheme, module, (2, 3, 4, 5, 6, 7, 8), is_float=False)
    codes = module.take("weight", ("I8",), (outputs, inputs))
    least, most = -(1 << (scheme.bits - 1)), (1 << (scheme.bits - 1)) - 1
    if not codes.is_meta and not least <= int(codes.min()) <= int(codes.max()) <= most:
        raise scheme.at.refusal("num_bits", f"is too few for the numbers of {module.name}.weight")
    return _of_integers(module, scheme, codes, outputs, inputs)


def _of_integers(
    module: Module, scheme: GroupScheme, codes: Tensor, outputs: int, inputs: int
) -> QuantMatrix:
    """Return signed codes with their scales and zeros, in 4 bits if they fit."""
    group = _group_of(scheme, inputs)
    order = order_of(module, "weight_g_idx", outputs, inputs, group)
    if order is None and scheme.is_sorted and not module.has("weight_g_idx"):
        raise module.refusal("weight_g_idx", "is missing, but actorder sorts inputs by groups")
    scaled = inputs if order is None else order.scaled
    scales, group = _scales(module, scheme, outputs, scaled)
    zeros = _zeros(module, scheme, outputs, num_groups(scaled, group))
    if scheme.bits > 4:
        kept = None if zeros is None else without(zeros.to(torch.int8), 0)
        eight = _rounded(module, scheme, "int8", "integers of 8 bits")
        sizes = (codes.to(torch.int8), scales, group, inputs)
        found = QuantMatrix(Kind.W8, *sizes, zeros=kept, row_type=eight)
        return found if order is None else order.sort(found)
    kept = None if zeros is None else without((zeros + 8).to(torch.uint8), 8)
    four = scheme.row_type
    if kept is not None or order is not None:
        what = "with zeros" if order is None else "with sorted inputs"
        four = _rounded(module, scheme, "", f"integers of 4 bits {what}")
    found = QuantMatrix(
        Kind.W4, halves(codes + 8), scales, group, inputs, zeros=kept, row_type=four
    )
    return found if order is None else order.sort(found)


def _rounded(module: Module, scheme: GroupScheme, taken: RowType, weights: str) -> RowType:
    """Return the type that rows are to be rounded to if it is taken; else the start says so."""
    if scheme.row_type in ("", taken):
        return scheme.row_type
    module.note(f"rows in {scheme.row_type} beside weights in {weights}: they are not rounded")
    return ""


def _e4m3(module: Module, scheme: GroupScheme, outputs: int, inputs: int) -> QuantMatrix:
    """Read float-quantized."""
    _check(scheme, module, (8,), is_float=True)
    codes = module.take("weight", ("F8_E4M3",), (outputs, inputs))
    check_numbers(module, "weight", codes)
    scales, group = _scales(module, scheme, outputs, inputs)
    module.drop("weight_zero_point", "not used: the scheme is symmetric")
    return QuantMatrix(Kind.F8, codes, scales, group, inputs, row_type=scheme.row_type)


def _e2m1(module: Module, scheme: GroupScheme, outputs: int, inputs: int) -> QuantMatrix:
    """Read nvfp4 and mxfp4, which differ in their scales."""
    _check(scheme, module, (4,), is_float=True)
    _rounded(module, scheme, "", "floats of 4 bits")
    codes = module.take("weight_packed", ("U8",), (outputs, inputs // 2))
    _check_shape(module, outputs, inputs)
    if module.has("weight_global_scale"):
        group = _fixed(scheme, inputs, 16)
        shape = (outputs, num_groups(inputs, group))
        scales = module.take("weight_scale", ("F8_E4M3",), shape)
        check_numbers(module, "weight_scale", scales)
        overall = module.take("weight_global_scale", FLOATS, (1,), (), (1, 1)).float().reshape(1)
        if not overall.is_meta and not bool(overall > 0):
            raise module.refusal("weight_global_scale", "is no scale: not above 0")
        outer = overall.reciprocal().expand(outputs).contiguous()
        return QuantMatrix(Kind.F4, codes, scales, group, inputs, outer=outer)
    group = _fixed(scheme, inputs, 32)
    scales = module.take("weight_scale", _BYTES, (outputs, num_groups(inputs, group)))
    return QuantMatrix(Kind.F4, codes, powers(module, scales), group, inputs)


def _fixed(scheme: GroupScheme, inputs: int, group: int) -> int:
    """Return the size that groups of a type always have; raises `CheckpointError` for another."""
    if scheme.group not in (None, group):
        raise scheme.at.refusal("group_size", f"is not {group}")
    return _group_of(scheme, inputs, group)


def powers(module: Module, exponents: Tensor, part: str = "weight_scale") -> Tensor:
    """Return the powers of two that e8m0 bytes stand for, which bfloat16 holds."""
    exponents = exponents.view(torch.uint8)
    if not exponents.is_meta and bool((exponents == 255).any()):
        raise module.refusal(part, "holds NaN")
    return torch.exp2(exponents.float() - 127).to(torch.bfloat16)
