"""bitsandbytes: nf4 (with double quantisation or without) and int8."""

import json
import math
from typing import Any

import torch
from slipstream_contract.errors import clip
from torch import Tensor

from slipstream.models.formats.format import Format, Row, skipped
from slipstream.models.formats.module import FLOATS, Module
from slipstream.models.reader import Reader, words
from slipstream.quant.matrix import Kind, QuantMatrix, halves

_STATE = "weight.quant_state.bitsandbytes__nf4"
_FP4 = "weight.quant_state.bitsandbytes__fp4"


class BitsAndBytes(Format):
    """Blocks of the flattened matrix with a table of 16 numbers, or rows of 8 bits."""

    methods = ("bitsandbytes",)
    title = "bitsandbytes"
    rows = (
        Row("nf4, double quantised too", "`weight` u8, `absmax` by 64", "F4 with its table"),
        Row("int8", "`weight` i8, `SCB` by row", "W8"),
    )
    keys = words(
        "_load_in_4bit _load_in_8bit load_in_4bit load_in_8bit bnb_4bit_compute_dtype "
        "bnb_4bit_quant_storage bnb_4bit_quant_type bnb_4bit_use_double_quant "
        "llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_skip_modules "
        "llm_int8_threshold"
    )

    def __init__(self, config: Reader) -> None:
        super().__init__(config)
        self._is_4 = config.flag("load_in_4bit", default=False)
        if self._is_4 == config.flag("load_in_8bit", default=False):
            raise config.refusal("load_in_4bit", "and load_in_8bit are not one true, one false")
        if self._is_4 and config.get("bnb_4bit_quant_type") != "nf4":
            raise config.refusal("bnb_4bit_quant_type", "is not implemented; nf4 is")
        if self._is_4 and config.get("bnb_4bit_quant_storage") not in (None, "uint8"):
            raise config.refusal("bnb_4bit_quant_storage", "is not uint8")
        self._excluded = skipped(config, "llm_int8_skip_modules")

    def excludes(self, name: str) -> str:
        """Return `llm_int8_skip_modules` where it has the module or one around it."""
        return "llm_int8_skip_modules" if self._excluded.has(name) else ""

    def holds(self, module: Module) -> bool:
        """Whether there are scales of blocks or of rows."""
        return module.has("weight.absmax") or module.has("SCB") or module.has(_FP4)

    def units(self, module: Module, outputs: int, inputs: int) -> tuple[int, int] | None:
        """Return any rows and inputs of 8 bits; of 4, rows that end where blocks of scales do.

        Inputs of 4 bits begin at a scale of their own, and at a byte where all rows do. Of pairs of
        rows that do not, each row is read by itself; of an odd number of such rows all is.
        """
        if not self._is_4:
            return 1, 1
        state = _state(module)
        sizes = state["blocksize"], state.get("nested_blocksize", 1)
        if not all(type(each) is int and each > 0 for each in sizes):
            return None
        columns = math.lcm(math.gcd(inputs, sizes[0]), 1 if inputs % 2 else 2)
        if inputs % 2 and outputs % 2:
            columns = inputs
        return math.lcm(2 * math.prod(sizes), inputs) // inputs, columns

    def load(self, module: Module, outputs: int, inputs: int) -> QuantMatrix:
        """Read it; raises `CheckpointError` if it is not of the bits that are configured."""
        key = "load_in_4bit" if self._is_4 else "load_in_8bit"
        if module.has("SCB") == self._is_4:
            raise self.config.refusal(key, f"is not what the tensors of {module.name} are")
        if self._is_4:
            return _nf4(module, outputs, inputs)
        codes = module.take("weight", ("I8",), (outputs, inputs))
        scales = module.take("SCB", FLOATS, (outputs,)).float()[:, None] / 127
        if module.has("weight_format") and not module.is_zero("weight_format"):
            raise module.refusal(
                "weight_format",
                "is not 0, rows: tiles of a GPU, as bitsandbytes before 0.45 saved them, are not "
                "implemented; save the checkpoint again with a newer one",
            )
        module.drop("weight_format", "rows")
        return QuantMatrix(Kind.W8, codes, scales, inputs, inputs)


def _state(module: Module) -> dict[str, Any]:
    """Read the JSON object beside the weights; raises `CheckpointError`."""
    if not module.has(_STATE):
        raise module.refusal(_STATE, "is missing: fp4 and others are not implemented")
    try:
        state = json.loads(module.text(_STATE))
    except (ValueError, RecursionError):
        raise module.refusal(_STATE, "is not valid JSON") from None
    names = ("quant_type", "blocksize", "shape")
    if not isinstance(state, dict) or any(name not in state for name in names):
        raise module.refusal(_STATE, f"has not all of {', '.join(names)}")
    block = state["blocksize"]
    if type(block) is not int or block < 1:
        raise module.refusal(_STATE, f"has blocksize {clip(block)}")
    return state


def _nf4(module: Module, outputs: int, inputs: int) -> QuantMatrix:
    """Read blocks; where they straddle rows, each weight is given its own scale's group."""
    state = _state(module)
    block = state["blocksize"]
    whole = list(module.whole(outputs, inputs))
    if state["quant_type"] != "nf4" or state["shape"] != whole:
        raise module.refusal(_STATE, f"is not of nf4 and {whole}")
    codes = module.take_halves("weight", outputs, inputs)
    table = module.take("weight.quant_map", FLOATS, (16,)).float()
    group = math.gcd(whole[1], block)  # lies in one block, if rows do not
    scales = _scales(module, state, outputs, inputs, group)
    return QuantMatrix(Kind.F4, halves(codes), scales, group, inputs, table=table)


def _scales(module: Module, state: dict[str, Any], outputs: int, inputs: int, group: int) -> Tensor:
    """Return the scale of the block around each group of the inputs that are read, fp32."""
    block, whole = state["blocksize"], module.whole(outputs, inputs)[1]
    blocks = -(-outputs * whole // block)
    own = blocks * inputs // whole if group == block else blocks  # else they go on over rows
    found = module.has("weight.nested_absmax")
    dtypes = ("U8",) if found else FLOATS
    absmax = module.take("weight.absmax", dtypes, (own,), rows=outputs)
    first = torch.arange(outputs, device=absmax.device)[:, None] * whole + module.first_input
    at = (first + torch.arange(0, inputs, group, device=absmax.device)) // block
    absmax = absmax.view(outputs, -1) if group == block else absmax[at]
    return _unnested(module, state, absmax, at, blocks) if found else absmax.float()


def _unnested(
    module: Module, state: dict[str, Any], codes: Tensor, at: Tensor, blocks: int
) -> Tensor:
    """Return scales that are quantised themselves, `codes` of the blocks `at` of so many."""
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if type(size) is not int or size < 1 or not isinstance(offset, int | float):
        raise module.refusal(_STATE, "has no nested_blocksize and nested_offset")
    if not abs(offset) <= torch.finfo(torch.float32).max:
        raise module.refusal(_STATE, f"has nested_offset {clip(offset)}")
    table = module.take("weight.nested_quant_map", FLOATS, (256,)).float()
    above = module.take("weight.nested_absmax", FLOATS, (-(-blocks // size),)).float()
    return table[codes.long()] * above[at // size] + offset
