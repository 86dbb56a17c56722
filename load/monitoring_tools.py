"""Prometheus and promtool: those on PATH, else Debian's package, unpacked and not installed.

python load/monitoring_tools.py     what `make monitoring-tools` runs; needs no root
"""

import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from slipstream_serve.server import repository_root

PACKAGE = "prometheus"
TOOLS = ("prometheus", "promtool")
_HOME = repository_root() / ".slipstream" / "monitoring"
_TIMEOUT_S = 120


class ToolsError(Exception):
    """Why the tools cannot be had, in one line."""


def find() -> dict[str, Path]:
    """The tools by name; empty unless there are both."""
    places = {name: shutil.which(name) or _HOME / "usr" / "bin" / name for name in TOOLS}
    found = {name: Path(place) for name, place in places.items() if Path(place).is_file()}
    return found if len(found) == len(TOOLS) else {}


def get() -> dict[str, Path]:
    """The tools by name, fetched if need be. Raises ToolsError."""
    if not find():
        _fetch()
    return find()


def _fetch() -> None:
    _HOME.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_HOME.parent, prefix="monitoring-") as folder:
        _run("apt-get", "download", PACKAGE, cwd=folder)
        packages = sorted(Path(folder).glob("*.deb"))
        if not packages:
            raise ToolsError(f"apt-get download {PACKAGE} left no package")
        _run("dpkg", "-x", str(packages[0]), "unpacked", cwd=folder)
        with contextlib.suppress(OSError):  # somebody else was faster
            (Path(folder) / "unpacked").rename(_HOME)
    if not find():
        raise ToolsError(f"the package {PACKAGE} holds no {' and '.join(TOOLS)}")


def _run(*command: str, cwd: str) -> None:
    try:
        subprocess.run(
            command, cwd=cwd, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["no reason given"]
        raise ToolsError(f"{command[0]}: {said[-1]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolsError(f"{command[0]}: {error}") from None


def main() -> int:
    """0 with the paths, 1 with the reason."""
    try:
        tools = get()
    except ToolsError as error:
        print(f"monitoring-tools: {error}", file=sys.stderr)
        return 1
    for name, path in tools.items():
        print(f"{name}: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
