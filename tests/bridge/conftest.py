"""A desk of calls, flow control with postprocessing's end of its file, and a tiny checkpoint."""

import json
import math

import pytest
from fixtures.bridge.launching import CONFIG
from fixtures.bridge.streams import Desk
from slipstream.bridge.flow import Flow
from slipstream_runtime.credit import CreditFile, Taker


@pytest.fixture
def desk():
    desk = Desk()
    yield desk
    desk.senders.close()


@pytest.fixture
def flow(desk, tmp_path):
    """Flow control, and postprocessing's end of its file: a process that is at work."""

    def cancel(call, error):
        desk.calls.cancel(call, error)
        desk.calls.end_cancelled(math.inf)

    flow = Flow(CreditFile(tmp_path / "credits"), desk.senders.hand_over, cancel)
    flow.other_end = CreditFile(tmp_path / "credits")
    flow.taker = Taker(flow.other_end)
    flow.taker.start()
    desk.calls.settle = flow.settle
    yield flow
    flow.close()
    flow.taker.close()


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "checkpoint"
