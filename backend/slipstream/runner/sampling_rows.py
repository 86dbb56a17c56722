"""Inputs of the sampling kernels as numpy arrays: two for samples, four for histories."""

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from slipstream_contract.sampling import SamplingParams

from slipstream.core.batch import Row
from slipstream.core.moving import Moved
from slipstream.kernels.sampling.sample import CHOSEN, EDIT_WORDS, ROW, ROW_WORDS

Words = NDArray[np.int32]

assert ROW.fields is not None
_WORD = {name: offset // 4 for name, (_, offset, *_) in ROW.fields.items()}
NUMBER, RESULT = _WORD["number"], _WORD["result"]  # words of a row
_FIRST_EDIT, _END_EDIT = _WORD["first_edit"], _WORD["end_edit"]
_NUM_STEP_FIELDS = len(ROW.fields) - len(CHOSEN) - 2  # behind slot and seed: of each step
_CODES = {"<i4": "i", "<f4": "f", "<i8": "q"}


def _packer() -> Struct:
    """Return the function that packs a `ROW` from its fields in order."""
    assert ROW.fields is not None
    code, end = "<", 0
    for name in ROW.names or ():
        kind, offset = ROW.fields[name][:2]
        code += "x" * (offset - end) + _CODES[kind.str]
        end = offset + kind.itemsize
    return Struct(code + "x" * (ROW.itemsize - end))


_RECORD = _packer()


class SamplingArrays(NamedTuple):
    """`n` rows of logits and all their edits, in the order of `SamplingInputs`."""

    rows: Words  # [n, ROW_WORDS]
    edits: Words  # [e, 2]


class HistoryArrays(NamedTuple):
    """The arguments of `count_tokens` after `counts`, in order: `h` histories, `t` tokens."""

    tokens: Words  # [t]
    slots: Words  # [h]
    starts: Words  # [h + 1]
    num_prompts: Words  # [h]


def pack_row(sampling: SamplingParams, seed: int, slot: int) -> bytes:
    """Pack what does not change in a sequence's `ROW` record while it keeps its slot."""
    values = {name: getattr(sampling, name) for name in CHOSEN.values()}
    if sampling.order == "trtllm":  # logit / T - p is (logit - p T) / T
        for name in ("presence_penalty", "frequency_penalty"):
            values[name] *= sampling.penalty_temperature
    return _RECORD.pack(
        *values.values(),
        slot,
        (seed + 2**63) % 2**64 - 2**63,  # the 64 bits as a signed number
        *(0,) * _NUM_STEP_FIELDS,
    )


def sampling_arrays(
    packed: Sequence[bytes],
    numbers: Sequence[int],
    edits: Sequence[bytes],
    num_rows: int = 0,
    first_result: int = 0,
) -> SamplingArrays:
    """Rows in the order of their logits, then padding up to `num_rows`: see `fill_rows`."""
    num_edits = sum(map(len, edits)) // (4 * EDIT_WORDS)
    arrays = SamplingArrays(
        np.zeros((max(len(packed), num_rows), ROW_WORDS), np.int32),
        np.zeros((num_edits, EDIT_WORDS), np.int32),
    )
    fill_rows(*arrays, slice(len(packed)), packed, numbers, edits, first_result)
    return arrays


def fill_rows(
    rows: Words,
    all_edits: Words,
    places: slice | NDArray[np.int64],
    packed: Sequence[bytes],
    numbers: Sequence[int],
    edits: Sequence[bytes],
    first_result: int,
) -> None:
    """Write `SamplingArrays` that are zeroed; rows that have no place are padding.

    Args:
        rows, all_edits: the arrays.
        places: which of the rows.
        packed: `pack_row` of each.
        numbers: how many output tokens are before the one to sample.
        edits: `Edits.pack` of each, empty for most.
        first_result: where in the results the tokens go, one after the other.
    """
    count = len(packed)
    rows[:, RESULT] = -1
    rows[places] = np.frombuffer(b"".join(packed), np.int32).reshape(count, ROW_WORDS)
    rows[places, NUMBER] = numbers
    rows[places, RESULT] = np.arange(first_result, first_result + count)
    if any(edits):
        lengths = np.fromiter(map(len, edits), np.int64, count) // (4 * EDIT_WORDS)
        ends = lengths.cumsum()
        rows[places, _FIRST_EDIT], rows[places, _END_EDIT] = ends - lengths, ends
        all_edits[: ends[-1]] = np.frombuffer(b"".join(edits), np.int32).reshape(-1, EDIT_WORDS)


def move_rows(rows: Words, places: Sequence[int], moved: Sequence[Moved]) -> None:
    """Write fields that hold for one row of this step alone."""
    values = rows.view(np.float32)
    for place, fields in zip(places, moved, strict=True):
        for name, value in fields:
            values[place, _WORD[name]] = value


def history_arrays(histories: Sequence[tuple[int, Sequence[int], int]]) -> HistoryArrays:
    """Make the arrays of histories: (slot, prompt and output, length of the prompt) each."""
    lengths = [len(token_ids) for _, token_ids, _ in histories]
    parts = [np.asarray(token_ids, np.int32) for _, token_ids, _ in histories]
    return HistoryArrays(
        np.concatenate([*parts, np.zeros(0, np.int32)]),
        np.array([slot for slot, _, _ in histories], np.int32),
        np.append(0, np.cumsum(lengths)).astype(np.int32),
        np.array([num_prompt for _, _, num_prompt in histories], np.int32),
    )


def histories(rows: tuple[Row, ...]) -> HistoryArrays | None:
    """Return the arrays of the rows whose tokens are to be counted anew.

    In TensorRT-LLM's order the prompt counts as output does.
    """
    found = [
        (r.slot, r.history, 0 if r.sampling.order == "trtllm" else len(r.history) - r.num_outputs)
        for r in rows
        if r.history is not None
    ]
    return history_arrays(found) if found else None
