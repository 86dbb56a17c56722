"""Faults of the engine's process alone, without a server: on a GPU they are real ones."""

import contextlib
import queue
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch
from fixtures.faults.planter import VICTIM, plant, write_python
from fixtures.server.support import CHECKPOINT
from slipstream import wire
from slipstream.bridge.connection import Connection
from slipstream.config import EngineConfig
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
CPU = pytest.param("cpu", marks=pytest.mark.slow)  # the server's tests have the same, together
NUM = 12


@dataclass
class Answer:
    """The outcome of one request."""

    token_ids: list[int] = field(default_factory=list)
    end: str = ""  # why, or the error


class House:
    """An engine's process that takes orders, and a bridge of its own."""

    def __init__(self, folder: Path, device: str, lock: Path | None = None, **changes) -> None:
        self.orders = folder / "orders"
        self.orders.mkdir(parents=True)
        self._folder, self._lock = folder, lock
        config = EngineConfig(
            checkpoint=str(CHECKPOINT),
            device=device,
            deterministic=device == "cuda",
            dtype="auto" if device == "cuda" else "float32",
            **{"kv_cache_tokens": 8192, **changes},
        )
        (folder / "config.json").write_bytes(msgspec.json.encode(config))
        write_python(folder / "python", self.orders)
        self.address = f"ipc://{folder}/engine"
        self.events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.process = self._start()
        self.connection = Connection(self.address, "test", self, lambda: None)

    def _start(self) -> subprocess.Popen[bytes]:
        words = [
            "-P",
            "-m",
            "slipstream.engine.process",
            "--config",
            str(self._folder / "config.json"),
        ]
        if self._lock is not None:
            words += ["--memory-lock", str(self._lock)]
        command = [str(self._folder / "python"), *words, "--socket", self.address]
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def restart(self) -> None:
        """Another process in the place of one that has ended."""
        self.process = self._start()

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()

    # The listener of the connection.

    def take(self, outputs: wire.StepOutputs) -> None:
        self.events.put(outputs)

    def reject(self, rejected: wire.Rejected) -> None:
        self.events.put(rejected)

    def lose_messages(self, requests) -> None:
        self.events.put(("missed", set(requests)))

    def lose_engine(self, kept) -> None:
        self.events.put(("lost", set(kept)))

    def is_waiting_for(self, request: int) -> bool:
        return False

    # What tests do.

    def ask(self, first: int, victim: bool = False) -> dict[int, Answer]:
        """Submit NUM requests; the last may be the victim. Answers by place, none yet."""
        assert self.connection.wait_welcome(300), (self._folder / "log").read_text()
        submits = []
        for i in range(NUM):
            seed = VICTIM if victim and i == NUM - 1 else i
            prompt = [5 + (7 * i + j) % 900 for j in range(40 + 50 * (i % 3))]
            sampling = SamplingParams(max_tokens=48, temperature=0.9, top_p=0.95, seed=seed)
            submits.append(wire.Submit(first + i, pack(prompt), sampling, 0))
        self.connection.send(*submits)
        return {first + i: Answer() for i in range(NUM)}

    def collect(self, answers: dict[int, Answer], timeout_s: float = 120.0) -> list[Answer]:
        """Until all have ended or the engine has."""
        deadline = time.monotonic() + timeout_s
        while any(not answer.end for answer in answers.values()):
            event = self.events.get(timeout=max(0.1, deadline - time.monotonic()))
            if isinstance(event, tuple):
                assert event[0] == "lost", event
                for answer in answers.values():
                    answer.end = answer.end or "lost"
                break
            assert isinstance(event, wire.StepOutputs), event
            for tokens in event.tokens:
                answer = answers[tokens.request]
                assert not answer.end
                answer.token_ids += tokens.token_ids
                if tokens.finished is not None:
                    answer.end = tokens.finished.error or tokens.finished.reason.value
        return list(answers.values())

    def check_idle(self) -> None:
        """Every block is free."""
        status = self.connection.request_status(10)
        assert (status.running, status.waiting) == (0, 0)
        assert status.kv_blocks_free == status.kv_blocks_total


@pytest.fixture
def house(tmp_path: Path, device: str) -> Iterator[House]:
    house = House(tmp_path, device)
    yield house
    house.close()


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_nan_in_one_row(house: House) -> None:
    want = house.collect(house.ask(0, victim=True))
    plant(house.orders, "nan", number=9)
    got = house.collect(house.ask(100, victim=True))
    assert got[:-1] == want[:-1]
    assert got[-1].end == "numerical error"
    assert got[-1].token_ids == want[-1].token_ids[: len(got[-1].token_ids)]
    house.check_idle()
    plant(house.orders, "heal")
    for first in (200, 300):  # in the blocks that held NaN
        assert house.collect(house.ask(first, victim=True)) == want
    house.check_idle()


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_engines_that_share_a_device_answer_as_one_alone_does(tmp_path: Path, device: str) -> None:
    shares, tokens = {"a": 0.2, "b": 0.3}, {"kv_cache_tokens": 8192}
    if (
        device == "cuda"
    ):  # one that all sequences at their longest would not fit in, one that has room
        shares, tokens = {"a": 2e9 / torch.cuda.mem_get_info()[1], "b": 0.3}, {}
    with contextlib.ExitStack() as stack:
        houses = []
        for name, share in shares.items():  # they start at once
            changes = {"memory_share": share, "kv_cache_tokens": None, **tokens}
            house = House(tmp_path / name, device, tmp_path / "memory.lock", **changes)
            houses.append(house)
            stack.callback(house.close)
        answers = [house.ask(0) for house in houses]  # side by side
        first, second = (house.collect(each) for house, each in zip(houses, answers, strict=True))
        assert first == second
        assert all(len(answer.token_ids) == 48 for answer in first)
        for house in houses:
            house.check_idle()
        if device == "cuda":
            used = [house.connection.request_status(10).kv_blocks_total for house in houses]
            assert used[0] < used[1]
            assert torch.cuda.mem_get_info()[0] > 0.4 * torch.cuda.mem_get_info()[1]
        houses[0].process.kill()
        houses[0].process.wait()
        assert houses[1].collect(houses[1].ask(100)) == second


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_memory_runs_short(house: House, device: str) -> None:
    want = house.collect(house.ask(0))
    if device == "cuda":
        plant(house.orders, "fill_memory")
    plant(house.orders, "short_memory", max_tokens=100)
    assert house.collect(house.ask(100)) == want
    got = house.collect(house.ask(200, victim=True))
    assert got[:-1] == want[:-1]
    assert got[-1].end == "the step failed: OutOfMemoryError"
    house.check_idle()
    plant(house.orders, "heal")
    assert house.collect(house.ask(300)) == want
    assert house.process.poll() is None


@pytest.mark.parametrize(
    ("device", "fault"),
    [
        pytest.param("cpu", "sticky", marks=pytest.mark.slow),
        pytest.param("cuda", "illegal_address", marks=pytest.mark.gpu),
    ],
)
def test_a_context_that_is_lost(house: House, fault: str) -> None:
    want = house.collect(house.ask(0))
    plant(house.orders, "pace", seconds=0.02)
    answers = house.ask(100)
    time.sleep(0.4)
    plant(house.orders, fault)
    got = house.collect(answers)
    for one, other in zip(got, want, strict=True):
        assert one.end == "lost"
        assert one.token_ids == other.token_ids[: len(one.token_ids)]
    assert house.process.wait(120) == 1
    house.restart()
    deadline = time.monotonic() + 120
    while house.connection.wait_welcome(0) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert house.collect(house.ask(200)) == want
    house.check_idle()
