"""Define where a tensor lies, and how it is stored. No torch."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The place of a tensor: bytes `begin .. end` of `file`, row-major.

    A reader undoes `paired_heads` and `added`, so that a layer sees the values of a Hugging Face
    checkpoint.
    """

    file: Path
    dtype: str  # the format's name: F32, BF16, ..., or a type of GGUF's blocks: Q4_0, Q6_K, ...
    shape: tuple[int, ...]
    begin: int
    end: int
    paired_heads: int = 0  # rows are of so many heads, in each the two that rotate side by side
    added: float = 0.0  # to every value
