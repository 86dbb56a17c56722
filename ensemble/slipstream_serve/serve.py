"""`slipstream serve`: a tritonserver in the foreground, from start to an end without a trace.

What breaks meanwhile is repaired (`supervise`). Ready means that a token could be had, not only
that the server says so of itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

from slipstream_serve.probe import first_token, stream_text, text_model
from slipstream_serve.server import repository_root, server_directory
from slipstream_serve.supervise import Repairer
from slipstream_serve.triton import (
    ENDING,
    Endpoints,
    ServeError,
    TritonServer,
    check_repository,
    check_shared_memory,
    clean_leftovers,
    signals_held,
)
from slipstream_serve.workarounds.triton_24_10.harden import refuses_compression
from slipstream_serve.workarounds.triton_24_10.http_notes import ENOUGH

DEMO_PROMPT = "class Counter(dict):\n    def __init__(self, "
DEMO_TOKENS = 56
_START_INTERVAL_S = 0.05
_LOG_ENTRY = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ \S+ (?P<level>[A-Z]+) (?P<text>.*)")
_BAR = re.compile(r"\d%\|")
_BANNER_MARK = ": KV cache of "  # as the engine writes it


class _Asked(BaseException):
    """SIGTERM, SIGHUP or Ctrl-C: the way a server is meant to end."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `slipstream serve`."""
    parser = subparsers.add_parser("serve", help="start a tritonserver on a model repository")
    default = repository_root() / "model_repository"
    parser.add_argument("--model-repository", type=Path, metavar="DIR", default=default)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--http-port", type=int, default=8000, metavar="N", help="(%(default)s)")
    parser.add_argument("--grpc-port", type=int, default=8001, metavar="N", help="(%(default)s)")
    parser.add_argument("--metrics-port", type=int, default=8002, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="give up when no token could be had by then (%(default).0f)",
    )
    parser.add_argument(
        "--log-file",
        type=Path,
        metavar="FILE",
        help="tritonserver's log (default: .slipstream/logs/tritonserver-PORT.log)",
    )
    parser.add_argument(
        "--demo", action="store_true", help="when ready, stream one completion and show commands"
    )


