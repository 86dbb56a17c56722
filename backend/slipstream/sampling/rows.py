"""What the sampling kernels read of a step, as numpy arrays: two for a draw, four for histories."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from slipstream_contract.sampling import SamplingParams

from slipstream.kernels.sample import EDIT_WORDS, ROW, ROW_WORDS

Words = NDArray[np.int32]


class SamplingArrays(NamedTuple):
    """`n` rows of logits and all their edits, in the order of `SamplingInputs`."""

    rows: Words  # [n, 16]
    edits: Words  # [e, 2]


class HistoryArrays(NamedTuple):
    """The arguments of `count_tokens` after `counts`, in order: `h` histories, `t` tokens."""

    tokens: Words  # [t]
    slots: Words  # [h]
    starts: Words  # [h + 1]
    num_prompts: Words  # [h]


def pack_row(sampling: SamplingParams, seed: int, slot: int) -> bytes:
    """What never changes of a sequence's `ROW` record while it keeps its slot: worth keeping."""
    row = np.zeros(1, ROW)
    row["temperature"] = sampling.temperature
    row["top_k"] = min(sampling.top_k, 2**31 - 1)
    row["top_p"], row["min_p"] = sampling.top_p, sampling.min_p
    row["repetition"] = sampling.repetition_penalty
    row["presence"], row["frequency"] = sampling.presence_penalty, sampling.frequency_penalty
    row["slot"] = slot
    row["seed"] = np.uint64(seed % 2**64).astype(np.int64)
    return row.tobytes()


def sampling_arrays(
    packed: Sequence[bytes],
    numbers: Sequence[int],
    edits: Sequence[bytes],
    num_rows: int = 0,
    first_result: int = 0,
) -> SamplingArrays:
    """Rows in the order of their logits, then padding up to `num_rows`.

    Args:
        packed: `pack_row` of each.
        numbers: how many output tokens are before the one to draw.
        edits: `Edits.pack` of each, empty for most.
        num_rows: how many rows the logits have, if more.
        first_result: where in the results the tokens go, one after the other.
    """
    count = len(packed)
    rows = np.zeros(max(count, num_rows), ROW)
    rows["result"] = -1
    rows[:count] = np.frombuffer(b"".join(packed), ROW)
    rows["number"][:count] = numbers
    rows["result"][:count] = np.arange(first_result, first_result + count)
    joined = b"".join(edits)
    if joined:
        lengths = np.fromiter(map(len, edits), np.int64, count) // (4 * EDIT_WORDS)
        ends = lengths.cumsum()
        rows["first_edit"][:count], rows["end_edit"][:count] = ends - lengths, ends
    return SamplingArrays(
        rows.view(np.int32).reshape(-1, ROW_WORDS),
        np.frombuffer(joined, np.int32).reshape(-1, EDIT_WORDS),
    )


def history_arrays(histories: Sequence[tuple[int, Sequence[int], int]]) -> HistoryArrays:
    """Of (slot, prompt and output, length of the prompt) each."""
    lengths = [len(token_ids) for _, token_ids, _ in histories]
    parts = [np.asarray(token_ids, np.int32) for _, token_ids, _ in histories]
    return HistoryArrays(
        np.concatenate([*parts, np.zeros(0, np.int32)]),
        np.array([slot for slot, _, _ in histories], np.int32),
        np.append(0, np.cumsum(lengths)).astype(np.int32),
        np.array([num_prompt for _, _, num_prompt in histories], np.int32),
    )
