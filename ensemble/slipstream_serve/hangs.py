"""Tell whether a server hangs or is busy, before anything is killed.

The server is probed over HTTP and over gRPC. While an answer is overdue, `ThreadWatch` looks at the
server's threads: a thread that computes, or waits for a processor or a disk, makes progress; a
server with an overdue answer whose threads all rest will never give it. tritonserver parses the
body of a request in the thread that answers over HTTP, so a long body delays answers by seconds.
"""

from __future__ import annotations

from typing import NamedTuple

from slipstream_runtime.threads import ThreadWatch

from slipstream_serve.front_end import FrontEnd
from slipstream_serve.pulse import Pulse
from slipstream_serve.triton import Endpoints

LATE_S = 1.2  # an answer is overdue: a probe goes out every second
DOUBT_S = 2.0  # of silence over HTTP: models, which are probed over HTTP, may only seem silent
HUNG_S = 3.5  # without an answer, while no thread of the server works
STREAMS_HUNG_S = 20.0  # without an answer over a gRPC stream, while a thread works
HTTP_HUNG_S = 60.0  # the same over HTTP: the thread may parse a long body
REST_S = 2.0  # without work in any thread
_HTTP_PATIENCE_S = HTTP_HUNG_S + 30.0  # on one connection: another thread would serve a new one


class ServerSigns(NamedTuple):
    """The signs of a server that are visible from outside, in seconds."""

    http_silence_s: float  # since its last answer over HTTP
    streams_silence_s: float  # since its last answer over a gRPC stream
    resting_s: float  # for which no thread of it has worked


def verdict(signs: ServerSigns) -> str:
    """Return how the server hangs; empty if it answers, or may still do so."""
    is_resting = signs.resting_s > REST_S
    streams_hung_s = HUNG_S if is_resting else STREAMS_HUNG_S
    http_hung_s = HUNG_S if is_resting else HTTP_HUNG_S
    if signs.http_silence_s > http_hung_s:
        return f"tritonserver did not answer for {http_hung_s:g} s"
    if signs.streams_silence_s > streams_hung_s:
        return f"gRPC streams of tritonserver stood still for {streams_hung_s:g} s"
    return ""


class ServerWatch:
    """Probes a server over HTTP and gRPC, and judges it. Look several times a second."""

    def __init__(self, endpoints: Endpoints) -> None:
        """Start to send probes."""
        self._http = Pulse(endpoints, None, patience_s=_HTTP_PATIENCE_S)
        self._streams = FrontEnd(endpoints)
        self._threads = ThreadWatch()

    @property
    def is_in_doubt(self) -> bool:
        """Whether HTTP is silent for so long that models probed over it seem silent, too."""
        return self._http.silence_s() > DOUBT_S

    def hang(self, pid: int) -> str:
        """Return how the server, process `pid`, hangs; empty if it does not."""
        silences = self._http.silence_s(), self._streams.silence_s()
        if max(silences) < LATE_S:
            self._threads.reset()
            return ""
        return verdict(ServerSigns(*silences, self._threads.resting_s(pid)))

    def reset(self) -> None:
        """Measure all silence from now on."""
        self._threads.reset()
        self._http.reset()
        self._streams.reset()

    def renew(self) -> None:
        """Reset, and send new probes: another server has taken the place of the old one."""
        self._threads.reset()
        self._http.renew()
        self._streams.renew()

    def close(self) -> None:
        """Stop the probes."""
        self._http.close()
        self._streams.close()
