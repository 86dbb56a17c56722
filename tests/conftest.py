"""What all tests share: one during which a tritonserver crashed by itself is run again."""

import contextlib
import warnings

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings
from slipstream_compose.triton import TritonServer

# tritonserver 24.10 itself: rarely, in its gRPC streams under cancels; once in eight times where a
# model's process is killed that has streams, for that may hold a lock which the server shares.
CRASHES = ("Signal (11) received", "boost::interprocess::lock_exception")
MAX_RUNS = 4
TOO_SLOW = HealthCheck.too_slow
_started: list[TritonServer] = []
_start = TritonServer.start


def _start_noted(server: TritonServer) -> None:
    if server not in _started:
        _started.append(server)
    _start(server)


def pytest_configure() -> None:
    TritonServer.start = _start_noted
    # How fast a machine draws is no property of what is drawn.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[TOO_SLOW])
    settings.load_profile("any machine")


def crashed() -> list[TritonServer]:
    """Those that have crashed by themselves, told once."""
    found = []
    for server in list(_started):
        with contextlib.suppress(OSError):
            log = server.log.read_text(errors="replace")
            if any(crash in log for crash in CRASHES):
                found.append(server)
                _started.remove(server)
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem) -> bool:
    """Whatever fixtures there are is made anew then, the servers with them."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for _ in range(MAX_RUNS - 1):
        if not any(report.failed for report in reports) or not crashed():
            break
        warnings.warn("tritonserver crashed; the test is run again", stacklevel=1)
        with contextlib.suppress(Exception):  # of a server that is gone
            item.session._setupstate.teardown_exact(None)
        item._initrequest()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
