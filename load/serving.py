"""A server to load: one that runs already, or the default repository on free ports."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slipstream_serve.probe import first_token
from slipstream_serve.server import repository_root
from slipstream_serve.triton import Endpoints, TritonServer, check_repository

REPORTS = repository_root() / "benchmarks" / "out"
PROMPTS = (
    "def read_lines(path):\n    ",
    "import os\nimport sys\n\n\ndef main():\n",
    'class Stack:\n    """A last-in, first-out stack."""\n\n',
    "    def test_append(self):\n        ",
    "try:\n    import json\nexcept ImportError:\n",
    "for name in sorted(names):\n    ",
    "with open(filename) as file:\n    ",
    "# Copyright\n\n__all__ = [",
)


GUIDE = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_REPEATED = "def test_{0}(self):\n    self.assertEqual(read({0}), {0})\n\n"
# What a draft from the prompt itself, or from earlier answers, may guess.
REPEATING = tuple("".join(map(_REPEATED.format, "abcdef"[: 2 + i])) + "def test_" for i in range(4))
LOADS = ("plain", "guided", "repeating")
"""Kinds of requests: free text; JSON by `GUIDE`; free text that repeats itself, for drafts."""


def prompts(load: str) -> tuple[str, ...]:
    """Return the prompts of a kind of load."""
    return REPEATING if load == "repeating" else PROMPTS


def fields(model: str, load: str, max_tokens: int, given: str = "") -> dict[str, Any]:
    """Return the parameters of every request, by the model's names.

    Guided answers end where their JSON does; all others have `max_tokens` tokens. `given` is JSON
    of further parameters.
    """
    is_vllm = model == "vllm_model"
    made: dict[str, Any] = {"max_tokens": max_tokens}
    if load != "guided":
        made |= {"ignore_eos": True} if is_vllm else {"end_id": -1}
    elif is_vllm:
        made |= {"structured_outputs": {"json": GUIDE}}
    else:
        guide = {"guide_type": "json_schema", "guide": json.dumps(GUIDE)}
        made |= {f"guided_decoding_{name}": value for name, value in guide.items()}
    return made | json.loads(given or "{}")


def commit() -> str:
    """Return the measured commit; SLIPSTREAM_COMMIT names it where git does not know the tree."""
    git = ["git", "-C", str(repository_root()), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return os.environ.get("SLIPSTREAM_COMMIT") or found


def about() -> dict[str, Any]:
    """When, of what and where something was measured."""
    cores = len(os.sched_getaffinity(0))
    return {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "cores": cores}


def fuzz(title: str, run: Callable[[int, int, Path], dict[str, Any]], log: Path) -> int:
    """Run the command of a fuzzer, `run(requests, seed, log)`; return 0 where nothing is wrong."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--requests", type=int, default=2000, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--output", type=Path, help="the result, as JSON")
    args = parser.parse_args()
    result = about() | run(args.requests, args.seed, log)
    for problem in result["problems"]:
        print(f"fuzz: {problem}", file=sys.stderr)
    text = json.dumps(result, indent=1)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")
    return 1 if result["problems"] else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that say which server to load."""
    parser.add_argument("--http", metavar="HOST:PORT", help="a running server; also give --grpc")
    parser.add_argument("--grpc", metavar="HOST:PORT")
    parser.add_argument(
        "--model-repository", type=Path, default=repository_root() / "model_repository"
    )
    parser.add_argument("--model", default="ensemble", help="(%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32, help="a request (%(default)s)")
    parser.add_argument(
        "--load",
        choices=LOADS,
        default=LOADS[0],
        help="free text, JSON by a schema, or text that repeats itself, for drafts (%(default)s)",
    )
    parser.add_argument(
        "--fields", default="", metavar="JSON", help="further parameters of every request"
    )


@contextlib.contextmanager
def serving(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """HTTP and gRPC address (host:port) of a server that has made a token."""
    if args.http and args.grpc:
        yield args.http, args.grpc
        return
    if args.http or args.grpc:
        raise SystemExit("give both --http and --grpc, or neither")
    endpoints = Endpoints.free()
    models = check_repository(args.model_repository)
    log = REPORTS / "tritonserver.log"
    print(f"starting a server on {args.model_repository}", file=sys.stderr)
    with TritonServer(args.model_repository, endpoints, log).running():
        first_token(endpoints.http, models)
        yield endpoints.http.removeprefix("http://"), endpoints.grpc
