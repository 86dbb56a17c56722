"""Run schemathesis on the OpenAPI file of a gateway: `run_schemathesis.py [OPTION ...]`.

Serves the small model with a context of 96 tokens, so that an answer without a limit is short, and
writes what schemathesis prints to benchmarks/out/schemathesis.txt. Options go to schemathesis.
Exit status 1: a check failed, or the gateway's log has a traceback.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from environments import Environments
from slipstream_serve.gateway_alone import gateway_alone, wait_ready

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHECKPOINT = ROOT / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
CONTEXT = 96  # tokens
LIMIT_S = 1800.0
COMPOSE = ["--dtype", "float32", "--max-model-len", str(CONTEXT), "--kv-cache-tokens", "4096"]
SERVE = ["--chat-template", str(HERE / "hermes.jinja"), "--reasoning-parser", "none"]
RUN = ["--workers", "2", "--no-color", "--continue-on-failure", "--no-shrink"]
RUN += ["--suppress-health-check", "all", "--request-timeout", "120"]
# A schema cannot say which prompts fit the context, which token ids a model has, which fields
# exclude each other, and what a grammar can be made of: those are refused although it allows them.
RUN += ["--exclude-checks", "positive_data_acceptance"]


def main() -> int:
    """Run it, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / ".slipstream" / "sdks")
    parser.add_argument("--examples", default="10", help="a field's, at most (%(default)s)")
    parser.add_argument("--seed", default="1", help="(%(default)s)")
    parser.add_argument(
        "--report", type=Path, default=ROOT / "benchmarks" / "out" / "schemathesis.txt"
    )
    options, more = parser.parse_known_args()
    python = Environments(options.folder).python("schemathesis")
    with tempfile.TemporaryDirectory(prefix="schemathesis-") as made:
        home = Path(made)
        log = home / "log"
        compose = ["compose", "--checkpoint", str(CHECKPOINT), "--output", str(home / "models")]
        command = [sys.executable, "-m", "slipstream_client.cli", *compose, *COMPOSE]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with gateway_alone(home / "models", log, *SERVE) as (process, address):
            wait_ready(process, address, log)
            program = [str(python.with_name("schemathesis"))]
            program += ["--config-file", str(HERE / "schemathesis.toml"), "run"]
            shown = ["--max-examples", options.examples, "--seed", options.seed, *RUN, *more]
            done = subprocess.run(
                [*program, f"http://{address}/openapi.json", *shown],
                cwd=home,
                check=False,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_S,
            )
        has_fault = "Traceback" in log.read_text()
    commit = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    of = subprocess.check_output(commit, text=True).strip()
    about = f"{time.strftime('%Y-%m-%d')}, {of}, {len(os.sched_getaffinity(0))} cores\n"
    about += f"schemathesis run URL/openapi.json {' '.join(shown)}\n"
    about += f"tracebacks in the gateway's log: {'some' if has_fault else 'none'}\n\n"
    options.report.parent.mkdir(parents=True, exist_ok=True)
    said = done.stdout.replace(address, "127.0.0.1:PORT").replace(f"{ROOT}/", "")
    options.report.write_text(about + said)
    print(f"{done.stdout}{options.report}")
    return 1 if done.returncode or has_fault else 0


if __name__ == "__main__":
    raise SystemExit(main())
