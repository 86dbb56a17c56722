"""Choose the format of a checkpoint: by what its configuration names, or by its tensors."""

from pathlib import Path

from slipstream.models.cache_scheme import beside_of, quantization_of
from slipstream.models.formats.awq import Awq
from slipstream.models.formats.bitsandbytes import BitsAndBytes
from slipstream.models.formats.compressed_tensors import CompressedTensors
from slipstream.models.formats.fine_grained import FineGrained
from slipstream.models.formats.format import Format
from slipstream.models.formats.gptq import Gptq
from slipstream.models.formats.modelopt import ModelOpt
from slipstream.models.formats.module import Module, RawSource
from slipstream.models.formats.mxfp4 import Mxfp4
from slipstream.models.formats.windowed import Seen, Windowed
from slipstream.models.parts import Part
from slipstream.quant.matrix import QuantMatrix

FORMATS: tuple[type[Format], ...] = (
    CompressedTensors,
    Awq,
    Gptq,
    ModelOpt,
    FineGrained,
    BitsAndBytes,
    Mxfp4,
)
_QUANTISED = (
    "qweight",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "SCB",
    "weight.absmax",
)


class Formats:
    """The format of a directory, and matrices by it.

    Args:
        directory: of the checkpoint.
        source: its tensors.
        head: name of the head, which is in 16 bits where nothing says so.
    """

    def __init__(self, directory: Path, source: RawSource, head: str) -> None:
        self._directory, self._source, self._head = directory, source, head
        self._format = self._chosen(directory)
        beside = beside_of(directory)
        self._beside = None if beside is None else ModelOpt(beside)
        self._last: tuple[str, QuantMatrix | None] = ("", None)  # several may be made of one

    @staticmethod
    def _chosen(directory: Path) -> Format | None:
        found = quantization_of(directory)
        if found is None:
            return None
        method, config = found
        return next(each for each in FORMATS if method in each.methods)(config)

    def load(self, name: str, outputs: int, inputs: int) -> QuantMatrix | None:
        """Read the matrix `name` (the checkpoint's name) if it is quantised.

        Raises `CheckpointError` if tensors are wrong, or contradict the configuration.
        """
        if self._last[0] != name:
            self._last = (name, self._load(name, outputs, inputs))
        return self._last[1]

    def load_part(self, name: str, outputs: int, inputs: int, part: Part) -> QuantMatrix | None:
        """Read a part of a matrix, and of its tensors only what the part needs; see `load`."""
        module, seen = Module(name, self._source), Seen(name, self._source)
        if (found := self._checked(module)) is None:
            return None
        window = part.window(found.units(module, outputs, inputs))
        if window is None:
            whole = self.load(name, outputs, inputs)
            return whole and part.of(whole, None)
        found.load(seen, outputs, inputs)
        sizes = window.sizes(outputs, inputs)
        read = found.load(Windowed(name, self._source, window, seen.shapes), *sizes)
        return part.of(read, window)

    def _load(self, name: str, outputs: int, inputs: int) -> QuantMatrix | None:
        module = Module(name, self._source)
        found = self._checked(module)
        return None if found is None else found.load(module, outputs, inputs)

    def _checked(self, module: Module) -> Format | None:
        """Return the format of a matrix that is quantised, and must be; raises for any other."""
        if self._format is None:
            part = next((each for each in _QUANTISED if module.has(each)), None)
            if part is not None:
                raise module.refusal(
                    part, f"is of quantised weights, but {self._directory} has no config of them"
                )
            return None
        is_held = self._format.holds(module)
        if is_held or module.name != self._head:
            self._format.check(module)
            if self._beside is not None:
                self._beside.check(module)
        return self._format if is_held else None

    def is_quantised(self, name: str) -> bool:
        """Whether the matrix `name` is."""
        if self._format is None:
            return False
        return self._format.holds(Module(name, self._source))


def table() -> list[str]:
    """Return the lines of docs/quantization.md's table: what is read, and what it becomes."""
    lines = ["| from | what | tensors | in memory |", "|---|---|---|---|"]
    for each in FORMATS:
        for row in each.rows:
            lines.append(f"| {each.title} | {row.name} | {row.tensors} | {row.becomes} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
