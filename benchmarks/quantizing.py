"""How long `slipstream quantize` takes: `python benchmarks/quantizing.py [--schemes ...]`.

Writes a checkpoint of random bf16 weights of a shape (16 GB for 8B, kept in the folder for
temporary files), puts the default model's tokenizer beside it, and makes each scheme with the
command's own defaults: its texts, its pieces, bits a byte before and after. Of each: seconds in
all, seconds of each part of the work (the device has ended what it was given), the most memory of
the device. What is written is removed. Nothing is fetched.
"""

import argparse
import functools
import gc
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_checkpoint
import torch
from quality import CHECKPOINT
from report import commit
from shapes import SHAPES
from slipstream_client.cli import main as slipstream
from slipstream_quantize import make
from slipstream_quantize.job import Job
from slipstream_quantize.recipe import RECIPES

SCHEMES = ("fp8", "int8-sq", "awq-gptq")
# Each is timed without what it calls of the others.
PARTS = {
    "read": (make, "Opened"),
    "measure": (make, "measured_bits"),
    "watch": (Job, "_watch"),
    "smooth": (Job, "_smooth"),
    "round": (Job, "_quantise"),
    "write tensors": (Job, "_write"),
    "write the rest": (make, "write"),
}


class Clock:
    """Adds up seconds of parts that may call one another."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner: list[float] = []

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                took = time.perf_counter() - start
                self.seconds[name] = self.seconds.get(name, 0.0) + took - self._inner.pop()
                if self._inner:
                    self._inner[-1] += took

        return run


def quantised(directory: Path, scheme: str, args: argparse.Namespace) -> dict[str, Any]:
    """Make one scheme; return what it took."""
    clock = Clock()
    whole = {name: getattr(owner, key) for name, (owner, key) in PARTS.items()}
    for name, (owner, key) in PARTS.items():
        setattr(owner, key, clock.timed(name, whole[name]))
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    output = Path(tempfile.mkdtemp(dir=args.folder)) / scheme
    command = ["quantize", "--checkpoint", str(directory), "--output", str(output)]
    command += ["--scheme", scheme, "--device", args.device]
    try:
        start = time.perf_counter()
        if slipstream(command):
            raise SystemExit(f"--scheme {scheme} failed")
        seconds = time.perf_counter() - start
        report = json.loads((output / "quantize_report.json").read_text())
    finally:
        shutil.rmtree(output.parent)
        for name, (owner, key) in PARTS.items():
            setattr(owner, key, whole[name])
        gc.collect()  # a decoder refers to itself
    gigabytes = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None
    return {
        "scheme": scheme,
        "seconds": round(seconds, 1),
        "parts": {name: round(took, 1) for name, took in clock.seconds.items()},
        "device_gb": gigabytes and round(gigabytes, 1),
        "calibration_tokens": report["calibration_tokens"],
        "bytes": [report["bytes_before"], report["bytes_after"]],
        "commit": commit(),
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, choices=RECIPES)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    directory = args.folder / args.shape
    make_checkpoint.make(args.shape, directory)
    shutil.copy(CHECKPOINT / "tokenizer.json", directory)
    for scheme in args.schemes:
        print(json.dumps(quantised(directory, scheme, args)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
