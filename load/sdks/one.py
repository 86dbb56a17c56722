"""Run the checks of one tool, in an environment that has it: `one.py openai_chat --url URL ...`.

Prints a line for each check, `pass NAME ...` or `FAIL NAME ...`. Exit status 1: a check failed.
"""

import argparse
import asyncio
import importlib
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from checks import Target


def run(name: str, check: Callable[[], object]) -> bool:
    """Run one check, print how it went, and return whether it passed."""
    start_s = time.monotonic()
    try:
        found = check()
        if asyncio.iscoroutine(found):
            found = asyncio.run(found)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)
        lines = ", ".join(f"{Path(each.filename).name}:{each.lineno}" for each in last[-4:])
        message = " ".join(str(error).split())[:700]
        print(f"FAIL {name}: {type(error).__name__}: {message} ({lines})", flush=True)
        return False
    shown = "" if found is None else f": {' '.join(str(found).split())[:200]}"
    print(f"pass {name} ({time.monotonic() - start_s:.2f} s){shown}", flush=True)
    return True


def main() -> int:
    """Run all checks of a tool."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool", help="NAME of a file with_NAME.py")
    parser.add_argument("--url", required=True)
    parser.add_argument("--plain-url", default="", help="a gateway without reasoning, for calls")
    parser.add_argument("--model", required=True)
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--tools", action="store_true", help="the model calls tools when it must")
    parser.add_argument("--triton", default="", help="URL of Triton's HTTP endpoint")
    parser.add_argument("--checkpoint", default="", help="folder of the model's checkpoint")
    parser.add_argument("--only", default="", help="checks whose names hold this text")
    options = parser.parse_args()
    target = Target(
        options.url,
        options.model,
        options.api_key,
        options.tools,
        options.plain_url or options.url,
        options.triton,
        options.checkpoint,
    )
    found = importlib.import_module(f"with_{options.tool}").checks(target)
    results = [run(name, check) for name, check in found.items() if options.only in name]
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
