"""`slipstream quantize`: make a checkpoint in fewer bits."""

from __future__ import annotations

import argparse
from pathlib import Path

from slipstream.errors import ConfigError

from slipstream_quantize.recipe import LENGTH, RECIPES, ROWS_AUTO, ROWS_NONE, SAMPLES, SUMMARIES


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `slipstream quantize`."""
    schemes = "\n".join(f"  {name:10} {SUMMARIES[name]}" for name in RECIPES)
    parser = subparsers.add_parser(
        "quantize",
        help="make a checkpoint in fewer bits",
        description=f"Make a checkpoint in fewer bits. Schemes:\n{schemes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="PATH",
        required=True,
        help="a Hugging Face directory, or a GGUF file",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", required=True, help="is made")
    parser.add_argument("--scheme", choices=RECIPES, required=True)
    parser.add_argument(
        "--group-size",
        type=_whole,
        metavar="N",
        help="inputs that share a scale, 4 bits (default: the first of 128, 64, 32 and 16 that "
        "divides the inputs of all matrices)",
    )
    parser.add_argument(
        "--symmetric", action="store_true", help="4 bits without zeros, as always in a mixture"
    )
    parser.add_argument(
        "--ignore",
        nargs="+",
        default=[],
        metavar="NAME",
        help="linear layers that stay as they are: names, parts of names (down_proj, layers.0), or "
        "re:REGEX for the beginning of a name, as in llm-compressor; head and routers always stay",
    )
    parser.add_argument(
        "--rows16",
        nargs="+",
        default=[ROWS_NONE],
        metavar="NAME",
        help="linear layers whose rows stay in 16 bits beside weights in e4m3 (fp8, fp8-gptq): "
        "auto, those in which rounding costs most on the calibration text; none (default); or "
        "names as for --ignore",
    )
    _add_texts(parser)
    parser.add_argument(
        "--dtype",
        choices=("auto", "float16", "bfloat16", "float32"),
        default="auto",
        help="of what is not quantised, and of scales (default: the checkpoint's)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def _add_texts(parser: argparse.ArgumentParser) -> None:
    """Declare the options of texts to calibrate with and to measure on."""
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="text, or .jsonl with a `text` in each line (default: texts that come with Python, "
        "English and sources)",
    )
    parser.add_argument(
        "--samples",
        type=_whole,
        metavar="N",
        help=f"pieces of it (default: {SAMPLES['cpu']} on a CPU, {SAMPLES['cuda']} on a GPU)",
    )
    parser.add_argument(
        "--sample-length", type=_whole, metavar="N", help=f"tokens of a piece (default: {LENGTH})"
    )
    parser.add_argument(
        "--measure",
        type=Path,
        metavar="FILE",
        help="text on which bits a byte are measured before and after (default: likewise; none of "
        "it is in the default calibration text)",
    )
    parser.add_argument("--no-measure", action="store_true", help="skip that")


def run(args: argparse.Namespace) -> int:
    """Quantise, and print the report. Raises `ConfigError` or `CheckpointError`."""
    from slipstream_quantize.make import make

    if args.no_measure and args.measure:
        raise ConfigError("--measure and --no-measure exclude each other")
    needs_text = RECIPES[args.scheme].needs_text or args.rows16 == [ROWS_AUTO]
    if args.calibration and not needs_text:
        raise ConfigError(f"--calibration: --scheme {args.scheme} needs no text")
    if (args.samples or args.sample_length) and not needs_text:
        raise ConfigError(f"--samples and --sample-length: --scheme {args.scheme} needs no text")
    for line in make(args):
        print(line)
    return 0


def _whole(text: str) -> int:
    """Read a whole number above zero (an argparse type)."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return int(text)
