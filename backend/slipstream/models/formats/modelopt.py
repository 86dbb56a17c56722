"""NVIDIA ModelOpt: fp8, int8, int4 AWQ and FP4 checkpoints, old and new configurations."""

import math
from dataclasses import replace
from fnmatch import fnmatchcase

import torch

from slipstream.models.cache_scheme import MODELOPT, group_size_of
from slipstream.models.formats.compressed_tensors import powers
from slipstream.models.formats.format import Format, Row, listed, spellings
from slipstream.models.formats.module import FLOATS, Module, check_numbers, num_groups, over_rows
from slipstream.models.reader import Reader, words
from slipstream.quant.matrix import Kind, QuantMatrix, RowType, halves

# quant_algo -> the dtype of weights, by which tensors are read.
ALGORITHMS = {
    "FP8": "F8_E4M3",
    "FP8_PER_CHANNEL_PER_TOKEN": "F8_E4M3",
    "FP8_PB_WO": "F8_E4M3",
    "W8A8_SQ_PER_CHANNEL": "I8",
    "INT8_SQ": "I8",
    "W8A16": "I8",
    "W4A16_AWQ": "U8",
    "INT4_AWQ": "U8",
    "W4A8_AWQ": "U8",
    "NVFP4": "U8",
    "NVFP4_AWQ": "U8",
    "W4A16_NVFP4": "U8",
    "W4A8_NVFP4_FP8": "U8",
    "MXFP4": "U8",
    "W4A8_MXFP4_FP8": "U8",
}
_INT4 = ("W4A16_AWQ", "INT4_AWQ", "W4A8_AWQ")
_ROWS: dict[str, RowType] = {  # to what rows are rounded
    "FP8": "e4m3",
    "FP8_PER_CHANNEL_PER_TOKEN": "e4m3",
    "W4A8_AWQ": "e4m3",
    "W8A8_SQ_PER_CHANNEL": "int8",
    "INT8_SQ": "int8",
}
_KEPT_ROWS = {  # which stay in 16 bits
    "NVFP4": "floats of 4 bits",
    "NVFP4_AWQ": "floats of 4 bits",
    "W4A8_NVFP4_FP8": "e4m3",
    "MXFP4": "floats of 4 bits",
    "W4A8_MXFP4_FP8": "e4m3",
}
_POWERS = ("U8", "F8_E8M0")
_BLOCK = 128


