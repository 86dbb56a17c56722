"""Measuring in idle times, all but the measuring: what is searched, kept, taken and left out."""

import itertools
import logging
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from fixtures.models.checkpoints import make_model, save
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from slipstream.config import EngineConfig
from slipstream.kernels.gemm import cublaslt, search, tiles, tuning
from slipstream.kernels.gemm.cublaslt_api import Algorithm
from slipstream.kernels.gemm.trials import Found, Operands
from slipstream.kernels.gemm.tuning import Choice, Choices, Machine, Product
from slipstream.kernels.runtime.op import KernelError
from slipstream.kernels.runtime.registry import KNOWN
from slipstream.layers.decoder import Decoder
from slipstream.models.decoder import build
from slipstream.models.fileless import RandomSource
from slipstream.models.source import Weights
from slipstream.runner import idle_tuning
from slipstream.runner.graphs import Captured, Graphs
from slipstream.runner.idle_tuning import IdleTuning, covering_rows, refusal, stale
from slipstream.runner.matrices import tensors_of
from slipstream.runner.plan import resolve
from slipstream.runner.step_shape import StepShape
from slipstream_runtime.claims import Claims

MACHINE = Machine(gpu="NVIDIA A100", num_sms=108, driver=13000, cublaslt=130100)
PIECES = 3  # of a search
BLOB = bytes([7] * 64)


class Device:
    """A GPU that is not there: what was searched, and what a search finds."""

    def __init__(self) -> None:
        self.searched: list[tuple[tuple[int, ...], int]] = []
        self.errors: dict[int, Exception] = {}  # by rows
        self.gain = 0.1
        self.seconds = 1e-5
        self.num_discarded = 0
        self.stale: list[Callable[[StepShape], bool]] = []

    def search(
        self, operands: Operands, rows: int, longest_s: float
    ) -> Generator[None, None, Found]:
        self.searched.append((tuple(operands.weights[0].shape), rows))
        for _ in range(PIECES):
            yield
        if rows in self.errors:
            raise self.errors[rows]
        if self.seconds > longest_s:
            return Found(Algorithm(BLOB, 0), self.seconds, self.seconds)
        return Found(Algorithm(BLOB, 0), (1 - self.gain) * self.seconds, self.seconds)

    def recaptured(self, is_stale: Callable[[StepShape], bool]) -> Iterator[None]:
        self.stale.append(is_stale)
        yield

    def discard(self) -> None:
        self.num_discarded += 1


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(search, "searched", made.search)
    monkeypatch.setattr(tiles, "describe", lambda algorithm: "64x32 swizzle 1")
    monkeypatch.setattr(Machine, "of", staticmethod(lambda device: MACHINE))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cublaslt, "discard_plans", made.discard)
    monkeypatch.setattr(tuning, "choices", lambda device: None)
    monkeypatch.setattr(tuning, "_unsaved", {})
    monkeypatch.setattr(idle_tuning, "target_of", lambda device: KNOWN["sm_80"])
    return made


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 1000}
    model = make_model(tie_word_embeddings=False, **sizes)
    folder = save(model, tmp_path_factory.mktemp("idle") / "tiny")
    plan = resolve(EngineConfig(checkpoint=str(folder), device="cpu"))
    cpu = torch.device("cpu")
    made = build(plan.model, Weights(RandomSource(cpu), cpu, torch.bfloat16), plan.max_model_len)
    assert isinstance(made, Decoder)
    return made


def plan(**changes: object) -> SimpleNamespace:
    config = EngineConfig(checkpoint="c")
    facts = {
        "config": config,
        "device": torch.device("cuda", 0),
        "dtype": torch.bfloat16,
        "max_num_seqs": 64,
        "max_num_rows": 64,
        "max_num_batched_tokens": 1024,
    }
    return SimpleNamespace(**facts | changes)


def pieces(device: Device, decoder: Decoder) -> Iterator[float | None]:
    tensors = tensors_of(decoder, torch.bfloat16)
    return IdleTuning(plan(), tensors).pieces(device.recaptured)  # type: ignore[arg-type]


def test_every_number_of_rows_finds_a_choice(device: Device, decoder: Decoder) -> None:
    for _ in pieces(device, decoder):
        pass
    choices = Choices(tuning.load(MACHINE))
    gate_up = Product(128, 512, "bfloat16", "bfloat16", adds=False)
    down = Product(256, 128, "bfloat16", "bfloat16", adds=True)
    head = Product(128, 1000, "bfloat16", "bfloat16", adds=False)
    for rows in range(1, 1025):
        assert choices.find(gate_up, rows) == BLOB
        assert choices.find(down, rows) == BLOB
    assert all(choices.find(head, rows) == BLOB for rows in range(1, 65))
    assert choices.find(head, 100) is None  # no step samples so many
    assert len(device.searched) == len(set(device.searched)) == len(tuning.load(MACHINE))
    # The rows of decodes come first, for all matrices.
    first = [rows for _, rows in device.searched].index(144)
    assert {size for size, _ in device.searched[:first]} == {size for size, _ in device.searched}


