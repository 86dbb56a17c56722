"""`slipstream kernels`: print which GEMM kernel runs for each matrix of a model, and why."""

from __future__ import annotations

import argparse

import msgspec
from slipstream import quant

from slipstream_serve.tune import add_source, run_engine_module, source_of, whole_number


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `slipstream kernels`."""
    parser = subparsers.add_parser(
        "kernels", help="print which GEMM kernel runs for each matrix, and why not the others"
    )
    add_source(parser)
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
    options = ["--architecture", args.architecture] if args.architecture is not None else []
    if args.rows:
        options += ["--rows", *map(str, args.rows)]
    with source_of(args) as config:
        if args.quantization:
            config = msgspec.structs.replace(config, quantization=args.quantization)
        return run_engine_module("slipstream.runner.kernels", options, config)