class ModelOpt(Format):
    """`W = q * weight_scale (* weight_scale_2)` behind `x * pre_quant_scale`."""

    methods = MODELOPT
    title = "ModelOpt"
    rows = (
        Row("FP8, FP8_PER_CHANNEL_PER_TOKEN", "`weight` e4m3, rows too", "F8"),
        Row("FP8_PB_WO", "`weight` e4m3", "F8"),
        Row("W8A8_SQ_PER_CHANNEL, W8A16", "`weight` i8, `pre_quant_scale`", "W8"),
        Row("W4A16_AWQ, W4A8_AWQ", "`weight` u8 `[N/2, K]`, `pre_quant_scale`", "W4"),
        Row("NVFP4, NVFP4_AWQ, W4A8_NVFP4_FP8", "`weight` u8 `[N, K/2]`, e4m3 scales", "F4"),
        Row("MXFP4, W4A8_MXFP4_FP8", "`weight` u8 `[N, K/2]`, powers of two", "F4"),
    )
    keys = words(
        "quant_algo kv_cache_quant_algo group_size exclude_modules ignore has_zero_point "
        "pre_quant_scale quantized_layers config_groups"
    )

    def __init__(self, config: Reader) -> None:
        super().__init__(config)
        if config.get("has_zero_point"):
            raise config.refusal("has_zero_point", "is not implemented")
        self._layers = config.child("quantized_layers")
        self._algorithm = self._checked(config)
        for name in self._layers.data:
            self._checked(self._layers.child(name))
        self._excluded = {key: listed(config, key) for key in ("exclude_modules", "ignore")}

    def _checked(self, at: Reader) -> str:
        name = at.get("quant_algo")
        if name in (None, "MIXED_PRECISION"):
            return ""
        # ModelOpt 0.47 itself writes fp8_pb_wo and mxfp4.
        if not isinstance(name, str) or name.upper() not in ALGORITHMS:
            raise at.refusal("quant_algo", f"is not one of {', '.join(ALGORITHMS)}")
        return name.upper()

    def excludes(self, name: str) -> str:
        """Return the key that leaves the module out; `*` stands for anything."""
        for key, patterns in self._excluded.items():
            for each in patterns:
                own = spellings(name)
                if any(fnmatchcase(n, each) or n.startswith(f"{each}.") for n in own):
                    return key
        if not self._algorithm and self._layers.data and not self._layer(name):
            return "quantized_layers"
        return ""

    def holds(self, module: Module) -> bool:
        """Whether the weights are bytes."""
        return module.dtype("weight") in ("F8_E4M3", "I8", "U8")

    def _at(self, module: Module) -> Reader:
        """Return what is said of a layer, else of all."""
        own = self._layer(module.name)
        return self._layers.child(own) if own else self.config

    def _layer(self, name: str) -> str:
        """Return the name in `quantized_layers` of a module or one around it; empty: none is."""
        found = spellings(name)
        while any(found) and not any(each in self._layers.data for each in found):
            found = tuple(each.rpartition(".")[0] for each in found)
        return next((each for each in found if each in self._layers.data), "")

    def units(self, module: Module, outputs: int, inputs: int) -> tuple[int, int]:
        """Return rows and inputs of a block; of 4 bits rows that share bytes, and groups."""
        if module.dtype("weight") == "U8":
            group = _said(self._at(module), self.config) or _shaped(module, outputs, inputs)
            return 2, math.lcm(group or _BLOCK, 32)
        scale = module.shape("weight_scale")
        is_blocks = len(scale) > 1 and scale[0] != outputs and math.prod(scale) > 1
        return (_BLOCK, _BLOCK) if is_blocks else (1, 1)

    def load(self, module: Module, outputs: int, inputs: int) -> QuantMatrix:
        """Read it by the dtypes of its weights and scales."""
        at = self._at(module)
        algorithm = self._checked(at) or self._algorithm
        dtype = module.dtype("weight")
        if algorithm and ALGORITHMS[algorithm] != dtype:
            raise at.refusal("quant_algo", f"is not what {module.name}.weight is: {dtype}")
        is_4 = dtype == "U8"
        is_integer = is_4 and module.dtype("weight_scale") in FLOATS
        has_scales = module.has("weight_scale")
        is_other = has_scales and module.dtype("weight_scale") not in _scales_of(algorithm)
        if algorithm and is_4 and is_other:
            raise at.refusal("quant_algo", f"is not what the scales of {module.name} are")
        row_type = _ROWS.get(algorithm, "") if algorithm else self._unnamed_rows(module)
        module.drop_activations()
        if kept := _KEPT_ROWS.get(algorithm):
            module.note(f"rows in {kept} beside weights in floats of 4 bits: they are not rounded")
        factors = None
        if module.has("pre_quant_scale"):
            factors = module.take("pre_quant_scale", FLOATS, (inputs,)).float()
        read = _fp4 if is_4 and not is_integer else _by_dtype
        matrix = read(module, at, self.config, outputs, inputs)
        return replace(matrix, factors=factors, row_type=row_type)

    def _unnamed_rows(self, module: Module) -> RowType:
        """Return to what rows are rounded where no algorithm is named: e4m3 beside e4m3, if groups
        or tensors tell of scales for rows.
        """
        groups = self.config.child("config_groups")
        says = any(groups.child(name).child("input_activations").data for name in groups.data)
        is_e4m3 = module.dtype("weight") == "F8_E4M3" and (says or module.has("input_scale"))
        return "e4m3" if is_e4m3 else ""


def _scales_of(algorithm: str) -> tuple[str, ...]:
    """Return the dtypes of scales that weights of 4 bits have."""
    if algorithm in _INT4:
        return FLOATS
    return _POWERS if "MXFP4" in algorithm else ("F8_E4M3",)


