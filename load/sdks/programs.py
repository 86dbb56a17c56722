"""Programs that load a server: how they are run, and what their reports must say."""

import os
import re
import subprocess
import sys
from pathlib import Path

REQUESTS, STREAMS = 12, 4
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 16


def run(program: list[str], folder: Path, **variables: str) -> str:
    """Run a program of this environment, and return what it printed. Raises AssertionError."""
    command = [sys.executable, *program]
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "TQDM_DISABLE": "1", **variables, "PATH": paths, "COLUMNS": "200"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, " ".join(re.sub(r"[^\x20-\x7e]", " ", done.stdout).split())[-600:]
    return done.stdout
