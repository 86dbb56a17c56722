"""Hugging Face's `fp8`: e4m3 with a scale for each block of 128 x 128, or for a whole matrix."""

from torch import Tensor

from slipstream.models.formats.compressed_tensors import powers
from slipstream.models.formats.format import Format, Row, skipped
from slipstream.models.formats.module import FLOATS, Module, check_numbers, num_groups, over_rows
from slipstream.models.reader import Reader, words
from slipstream.quant.matrix import Kind, QuantMatrix


class FineGrained(Format):
    """`W = q * weight_scale_inv`, despite the name; blocks begin anew in each matrix.

    Rows are e4m3, too, by either `activation_scheme`.
    """

    methods = ("fp8", "fbgemm_fp8")  # the second has a scale for each output
    title = "Hugging Face `fp8`"
    rows = (
        Row(
            "blocks",
            "`weight` e4m3, rows too, `weight_scale_inv` `[N/128, K/128]`, powers of two in a byte "
            "too",
            "F8",
        ),
        Row("matrices", "`weight` e4m3, rows too, one `weight_scale` or one for each output", "F8"),
    )
    keys = words(
        "fmt weight_block_size activation_scheme modules_to_not_convert ignored_layers scale_fmt "
        "dequantize expert_dtype activation_scale_ub"
    )

    def __init__(self, config: Reader) -> None:
        super().__init__(config)
        for key, known in {
            "fmt": (None, "e4m3", "float8_e4m3fn"),
            "activation_scheme": (None, "dynamic", "static"),
            "scale_fmt": (None, "ue8m0", "float"),
            "expert_dtype": (None, "fp8"),  # transformers 5 writes it for models without experts
        }.items():
            if config.get(key) not in known:
                raise config.refusal(key, f"is not {' or '.join(map(str, known[1:]))}")
        block = config.get("weight_block_size")
        is_block = (
            isinstance(block, list)
            and len(block) == 2
            and all(type(each) is int and each > 0 for each in block)
        )
        if block is not None and not is_block:
            raise config.refusal("weight_block_size", "is not two whole numbers")
        self._block = (block[0], block[1]) if is_block and isinstance(block, list) else None
        self._excluded = {
            key: skipped(config, key) for key in ("modules_to_not_convert", "ignored_layers")
        }

    def excludes(self, name: str) -> str:
        """Return the list that has the module, or one around it."""
        return next((key for key, each in self._excluded.items() if each.has(name)), "")

    def holds(self, module: Module) -> bool:
        """Whether the weights are e4m3."""
        return module.dtype("weight") == "F8_E4M3"

    def units(self, module: Module, outputs: int, inputs: int) -> tuple[int, int]:
        """Return rows and inputs of a block."""
        return self._block or (1, 1)

    def load(self, module: Module, outputs: int, inputs: int) -> QuantMatrix:
        """Read it; scales of blocks are spread over rows."""
        codes = module.take("weight", ("F8_E4M3",), (outputs, inputs))
        check_numbers(module, "weight", codes)
        module.drop_activations()
        for bound in ("activation_scale", "input_scale_ub"):
            module.drop(bound, "not used: rows have a scale for each token")
        part = "weight_scale_inv" if module.has("weight_scale_inv") else "weight_scale"
        if self._block is None:
            scales = _scales(module, part, (), (1,), (1, 1), (outputs, 1), (outputs,))
            return QuantMatrix(
                Kind.F8, codes, over_rows(scales, outputs), inputs, inputs, row_type="e4m3"
            )
        rows, group = self._block
        shape = (num_groups(outputs, rows), num_groups(inputs, group))
        scales = over_rows(_scales(module, part, shape), outputs, rows)
        return QuantMatrix(Kind.F8, codes, scales, group, inputs, row_type="e4m3")


def _scales(module: Module, part: str, *shapes: tuple[int, ...]) -> Tensor:
    """Read scales: numbers, or powers of two in a byte each (`scale_fmt` of ue8m0)."""
    found = module.take(part, (*FLOATS, "F8_E8M0"), *shapes)
    return powers(module, found, part) if module.dtype(part) == "F8_E8M0" else found
