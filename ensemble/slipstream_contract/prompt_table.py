"""Prompt tuning by TensorRT-LLM's inputs: rows of embeddings that a request brings.

Token id `vocabulary + i` is row i of `prompt_embedding_table [rows, width]`. A prompt without such
ids has all rows before it. `prompt_vocab_size` is how many rows count; `prompt_table_extra_id`
names the table in the prefix cache, beside the digest of its rows, which alone would do.
"""

from typing import Any, Protocol

import msgspec
import numpy as np

from slipstream_contract import limits
from slipstream_contract.errors import ContractError

TABLE, SIZE = "prompt_embedding_table", "prompt_vocab_size"
EXTRA_ID, EXTRA_IDS = "prompt_table_extra_id", "prompt_table_extra_ids"
MAX_ROWS = 1 << 16
MAX_BYTES = 448 << 20


class PromptTable(msgspec.Struct, frozen=True):
    """Embeddings of the virtual tokens of one request."""

    num_rows: int
    width: int
    rows: bytes  # fp16 `[num_rows, width]`
    extra_ids: tuple[int, ...] = ()  # each once, rising, without 0


class _Inputs(Protocol):
    def has(self, name: str) -> bool: ...
    def array(self, name: str) -> Any: ...
    def whole(self, name: str, default: int | None = None) -> int: ...


def read_table(read: _Inputs, num_ids: int = 0) -> PromptTable | None:
    """Read a request's table; None: it has none. Raises ContractError.

    `num_ids`: of `input_ids`, padding included, which have an extra id each; 0: a text has one.
    """
    table, size = read.array(TABLE), read.whole(SIZE, 0)
    extra_ids = _extra_ids(read, num_ids)
    if table is None or table.size == 0:
        for name, given in ((SIZE, size), (EXTRA_IDS if num_ids else EXTRA_ID, len(extra_ids))):
            if given:
                raise ContractError(f"{name} is given without {TABLE}")
        return None
    limits.check_count(TABLE, len(table), MAX_ROWS, "rows")
    if table.nbytes > MAX_BYTES:
        raise ContractError(f"{TABLE} has {table.nbytes} bytes, at most {MAX_BYTES} are served")
    rows, width = table.shape
    if read.has(SIZE):
        rows = limits.check_whole(SIZE, size, 1, rows)
    return PromptTable(rows, width, np.ascontiguousarray(table[:rows]).tobytes(), extra_ids)


def _extra_ids(read: _Inputs, num_ids: int) -> tuple[int, ...]:
    if not num_ids:
        given = limits.check_whole(EXTRA_ID, read.whole(EXTRA_ID, 0), 0, limits.UINT64_MAX)
        return (given,) if given else ()
    array = read.array(EXTRA_IDS)
    if array is None or array.size == 0:
        return ()
    if len(array) != num_ids:
        raise ContractError(f"{EXTRA_IDS} has {len(array)} values for {num_ids} input_ids")
    return tuple(sorted({int(each) for each in array.tolist()} - {0}))
