"""`slipstream tune`: measure which GEMM kernels are fastest on this GPU, and save the result.

The measurement runs in the engine's Python; an engine loads the result when it starts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from slipstream.config import EngineConfig
from slipstream.models.gguf.unpack import as_directory
from slipstream_compose.compose import ComposeError
from slipstream_contract.deployment import ENGINE, deployments_of, name_of

from slipstream_serve.server import repository_root


class _Settings(msgspec.Struct):
    """The fields of `1/model.json` that are read."""

    engine: EngineConfig


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `slipstream tune`."""
    parser = subparsers.add_parser("tune", help="measure which GEMM kernels are the fastest here")
    add_source(parser)
    parser.add_argument(
        "--rows",
        type=whole_number,
        nargs="+",
        metavar="N",
        help="tokens of a step to measure (default: sizes of decode steps, and a full step)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, and return the exit code. Raises ComposeError if no engine is configured."""
    options = ["--rows", *map(str, args.rows)] if args.rows else []
    with source_of(args) as config:
        return run_engine_module("slipstream.runner.tune", options, config)


def add_source(parser: argparse.ArgumentParser) -> None:
    """Declare where the engine's configuration comes from: a repository or a checkpoint."""
    default = repository_root() / "model_repository"
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model-repository", type=Path, metavar="DIR", default=default)
    source.add_argument(
        "--checkpoint", type=Path, metavar="PATH", help="a Hugging Face directory, or a GGUF file"
    )
    parser.add_argument("--name", help="the deployment, where the repository has several")


@contextlib.contextmanager
def source_of(args: argparse.Namespace) -> Iterator[EngineConfig]:
    """Give the configuration that `add_source`'s options name, as long as the context.

    Raises ComposeError, or CheckpointError for a GGUF file that is not served.
    """
    if not args.checkpoint:
        yield configured(args.model_repository, args.name)
        return
    if args.name is not None:
        raise ComposeError(f"--name {args.name} is of a repository, --checkpoint has none")
    with as_directory(args.checkpoint) as (directory, _):
        yield EngineConfig(checkpoint=os.path.abspath(directory))


def run_engine_module(module: str, options: list[str], config: EngineConfig) -> int:
    """Run a module of the engine in the engine's Python with `config` on its stdin."""
    python = os.environ.get("SLIPSTREAM_PYTHON", sys.executable)
    command = [python, "-P", "-m", module, *options]
    return subprocess.run(command, input=msgspec.json.encode(config), check=False).returncode


def whole_number(text: str) -> int:
    """Read a whole number above zero (an argparse type)."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return int(text)


def configured(repository: Path, name: str | None = None) -> EngineConfig:
    """Read the configuration of a repository's engine; its checkpoint is made absolute.

    `name` is that of the deployment; None: the only one.
    """
    path = repository / _engine_model(repository, name) / "1" / "model.json"
    try:
        engine = msgspec.json.decode(path.read_bytes(), type=_Settings).engine
    except FileNotFoundError:
        raise ComposeError(f"{path}: no such file; make one with `slipstream compose`") from None
    except msgspec.DecodeError as error:
        raise ComposeError(f"{path}: {error}") from None
    checkpoint = (path.parent / engine.checkpoint).resolve()
    return msgspec.structs.replace(engine, checkpoint=str(checkpoint))


def _engine_model(repository: Path, name: str | None) -> str:
    """Return the engine's model of a deployment. Raises ComposeError if it is not clear which."""
    if name is not None:
        return name_of(name, ENGINE)
    try:
        found = deployments_of(repository)
    except ValueError as error:
        raise ComposeError(str(error)) from None
    if len(found) > 1:
        names = ", ".join(deployment.name for deployment in found)
        raise ComposeError(f"{repository} has several deployments: choose one of {names} by --name")
    return found[0].engine_model if found else ENGINE
