"""`slipstream eval`: lm-eval's tasks on a checkpoint, by lm-eval's own model interface.

lm-eval runs in an environment apart, made once, and the engine in this one; they speak over a pipe.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import msgspec
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.models.gguf.unpack import as_directory
from slipstream.preflight import preflight
from slipstream_contract.arguments import count, count_or_zero

PACKAGE = "lm_eval==0.4.13"
_MARK = "made"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `slipstream eval`."""
    parser = subparsers.add_parser("eval", help="run lm-eval's tasks on a checkpoint")
    parser.add_argument(
        "checkpoint", type=Path, metavar="MODEL", help="a Hugging Face directory, or a GGUF file"
    )
    parser.add_argument("--tasks", required=True, metavar="NAME,...", help="lm-eval's names")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", required=True, help="gets the results, as JSON"
    )
    parser.add_argument("--limit", type=count, metavar="N", help="questions of a task, at most")
    parser.add_argument(
        "--num-fewshot", type=count_or_zero, metavar="N", help="default: the task's"
    )
    parser.add_argument(
        "--include-path", type=Path, metavar="DIR", help="tasks of your own, lm-eval's YAML"
    )
    parser.add_argument("--apply-chat-template", action="store_true")
    parser.add_argument(
        "--log-samples", action="store_true", help="keep every question and answer in the results"
    )
    parser.add_argument(
        "--environment",
        type=Path,
        metavar="DIR",
        default=Path.home() / ".cache" / "slipstream" / "lm_eval",
        help=f"where {PACKAGE} is installed, once (default: %(default)s)",
    )
    for name in ("device", "dtype", "quantization", "kv_cache_dtype"):
        parser.add_argument(f"--{name.replace('_', '-')}", help="as of `slipstream compose`")


def run(args: argparse.Namespace) -> int:
    """Run the tasks; return the exit code. Raises `ConfigError` or `CheckpointError`."""
    tasks = [name for name in args.tasks.split(",") if name]
    _check(args, tasks)
    names = ("device", "dtype", "quantization", "kv_cache_dtype")
    options = {name: getattr(args, name) for name in names if getattr(args, name)}
    with as_directory(args.checkpoint) as (directory, _):
        config = EngineConfig(checkpoint=os.path.abspath(directory), **options)
        preflight(config)  # what cannot be served is refused before anything is installed
        python = _python(args.environment)
        given = {
            "tasks": tasks,
            "output": os.path.abspath(args.output),
            "limit": args.limit,
            "num_fewshot": args.num_fewshot,
            "include_path": args.include_path and os.path.abspath(args.include_path),
            "apply_chat_template": args.apply_chat_template,
            "log_samples": args.log_samples,
            "scorer": [sys.executable, "-P", "-m", "slipstream_eval.scorer"],
            "config": msgspec.json.encode(config).decode(),
            "model": str(args.checkpoint),
        }
        harness = Path(__file__).with_name("harness.py")
        command = [str(python), "-P", str(harness)]
        return subprocess.run(command, input=json.dumps(given), text=True, check=False).returncode


def _check(args: argparse.Namespace, tasks: list[str]) -> None:
    """Raise `ConfigError` for what is wrong whatever the checkpoint and the tasks are."""
    if not tasks:
        raise ConfigError(f"--tasks {args.tasks!r} names no task")
    if args.output.exists():
        raise ConfigError(f"--output {args.output}: is there already")
    if not args.output.absolute().parent.is_dir():
        raise ConfigError(f"--output {args.output}: its directory does not exist")
    if args.include_path is not None and not args.include_path.is_dir():
        raise ConfigError(f"--include-path {args.include_path}: no such directory")


def _python(home: Path) -> Path:
    """Return the Python of the environment, which is made if it is not there."""
    python, mark = home / "bin" / "python", home / _MARK
    if not mark.is_file() or mark.read_text() != PACKAGE:
        print(f"installing {PACKAGE} into {home}", file=sys.stderr, flush=True)
        venv.create(home, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*command, PACKAGE], check=False, capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise ConfigError(f"pip cannot install {PACKAGE}: {' '.join(lines[:1])}")
        mark.write_text(PACKAGE)
    return python
