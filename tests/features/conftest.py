"""An engine of the default checkpoint, with every wiring; a file that wants options has its own."""

from collections.abc import Iterator

import pytest
from fixtures.features.house import House


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Iterator[House]:
    house = House(tmp_path_factory.mktemp("house"))
    yield house
    house.engine.check_integrity()
    house.close()
