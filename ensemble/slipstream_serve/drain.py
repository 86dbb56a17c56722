"""`slipstream drain`: have this machine's server refuse new requests, and wait for running ones.

It is meant for the hook that runs before a container's end (docs/kubernetes.md). It needs no port:
only the server's user can drain it, by its runtime directory.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from slipstream_contract.arguments import seconds
from slipstream_runtime import draining
from slipstream_runtime.directory import Runtime
from slipstream_runtime.processes import is_running

from slipstream_serve.triton import RUNTIME_PREFIX, ServeError, temporary_directory

EXIT_LEFT = 1
DELAY_S, TIMEOUT_S = 5.0, 300.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `slipstream drain`."""
    parser = subparsers.add_parser("drain", help="refuse new requests, wait for running ones")
    parser.add_argument(
        "--delay",
        type=seconds,
        default=DELAY_S,
        metavar="SECONDS",
        help="report not ready, but accept requests for so long: until load balancers know "
        "(%(default)g)",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help="wait for so long at most, the delay included (%(default)g)",
    )
    parser.add_argument("--undo", action="store_true", help="accept requests again")
    parser.add_argument(
        "--runtime",
        type=Path,
        metavar="DIR",
        help="the server's runtime directory (default: of the `slipstream serve` that runs here)",
    )


def run(args: argparse.Namespace) -> int:
    """Return 0 once nothing is in flight; 1 if requests are left. Raises ServeError."""
    if args.timeout < args.delay:
        raise ServeError(f"--timeout is {args.timeout:g}, less than --delay, {args.delay:g}")
    runtime = Runtime(_directory(args.runtime))
    if args.undo:
        draining.undo(runtime)
        print("accepting requests again")
        return 0
    left = draining.drain(runtime, args.delay, args.timeout, Counter().show)
    if left:
        print(
            f"slipstream: {left} requests still run after {args.timeout:g} s; new ones are refused",
            file=sys.stderr,
        )
        return EXIT_LEFT
    print("drained: no request is in flight, new ones are refused", flush=True)
    return 0


class Counter:
    """Prints how many requests run, whenever the number changes."""

    def __init__(self) -> None:
        self._last: int | None = None

    def show(self, number: int) -> None:
        """Print a number of requests."""
        if number and number != self._last:
            print(f"draining: {number} in flight", flush=True)
        self._last = number


def _directory(given: Path | None) -> Path:
    """Return the runtime directory to use. Raises ServeError if that is not clear."""
    if given is not None:
        if not given.is_dir():
            raise ServeError(f"--runtime is {given}: no such directory")
        return given
    found = [folder for folder in _candidates() if _is_served(folder)]
    if not found:
        raise ServeError("no `slipstream serve` of this user runs here; --runtime names another")
    if len(found) > 1:
        names = ", ".join(map(str, found))
        raise ServeError(f"several servers run here, --runtime says which: {names}")
    return found[0]


def _candidates() -> list[Path]:
    return sorted(temporary_directory().glob(f"{RUNTIME_PREFIX}*-*"))


def _is_served(folder: Path) -> bool:
    """Return whether a `slipstream serve` of this user has that runtime directory."""
    owner = folder.name.removeprefix(RUNTIME_PREFIX).partition("-")[0]
    return owner.isdigit() and is_running(int(owner)) and folder.stat().st_uid == os.getuid()
