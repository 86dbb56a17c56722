"""The Makefile: every target is in `make help`, and no file of its name can stand in its way."""

import re
import subprocess

from slipstream_serve.server import repository_root

ROOT = repository_root()
TEXT = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", TEXT, re.MULTILINE))


def test_help_lists_every_target() -> None:
    done = subprocess.run(["make", "-C", ROOT, "help"], capture_output=True, text=True, check=True)
    assert set(re.findall(r"^  make (\S+) +\S", done.stdout, re.MULTILINE)) == TARGETS


def test_no_file_stands_in_the_way_of_a_target() -> None:
    """A folder `adapter` would make `make adapter` up to date."""
    phony = re.findall(r"^\.PHONY: (.*)", TEXT, re.MULTILINE)
    assert set(" ".join(phony).split()) == TARGETS
