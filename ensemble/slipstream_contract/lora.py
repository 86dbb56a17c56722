"""Adapters by TensorRT-LLM's inputs: an id of the client's, and with its first use the weights.

`lora_weights [rows, widest]` has a row for each module of a layer: A `[r, inputs]` and then B
`[outputs, r]`, flattened, times the scaling, with zeros behind. `lora_config [rows, 3]` says of
each row its module's id, its layer and its rank.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import numpy as np

from slipstream_contract import limits
from slipstream_contract.errors import ContractError
from slipstream_contract.prompt_table import TABLE

ID, WEIGHTS, CONFIG = "lora_task_id", "lora_weights", "lora_config"
MAX_ROWS = 1 << 16
MAX_BYTES = 448 << 20  # of the weights of a request
COLUMNS = 3


class LoraTask(msgspec.Struct, frozen=True):
    """An adapter that a client knows by a number; without weights it was sent before."""

    task_id: int  # above 0
    num_rows: int = 0
    width: int = 0
    weights: bytes = b""  # fp16 `[num_rows, width]`
    config: bytes = b""  # i32 `[num_rows, 3]`


class _Inputs(Protocol):
    def has(self, name: str) -> bool: ...
    def array(self, name: str) -> Any: ...
    def whole(self, name: str, default: int | None = None) -> int: ...


def read_task(read: _Inputs) -> LoraTask | None:
    """Read the three inputs; None: no adapter, as an id of 0 says. Raises ContractError."""
    task_id = limits.check_whole(ID, read.whole(ID, 0), 0, limits.UINT64_MAX)
    weights, config = read.array(WEIGHTS), read.array(CONFIG)
    has_weights = weights is not None and weights.size > 0
    has_config = config is not None and config.size > 0
    if has_weights != has_config:
        given, missing = (WEIGHTS, CONFIG) if has_weights else (CONFIG, WEIGHTS)
        raise ContractError(f"{given} is given without {missing}")
    if not task_id:
        if has_weights:
            raise ContractError(f"{WEIGHTS} is given, but {ID} is 0, which is no adapter")
        return None
    if not has_weights:
        return LoraTask(task_id)
    if len(weights) != len(config):
        raise ContractError(f"{WEIGHTS} has {len(weights)} rows, {CONFIG} has {len(config)}")
    limits.check_count(CONFIG, len(config), MAX_ROWS, "rows")
    if weights.nbytes > MAX_BYTES:
        raise ContractError(
            f"{WEIGHTS} has {weights.nbytes} bytes, at most {MAX_BYTES} are served; "
            "`slipstream adapter load` takes a directory of any size"
        )
    rows, width = weights.shape
    return LoraTask(task_id, rows, width, weights.tobytes(), config.tobytes())


def without_batch(arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a request's arrays, those of adapters without a leading 1 that clients send."""
    found = dict(arrays)
    for name in (WEIGHTS, CONFIG, TABLE):
        array = found.get(name)
        if isinstance(array, np.ndarray) and array.ndim == 3 and len(array) == 1:
            found[name] = array[0]
    return found
