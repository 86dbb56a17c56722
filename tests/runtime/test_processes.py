"""Which signals end a server."""

import signal
from collections.abc import Iterator

import pytest
from slipstream_runtime.processes import ending_signals


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN], ids=["terminal", "nohup"])
def hangup(request: pytest.FixtureRequest) -> Iterator[signal.Handlers]:
    before = signal.signal(signal.SIGHUP, request.param)
    yield request.param
    signal.signal(signal.SIGHUP, before)


def test_a_hangup_ends_a_server_unless_nohup_started_it(hangup: signal.Handlers) -> None:
    is_ended = hangup is signal.SIG_DFL
    assert (signal.SIGHUP in ending_signals()) == is_ended
    assert {signal.SIGTERM, signal.SIGINT} <= set(ending_signals())
