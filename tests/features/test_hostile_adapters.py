"""Clients that mean harm by adapters: each gets a typed error, and the others what they had."""

import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.features.adapters import text_of, write
from fixtures.features.house import House
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream_contract.errors import Code, ContractError

TYPED = {Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.UNAVAILABLE, Code.UNSUPPORTED}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("hostile")
    for seed, name in enumerate(("root/one", "root/two", "outside")):
        write(folder / name, seed)
    (folder / "root/link").symlink_to(folder / "outside")
    (folder / "root/loop").symlink_to(folder / "root/loop")
    made = House(folder, adapter_root=str(folder / "root"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def root(house: House) -> Path:
    return Path(house._loop._engine.adapters._root)


def refused(act: Callable[[], object]) -> bool:
    """Whether an act is refused, which is by a typed error, as short as a line."""
    refusal: ContractError | None = None
    try:
        act()
    except ContractError as error:
        refusal = error
    assert refusal is None or refusal.code in TYPED, refusal
    assert refusal is None or len(refusal.message) < 2000
    return refusal is not None


parts = st.sampled_from(
    ["..", ".", "one", "two", "link", "loop", "", "\0", "a" * 300, "é", "\u202e", "~", "*"]
)
paths = st.lists(parts, max_size=5).map("/".join) | st.sampled_from(
    ["/etc", "/proc/self", "/dev/zero", "x" * 10_000, "one/../../outside", "one/./..//../outside"]
)
names = st.text(max_size=8) | st.sampled_from(["a" * 10_000, "a,b", "\n", "checkpoint", "../x"])


@settings(max_examples=150)
@given(name=names, path=paths)
def test_names_and_paths(name: str, path: str, house: House, root: Path) -> None:
    """What is loaded lies below the root; nothing else is left by what is refused."""
    connection = house._bridge.connection
    is_refused = refused(lambda: connection.load_adapter(name, path, 60))
    found = [each for each in connection.adapters.values() if each.name == name]
    assert bool(found) == (not is_refused)
    if found:
        real = os.path.realpath(found[0].path)
        assert real in (str(root.resolve() / "one"), str(root.resolve() / "two"))
        connection.unload_adapter(name, 60)
    assert refused(lambda: connection.unload_adapter(name, 60))


numbers = st.sampled_from([0, 1, 2, 2**63 - 1, 2**63, 2**64 - 1])
values = st.sampled_from([0.0, 1.0, float("nan"), float("inf"), 65504.0])
cells = st.sampled_from([0, 1, 3, 7, 9, 512, 513, -1, 2**31 - 1, -(2**31)])


@settings(max_examples=150)
@given(
    number=numbers,
    config=st.lists(st.lists(cells, min_size=3, max_size=3), min_size=1, max_size=3),
    width=st.sampled_from([1, 5, 384, 1024]),
    value=values,
    given=st.sampled_from(["both", "weights", "config", "another count"]),
)
def test_tasks(
    number: int, config: list[list[int]], width: int, value: float, given: str, house: House
) -> None:
    """Ids to 2^64 - 1, and rows that point out of the model or hold what is no number."""
    weights = np.full((len(config) + (given == "another count"), width), value, np.float16)
    body: dict[str, Any] = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 2}
    body["lora_task_id"] = number
    if given != "config":
        body["lora_weights"] = weights.tolist()
    if given != "weights":
        body["lora_config"] = config
    if not refused(lambda: house.ask("tensorrt_llm", body)):
        assert given == "both"
        assert np.isfinite(value)
    house._loop._engine.adapters.check_integrity()


@pytest.mark.rest
def test_races_of_twenty_clients(house: House, root: Path) -> None:
    """They load, load again, unload and use the same names, a directory is swapped meanwhile for a
    link out of the root, and a stream beside them says what it always says.
    """
    connection = house._bridge.connection
    base = text_of(house, None)
    digests = set()
    for name in ("one", "two"):
        connection.load_adapter(name, name, 60)
        digests |= {each.digest for each in connection.adapters.values()}
        connection.unload_adapter(name, 60)
    write(root / "moving", 0)
    is_over = threading.Event()

    def swap() -> None:
        while not is_over.is_set():
            (root / "moving").rename(root / "away")
            (root / "moving").symlink_to(root.parent / "outside")
            (root / "moving").unlink()
            (root / "away").rename(root / "moving")

    def client(seed: int) -> int:
        rng, count = random.Random(seed), 0
        for _ in range(8):
            name, path = rng.choice("xyz"), rng.choice(["one", "two", "moving", "link", ".."])
            act = rng.choice(
                [
                    lambda: connection.load_adapter(name, path, 120),  # noqa: B023
                    lambda: connection.unload_adapter(name, 120),  # noqa: B023
                    lambda: text_of(house, name),  # noqa: B023
                ]
            )
            count += not refused(act)
            assert {each.digest for each in connection.adapters.values()} <= digests
        return count

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        with ThreadPoolExecutor(21) as pool:
            served = [pool.submit(client, seed) for seed in range(20)]
            canary = pool.submit(lambda: [text_of(house, None) for _ in range(10)])
            assert sum(each.result() for each in served)
            assert canary.result() == [base] * 10
    finally:
        is_over.set()
        swapping.join()
    for each in list(connection.adapters.values()):
        connection.unload_adapter(each.name, 60)
    assert text_of(house, None) == base
    house._loop._engine.check_integrity()
