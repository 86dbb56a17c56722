"""Options and helpers that the commands share: connection, sampling, printing a stream."""

import argparse
from typing import Any, TextIO

from slipstream_contract.arguments import patience, port
from slipstream_contract.deployment import role_of
from slipstream_contract.limits import INT32_MAX
from slipstream_contract.sampling import FIELDS
from slipstream_contract.tensors import LLMAPI

from slipstream_client.client import DEFAULT_MODEL, ChunkStream, SlipstreamClient
from slipstream_client.codec import BLS, ENSEMBLE, VLLM

MODEL_HELP = "of any deployment, as NAME or NAME_vllm_model (%(default)s)"
TEXT_MODELS = (ENSEMBLE, BLS, VLLM, LLMAPI.name)
"""The models that take text, most preferred first."""

SAMPLING = tuple(name for name, entry in FIELDS.items() if entry.field.is_option)
"""Options sent to the server under the contract's names; options not given are not sent."""


def add_connection(parser: argparse.ArgumentParser, timeout_s: float | None) -> None:
    """Add the options for the server's address and the time to wait for a whole answer."""
    parser.add_argument("--host", default="127.0.0.1", help="the server's host (%(default)s)")
    parser.add_argument("--grpc-port", type=port, default=8001, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--timeout",
        type=patience,
        default=timeout_s,
        metavar="S",
        help=f"seconds to wait for a whole answer ({timeout_s or 'no limit'})",
    )


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add the options for the model and its sampling; the server's defaults are greedy."""
    parser.add_argument("--model", default=TEXT_MODELS[0], help=MODEL_HELP)
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
    """Return the sampling parameters that were given."""
    chosen = {name: getattr(args, name) for name in SAMPLING}
    return {name: value for name, value in chosen.items() if value is not None}


def stop_at(model: str, stop_words: list[str]) -> dict[str, Any]:
    """Return the stop words under the model's name for them."""
    if not stop_words:
        return {}
    return {"stop" if role_of(model) in (VLLM, LLMAPI.name) else "stop_words": stop_words}


def connect(args: argparse.Namespace) -> SlipstreamClient:
    """Return a client for the server that the options name."""
    return SlipstreamClient(
        f"{args.host}:{args.grpc_port}",
        model=getattr(args, "model", DEFAULT_MODEL),
        timeout_s=args.timeout,
    )


class Printer:
    """Print a stream's text as it arrives, up to the stop word; `written` is what was printed.

    Text that may be the start of the stop word is withheld until the next text decides.
    """

    def __init__(self, sink: TextIO, stop_word: str = "") -> None:
        self.written = ""
        self._sink = sink
        self._stop_word = stop_word

    def print(self, chunks: ChunkStream) -> None:
        """Print the stream to its end, or to the stop word and cancel the rest."""
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
    """Return the length of the longest suffix of `text` that is a prefix of `stop_word`."""
    longest = min(len(text), len(stop_word) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop_word[:n])), 0)
