"""Check that tools which people use take this server for OpenAI's: `run.py [NAME ...]`.

Makes an environment for each tool (pip, npm) in `--folder`, serves the small model with all
endpoints, runs one tool after another, unmodified, and writes a report. Exit status 1: a check
failed. For a server that runs already: `PYTHON load/sdks/one.py NAME --url URL --model MODEL`.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments import Environments
from table import TOOLS, Tool

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHECKPOINT = ROOT / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
MODEL = "pystdlib-5m"
KEY = "sk-local"
# Small enough for a tool to meet a full queue; fp32, as log likelihoods are compared.
COMPOSE = ["--dtype", "float32", "--max-num-seqs", "8", "--max-waiting", "8"]
START_S = 180.0
TOOL_S = 1200.0
_LINE = re.compile(r"(pass|FAIL) (.*)")


@dataclass(frozen=True)
class Server:
    """URLs of a running server.

    Attributes:
        url: of the gateway with a template for tools and reasoning.
        plain: of a second gateway, for which the model has no reasoning.
        triton: of Triton's HTTP endpoint.
    """

    url: str
    plain: str
    triton: str


def free_ports(count: int) -> list[str]:
    """Return ports that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [str(each.getsockname()[1]) for each in sockets]


@contextlib.contextmanager
def running(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run a process of this project until the block is left."""
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "slipstream_client.cli", *command],
            stdout=sink,
            stderr=sink,
            env=environment,
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def wait_ready(url: str, log: Path) -> None:
    """Return when a gateway answers. Raises SystemExit with its log after a while."""
    start_s = time.monotonic()
    request = urllib.request.Request(f"{url}/health", headers={"authorization": f"Bearer {KEY}"})
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(request):
            return
        if time.monotonic() - start_s > START_S:
            raise SystemExit(f"{url} does not answer:\n{log.read_text()[-2000:]}")
        time.sleep(0.2)


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """Serve the small model on free ports until the block is left."""
    with tempfile.TemporaryDirectory(prefix="sdks-") as made:
        home = Path(made)
        repository, keys, log = home / "models", home / "keys", home / "log"
        keys.write_text(f"{KEY}\n")
        compose = ["compose", "--checkpoint", str(CHECKPOINT), "--output", str(repository)]
        subprocess.run(
            [sys.executable, "-m", "slipstream_client.cli", *compose, *COMPOSE],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        http, grpc, metrics, openai, plain = free_ports(5)
        options = ["--model-repository", str(repository), "--api-key-file", str(keys)]
        options += ["--chat-template", str(HERE / "hermes.jinja")]
        command = ["serve", "--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics]
        command += ["--openai-port", openai, *options]
        environment = {**os.environ, "TMPDIR": str(home)}  # where the runtime directory is found
        with running(command, log, environment):
            url = f"http://127.0.0.1:{openai}"
            wait_ready(url, log)
            (runtime,) = home.glob("slipstream-serve-*")
            second = ["gateway", "--runtime", str(runtime), "--port", plain, *options]
            with running([*second, "--reasoning-parser", "none"], home / "plain", environment):
                wait_ready(f"http://127.0.0.1:{plain}", home / "plain")
                yield Server(url, f"http://127.0.0.1:{plain}", f"http://127.0.0.1:{http}")


def run_tool(tool: Tool, server: Server, environments: Environments, only: str) -> dict[str, Any]:
    """Run a tool, print its lines, and return what the report says of it."""
    if tool.is_node:
        node, folder = environments.node()
        command = [str(node), str(folder / tool.script)]
    else:
        command = [str(environments.python(tool.environment)), str(HERE / "one.py"), tool.script]
        command += ["--triton", server.triton, "--checkpoint", str(CHECKPOINT)]
    url = server.plain if tool.is_plain else server.url
    command += ["--url", url, "--plain-url", server.plain, "--model", MODEL]
    command += ["--api-key", KEY, "--tools", "--only", only]
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "AI_SDK_LOG_WARNINGS": "false"}
    environment = {**os.environ, **quiet, "SLIPSTREAM_PYTHON": sys.executable}
    environment.pop("PYTHONPATH", None)
    start_s = time.monotonic()
    done = subprocess.run(
        command, env=environment, check=False, capture_output=True, text=True, timeout=TOOL_S
    )
    lines = [found.groups() for found in map(_LINE.fullmatch, done.stdout.splitlines()) if found]
    checks = [{"result": result, "check": text} for result, text in lines]
    has_passed = done.returncode == 0 and bool(checks)
    return {
        "version": environments.version(tool.environment, tool.package),
        "what": tool.what,
        "has_passed": has_passed,
        "seconds": round(time.monotonic() - start_s, 1),
        "checks": checks,
        **({} if has_passed else {"stderr": done.stderr[-1000:]}),
    }


def main() -> int:
    """Run the tools, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TOOLS))
    parser.add_argument("--folder", type=Path, default=ROOT / ".slipstream" / "sdks")
    parser.add_argument("--report", type=Path, default=ROOT / "benchmarks" / "out" / "sdks.json")
    parser.add_argument("--only", default="", help="checks whose names hold this text")
    options = parser.parse_args()
    if unknown := set(options.names) - set(TOOLS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(TOOLS)}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the server
    environments = Environments(options.folder)
    names = options.names or list(TOOLS)
    for name in names:  # before the server, which would wait
        environments.version(TOOLS[name].environment, TOOLS[name].package)
    commit = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": subprocess.check_output(commit, text=True).strip(),
        "cores": len(os.sched_getaffinity(0)),
        "model": MODEL,
    }
    report: dict[str, Any] = {}  # of tools that are not run now, it keeps what it says
    if options.report.is_file():
        report = json.loads(options.report.read_bytes())
    with serving() as server:
        for name in names:
            print(f"{name} {TOOLS[name].what}", flush=True)
            found = run_tool(TOOLS[name], server, environments, options.only)
            report[name] = {**about, **found}
            options.report.parent.mkdir(parents=True, exist_ok=True)
            options.report.write_text(json.dumps(report, indent=1) + "\n")
            for check in found["checks"]:
                print(f"  {check['result']} {check['check']}", flush=True)
            if not found["has_passed"]:
                print(f"  FAIL {name}\n{found['stderr']}", flush=True)
    results = [report[name]["has_passed"] for name in names]
    print(f"{sum(results)} of {len(results)} tools: {options.report}")
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
