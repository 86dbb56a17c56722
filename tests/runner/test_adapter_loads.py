"""Copies of adapters beside steps, on a GPU of which only the order of acts is there."""

from contextlib import contextmanager
from weakref import ref

import pytest
import torch
from slipstream.models.adapters.read import AdapterWeights
from slipstream.runner.adapter_forms import Loaded
from slipstream.runner.adapter_loads import Loads

WEIGHTS = AdapterWeights({}, b"", 1)


class Stream:
    """A stream; it notes what it is made to wait for, and what of the memory is there then."""

    def __init__(self) -> None:
        self.notes: list[object] = []
        self.num_steps = 0

    def record_event(self) -> str:
        return f"step {self.num_steps}"

    def wait_event(self, event: str) -> None:
        self.notes.append(event)

    def synchronize(self) -> None:
        self.notes.append("copied")


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream()

    @contextmanager
    def entered(own: Stream):
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    return made


class Memory:
    """What an adapter has on the device."""


def loaded() -> tuple[Loaded, "ref[Memory]"]:
    memory = Memory()
    return Loaded({"place": (memory,)}, None), ref(memory)  # type: ignore[dict-item]


def copied(loads: Loads, number: int) -> Loaded:
    loads.start(number, WEIGHTS)
    loads.wait_for(number)
    ((found, load),) = loads.take()
    assert found == number
    return load.result()


def test_a_copy_after_no_eviction_waits_for_no_step(stream: Stream) -> None:
    loads = Loads(torch.device("cuda"), lambda weights: loaded()[0])
    copied(loads, 1)
    assert stream.notes == ["copied"]


def test_memory_is_given_up_behind_the_steps_that_may_read_it(stream: Stream) -> None:
    """Evicted while another is copied, an adapter keeps its memory until a copy has waited."""
    seen: list[bool] = []
    evicted, memory = loaded()

    def copy(weights: AdapterWeights) -> Loaded:
        nonlocal evicted
        if not seen:  # the engine's thread evicts meanwhile
            stream.num_steps = 7
            loads.evict(evicted)
            del evicted
        seen.append(memory() is not None)
        return loaded()[0]

    loads = Loads(torch.device("cuda"), copy)
    copied(loads, 1)
    assert memory() is not None, "a step may read it"
    copied(loads, 2)
    assert seen == [True, False]
    assert stream.notes == ["copied", "step 7", "copied"]


def test_on_a_cpu_steps_keep_what_they_read() -> None:
    loads = Loads(torch.device("cpu"), lambda weights: loaded()[0])
    evicted, memory = loaded()
    copied(loads, 1)
    loads.evict(evicted)
    del evicted
    assert memory() is None
