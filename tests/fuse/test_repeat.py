"""Blocks by the launches of one before them: the same launches of the same memory."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fixtures.kernels.driverless import WRITES, Driver, TorchCalls, driverless
from fixtures.models.checkpoints import FAMILIES
from fixtures.models.six_layers import CPU, LAYERS, made
from slipstream.errors import ConfigError
from slipstream.fuse import operators, repeat
from slipstream.fuse.alike import form_of
from slipstream.fuse.recording import Recording
from slipstream.fuse.repeat import Repeating
from slipstream.kernels.runtime import tape
from slipstream.layers.adapted import Group, StepGroups
from slipstream.layers.attention import AttentionInputs, StepRows
from slipstream.layers.decoder import Decoder, InTurn, one_by_one
from slipstream.layers.residual import Residual
from slipstream.runner.plan import Plan
from torch import Tensor

SCHEMES = ("none", "fp8", "int4", "w4a8", "w8a8")
STEPS = [(0, 600), (600, 0), (40, 700)]  # decodes, tokens of a chunk
# Of torch: the first word of a result is of the first words of what is given.
ELEMENTWISE = {"torch copy_", "torch zeros_like", "torch add_", "torch clone", "torch repeat"}
Launches = list[tuple[str, str, dict[int, int | None]]]


def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)


def first(x: Tensor) -> int:
    return int(x.flatten().view(torch.uint8)[:8].view(torch.int64))


class Step:
    """A step of a model, from the same start at each run."""

    def __init__(self, plan: Plan, model: Decoder, decodes: int, chunk: int) -> None:
        d, count, n = plan.model.dims, decodes + (chunk > 0), decodes + chunk
        self.model, self.dtype, self.size = model, plan.dtype, (n, d.hidden_size)
        positions, starts = numbers(n, dtype=torch.int64), numbers(1 + (chunk > 0))
        every = (positions, positions + 1, numbers(count, 16), starts, numbers(count) + 1)
        rows = StepRows(*every, decodes, chunk)
        shape, dtype = plan.kv.allocate(4, CPU).shape[1:], plan.kv.dtype
        self.caches = [torch.zeros(shape, dtype=dtype) for _ in model.blocks]
        of_window = {
            window: AttentionInputs.of(plan.attention, self.caches[0], rows, window)
            for window in set(plan.model.windows)
        }
        self.inputs = [of_window[window] for window in plan.model.windows]
        self.inputs[-1] = replace(self.inputs[-1])
        own = [form.tensors for block in model.blocks if (form := form_of(block))]
        known = [*every, *self.caches, *(x for each in own for x in each)]
        self.known = [range(x.data_ptr(), x.data_ptr() + x.nbytes) for x in known]

    def run(self, driver: Driver, apply: InTurn) -> tuple[list[int], Launches]:
        """Return the first words of the residual sum and of all caches, and what was launched, with
        the addresses of all that lasts.
        """
        for i, cache in enumerate(self.caches):
            cache.fill_(i)
        residual = Residual(torch.ones(self.size, dtype=self.dtype))
        driver.launches.clear()
        with TorchCalls(driver):
            apply(self.model.blocks, residual, self.inputs, self.caches)
        launches = [
            (name, text, {place: self._lasting(at) for place, at in places.items()})
            for name, text, places in driver.launches
        ]
        return [first(x) for x in (residual.values, *self.caches)], launches

    def _lasting(self, address: int) -> int | None:
        return address if any(address in each for each in self.known) else None


@pytest.fixture
def driver() -> Iterator[Driver]:
    with driverless() as found, torch.inference_mode():
        yield found


def compare(
    plan: Plan, model: Decoder, driver: Driver, steps: list[tuple[int, int]] = STEPS
) -> list[int]:
    """Run steps both ways, and return how many blocks of each were launched by themselves.

    Words are compared where all is known of what is launched.
    """
    repeating, called = Repeating("cpu"), []
    for decodes, chunk in steps:
        step = Step(plan, model, decodes, chunk)
        expected = step.run(driver, one_by_one)
        (kind,) = {type(block) for block in model.blocks}
        with patch.object(kind, "__call__", autospec=True, side_effect=kind.__call__) as calls:
            words, launches = step.run(driver, repeating)
        assert launches == expected[1]
        if {name for name, *_ in launches} <= WRITES.keys() | ELEMENTWISE:
            assert words == expected[0], (decodes, chunk)
        called.append(calls.call_count)
    return called


@pytest.mark.parametrize(
    ("family", "scheme", "alone"),
    [
        ("llama", "none", 2),
        ("qwen2", "none", 2),
        pytest.param("llama", "fp8", 3, marks=pytest.mark.rest),
        pytest.param("cwm", "none", 3, marks=pytest.mark.rest),
        *[
            pytest.param(*each, marks=pytest.mark.rest)
            for each in (
                *(("qwen3", "none", 2), ("gemma2", "none", 3), ("glm4", "none", 2)),
                *(("gemma3", "none", 2), ("olmo2", "none", 2)),
            )
        ],
        pytest.param("mistral", "w8a8", 2, marks=pytest.mark.rest),
    ],
)
def test_repeated_blocks_read_what_others_read(
    family: str, scheme: str, alone: int, driver: Driver, tmp_path: Path
) -> None:
    """All but the first of a kind, and the last, whose inputs are its own: of fp8 the first block
    finds nothing that is still to be added.
    """
    plan, model = made(family, scheme, tmp_path)
    assert max(compare(plan, model, driver)) == alone
    assert {name for name, *_ in driver.launches} <= WRITES.keys() | ELEMENTWISE


@pytest.mark.parametrize(
    ("more", "tokens"),
    [({"deterministic": True}, 640), *[({"kv_cache_dtype": x}, 600) for x in ("fp8", "int4")]],
)
def test_every_kind_of_step_is_repeated(
    more: dict[str, Any], tokens: int, driver: Driver, tmp_path: Path
) -> None:
    """Slices of the deterministic mode, which torch puts together; quantised caches."""
    plan, model = made("llama", "none", tmp_path, **more)
    assert compare(plan, model, driver, [(0, tokens)]) == [2]


REST = [  # of one structure each; all others are slow
    *(("codegen", "w4a8"), ("cwm", "int4"), ("deepseek_v3", "none"), ("gemma2", "fp8")),
    *(("gpt_oss", "none"), ("mixtral", "fp8"), ("mixtral", "w8a8"), ("qwen2", "none")),
    ("qwen3_moe", "none"),
]
CASES = [
    pytest.param(*each, marks=pytest.mark.rest if each in REST else pytest.mark.slow)
    for each in itertools.product(sorted(FAMILIES), SCHEMES)
]


@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_every_family_launches_what_it_launches_one_by_one(
    family: str, scheme: str, driver: Driver, tmp_path: Path
) -> None:
    try:
        plan, model = made(family, scheme, tmp_path)
    except ConfigError:
        return
    if len({type(block) for block in model.blocks}) == 1:
        compare(plan, model, driver, STEPS[-1:])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_is_not_known_is_launched_one_by_one(
    family: str, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator that may not be called again; tensors that no form has."""
    plan, model = made(family, "none", tmp_path)
    monkeypatch.setattr(operators, "_MAKE", operators._MAKE - {"native_layer_norm"})
    if family == "llama":
        monkeypatch.setattr(repeat, "form_of", lambda block: form_of(block)._replace(tensors=[]))
    assert compare(plan, model, driver, STEPS[:1]) == [LAYERS]


