"""Run Codex CLI and Claude Code, unmodified, for one turn each on a gateway of the small model.

    .venv/bin/python load/sdks/agents.py --codex PATH --claude PATH

The model writes Python and reads no instructions, nor tools, which the prompt leaves out: what is
tried is that the real request of each agent is served, and that it takes the answer for a complete
one. For that the model gets a context of 96k tokens and ends its answer with the line. Exit status
1: an agent did not complete its turn.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
SLIPSTREAM = (sys.executable, "-m", "slipstream_client.cli")
CONTEXT = 98_304  # tokens
ENGINE = (
    *("--kv-cache-tokens", str(CONTEXT)),
    *("--max-num-batched-tokens", "512"),
    *("--stuck-after-s", "900"),
    *("--dtype", "float32"),
)
PROMPT = "import os"
LIMIT_S = 600
NAME = "ensemble"
TEMPLATE = """\
{% for message in messages %}# {{ message.role }}
{{ message.content }}
{% endfor %}import"""
CODEX = """\
model = "{model}"
model_provider = "slipstream"
model_context_window = 90000

[model_providers.slipstream]
name = "Slipstream"
base_url = "{url}/v1"
wire_api = "responses"
"""


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a JSON file."""
    value = json.loads(path.read_bytes())
    change(value)
    path.write_text(json.dumps(value))


def make_repository(folder: Path) -> Path:
    """Compose the small model, with a long context and with the end of a line as an end."""
    checkpoint, repository = folder / "checkpoint", folder / "models"
    shutil.copytree(CHECKPOINT, checkpoint)
    tokens = json.loads((checkpoint / "tokenizer.json").read_bytes())["model"]["vocab"]
    ends = [0, *sorted(number for text, number in tokens.items() if "\u010a" in text)]
    for name in ("config.json", "generation_config.json"):
        edit(checkpoint / name, lambda value: value.update(eos_token_id=ends))
    edit(checkpoint / "config.json", lambda value: value.update(max_position_embeddings=CONTEXT))
    command = [*SLIPSTREAM, "compose", "--checkpoint", str(checkpoint), *ENGINE]
    subprocess.run([*command, "--output", str(repository)], check=True, capture_output=True)
    return repository


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Run a gateway on a free port and yield its address."""
    log = folder / "log"
    command = [*SLIPSTREAM, "gateway", "--port", "0"]
    command += ["--model-repository", str(make_repository(folder))]
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    command += ["--tool-call-parser", "hermes", "--chat-template", str(template)]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink)
    try:
        yield _ready(log, process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _ready(log: Path, process: subprocess.Popen[bytes]) -> str:
    while process.poll() is None:
        time.sleep(0.5)
        found = re.search(r"http://[\d.:]+", log.read_text())
        with contextlib.suppress(OSError):
            if found is not None and urllib.request.urlopen(f"{found[0]}/health").status == 200:
                return found[0]
    raise RuntimeError(log.read_text())


def run(command: list[str], home: Path, **variables: str) -> str:
    """Run an agent with a home of its own and return what it prints."""
    environment = {**os.environ, "HOME": str(home), **variables}
    done = subprocess.run(
        command,
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.stdout


def run_codex(program: str, url: str, home: Path) -> str:
    """Run one turn of Codex CLI."""
    folder = home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(CODEX.format(model=NAME, url=url))
    command = [program, "exec", "--skip-git-repo-check", "--json", "-s", "read-only", PROMPT]
    lines = run(command, home, CODEX_HOME=str(folder)).splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    last = events[-1] if events else {}
    assert last.get("type") == "turn.completed", lines[-3:]
    return json.dumps(last["usage"])


def run_claude(program: str, url: str, home: Path) -> str:
    """Run one turn of Claude Code."""
    found = run(
        [program, "-p", PROMPT, "--output-format", "json"],
        home,
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL=NAME,
        ANTHROPIC_DEFAULT_HAIKU_MODEL=NAME,
        ANTHROPIC_DEFAULT_SONNET_MODEL=NAME,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        API_TIMEOUT_MS=str(LIMIT_S * 1000),
    )
    result = json.loads(found)
    assert not result["is_error"], found[:500]
    usage = result["usage"]
    counts = {name: usage[name] for name in ("input_tokens", "output_tokens")}
    return json.dumps({"stop_reason": result["stop_reason"], **counts})


def main() -> int:
    """Run the agents that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codex", metavar="PATH")
    parser.add_argument("--claude", metavar="PATH")
    options = parser.parse_args()
    status = 0
    agents = ((options.codex, run_codex), (options.claude, run_claude))
    for program, turn in agents:
        if program is None:
            continue
        with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as url:
            home = Path(folder) / "home"
            home.mkdir()
            version = run([program, "--version"], home).strip()
            start_s = time.monotonic()
            try:
                how = f"pass {version}: a turn in {{:.0f}} s: {turn(program, url, home)}"
            except (AssertionError, ValueError, subprocess.TimeoutExpired) as error:
                how, status = f"FAIL {version} after {{:.0f}} s: {str(error)[:500]}", 1
            print(how.replace("{:.0f}", f"{time.monotonic() - start_s:.0f}"), flush=True)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
