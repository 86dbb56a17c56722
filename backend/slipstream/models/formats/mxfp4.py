"""OpenAI's `mxfp4`: experts of all in one tensor, e2m1 with a power of two for each 32 inputs."""

from slipstream.models.formats.compressed_tensors import powers
from slipstream.models.formats.format import Format, Row, listed
from slipstream.models.formats.module import Module
from slipstream.models.reader import Reader, words
from slipstream.quant.matrix import Kind, QuantMatrix

_GROUP = 32  # inputs of a scale
_BYTES = 16  # of a group


class Mxfp4(Format):
    """`NAME_blocks [E, N, K / 32, 16]`, two numbers in a byte, and `NAME_scales [E, N, K / 32]`.

    Everything else is in 16 bits, whatever `modules_to_not_convert` says.
    """

    methods = ("mxfp4",)
    title = "OpenAI `mxfp4`"
    rows = (Row("experts", "`NAME_blocks`, `NAME_scales` u8, powers of two by 32", "F4"),)
    keys = words("modules_to_not_convert dequantize")

    def __init__(self, config: Reader) -> None:
        super().__init__(config)
        listed(config, "modules_to_not_convert")

    def excludes(self, name: str) -> str:
        """Return nothing: tensors say what is quantised."""
        return ""

    def holds(self, module: Module) -> bool:
        """Whether the experts have blocks."""
        around, last = module.around()
        return around.has(f"{last}_blocks")

    def check(self, module: Module) -> None:
        """Take matrices as they come."""

    def units(self, module: Module, outputs: int, inputs: int) -> tuple[int, int] | None:
        """Return any rows, and inputs by whole groups."""
        return 1, _GROUP

    def load(self, module: Module, outputs: int, inputs: int) -> QuantMatrix:
        """Read the experts under one another, `[E * N, K]`."""
        around, last = module.around()
        whole, stored = module.whole(outputs, inputs), around.shape(f"{last}_blocks")
        count = stored[0] if len(stored) == 4 and stored[0] else 1  # experts
        groups, own = inputs // _GROUP, (count, outputs // count)
        fits = stored == (count, whole[0] // count, whole[1] // _GROUP, _BYTES)
        fits = fits and whole[0] % count == 0 and whole[1] % _GROUP == 0
        shape = (*own, groups, _BYTES) if fits else (outputs, groups, _BYTES)
        blocks = around.take(f"{last}_blocks", ("U8",), shape)
        scales = around.take(f"{last}_scales", ("U8", "F8_E8M0"), (*own, groups))
        codes, found = blocks.reshape(outputs, -1), powers(module, scales.reshape(outputs, -1))
        return QuantMatrix(Kind.F4, codes, found, _GROUP, inputs)
