"""`slipstream waits`: what the slowest first tokens of a request log waited for.

The engine writes a line for each request: `slipstream compose --request-log`, docs/metrics.md.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slipstream_contract.errors import ContractError, clip

_WAIT = "first_token_wait_s"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its options."""
    parser = subparsers.add_parser("waits", help="print what slow first tokens waited for")
    parser.add_argument("log", type=Path, metavar="FILE", help="of compose --request-log")
    parser.add_argument(
        "--slowest", type=int, default=20, metavar="N", help="requests to list (default: 20)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(args: argparse.Namespace) -> int:
    """Print the slowest requests, and the mean of all. Raises ContractError for a bad log."""
    if args.slowest < 1:
        raise ContractError(f"--slowest is {args.slowest}, below 1")
    try:
        lines = _read(args.log)
    except OSError as error:
        raise ContractError(f"{args.log}: {error.strerror}") from None
    slowest = sorted(lines, key=lambda line: -float(line["first_token_s"]))[: args.slowest]
    print(json.dumps(slowest) if args.json else _table(slowest, lines))
    return 0


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the entries of requests that had a token; a last line that is cut off is left out."""
    entries = []
    with path.open(encoding="ascii", errors="replace") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith("\n"):
                break  # it is being written
            try:
                entry = json.loads(text)
                if entry[_WAIT] is not None:
                    entries.append(entry)
            except (ValueError, KeyError, TypeError):
                raise ContractError(
                    f"{path}: line {number} has no {_WAIT}: {clip(text.rstrip())}"
                ) from None
    return entries


def _table(slowest: list[dict[str, Any]], lines: list[dict[str, Any]]) -> str:
    if not lines:
        return "no request of the log had a token"
    parts = list(lines[0][_WAIT])
    rows = [["first token", "prompt", *(part.replace("_", " ") for part in parts), "id"]]
    for line in slowest:
        rows.append([*_figures([line], parts), line["id"]])
    rows.append([*_figures(lines, parts), f"mean of {len(lines):,}"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    shown = (
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=False))
        + f"  {row[-1]}"
        for row in rows
    )
    return "\n".join(("times in ms", *shown))


def _figures(lines: list[dict[str, Any]], parts: Iterable[str]) -> list[str]:
    """Return the mean of some requests: first token, tokens of the prompt, parts of the wait."""
    count = len(lines)

    def mean_ms(values: Iterable[float]) -> str:
        return f"{1e3 * sum(values) / count:,.1f}"

    return [
        mean_ms(line["first_token_s"] for line in lines),
        f"{sum(line['num_input_tokens'] for line in lines) / count:,.0f}",
        *(mean_ms(line[_WAIT][part] for line in lines) for part in parts),
    ]
