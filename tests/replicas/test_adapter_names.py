"""Names of adapters stay known while the replicas that have them come back."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from slipstream import wire
from slipstream.replicas.adapters import RoutedAdapters
from slipstream.replicas.router import Router
from slipstream_contract.errors import Code, ContractError
from slipstream_contract.ids import pack


class Engine:
    """A replica and its engine, which loads and unloads at once."""

    def __init__(self, *names: str) -> None:
        self.own = names
        self.adapters: dict[str, wire.AdapterInfo] | None = None
        self.come()

    @property
    def connection(self) -> "Engine":
        return self

    def come(self) -> None:
        self.adapters = {name: info(name) for name in self.own}

    def end(self) -> None:
        self.adapters = None

    def is_up(self) -> bool:
        return self.adapters is not None

    def adapter_digest(self, name: str) -> bytes | None:
        return b"d" if name in (self.adapters or {}) else None

    def load_adapter(self, name: str, path: str, timeout_s: float) -> None:
        self.adapters = {**(self.adapters or {}), name: info(name)}

    def unload_adapter(self, name: str, timeout_s: float) -> None:
        if name not in (self.adapters or {}):
            raise ContractError("not loaded", Code.NOT_FOUND)
        self.adapters = {each: x for each, x in (self.adapters or {}).items() if each != name}

    def change_adapters(self, change: Callable[["Engine"], None]) -> ContractError | None:
        try:
            change(self)
        except ContractError as error:
            return error
        return None


def info(name: str) -> wire.AdapterInfo:
    return wire.AdapterInfo(name, f"/{name}", 4, 8, "00")


def names(adapters: RoutedAdapters) -> list[str]:
    adapters.take_watched()
    return [each.name for each in adapters.infos()]


@pytest.fixture
def engines() -> list[Engine]:
    return [Engine("own"), Engine("own")]


@pytest.fixture
def adapters(engines: list[Engine]) -> RoutedAdapters:
    made = RoutedAdapters(engines)
    answers: list[ContractError | None] = []
    made.start_load("mine", "/mine", answers.append)
    while not answers:
        made.poll()
    assert answers == [None]
    assert names(made) == ["mine", "own"]
    return made


@pytest.mark.parametrize("order", [*itertools.product(range(2), repeat=2)])
def test_a_name_stays_until_it_is_unloaded(
    engines: list[Engine], adapters: RoutedAdapters, order: tuple[int, int]
):
    removed: list[str] = []
    adapters.when_changed = lambda _, gone: removed.extend(gone)
    for number in order:
        engines[number].end()
        assert names(adapters) == ["mine", "own"]
    for number in dict.fromkeys(order):
        engines[number].come()  # without what others were given since
        assert names(adapters) == ["mine", "own"]
    assert removed == []
    adapters.unload("mine")
    assert names(adapters) == ["own"]
    assert removed == ["mine"]
    with pytest.raises(ContractError, match="not loaded"):
        adapters.unload("mine")


def test_one_that_no_engine_starts_with_any_more_is_gone(
    engines: list[Engine], adapters: RoutedAdapters
):
    for engine in engines:
        engine.end()
        engine.own = ()
    assert names(adapters) == ["mine", "own"]
    engines[0].come()
    assert names(adapters) == ["mine"]


def test_nothing_is_loaded_or_unloaded_where_no_replica_is_up(
    engines: list[Engine], adapters: RoutedAdapters
):
    for engine in engines:
        engine.end()
    for act in (lambda: adapters.unload("mine"), lambda: adapters.start_load("a", "/a", print)):
        with pytest.raises(ContractError, match="no replica is running") as down:
            act()
        assert down.value.code is Code.UNAVAILABLE
    assert names(adapters) == ["mine", "own"]


def test_a_request_for_one_that_is_loaded_again_is_not_told_that_it_is_unknown(
    engines: list[Engine], adapters: RoutedAdapters
):
    router = SimpleNamespace(adapters=adapters)
    message = wire.Submit(1, pack([1]), None, 0, adapter="mine")
    for engine in engines:
        engine.come()
    with pytest.raises(ContractError, match="load it again") as down:
        Router._choose(router, SimpleNamespace(message=message), dict(enumerate(engines)))
    assert down.value.code is Code.UNAVAILABLE
