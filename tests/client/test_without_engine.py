"""The client in an environment that has its own dependencies alone: no torch, nothing of an engine.

Each process refuses to import whatever `pip install slipstream`, without extras, does not bring.
"""

import functools
import importlib.metadata
import json
import subprocess
import sys
import tomllib

import pytest
from fixtures.client.triton import Triton
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from slipstream_serve.server import repository_root

PROJECT = tomllib.loads((repository_root() / "pyproject.toml").read_text())["project"]
REFUSING = """
import importlib.abc, json, sys
refused = frozenset(json.loads(sys.argv.pop()))
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Finder())
"""
COMMAND = "from slipstream_client.cli import main; sys.exit(main())"
ALL_OF_THE_SDK = """
import slipstream_client
for name in slipstream_client.__all__:
    getattr(slipstream_client, name)
"""


def brought(requirements: list[str]) -> set[str]:
    """The distributions that pip installs for these requirements, on this machine."""
    names: set[str] = set()
    pending = [Requirement(text) for text in requirements]
    seen = set()
    while pending:
        wanted = pending.pop()
        if str(wanted) in seen:
            continue
        seen.add(str(wanted))
        names.add(canonicalize_name(wanted.name))
        for text in importlib.metadata.requires(wanted.name) or ():
            needed = Requirement(text)
            extras = wanted.extras or {""}
            if not needed.marker or any(needed.marker.evaluate({"extra": e}) for e in extras):
                pending.append(needed)
    return names


@functools.cache
def refused() -> list[str]:
    """Every installed module that the client's own dependencies do not bring."""
    allowed = brought(PROJECT["dependencies"]) | {"slipstream"}
    owners = importlib.metadata.packages_distributions()
    return [
        name
        for name, distributions in owners.items()
        if not any(canonicalize_name(one) in allowed for one in distributions)
    ]


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", REFUSING + code, *arguments, json.dumps(refused())]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_engine_is_not_among_the_dependencies() -> None:
    absent = {"torch", "cupy", "cuda", "safetensors", "tokenizers", "zmq", "transformers"}
    installed = absent & set(importlib.metadata.packages_distributions())
    assert installed >= {"torch", "safetensors", "tokenizers", "zmq"}
    assert installed <= set(refused())
    done = run("import torch")
    assert "No module named 'torch'" in done.stderr


def test_the_sdk_is_imported() -> None:
    done = run(ALL_OF_THE_SDK)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", ["", "complete", "chat", "bench", "health"])
def test_help_is_shown(words: str) -> None:
    done = run(COMMAND, *words.split(), "--help")
    assert done.returncode == 0, done.stderr
    assert f"usage: slipstream {words}" in done.stdout


def test_a_completion_is_streamed(served: tuple[Triton, str]) -> None:
    host, _, port = served[1].partition(":")
    done = run(COMMAND, "complete", "--host", host, "--grpc-port", port, "say one")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == "one"


def test_what_needs_the_engine_says_what_to_install() -> None:
    done = run(COMMAND, "compose", "--help")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith(" the engine needs it: pip install 'slipstream[engine]'\n")
