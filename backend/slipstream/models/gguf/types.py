"""Name the types of tensors in a GGUF file that are served, and the sizes of their blocks.

A row of a tensor is a whole number of blocks of `elements` values in `num_bytes` bytes each.
"""

from typing import NamedTuple


class BlockType(NamedTuple):
    """A way to store values: in blocks of so many."""

    name: str
    elements: int
    num_bytes: int


F32, F16, BF16 = BlockType("F32", 1, 4), BlockType("F16", 1, 2), BlockType("BF16", 1, 2)

# Number in the file -> type.
BLOCK_TYPES = {
    0: F32,
    1: F16,
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    30: BF16,
    39: BlockType("MXFP4", 32, 17),
}
QUANTISED = {kind.name: kind for kind in BLOCK_TYPES.values() if kind.elements > 1}


def name_of(number: int) -> str:
    """Return the name of a type, served or not, for messages."""
    from gguf.constants import GGMLQuantizationType

    names = {int(kind): str(kind.name) for kind in GGMLQuantizationType}
    return names.get(number, f"number {number}")
