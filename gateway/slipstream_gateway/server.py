"""Run a gateway in the foreground: uvicorn with one worker, until a signal."""

import asyncio
import contextlib
import logging
import resource
import shutil
import socket
import time
from collections.abc import Iterator

import uvicorn
import uvloop
from slipstream.bridge.text import make_encoders
from slipstream_runtime.processes import ending_signals
from slipstream_runtime.stub import share_interpreter
from slipstream_runtime.waking import wake_gently
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from slipstream_gateway import page
from slipstream_gateway.app import App
from slipstream_gateway.errors import ApiError
from slipstream_gateway.generate import Generator
from slipstream_gateway.metrics import Metrics
from slipstream_gateway.models import Models, open_models
from slipstream_gateway.protocol import Protocol
from slipstream_gateway.routes import Routes, http_error
from slipstream_gateway.settings import Settings

_log = logging.getLogger(__name__)
_TICK_S = 0.25
_BACKLOG = 2048
_MAX_FILES = 1 << 16
_SEND_BYTES = 256 << 10  # of each connection, in the kernel: a slow reader holds no more
_STOPPING = ApiError(503, "the server is stopping", retry_after_ms=1000)


class Gateway:
    """The parts of a running gateway."""

    def __init__(self, models: Models, settings: Settings) -> None:
        metrics = Metrics()
        self.models = models
        self.generator = Generator(models, settings, metrics)
        routes = Routes(models, settings, metrics, lambda: self.generator.why_unready())
        handlers = {HTTPException: http_error}
        rest = Starlette(routes=[*routes.all(), *page.routes()], exception_handlers=handlers)
        self.app = App(self.generator, rest, settings, metrics)
        self._settings = settings
        self._ends = asyncio.Event()

    async def run(self, listener: socket.socket) -> None:
        """Serve on a bound socket until `end` is called; then drain."""
        settings = self._settings
        Protocol.header_s = settings.header_s
        config = uvicorn.Config(
            self.app,
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=round(settings.idle_s),
            timeout_graceful_shutdown=1,
        )
        server = _Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        helpers = [asyncio.create_task(each) for each in (self._tick(), self.models.follow())]
        stop = asyncio.create_task(self._ends.wait())
        await asyncio.wait((serving, stop), return_when=asyncio.FIRST_COMPLETED)
        await self._drain()
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        for helper in helpers:
            helper.cancel()

    def end(self) -> None:
        """Have `run` return."""
        self._ends.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self.generator.tick(time.monotonic())
            except Exception:
                _log.exception("streams could not be looked after")

    async def _drain(self) -> None:
        """Refuse new requests, and give the running ones some time."""
        self.generator.is_draining = True
        deadline = time.monotonic() + self._settings.drain_s
        while self.generator.exchanges and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self.generator.fail_all(_STOPPING)


class _Server(uvicorn.Server):
    """A server whose signals are handled elsewhere."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(settings: Settings) -> socket.socket:
    """Return a socket that listens at the settings' address. Raises OSError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(_BACKLOG)  # connections wait from here on
    except (OSError, OverflowError) as error:
        listener.close()
        raise OSError(
            f"port {settings.port} on {settings.host} cannot be used ({error}): choose another "
            "with --port, or another address with --host"
        ) from None
    return listener


async def serve(settings: Settings, listener: socket.socket) -> None:
    """Serve until a signal ends it. Raises ValueError, OSError for a bad repository."""
    loop = asyncio.get_running_loop()
    pool = make_encoders()
    models = open_models(settings, loop, pool)
    try:
        gateway = Gateway(models, settings)
        for number in ending_signals():
            loop.add_signal_handler(number, gateway.end)
        share_interpreter()
        await gateway.run(listener)
    finally:
        models.close()
        pool.shutdown(wait=False)
        if settings.runtime is None:
            shutil.rmtree(models.directory, ignore_errors=True)


def allow_connections() -> None:
    """Let this process open as many files and sockets as the system allows it.

    The usual first limit, 1,024, would refuse streams beyond it in silence.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def run(settings: Settings, listener: socket.socket) -> None:
    """Serve in an event loop of uvloop."""
    wake_gently()
    allow_connections()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, listener))
