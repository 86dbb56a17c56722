"""Features of requests meet the stages of a pipeline: two of them answer as one process does."""

import threading
from collections.abc import Iterator

import pytest
from fixtures.bridge.texts import CHECKPOINT
from fixtures.features import answers
from fixtures.features.house import House
from fixtures.features.pairing import cases
from fixtures.features.table import MODELS, body_of
from fixtures.tiers import quick_of
from slipstream.config import EngineConfig
from slipstream.runner.joining import start
from slipstream.runner.plan import resolve
from slipstream_runtime.ranks import RankMemory, close_quietly

CASES = [(model, case) for model in MODELS[1:] for case in cases(model)][::4]
SETTINGS = {"dtype": "float32", "kv_cache_tokens": 4096, "pipeline_parallel": 2}


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Iterator[House]:
    house = House(tmp_path_factory.mktemp("house"))
    yield house
    house.close()


@pytest.fixture(scope="module")
def staged(tmp_path_factory) -> Iterator[House]:
    """A house whose engine is rank 0, beside another stage in a thread."""
    descriptor = RankMemory.create(2)
    plan = resolve(EngineConfig(checkpoint=str(CHECKPOINT), **SETTINGS), 1)
    first, other = (RankMemory(descriptor, 2, rank) for rank in range(2))
    thread = threading.Thread(target=lambda: start(plan, other)[0].follow(), daemon=True)
    thread.start()
    house = House(tmp_path_factory.mktemp("staged"), ranks=first, pipeline_parallel=2)
    yield house
    house.engine.check_integrity()
    house.engine._runner.stop()
    thread.join(30)
    assert not thread.is_alive()
    house.close()
    close_quietly(descriptor)


@pytest.mark.parametrize(
    "case", quick_of(CASES, CASES[::16]), ids=["-".join((model, *names)) for model, names in CASES]
)
def test_stages_change_nothing(house: House, staged: House, case) -> None:
    model, names = case
    answer = answers.same(model, names, house.ask, staged.ask)
    answers.check(model, names, answer, staged.ask(model, body_of(model, names)))
