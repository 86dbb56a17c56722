"""An interpreter in the place of the engine's."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def noting_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter that notes its arguments and its input, and ends with 3; return where."""
    script, heard = tmp_path / "python", tmp_path / "heard"
    script.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\n"
        f"json.dump([sys.argv[1:], json.load(sys.stdin)], open({str(heard)!r}, 'w'))\n"
        "sys.exit(3)\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("SLIPSTREAM_PYTHON", str(script))
    return heard
