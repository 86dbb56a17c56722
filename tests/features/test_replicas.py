"""Features of requests meet several replicas: a router and two engines answer as one does."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import pytest
from fixtures.bridge.launching import Server
from fixtures.bridge.texts import CHECKPOINT
from fixtures.features import answers
from fixtures.features.house import House, Wirings
from fixtures.features.pairing import cases, refused
from fixtures.features.table import FEATURES, MODELS, body_of, has
from fixtures.waiting import wait_for
from slipstream.config import EngineConfig
from slipstream_contract.errors import ContractError

pytestmark = pytest.mark.rest
SETTINGS = {"dtype": "float32", "kv_cache_tokens": 4096}
AT_ONCE = 8  # requests, so that both engines have some
CASES = [(model, case) for model in MODELS[1:] for case in cases(model)]
PARTS = [CASES[first::7] for first in range(7)]
REFUSED = [
    (model, first.name, second.name)
    for model in MODELS[1:]
    for first, second in combinations(FEATURES, 2)
    if has(model, first.name) and has(model, second.name)
    and refused(model, first.name, second.name)
]  # fmt: skip


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Iterator[House]:
    house = House(tmp_path_factory.mktemp("house"), **SETTINGS)
    yield house
    house.close()


@pytest.fixture(scope="module")
def routed(tmp_path_factory) -> Iterator[Wirings]:
    """Wirings to a router, whose engines are processes, as a server's bridges start them."""
    config = EngineConfig(checkpoint=str(CHECKPOINT), device="cpu", replicas=2, **SETTINGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_PYTHON", sys.executable)
        server = Server(tmp_path_factory.mktemp("routed") / "run", config)
        server.supervisions[0].ensure()
        wirings = Wirings(server.runtime.address, server.supervisions[0].ensure)
        yield wirings
        wirings.close()
        server.stop()
        wait_for(lambda: not server.supervisor and not server.engine and not server.router)


@pytest.mark.parametrize("part", range(len(PARTS)))
def test_replicas_change_nothing(house: House, routed: Wirings, part: int) -> None:
    def same(case: tuple[str, tuple[str, ...]]) -> None:
        model, names = case
        answer = answers.same(model, names, house.ask, routed.ask)
        answers.check(model, names, answer, routed.ask(model, body_of(model, names)))

    before = [each.num_requests for each in routed.connection.request_status(60).replicas]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(same, PARTS[part]))
    after = [each.num_requests for each in routed.connection.request_status(60).replicas]
    assert all(b > a for a, b in zip(before, after, strict=True))


def test_what_is_refused_is_refused_by_the_same_words(house: House, routed: Wirings) -> None:
    for model, first, second in REFUSED:
        said = []
        for each in (house, routed):
            with pytest.raises(ContractError) as caught:
                each.ask(model, body_of(model, [first, second]))
            said.append(str(caught.value))
        assert said[0] == said[1]
        assert said[0].endswith(tuple(pair.reason for pair in refused(model, first, second)))
