"""The ring of weights that kernels of a few rows' experts have in shared memory, beside rows."""

from typing import NamedTuple

LEAST_SLOTS = 2
_PART_BYTES = 2048  # of a weight row in a slot, at most
_PAD = 64  # bytes behind a part
_STATIC_BYTES = 15 << 10
_MEMORY = (227 << 10) - _STATIC_BYTES
_PLAIN_BYTES = 48 << 10  # that a CTA has without asking for more
_CHUNK_BYTES = 128  # of a weight row, which a warp multiplies at once


class Ring(NamedTuple):
    """Sizes of rows, `[num_rows, width]` of 16 bits, and of weights that stream past them."""

    num_rows: int
    width: int
    is_fp8: bool  # weights

    @property
    def pitch(self) -> int:
        """Return the bytes between two rows, by which loads of several meet different banks."""
        return _up(self.width * 2) + (16 if self.is_fp8 else 64)

    @property
    def part_bytes(self) -> int:
        """Return the bytes of a weight row in a slot, by whole chunks."""
        return min(_PART_BYTES, _up(self.width * (1 if self.is_fp8 else 2)))

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of a slot, of 16 weight rows."""
        return 16 * (self.part_bytes + _PAD)

    def num_slots(self, most: int) -> int:
        """Count slots for which there is room beside the rows."""
        return min(most, (_MEMORY - self.num_rows * self.pitch) // self.slot_bytes)

    def num_bytes(self, most: int) -> int:
        """Return the bytes of shared memory that a launch requests.

        What does not fit into a CTA's default beside static memory is counted as more than the
        default, which the launch then raises.
        """
        found = self.num_slots(most) * self.slot_bytes + self.num_rows * self.pitch
        return found if found + _STATIC_BYTES <= _PLAIN_BYTES else max(found, _PLAIN_BYTES + 16)

    def arguments(self, most: int, under_way: int) -> tuple[int, ...]:
        """Return a kernel's last arguments."""
        slots = self.num_slots(most)
        return self.pitch, self.part_bytes, slots, min(under_way, slots)


def _up(num_bytes: int) -> int:
    return -(-num_bytes // _CHUNK_BYTES) * _CHUNK_BYTES
