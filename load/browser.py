"""A headless Chromium: the one on PATH, else Debian's packages, unpacked and not installed.

python load/browser.py     what `make browser` runs; needs no root
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from slipstream_serve.server import repository_root

PACKAGES = ("chromium-headless-shell", "fonts-inter", "fonts-jetbrains-mono")
_COMMANDS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_HOME = repository_root() / ".slipstream" / "browser"
_BINARY = _HOME / "usr" / "lib" / "chromium" / "chromium-headless-shell"
_LIBRARIES = ("usr/lib/*-linux-gnu", "usr/lib/*-linux-gnu/pulseaudio", "usr/lib/chromium")
_TIMEOUT_S = 300
# A package that is missing here, in what apt says it would do.
_MISSING = re.compile(r"^Inst (\S+)", re.MULTILINE)
_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir>{home}/usr/share/fonts</dir>
  <dir>/usr/share/fonts</dir>
  <cachedir>{home}/fonts-cache</cachedir>
</fontconfig>
"""


class BrowserError(Exception):
    """Why no browser can be had, in one line."""


def find() -> Path | None:
    """Return the browser's program; None: there is none yet."""
    places = [*filter(None, map(shutil.which, _COMMANDS)), _BINARY]
    return next((Path(place) for place in places if Path(place).is_file()), None)


def get() -> Path:
    """Return the browser's program, fetched if need be. Raises BrowserError."""
    if find() is None:
        _fetch()
    if (found := find()) is None:
        raise BrowserError(f"the packages {' '.join(PACKAGES)} hold no {_BINARY.name}")
    return found


def environment() -> dict[str, str]:
    """Return the environment to start it in: its own libraries and fonts, if it was unpacked."""
    if find() != _BINARY:
        return dict(os.environ)
    libraries = [str(folder) for pattern in _LIBRARIES for folder in _HOME.glob(pattern)]
    return os.environ | {
        "LD_LIBRARY_PATH": ":".join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]),
        "FONTCONFIG_FILE": str(_HOME / "fonts.conf"),
    }


def _fetch() -> None:
    _HOME.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_HOME.parent, prefix="browser-") as folder:
        wanted = ("install", "--simulate", "--no-install-recommends", *PACKAGES)
        names = _MISSING.findall(_run("apt-get", *wanted, cwd=folder))
        _run("apt-get", "download", *names, cwd=folder)
        unpacked = Path(folder) / "unpacked"
        for package in sorted(Path(folder).glob("*.deb")):
            _run("dpkg", "-x", str(package), str(unpacked), cwd=folder)
        (unpacked / "fonts.conf").write_text(_FONTS.format(home=_HOME))
        with contextlib.suppress(OSError):  # another process was faster
            unpacked.rename(_HOME)


def _run(*command: str, cwd: str) -> str:
    try:
        done = subprocess.run(
            command, cwd=cwd, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["no reason given"]
        raise BrowserError(f"{command[0]}: {said[-1]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BrowserError(f"{command[0]}: {error}") from None
    return done.stdout


def main() -> int:
    """Print the path and return 0, or the reason and 1."""
    try:
        print(get())
    except BrowserError as error:
        print(f"browser: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
