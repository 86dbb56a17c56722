"""Model `slipstream_health`: whether tokens can be had now, told by the engine itself.

The server's own readiness stays 200 when the engine, or even a stub, is dead: ask here.
"""

import msgspec
import numpy as np

from slipstream import wire
from slipstream.bridge.bridge import Bridge
from slipstream.bridge.streams import Outputs

_ANSWER_S = 1.0


class Report(msgspec.Struct, frozen=True):
    """The JSON of the answer."""

    model: str
    engine_pid: int
    kv_blocks_free: int  # a cached block that no sequence uses counts as free
    kv_blocks_total: int
    running: int
    waiting: int
    last_step_age_s: float  # 0 while idle


def health(bridge: Bridge, output: str) -> Outputs:
    """A `Report` as the given output. Raises ContractError if the engine is silent for 1 s."""
    status: wire.Status = bridge.connection.ask_status(_ANSWER_S)
    report = Report(*(getattr(status, field) for field in Report.__struct_fields__))
    return {output: np.array([msgspec.json.encode(report)], dtype=object)}
