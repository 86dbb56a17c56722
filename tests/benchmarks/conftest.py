"""The scripts of benchmarks/ that a test file has in NAMES, as modules."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from fixtures.scripts import scripts
from slipstream_serve.server import repository_root


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    with scripts(repository_root() / "benchmarks", request.module.NAMES) as found:
        yield found