@pytest.mark.parametrize(
    ("scheme", "alone"), [("none", 2), pytest.param("w4a8", 3, marks=pytest.mark.rest)]
)
def test_memory_that_lasts_is_told_apart(
    scheme: str, alone: int, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters of attention, an integer's address, and ones in the place of scales."""
    plan, model = made("llama", scheme, tmp_path)
    Step(plan, model, *STEPS[0]).run(driver, one_by_one)  # all of it is made
    assert compare(plan, model, driver, STEPS[:1]) == [alone]
    monkeypatch.setattr(tape, "lasting", list)
    assert compare(plan, model, driver, STEPS[:1]) == [LAYERS]


def test_tensors_that_share_memory_elsewhere_make_another_form() -> None:
    """A launch that passes one address says nothing of which of two tensors it means."""
    x, y = torch.zeros(64), torch.zeros(64)
    form, *others = [
        form_of([torch.zeros(64), *tensors])
        for tensors in (
            *((x, y.view(8, 8)), (x, x.view(8, 8)), (x[:32], x[16:48]), (x[:32], x[32:])),
            *((x, torch.zeros(64).view(8, 8)), (y, y.view(8, 8))),
        )
    ]
    assert form is not None
    assert form.parts != others[0].parts
    assert form.parts == others[3].parts, "each has memory of its own"
    assert others[0].parts == others[4].parts
    assert len({each.parts for each in others[:3]}) == 3


def test_a_block_that_fails_leaves_nothing_noted(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that runs out in the middle of a block, as it is recorded or as it is repeated."""
    plan, model = made("llama", "none", tmp_path)
    step, failing = Step(plan, model, *STEPS[0]), iter(range(1 << 30))
    launch = Driver.kernel

    def short(*given: Any) -> int:
        if next(failing) in (3, 15):
            raise torch.OutOfMemoryError("no memory is left")
        return launch(*given)

    monkeypatch.setattr(Driver, "kernel", short)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            step.run(driver, Repeating("cpu"))
        assert tape._notes is None
    monkeypatch.setattr(Driver, "kernel", launch)
    assert step.run(driver, Repeating("cpu")) == step.run(driver, one_by_one)


def test_prompts_over_unpacked_blocks_are_repeated(driver: Driver, tmp_path: Path) -> None:
    """The memory that all layers unpack into is the backend's."""
    plan, model = made("llama", "none", tmp_path, kv_cache_dtype="fp8")
    plan.attention.reserve(4096, 256, CPU)
    step = Step(plan, model, *STEPS[1][::-1])
    rows = step.inputs[0].rows._replace(block_tables=numbers(1, 256), contexts=((600, 3000),))
    step.inputs = [AttentionInputs.of(plan.attention, step.caches[0], rows, 0)] * LAYERS
    expected = step.run(driver, one_by_one)
    assert "unpack_blocks" in {name for name, *_ in driver.launches}
    assert step.run(driver, Repeating("cpu")) == expected
    with patch.object(Recording, "repeat", autospec=True, side_effect=Recording.repeat) as repeats:
        step.run(driver, Repeating("cpu"))
    assert repeats.call_count == LAYERS - 1


@pytest.mark.parametrize("alias", ["cache", "block", "blocks", "within", "storage"])
def test_blocks_that_share_memory_launch_what_they_launch_one_by_one(
    alias: str, driver: Driver, tmp_path: Path
) -> None:
    """A cache of several layers, a block in several places, weights of two blocks or of one, and
    weights that are parts of one tensor.
    """
    plan, model = made("llama", "none", tmp_path)
    blocks: list[Any] = list(model.blocks)
    own = [block.input_norm.weight for block in blocks]
    if alias == "block":
        model.blocks = blocks[:1] * 3 + blocks[3:]
    elif alias == "storage":
        for block, rows in zip(blocks, torch.stack(own * 2).split(2), strict=True):
            block.input_norm.weight, block.mlp_norm.weight = rows
    elif alias != "cache":
        other = blocks[2].input_norm if alias == "blocks" else blocks[4].mlp_norm
        blocks[4].input_norm.weight = other.weight
    step = Step(plan, model, *STEPS[2])
    if alias == "cache":
        step.caches[3:] = [step.caches[2]] * 3
    with patch.object(repeat, "record", side_effect=repeat.record) as records:
        assert step.run(driver, Repeating("cpu")) == step.run(driver, one_by_one)
    assert records.called


def test_two_threads_record_at_once(driver: Driver, tmp_path: Path) -> None:
    """The second notes nothing, and launches its blocks one by one."""
    plan, model = made("llama", "none", tmp_path)
    step = Step(plan, model, *STEPS[0])
    expected = step.run(driver, one_by_one)
    with tape.noting() as launches, ThreadPoolExecutor(1) as other:
        with torch.inference_mode():
            assert step.run(driver, Repeating("cpu")) == expected
        assert len(launches) == len(expected[1]), "they are this thread's"
        launches.clear()
        inferring = torch.inference_mode()(step.run)
        assert other.submit(inferring, driver, Repeating("cpu")).result() == expected
        assert not launches
    assert not tape.is_noting()
    with tape.noting():
        assert tape.is_noting()


def test_many_tokens_are_launched_one_by_one(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, model = made("llama", "none", tmp_path)
    monkeypatch.setattr(repeat, "MOST_TOKENS", 599)
    assert compare(plan, model, driver, STEPS[:1]) == [LAYERS]


def test_blocks_are_launched_one_by_one_beside_adapters(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what an engine's decoder has itself."""
    monkeypatch.setattr(Repeating.__init__, "__defaults__", ("cpu",))
    groups, beside = StepGroups(), [Group({}, numbers(3, dtype=torch.int64))]
    plan, model = made("llama", "none", tmp_path, groups)
    step = Step(plan, model, *STEPS[0])
    for tokens, is_repeated in (((), True), (beside, False)):
        groups.tokens = tokens
        with patch.object(repeat, "record", side_effect=repeat.record) as records:
            step.run(driver, model.in_turn)
        assert records.called == is_repeated
