"""The scripts of load/ as modules, for tests of what they do."""

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from slipstream_serve.server import repository_root


@pytest.fixture
def load(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Load the scripts in NAMES of the test's module; they import each other by plain names."""
    names = request.module.NAMES
    monkeypatch.syspath_prepend(str(repository_root() / "load"))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        sys.modules.pop(name)