def run(args: argparse.Namespace) -> int:
    """Serve, and repair what breaks, until told to end (0). Raises ServeError at the start only."""
    began = time.monotonic()
    endpoints = Endpoints(args.http_port, args.grpc_port, args.metrics_port, args.host)
    models = check_repository(args.model_repository)
    endpoints.check_free()
    check_shared_memory()
    clean_leftovers()
    log = args.log_file or server_directory().parent / "logs" / f"tritonserver-{args.http_port}.log"
    server = None
    with _signals_raise():
        try:
            with signals_held():
                server = TritonServer(args.model_repository, endpoints, log, is_supervised=True)
            print(
                f"starting tritonserver on {args.model_repository}: {', '.join(models)}", flush=True
            )
            banner = _bring_up(server, models, began + args.start_timeout)
            _print_ready(server, banner, time.monotonic() - began)
            if args.demo:
                _demo(endpoints, models)
            print("Ctrl-C ends it.", flush=True)
            _supervise(server, models, args.start_timeout)
        except _Asked:
            print("\nending ...", flush=True)
        finally:
            for number in ENDING:
                signal.signal(number, signal.SIG_IGN)
            if server is not None:
                server.stop()
    return 0


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    def asked(number: int, frame: FrameType | None) -> None:
        raise _Asked

    before = {number: signal.signal(number, asked) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _supervise(server: TritonServer, models: list[str], start_timeout_s: float) -> NoReturn:
    def wait_ready() -> None:
        server.wait_ready(start_timeout_s)
        first_token(server.endpoints.http, models)

    Repairer(server, wait_ready, lambda line: print(line, flush=True)).run()


def _bring_up(server: TritonServer, models: list[str], deadline: float) -> str:
    """Start it and return once a token could be had; meanwhile show what the engine is doing.

    Returns the engine's banner: model, dtype, size of the cache, how many sequences fit.
    """
    server.start()
    engine = _EngineLog(server.runtime.log, sys.stderr)
    while not server.is_ready():
        if server.runtime.error.exists() or server.exit_code is not None:
            # It has no clients yet, and would take seconds to find out that it cannot start.
            reason = server.reason()
            server.kill()
            raise ServeError(reason)
        if time.monotonic() > deadline:
            raise ServeError(f"no token could be had in time: see {server.log}")
        engine.show()
        time.sleep(_START_INTERVAL_S)
    server.widen_notes()
    engine.show()
    first_token(server.endpoints.http, models)
    return engine.banner


class _EngineLog:
    """Shows progress bars and warnings of a log that may not exist yet, and finds the banner."""

    def __init__(self, path: Path, sink: TextIO) -> None:
        self.banner = ""
        self._path = path
        self._sink = sink
        self._position = 0

    def show(self) -> None:
        """Look at what is new. A bar is redrawn on a terminal and shown once in a file."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as source:
            source.seek(self._position)
            data = source.read()
            whole = data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]
            self._position += len(whole)
            for piece in re.findall(r"[^\r\n]*[\r\n]", whole.decode(errors="replace")):
                self._show_piece(piece)
            self._sink.flush()

    def _show_piece(self, piece: str) -> None:
        entry = _LOG_ENTRY.match(piece)
        if entry is None:
            is_last = piece.endswith("\n")
            if _BAR.search(piece) and (is_last or self._sink.isatty()):
                self._sink.write(piece)
        elif entry["level"] == "WARNING":  # an error that matters ends the start, and is told then
            self._sink.write(f"warning: {entry['text']}\n")
        elif _BANNER_MARK in entry["text"]:
            self.banner = entry["text"]


def _print_ready(server: TritonServer, banner: str, seconds: float) -> None:
    ends = server.endpoints
    print(
        f"ready in {seconds:.1f} s{': ' if banner else ''}{banner}\n"
        f"  HTTP     {ends.http}\n"
        f"  gRPC     {ends.grpc}\n"
        f"  metrics  {ends.metrics}\n"
        f"  log      {server.log}",
        flush=True,
    )
    if not ends.is_local:
        print(f"listening on {ends.host}: there is no authentication")
    if not refuses_compression((server_directory() / "bin" / "tritonserver").read_bytes()):
        print("this tritonserver inflates compressed requests (docs/security.md)")
    if server.note_room is None or server.note_room < ENOUGH:
        kept = server.note_room or "some hundred"
        print(
            f"over HTTP, {kept} responses are kept while tritonserver parses another's long body; "
            "it loses the rest (docs/faults.md)"
        )


def _demo(endpoints: Endpoints, models: list[str]) -> None:
    """One completion, streamed, and the lines with which to go on."""
    model = text_model(models)
    if model is None:
        return
    print(f"\n{DEMO_PROMPT}", end="", flush=True)
    began, first, pieces = time.monotonic(), 0.0, 0
    for piece in stream_text(endpoints.http, model, DEMO_PROMPT, DEMO_TOKENS):
        first = first or time.monotonic() - began
        pieces += 1
        print(piece, end="", flush=True)
    seconds = time.monotonic() - began
    print(f"\n\nfirst token after {first * 1e3:.0f} ms, {pieces} responses in {seconds:.2f} s")
    body = {"text_input": "import ", "max_tokens": 32, "stream": True}
    url = f"{endpoints.http}/v2/models/{model}/generate_stream"
    port = "" if endpoints.grpc_port == 8001 else f" --grpc-port {endpoints.grpc_port}"
    here = os.path.relpath(sys.prefix)
    folder = sys.prefix if here.startswith(os.pardir) else here
    command = f"{shlex.quote(folder)}/bin/slipstream"
    print(
        "\ntry:\n"
        f"  curl -N {url} -d {shlex.quote(json.dumps(body))}\n"
        f"  {command} complete{port} 'class Stack:'\n"
        f"  {command} chat{port}\n"
        f"  {command} health{port}\n"
    )
