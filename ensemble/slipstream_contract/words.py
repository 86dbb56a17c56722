"""Word lists as the contract has them: int32[2, n], flat token ids above the ends of the words."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream_contract.errors import ContractError, clip

_MALFORMED = "not flat token ids above the cumulative ends of the words, padded with -1"


def pack_word_list(words: Iterable[Sequence[int]]) -> NDArray[np.int32]:
    """Return int32[2, n], n >= 1: ids padded with 0, ends padded with -1, without empty words."""
    kept = [word for word in words if len(word)]
    ids = [token_id for word in kept for token_id in word]
    packed = np.zeros((2, max(1, len(ids))), np.int32)
    packed[1] = -1
    packed[0, : len(ids)] = ids
    packed[1, : len(kept)] = np.cumsum([len(word) for word in kept], dtype=np.int32)
    return packed


def unpack_word_list(packed: NDArray[Any], field: str = "words") -> list[list[int]]:
    """Invert `pack_word_list`; words of no tokens are left out. Raises ContractError."""
    if packed.ndim != 2 or packed.shape[0] != 2 or packed.dtype.kind not in "iu":
        raise ContractError(
            f"{field} has shape {clip(list(packed.shape))}, type {packed.dtype}, not INT32 [2, n]"
        )
    ids: list[int] = packed[0].tolist()
    ends: list[int] = packed[1].tolist()
    size = ends.index(-1) if -1 in ends else len(ends)
    is_sound = all(end == -1 for end in ends[size:])
    words, begin = [], 0
    for end in ends[:size]:
        if not begin <= end <= len(ids):
            is_sound = False
            break
        words.append(ids[begin:end])
        begin = end
    if not is_sound:
        raise ContractError(f"{field} has ends {clip(ends)}, {_MALFORMED}")
    if any(token_id < 0 for word in words for token_id in word):
        raise ContractError(f"{field} holds the token id {min(ids)}, below 0")
    return [word for word in words if word]
