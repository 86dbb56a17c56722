"""Process start to first token: `python benchmarks/start.py CHECKPOINT [--repeat 3]`.

The weights are in the page cache. Once without compiled kernels, then `--repeat` times with them
(`first_token.py`). Prints and returns seconds from before the process exists to its first token.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FIRST_TOKEN = Path(__file__).with_name("first_token.py")


def run_once(checkpoint: Path, cache: Path) -> dict[str, Any]:
    """One process; `seconds` to its first token, and its parts."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "CUPY_CACHE_DIR": str(cache / "cupy")}
    began = time.time()
    result = subprocess.run(
        [sys.executable, str(FIRST_TOKEN), str(checkpoint)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise SystemExit(f"{FIRST_TOKEN.name} ended with {result.returncode}:\n{result.stderr}")
    told = json.loads(result.stdout.splitlines()[-1])
    return {
        "seconds": round(told["first_token_at"] - began, 3),
        "laps": told["laps"],
        "log": result.stderr.splitlines(),
    }


def measure(checkpoint: Path, repeat: int) -> dict[str, list[float]]:
    """`cached` and `uncached`, seconds of each run; its parts are printed."""
    for path in sorted(checkpoint.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.read(64 << 20):
                pass
    figures: dict[str, list[float]] = {"uncached": [], "cached": []}
    with tempfile.TemporaryDirectory(prefix="slipstream-start-") as cache:
        for number in range(1 + repeat):
            kind = "cached" if number else "uncached"
            run = run_once(checkpoint, Path(cache))
            figures[kind].append(run["seconds"])
            parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in run["laps"].items())
            print(f"start, kernels {kind}: {run['seconds']:.2f} s ({parts})", flush=True)
            if number < 2:
                print("\n".join(f"    {line}" for line in run["log"]), flush=True)
    return figures


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    print(json.dumps(measure(args.checkpoint, args.repeat)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
