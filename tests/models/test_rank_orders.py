"""Orders about adapters between a step's launch and its end: other ranks obey them behind it.

On a CPU a step is computed, and announced, when it is waited for.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.models.adapters import draw_pairs, targets_of, write_adapter
from fixtures.models.checkpoints import Driver, Generation, make_model, make_runner, save
from fixtures.models.ranks import Group
from slipstream.core.batch import Batch, Sampled
from slipstream.runner.model_runner import ModelRunner


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A base and two adapters."""
    folder = tmp_path_factory.mktemp("orders")
    model = make_model("llama", num_hidden_layers=1)
    names = targets_of(model)
    made = [save(model, folder / "base")]
    for rank in (2, 5):
        pairs = draw_pairs(model, names, rank, rank)
        made.append(write_adapter(folder / str(rank), pairs, rank))
    return made


@pytest.fixture
def group(directories: list[Path]) -> Iterator[Group]:
    """Two ranks, of which none fails."""
    made = Group(directories[0], 2)
    yield made
    made.end()
    assert made.errors == []


def batch_of(runner: ModelRunner, number: int) -> Batch:
    row = Driver(runner)._row(0, Generation([3, 1, 4], 1, adapter=number), 16)
    return Batch((row,), 0)


def play(runner: ModelRunner, directories: list[Path]) -> list[list[int]]:
    """Steps with adapters that leave, and come, while the step is on its way."""
    adapters = runner.adapters
    weights = [adapters.read(str(each)) for each in directories[1:]]
    first, second = adapters.add(weights[0]), adapters.store(weights[1])
    found: list[Sampled] = []
    launched = runner.launch(batch_of(runner, first))
    adapters.evict(first)
    adapters.start_load(second)
    found.append(launched.wait())
    while second not in adapters._loaded:
        adapters.take_loaded(1.0)
    launched = runner.launch(batch_of(runner, second))
    adapters.evict(second)
    adapters.remove(second)
    found.append(launched.wait())
    again = adapters.store(weights[1])
    adapters.start_load(first)
    adapters.settle(first)
    found.append(runner.run(batch_of(runner, first)))
    adapters.remove(first)
    adapters.remove(again)
    return [list(each.token_ids) for each in found]


def test_an_adapter_leaves_behind_the_step_that_has_it(
    group: Group, directories: list[Path]
) -> None:
    wanted = play(make_runner(directories[0]), directories)
    assert play(group.leader, directories) == wanted
    assert wanted[0] == wanted[2] != wanted[1]


def test_a_step_that_fails_unannounced_holds_no_order_back(
    group: Group, directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, adapters = group.leader, group.leader.adapters
    number = adapters.store(adapters.read(str(directories[1])))
    launched = runner.launch(batch_of(runner, 0))
    adapters._ranks.give_all(number)
    adapters.start_load(number)
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise MemoryError

        patch.setattr(runner._builder, "build", fail)
        with pytest.raises(MemoryError):
            launched.wait()
    adapters.settle(number)
    assert len(runner.run(batch_of(runner, number)).token_ids) == 1
    adapters.remove(number)
