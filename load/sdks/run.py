"""Run openai's and anthropic's SDKs, unmodified, against a server: every call that they offer here.

    PYTHON load/sdks/run.py --url http://localhost:9000 [--model NAME] [--api-key KEY] [--tools]

PYTHON has `openai`, `anthropic` and `pydantic`. `--tools`: the model calls tools when it must.
Exit status 1: a check failed.
"""

import argparse
import asyncio
import json
import platform
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path

import anthropic
import openai
import pydantic

sys.path.insert(0, str(Path(__file__).parent))
import with_anthropic
import with_openai
from checks import Checks, Target


def models_of(url: str, key: str) -> list[str]:
    """Return the names of the server's models."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
    return [model.id for model in client.models.list()]


def run(name: str, check: Callable[[], object]) -> bool:
    """Run one check, print how it went, and return whether it passed."""
    start_s = time.monotonic()
    try:
        found = check()
        if asyncio.iscoroutine(found):
            found = asyncio.run(found)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        print(f"FAIL {name}: {type(error).__name__}: {str(error)[:300]} (line {last.lineno})")
        return False
    print(f"pass {name} ({time.monotonic() - start_s:.2f} s){f': {found}' if found else ''}")
    return True


def main() -> int:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:9000")
    parser.add_argument("--model")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--tools", action="store_true")
    options = parser.parse_args()
    model = options.model or models_of(options.url, options.api_key)[0]
    with urllib.request.urlopen(f"{options.url}/version") as answer:
        version = json.load(answer)["version"]
    print(f"openai {openai.__version__}, anthropic {anthropic.__version__}, ", end="")
    print(f"pydantic {pydantic.VERSION}, Python {platform.python_version()}")
    print(f"Slipstream {version}, model {model}")
    target = Target(options.url, model, options.api_key, options.tools)
    checks: list[tuple[str, Checks]] = [
        ("responses", with_openai.checks(target)),
        ("messages", with_anthropic.checks(target)),
    ]
    results = [
        run(f"{group}: {name}", check) for group, each in checks for name, check in each.items()
    ]
    print(f"{sum(results)} of {len(results)} checks passed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
