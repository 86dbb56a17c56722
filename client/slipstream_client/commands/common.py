"""What the commands share: where the server is, how to sample, a stream on a terminal."""

import argparse
from typing import Any, TextIO

from slipstream_contract.limits import INT32_MAX
from slipstream_contract.sampling import FIELDS

from slipstream_client.client import DEFAULT_MODEL, ChunkStream, SlipstreamClient
from slipstream_client.codec import BLS, ENSEMBLE, VLLM

TEXT_MODELS = (ENSEMBLE, BLS, VLLM)
"""Take text, in the order in which a command prefers them."""

SAMPLING = tuple(name for name, entry in FIELDS.items() if entry.field.is_option)
"""Options that go to the server under the contract's own names; what is not given is not sent."""


def add_connection(parser: argparse.ArgumentParser, timeout_s: float | None) -> None:
    """Options that say where the server is and how long to wait for a whole answer."""
    parser.add_argument("--host", default="127.0.0.1", help="the server's host (%(default)s)")
    parser.add_argument("--grpc-port", type=int, default=8001, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=timeout_s,
        metavar="S",
        help=f"seconds to wait for a whole answer ({timeout_s or 'no limit'})",
    )


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Options that choose the model and its sampling; the server's defaults are greedy."""
    parser.add_argument(
        "--model", choices=TEXT_MODELS, default=TEXT_MODELS[0], help="(%(default)s)"
    )
    for name in SAMPLING:
        add_field(parser, name, max_tokens if name == "max_tokens" else None)


def add_field(parser: argparse.ArgumentParser, name: str, default: int | None = None) -> None:
    """Add a sampling parameter as an option, with the type, help and bounds of its field."""
    entry = FIELDS[name]
    bounds = entry.field.bounds
    assert bounds is not None, "an option is a number"
    limit = f"{bounds}" if bounds.most < INT32_MAX else f"at least {bounds.least}"
    shown = "" if default is None else " (%(default)s)"
    parser.add_argument(
        f"--{name.replace('_', '-')}",
        type=entry.kind,
        default=default,
        metavar="N" if entry.kind is int else "X",
        help=f"{entry.field.help}; {limit}{shown}",
    )


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given."""
    chosen = {name: getattr(args, name) for name in SAMPLING}
    return {name: value for name, value in chosen.items() if value is not None}


def stop_at(model: str, stop_words: list[str]) -> dict[str, Any]:
    """The stop words under the name that the model gives them."""
    if not stop_words:
        return {}
    return {"stop" if model == VLLM else "stop_words": stop_words}


def connect(args: argparse.Namespace) -> SlipstreamClient:
    """A client for the server that the options name."""
    return SlipstreamClient(
        f"{args.host}:{args.grpc_port}",
        model=getattr(args, "model", DEFAULT_MODEL),
        timeout_s=args.timeout,
    )


class Printer:
    """Writes a stream's text as it comes, up to the stop word; `written` is what was shown.

    Text that may be the beginning of the stop word waits for what follows it.
    """

    def __init__(self, sink: TextIO, stop_word: str = "") -> None:
        self.written = ""
        self._sink = sink
        self._stop_word = stop_word

    def print(self, chunks: ChunkStream) -> None:
        """Writes all of it; what is left of the stream after the stop word is cancelled."""
        waiting = ""
        with chunks:
            for chunk in chunks:
                waiting += chunk.text
                found = waiting.find(self._stop_word) if self._stop_word else -1
                if found >= 0:
                    self._write(waiting[:found])
                    return
                ready = len(waiting) - _overlap(waiting, self._stop_word)
                self._write(waiting[:ready])
                waiting = waiting[ready:]
        self._write(waiting)

    def _write(self, text: str) -> None:
        self._sink.write(text)
        self._sink.flush()
        self.written += text


def _overlap(text: str, stop_word: str) -> int:
    """Length of the longest end of the text that is a beginning of the stop word."""
    longest = min(len(text), len(stop_word) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop_word[:n])), 0)
