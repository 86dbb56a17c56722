"""`slipstream convert`: write a checkpoint's pickled tensors as safetensors."""

from __future__ import annotations

import argparse
from pathlib import Path

from slipstream.errors import ConfigError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `slipstream convert`."""
    parser = subparsers.add_parser(
        "convert",
        help="write pickled weights as safetensors",
        description="Write a checkpoint whose weights are pickles (pytorch_model.bin), or such an "
        "adapter (adapter_model.bin), as safetensors, which is all that is served. No code of a "
        "pickle runs: a file with anything but tensors is refused.",
    )
    parser.add_argument("checkpoint", type=Path, metavar="DIR", help="a Hugging Face directory")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="is made (default: DIR-safetensors)"
    )


def run(args: argparse.Namespace) -> int:
    """Convert, and print where the result lies. Raises `ConfigError` or `CheckpointError`."""
    from slipstream_convert.convert import convert

    checkpoint = args.checkpoint.absolute()
    if checkpoint.is_file():
        raise ConfigError(f"{args.checkpoint}: is a file; name its directory, {checkpoint.parent}")
    if not checkpoint.is_dir():
        raise ConfigError(f"{args.checkpoint}: no such directory")
    output = args.output or checkpoint.with_name(f"{checkpoint.name}-safetensors")
    count, num_bytes = convert(checkpoint, output)
    print(f"{output}: {count} tensors, {num_bytes / 1e9:.2f} GB")
    return 0