def _said(at: Reader, config: Reader) -> int:
    """Return `group_size` of a layer, of all, or in a group of the newer configuration; 0: none."""
    return at.whole("group_size") if at.get("group_size") else group_size_of(config)


def _shaped(module: Module, outputs: int, inputs: int) -> int:
    """Return the inputs of a group by the shape of the scales, as newer files say it nowhere else.

    0: they do not divide the inputs.
    """
    whole, shape = module.whole(outputs, inputs)[1], module.shape("weight_scale")
    count = shape[-1] if shape else 1
    return whole // count if count and whole % count == 0 else 0


def _group(at: Reader, config: Reader, shaped: int, *known: int) -> int:
    """Return what is said of groups, else the shape of scales if it is one of the `known`.

    Raises `CheckpointError` for a size that is said and is none of them.
    """
    said = _said(at, config)
    if said and said not in known:
        wrong = at if at.has("group_size") else config
        raise wrong.refusal("group_size", f"is not {' or '.join(map(str, known))}")
    return said or (shaped if shaped in known else known[0])


def _by_dtype(module: Module, at: Reader, config: Reader, outputs: int, inputs: int) -> QuantMatrix:
    """Read e4m3, 8 bits, or 4 bits."""
    dtype = module.dtype("weight")
    if dtype == "U8":
        group = min(_said(at, config) or _shaped(module, outputs, inputs) or _BLOCK, inputs)
        packed = module.take("weight", ("U8",), (-(-outputs // 2), inputs))
        both = torch.stack([packed & 15, packed >> 4], 1).flatten(0, 1)[:outputs]
        scales = module.take("weight_scale", FLOATS, (outputs, num_groups(inputs, group)))
        module.drop("weight_scale_2", "not used: it scales int4 to e4m3, which is not needed")
        return QuantMatrix(Kind.W4, halves(both ^ 8), scales.contiguous(), group, inputs)
    codes = module.take("weight", ("F8_E4M3", "I8"), (outputs, inputs))
    if dtype == "F8_E4M3":
        check_numbers(module, "weight", codes)
    blocks = (num_groups(outputs, _BLOCK), num_groups(inputs, _BLOCK))
    shapes = [(), (1,), (1, 1), (outputs,), (outputs, 1), blocks, (blocks[0], 1, blocks[1], 1)]
    scales = module.take("weight_scale", FLOATS, *shapes)
    kind = Kind.F8 if dtype == "F8_E4M3" else Kind.W8
    is_blocks = scales.numel() > 1 and scales.numel() == blocks[0] * blocks[1]
    is_blocks = is_blocks and scales.shape[0] != outputs
    if is_blocks:
        spread = over_rows(scales.reshape(blocks), outputs, _BLOCK)
        return QuantMatrix(kind, codes, spread, _BLOCK, inputs)
    return QuantMatrix(kind, codes, over_rows(scales, outputs), inputs, inputs)


def _fp4(module: Module, at: Reader, config: Reader, outputs: int, inputs: int) -> QuantMatrix:
    """Read NVFP4, whose second scale multiplies, and MXFP4."""
    codes = module.take("weight", ("U8",), (outputs, inputs // 2))
    shaped = _shaped(module, outputs, inputs)
    if module.dtype("weight_scale") == "F8_E4M3":
        group = _group(at, config, shaped, 16, 32)  # 32: W4A8_NVFP4_FP8
        shape = (outputs, num_groups(inputs, group))
        scales = module.take("weight_scale", ("F8_E4M3",), shape)
        check_numbers(module, "weight_scale", scales)
        second = module.take("weight_scale_2", FLOATS, (), (1,)).float().reshape(1)
        outer = second.expand(outputs).contiguous()
        return QuantMatrix(Kind.F4, codes, scales, group, inputs, outer=outer)
    group = _group(at, config, shaped, 32)
    shape = (outputs, num_groups(inputs, group))
    scales = powers(module, module.take("weight_scale", _POWERS, shape))
    if not module.has("weight_scale_2"):
        return QuantMatrix(Kind.F4, codes, scales, group, inputs)
    module.drop("weight_scale_2", "not used: it scales FP4 to e4m3, which is not needed")
    return QuantMatrix(Kind.F4, codes, scales, group, inputs)
