"""Masks of a step's rows in memory that the device reads while the step runs.

A step uses the places of its results, so two steps may overlap. A mask that comes after its step
has ended is dropped: another step may have the place by then.
"""

import threading
from collections.abc import Sequence

import numpy as np
import torch

from slipstream.core.batch import Batch, Outcome
from slipstream.kernels.sampling.constrain import MASK_TAG, Masks, mask_bytes
from slipstream.runner.step_arrays import Int32s, Int64s

_MOST_TAGS = 1 << 30


class StepMasks:
    """The masks of one step, which any thread may give until it has ended."""

    def __init__(self, places: "MaskPlaces", first: int, tag: int, wanted: Int32s) -> None:
        self._places = places
        self._first = first  # place of sample 0
        self._tag = tag
        self._wanted = wanted  # of each sample its record's tag
        self._lock = threading.Lock()
        self._is_open = True

    def give(self, sample: int, mask: bytes) -> bool:
        """Write the mask of a sample; return False if the step has ended."""
        with self._lock:
            if self._is_open:
                self._places.write(self._first + sample, mask, self._tag)
            return self._is_open

    def close(self) -> None:
        """Take no more masks."""
        with self._lock:
            self._is_open = False

    def ask(self, rows: Int32s, places: Int64s) -> None:
        """Write into the records `rows` which tags they want; `places` are those of the samples."""
        rows[places, MASK_TAG] = self._wanted

    def outcomes(self, outcomes: Sequence[int]) -> list[int]:
        """Return the outcomes of the step, `UNMASKED` where a sample has none and may do so."""
        applied = self._places.applied(self._first, len(outcomes))
        sampled = int(Outcome.SAMPLED)
        is_open = (self._wanted < 0) & (np.asarray(outcomes) == sampled) & (applied == 0)
        found: list[int] = np.where(is_open, int(Outcome.UNMASKED), outcomes).tolist()
        return found


class MaskPlaces:
    """A mask for each of `size` results."""

    def __init__(self, size: int, vocab_size: int, device: torch.device) -> None:
        is_pinned = device.type == "cuda"
        num_bytes = mask_bytes(vocab_size)
        self.masks = Masks(
            torch.zeros(size, dtype=torch.int32, pin_memory=is_pinned),
            torch.zeros((size, num_bytes), dtype=torch.uint8, pin_memory=is_pinned),
            torch.zeros(size, dtype=torch.uint8, pin_memory=is_pinned),
        )
        self._tags, self._bits, self._applied = (tensor.numpy() for tensor in self.masks)
        self._tag = 0

    def start(self, batch: Batch, first: int) -> StepMasks | None:
        """Return the masks of a step about to be launched; None: no row has one.

        Those that are known are written.
        """
        if not batch.has_masks:
            return None
        self._tag = self._tag % _MOST_TAGS + 1
        rows = [row for row in batch.rows if row.samples]
        signs = [0 if row.mask is None else 1 if row.needs_mask else -1 for row in rows]
        self._applied[first : first + len(rows)] = 0
        masks = StepMasks(self, first, self._tag, self._tag * np.array(signs, np.int32))
        for sample, row in enumerate(rows):
            if row.mask:
                masks.give(sample, row.mask)
        return masks

    def write(self, place: int, mask: bytes, tag: int) -> None:
        """Write a mask, and then the tag that says so."""
        self._bits[place, : len(mask)] = np.frombuffer(mask, np.uint8)
        self._tags[place] = tag

    def applied(self, first: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return of so many places whether a row of the last step there got its mask."""
        return self._applied[first : first + count]
