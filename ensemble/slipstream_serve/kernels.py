"""`slipstream kernels`: print which GEMM kernel runs for each matrix of a model, and why."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import msgspec
from slipstream import quant
from slipstream.config import EngineConfig

from slipstream_serve.server import repository_root
from slipstream_serve.tune import configured, whole_number


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `slipstream kernels`."""
    parser = subparsers.add_parser(
        "kernels", help="print which GEMM kernel runs for each matrix, and why not the others"
    )
    default = repository_root() / "model_repository"
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model-repository", type=Path, metavar="DIR", default=default)
    source.add_argument("--checkpoint", type=Path, metavar="DIR", help="a Hugging Face directory")
    parser.add_argument(
        "--architecture",
        metavar="NAME",
        help="GPU to print for, not necessarily this one: sm_80, sm_89, sm_90a, sm_100a, or cpu "
        "(default: this machine's)",
    )
    parser.add_argument(
        "--rows",
        type=whole_number,
        nargs="+",
        metavar="N",
        help="tokens of a step (default: 1 2 8 64 256)",
    )
    parser.add_argument(
        "--quantization", choices=quant.names(), help="instead of the configuration's"
    )


def run(args: argparse.Namespace) -> int:
    """Print the table and return the exit code. Raises ComposeError if no engine is configured."""
    if args.checkpoint:
        config = EngineConfig(checkpoint=os.path.abspath(args.checkpoint))
    else:
        config = configured(args.model_repository)
    if args.quantization:
        config = msgspec.structs.replace(config, quantization=args.quantization)
    python = os.environ.get("SLIPSTREAM_PYTHON", sys.executable)
    command = [python, "-P", "-m", "slipstream.runner.kernels"]
    if args.architecture:
        command += ["--architecture", args.architecture]
    if args.rows:
        command += ["--rows", *map(str, args.rows)]
    return subprocess.run(command, input=msgspec.json.encode(config), check=False).returncode