def test_the_next_start_measures_nothing(device: Device, decoder: Decoder) -> None:
    assert len(list(pieces(device, decoder))) > PIECES * len(device.searched)
    before = len(device.searched)
    assert list(pieces(device, decoder)) == []
    assert len(device.searched) == before


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_folder_that_cannot_be_written_is_said_once(
    device: Device,
    decoder: Decoder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")  # where nobody makes a folder
    for _ in pieces(device, decoder):
        pass
    (said,) = warnings_of(caplog)
    assert said.startswith("/proc/slipstream/tuning cannot be written, what is measured is kept in")
    assert os.strerror(2) in said
    assert len(tuning.load(MACHINE)) == len(set(device.searched)) == len(device.searched)
    assert device.num_discarded == len(device.stale) > 0
    assert list(pieces(device, decoder)) == []  # another engine of the process has it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.keep(MACHINE, []) is None
    assert len(warnings_of(caplog)) == 1
    assert not tuning._unsaved
    assert len(tuning.load(MACHINE)) == len(device.searched)


def test_nobody_waits_long_for_a_process_that_writes(
    device: Device, decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    """A stopped process delays nothing; what it kept others from writing is written later."""
    work = pieces(device, decoder)
    next(work)
    with closing(Claims(tuning.path(MACHINE))) as stopped, stopped.writing(0.0):
        while len(tuning.load(MACHINE)) < 3:
            next(work)
        assert not tuning.path(MACHINE).exists()
    for _ in work:
        pass
    (said,) = warnings_of(caplog)
    assert "kept in memory only" in said
    assert "another process writes it, for 0.1 s" in said
    assert not tuning._unsaved
    assert len(tuning.load(MACHINE)) == len(device.searched)


def test_a_process_that_writes_at_the_end_is_waited_for(device: Device, decoder: Decoder) -> None:
    work = pieces(device, decoder)
    next(work)
    with closing(Claims(tuning.path(MACHINE))) as stopped, stopped.writing(0.0):
        assert next(wait_s for wait_s in work if wait_s is not None) > 0
        assert tuning._unsaved
        assert not tuning.path(MACHINE).exists()
    assert list(work) == []
    assert not tuning._unsaved
    assert len(tuning.load(MACHINE)) == len(device.searched)


@pytest.fixture
def brief_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a second pass with every piece that waits, in place of waiting."""
    seconds = itertools.count()
    monkeypatch.setattr(idle_tuning, "time", SimpleNamespace(monotonic=lambda: next(seconds)))


def test_a_claim_of_an_engine_that_is_stopped_is_waited_for_for_a_minute(
    device: Device, decoder: Decoder, brief_patience: None, caplog: pytest.LogCaptureFixture
) -> None:
    """What a stopped process has claimed is measured elsewhere after a bounded wait."""
    work = pieces(device, decoder)
    assert next(work) is None
    places = {Product.of(Operands.of([each], False).shape(1)) for each in each_tensor(decoder)}
    stopped = Claims(tuning.path(MACHINE))
    with closing(stopped):
        for product in places:
            assert stopped.take(msgspec.json.encode(product).decode())
        waits = [wait_s for wait_s in itertools.islice(work, 10_000) if wait_s is not None]
    assert 0 < len(waits) <= 2 * len(places) * (1 + idle_tuning._PATIENCE_S)  # two passes
    assert next(work, "ended") == "ended"
    assert len(tuning.load(MACHINE)) == len(device.searched) > 0
    assert any("is claimed by an engine that has not" in said for said in warnings_of(caplog))


def test_a_writer_that_is_stopped_is_waited_for_for_a_minute(
    device: Device, decoder: Decoder, brief_patience: None
) -> None:
    work = pieces(device, decoder)
    next(work)
    with closing(Claims(tuning.path(MACHINE))) as stopped, stopped.writing(0.0):
        waits = [wait_s for wait_s in itertools.islice(work, 10_000) if wait_s is not None]
        assert 0 < len(waits) <= 1 + idle_tuning._PATIENCE_S
        assert next(work, "ended") == "ended"
    assert len(tuning.load(MACHINE)) == len(device.searched) > 0  # in memory


@pytest.mark.parametrize("num_pieces", [1, 2, 7, 100])
def test_what_was_found_before_the_end_is_kept(
    device: Device, decoder: Decoder, num_pieces: int
) -> None:
    work = pieces(device, decoder)
    for _ in range(num_pieces):
        next(work)
    work.close()  # type: ignore[attr-defined]
    found = len(tuning.load(MACHINE))
    assert found == max(0, len(device.searched) - 1)
    for _ in pieces(device, decoder):
        pass
    again = len(device.searched) - len(set(device.searched))
    assert again == (1 if num_pieces > 1 else 0)  # the one that had not ended


def test_plans_are_made_anew_and_graphs_that_are_stale(device: Device, decoder: Decoder) -> None:
    for _ in pieces(device, decoder):
        pass
    assert device.num_discarded == len(device.stale) > 0

    assert device.stale[0](decodes(64))
    assert not device.stale[0](decodes(4000))


def test_graphs_of_few_rows_of_int8_are_stale_with_the_rows_they_are_multiplied_as() -> None:
    product = Product(128, 128, "int8", "int32", adds=False)
    is_stale = stale([Choice(product, 32, bytes(64).hex(), "64x32", 1.0, 2.0)])
    assert [is_stale(decodes(rows)) for rows in (1, 32, 33)] == [True, True, False]


def test_nothing_changes_where_nothing_is_faster(device: Device, decoder: Decoder) -> None:
    device.gain = 0.0
    for _ in pieces(device, decoder):
        pass
    assert device.num_discarded == len(device.stale) == 0
    assert tuning.load(MACHINE)


def test_rows_that_take_too_long_for_a_piece_are_left_out(device: Device, decoder: Decoder) -> None:
    device.seconds = 5e-3
    for _ in pieces(device, decoder):
        pass
    sizes = {size for size, _ in device.searched}
    assert len(device.searched) <= 2 * len(sizes)  # once in each pass
    assert device.num_discarded == 0


@pytest.mark.parametrize("error", [KernelError("none runs"), torch.OutOfMemoryError("full")])
def test_what_cannot_be_measured_is_left_out(
    error: Exception, device: Device, decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    device.errors = {32: error}
    for _ in pieces(device, decoder):
        pass
    assert str(error) in caplog.text
    rows = {choice.rows for choice in tuning.load(MACHINE)}
    assert 32 not in rows
    assert {16, 48} <= rows


def test_what_breaks_the_device_is_not_tried_again(
    device: Device, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    guess = Algorithm(bytes([1] * 64), 0)
    monkeypatch.setattr(idle_tuning, "Problem", lambda shape, device: shape)
    monkeypatch.setattr(cublaslt, "default", lambda problem: guess)
    device.errors = {16: RuntimeError("illegal address")}
    with pytest.raises(RuntimeError, match="illegal address"):
        list(pieces(device, decoder))
    at_fault = [choice for choice in tuning.load(MACHINE) if choice.rows == 16]
    assert [choice.blob for choice in at_fault] == [guess.blob]
    device.errors = {}
    for _ in pieces(device, decoder):
        pass
    assert len(device.searched) - len(set(device.searched)) == 0


def test_matrices_are_the_model_s_own(
    device: Device, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {each.data_ptr() for each in each_tensor(decoder)}
    seen: set[int] = set()

    def noting(operands: Operands, rows: int, longest_s: float) -> Generator[None, None, Found]:
        seen.update(weight.data_ptr() for weight in operands.weights)
        return (yield from device.search(operands, rows, longest_s))

    monkeypatch.setattr(search, "searched", noting)
    for _ in pieces(device, decoder):
        pass
    assert seen
    assert seen <= own


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.lists(st.integers(0, 2), max_size=100), ends=st.lists(st.integers(0, 100)))
@example(order=[0, 0, 1, 1, 1, 2] * 20, ends=[])
@example(order=[0, 0, 0, 1, 2] * 20, ends=[40])
def test_engines_that_share_a_file_measure_each_product_once(
    device: Device,
    decoder: Decoder,
    monkeypatch: pytest.MonkeyPatch,
    order: list[int],
    ends: list[int],
) -> None:
    """Engines take turns in any order; at some turns the one whose turn it is ends, too."""
    tuning.path(MACHINE).unlink(missing_ok=True)
    device.searched.clear()
    small = plan(max_num_seqs=8, max_num_rows=8, max_num_batched_tokens=32)
    tensors = tensors_of(decoder, torch.bfloat16)
    monkeypatch.setattr(idle_tuning, "stale", list)
    taken = [list[Choice]() for _ in range(3)]

    def start(number: int) -> Iterator[float | None]:
        def recaptured(gained: list[Choice]) -> Iterator[None]:
            taken[number] += gained
            yield

        engine = IdleTuning(small, tensors).pieces(recaptured)  # type: ignore[arg-type]
        assert next(engine) is None
        return engine

    engines = {number: start(number) for number in range(3)}
    for turn, number in enumerate(order):
        if turn in ends and number in engines:
            engines.pop(number).close()  # type: ignore[attr-defined]
        elif number in engines:
            next(engines[number], None)
    for _ in range(1000):
        for engine in engines.values():
            next(engine, None)
    num_again = len(device.searched) - len(set(device.searched))
    assert num_again <= 3 - len(engines)  # what had not ended
    stored = tuning.load(MACHINE)
    assert not engines or len(stored) == len(set(device.searched))
    for number, engine in engines.items():  # each has taken what any has found
        assert next(engine, "ended") == "ended"
        assert sorted(taken[number], key=repr) == sorted(stored, key=repr)


def decodes(rows: int) -> StepShape:
    return StepShape(rows, rows, rows, rows, 0)


def each_tensor(decoder: Decoder) -> list[torch.Tensor]:
    groups = tensors_of(decoder, torch.bfloat16).values()
    return [tensor for tensors in groups for tensor in tensors if tensor is not None]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"config": EngineConfig(checkpoint="c", idle_tuning="off")}, "idle_tuning is off"),
        ({"config": EngineConfig(checkpoint="c", deterministic=True)}, "deterministic"),
        ({"config": EngineConfig(checkpoint="c", tensor_parallel=2)}, "several ranks"),
        ({"config": EngineConfig(checkpoint="c", memory_share=0.5)}, "memory_share"),
        ({"device": torch.device("cpu")}, "no NVIDIA GPU"),
        ({"dtype": torch.float32}, "float32"),
    ],
)
def test_where_nothing_is_measured(changes: dict[str, object], said: str, decoder: Decoder) -> None:
    refused = plan(**changes)
    assert said in str(refusal(refused, decoder))  # type: ignore[arg-type]
    given = None, lambda shape: None, lambda shape, experts: None
    assert list(idle_tuning.chores(refused, decoder, *given)) == []  # type: ignore[arg-type]


def test_on_a_gpu_it_is_the_default(decoder: Decoder) -> None:
    assert refusal(plan(), decoder) is None  # type: ignore[arg-type]
    assert "transformers" in str(refusal(plan(), object()))  # type: ignore[arg-type]


@given(most=st.integers(1, 9000))
def test_rows_that_cover_all(most: int) -> None:
    rows = covering_rows(most)
    product = Product(64, 64, "bfloat16", "bfloat16", adds=False)
    choices = Choices(Choice(product, each, BLOB.hex(), "", 1.0, 2.0) for each in rows)
    assert all(choices.find(product, count) == BLOB for count in range(1, most + 1))
    assert len(rows) < 80


def test_graphs_are_captured_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    shapes = [StepShape(rows, rows, rows, rows, 0) for rows in (8, 16, 32, 64)]
    old = {shape: Captured(object(), torch.zeros(1)) for shape in shapes}  # type: ignore[arg-type]
    graphs = Graphs.__new__(Graphs)
    graphs._graphs = {**old, shapes[3]: None}
    graphs._adapted = {shapes[0]: old[shapes[0]]}
    graphs._of_experts = {shapes[0]: old[shapes[0]]}
    made: list[tuple[str, int]] = []

    def captured(shape: StepShape, step: Callable[[], torch.Tensor], mode: str) -> Captured | None:
        made.append((str(step()), shape.num_tokens))
        new = Captured(object(), torch.ones(1))  # type: ignore[arg-type]
        return None if shape.num_tokens == 16 else new

    monkeypatch.setattr(graphs, "_made", captured)
    product = Product(64, 64, "bfloat16", "bfloat16", adds=False)
    is_stale = stale([Choice(product, 16, BLOB.hex(), "", 1.0, 2.0)])
    counts = []
    for _ in graphs.recaptured(
        lambda shape: lambda: "plain",  # type: ignore[return-value]
        lambda shape, experts: lambda: f"adapted {experts}",  # type: ignore[return-value]
        is_stale,
    ):
        counts.append(len(made))
    assert counts == [1, 2, 3, 4]
    adapted = [("adapted False", 8), ("adapted True", 8)]
    assert made == [("plain", 8), ("plain", 16), *adapted]
    assert graphs._graphs[shapes[0]] is not old[shapes[0]]
    assert graphs._graphs[shapes[1]] is old[shapes[1]]  # memory is too short
    assert graphs._graphs[shapes[2]] is old[shapes[2]]
    assert graphs._graphs[shapes[3]] is None
