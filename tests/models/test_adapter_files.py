"""Adapters on disk: what PEFT wrote itself, and what is refused, by name, before the device."""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.models.adapters import draw_pairs, targets_of, write_adapter
from fixtures.models.checkpoints import Driver, Generation, make_model, make_runner, save
from safetensors.torch import load_file, save_file
from slipstream.config import EngineConfig
from slipstream.errors import CheckpointError
from slipstream.models.adapters import read, stored, workers
from slipstream.models.adapters.stored import Module, ReadPiece, read_piece
from slipstream.preflight import preflight
from slipstream.runner.model_runner import ModelRunner
from slipstream_contract.lora import LoraTask

PEFT = Path(__file__).parents[1] / "fixtures/models/peft"  # by peft 0.21.2, logits too
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.mark.parametrize("name", ["rooted", "some", "magnitudes", "ends", "saved"])
def test_logits_are_those_of_peft(runner: ModelRunner, name: str) -> None:
    """Patterns of ranks and alphas, rank-stabilised; some modules of some layers; DoRA; terms of
    head and embedding, and whole ones.
    """
    recorded = load_file(PEFT / "logits.safetensors")
    number = runner.adapters.add(runner.adapters.read(str(PEFT / name)))
    ids = recorded["ids"].tolist()
    for count in range(1, len(ids) + 1):
        row = Generation(ids[:count], 1, adapter=number)
        Driver(runner, keep_logits=True).finish([row])
        assert (row.logits[0] - recorded[name][count - 1]).abs().max() < 1e-4
    runner.adapters.remove(number)


@pytest.mark.parametrize("by_tables", [False, True])
def test_each_target_alone_and_all_in_one_batch_are_peft_s(
    runner: ModelRunner, tmp_path: Path, by_tables: bool
) -> None:
    """Every linear layer, head and embedding: what PEFT computes with the tensors of one target."""
    recorded, given = (
        load_file(PEFT / "each_alone.safetensors"),
        load_file(PEFT / "each" / TENSORS),
    )
    names = [name for name in sorted(recorded) if not by_tables or name.endswith("_proj")]
    numbers = []
    runner.adapters.by_tables = by_tables
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        (folder / CONFIG).write_bytes((PEFT / "each" / CONFIG).read_bytes())
        own = {key: x for key, x in given.items() if name == "all" or f".{name}." in key}
        save_file(own, folder / TENSORS)
        numbers.append(runner.adapters.add(runner.adapters.read(str(folder))))
    ids = load_file(PEFT / "logits.safetensors")["ids"].tolist()
    try:
        for count in range(1, len(ids) + 1):
            rows = [Generation(ids[:count], 1, adapter=number) for number in numbers]
            Driver(runner, keep_logits=True).finish(rows)
            for name, row in zip(names, rows, strict=True):
                assert (row.logits[0] - recorded[name][count - 1]).abs().max() < 1e-4, name
    finally:
        runner.adapters.by_tables = False
        for number in numbers:
            runner.adapters.remove(number)


@pytest.mark.parametrize("ranks", ["", "tensor_parallel", "pipeline_parallel"])
def test_compose_takes_what_peft_writes(base: torch.nn.Module, tmp_path: Path, ranks: str) -> None:
    adapters = ",".join(f"{path.name}={path}" for path in PEFT.iterdir() if path.is_dir())
    assert adapters
    options = {ranks: 2} if ranks else {}
    checkpoint = str(save(base, tmp_path))
    preflight(EngineConfig(checkpoint=checkpoint, adapters=adapters, **options))


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        found = load_file(folder / TENSORS)
        change(found)
        save_file(found, folder / TENSORS)

    return apply


def config(**values: object) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        given = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(given | values))

    return apply


def put(name: str, value: torch.Tensor) -> Callable[[Path], object]:
    return tensors(lambda found: found.update({name: value}))


def cut(folder: Path) -> None:
    data = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(data[:-100])


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no configuration": (lambda f: (f / CONFIG).unlink(), "adapter_config.json: no such file"),
    "no JSON": (lambda f: (f / CONFIG).write_text("{"), "adapter_config.json: not valid JSON"),
    "a list": (lambda f: (f / CONFIG).write_text("[]"), "must be a JSON object"),
    "no tensors": (lambda f: (f / TENSORS).unlink(), "has neither adapter_model.safetensors"),
    "pickled": (
        lambda f: (f / TENSORS).rename(f / "adapter_model.bin"),
        r"only pickled weights \(adapter_model.bin\)",
    ),
    "truncated": (cut, "truncated"),
    "a header of nothing": (lambda f: (f / TENSORS).write_bytes(b"\0" * 64), "not safetensors"),
    "another kind": (config(peft_type="IA3"), "peft_type = 'IA3' is not implemented"),
    "no kind": (config(peft_type=None), "peft_type = None"),
    "prefix tuning": (config(peft_type="PREFIX_TUNING"), "r = 3 is not implemented"),
    "prompt tuning with a rank": (config(peft_type="PROMPT_TUNING"), "r = 3 is not implemented"),
    "rank 0": (config(r=0), "r = 0 is not a whole number >= 1"),
    "rank 513": (config(r=513), "r = 513 is above 512"),
    "a rank of text": (config(r="8"), "r = '8' is not a whole number"),
    "no alpha": (config(lora_alpha=-1), "lora_alpha = -1 is not a number > 0"),
    "endless alpha": (config(lora_alpha=math.inf), "lora_alpha = inf is not a number > 0"),
    "alpha patterns": (config(alpha_pattern=[1]), r"alpha_pattern = \[1\] is not an object"),
    "no regex": (config(rank_pattern={"(": 4}), r"has '\(', no regex"),
    "half a rank": (config(rank_pattern={"q_proj": 2.5}), "rank_pattern .* has 2.5, no rank"),
    "no number": (config(alpha_pattern={"q_proj": "x"}), "has 'x' for 'q_proj', no number"),
    "another rank": (config(r=5), "has rank 3, but adapter_config.json says 5"),
    "layers again": (config(layer_replication=[[0, 1]]), "layer_replication = .* not implemented"),
    "qalora": (config(use_qalora=True), "use_qalora = True is not implemented"),
    "alora": (config(alora_invocation_tokens=[5]), r"alora_invocation_tokens = \[5\] is not"),
    "parameters": (config(target_parameters=["x"]), "target_parameters = .* is not implemented"),
    "tokens": (config(trainable_token_indices=[5]), "trainable_token_indices = .* not implemented"),
    "a key to come": (config(uses_magic={"a": 1}), "uses_magic = .* is not implemented"),
    "a flag of text": (config(use_rslora="yes"), "use_rslora = 'yes' is neither true nor false"),
    "no B": (tensors(lambda t: t.pop(f"{Q}B.weight")), "q_proj.lora_B.weight is missing"),
    "no A": (tensors(lambda t: t.pop(f"{Q}A.weight")), "q_proj.lora_A.weight is missing"),
    "another input": (put(f"{Q}A.weight", torch.ones(3, 31)), r"A is \[3, 31\] and B \[32, 3\]"),
    "another output": (put(f"{Q}B.weight", torch.ones(33, 3)), "give no 32 outputs of 32 inputs"),
    "two ranks": (put(f"{Q}B.weight", torch.ones(32, 4)), "no rank fits both"),
    "three dims": (put(f"{Q}A.weight", torch.ones(3, 32, 1)), "no rank fits both"),
    "whole numbers": (put(f"{Q}A.weight", torch.ones(3, 32).int()), "is I32: not implemented"),
    "NaN": (put(f"{Q}B.weight", torch.full((32, 3), math.nan)), "q_proj: B, .* holds NaN"),
    "infinity": (put(f"{Q}A.weight", torch.full((3, 32), math.inf)), "q_proj: A, .* infinity"),
    "a layer too many": (
        put(f"{Q}A.weight".replace("0", "7"), torch.ones(3, 32)),
        "layers.7.self_attn.q_proj.lora_B.weight is missing",
    ),
    "another name": (put("weight", torch.ones(1)), "tensor 'weight' is none of a LoRA's"),
    "a bias": (put(f"{Q}B.bias", torch.ones(32)), r"q_proj has a bias \(lora_bias\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_malformed_adapter_is_refused_by_name(
    case: str, base: torch.nn.Module, runner: ModelRunner, tmp_path: Path
) -> None:
    change, why = BAD[case]
    folder = write_adapter(tmp_path / "x", draw_pairs(base, targets_of(base), 3), 3)
    runner.adapters.read(str(folder))
    change(folder)
    with pytest.raises(CheckpointError, match=why):
        runner.adapters.read(str(folder))


def test_a_module_that_no_adapter_can_change_is_named(
    base: torch.nn.Module, runner: ModelRunner, tmp_path: Path
) -> None:
    pair = (torch.ones(2, 32), torch.ones(32, 2))
    for module in ("model.layers.9.self_attn.q_proj", "model.norm", "model.layers.0.mlp.experts.1"):
        folder = write_adapter(tmp_path / module, {module: pair}, 2)
        with pytest.raises(CheckpointError, match=f"module '{module}' is none that adapters"):
            runner.adapters.read(str(folder))


def test_names_of_a_larger_model_and_biases_of_zero_are_read(
    base: torch.nn.Module, runner: ModelRunner, tmp_path: Path
) -> None:
    pairs = draw_pairs(base, ["q_proj"], 2)
    plain = write_adapter(tmp_path / "plain", pairs, 2)
    wrapped = {k.replace("model.", "model.language_model."): v for k, v in pairs.items()}
    other = write_adapter(tmp_path / "wrapped", wrapped, 2)
    put(f"{Q}B.bias".replace("model.layers", "model.language_model.layers"), torch.zeros(32))(other)
    read = runner.adapters.read
    one, two = read(str(plain)).terms, read(str(other)).terms
    assert one.keys() == two.keys()
    assert all(
        torch.equal(x, y)
        for place in one
        for a, b in zip(one[place], two[place], strict=True)
        for x, y in ((a.a, b.a), (a.b, b.b))
    )


def test_few_pieces_are_read_ahead(
    base: torch.nn.Module,
    runner: ModelRunner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is wrong with a module is reported when little behind it was read."""
    directory = write_adapter(tmp_path / "a", draw_pairs(base, targets_of(base), 2), 2)
    config(rank_pattern={"layers.0.self_attn.q_proj": 3})(directory)
    seen: list[str] = []

    def counted(modules: Sequence[Module]) -> Iterator[list[Module]]:
        for piece in stored.pieces_of(modules):
            seen.extend(each.name for each in piece)
            yield piece

    monkeypatch.setattr(stored, "PIECE", 1)
    monkeypatch.setattr(workers, "num_cores", lambda: 2)
    monkeypatch.setattr(read, "pieces_of", counted)
    with pytest.raises(CheckpointError, match=r"q_proj has rank 2, but .* says 3"):
        runner.adapters.read(str(directory))
    wrong = seen.index("model.layers.0.self_attn.q_proj")
    assert len(seen) == wrong + 3, "two behind it"


def test_reading_leaves_other_threads_their_number_of_torch_threads() -> None:
    """Threads that have not computed yet keep it, too: one of them folds the magnitudes."""

    def read_in_threads() -> tuple[list[int], int]:
        return [*workers.in_threads(lambda _: torch.get_num_threads(), range(3))], own_number()

    def own_number() -> int:
        return torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
            assert first.submit(read_in_threads).result() == ([1, 1, 1], 3)
            assert second.submit(own_number).result() == 3
    finally:
        torch.set_num_threads(before)


def test_threads_stay_and_one_piece_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, or a caller that takes no more, waits for what is being computed."""

    def thread(_: int) -> str:
        return threading.current_thread().name

    monkeypatch.setattr(workers, "num_cores", lambda: 4)
    assert [*workers.in_threads(thread, [])] == []
    assert [*workers.in_threads(thread, [0])] == [threading.current_thread().name]
    names = {*workers.in_threads(thread, range(64)), *workers.in_threads(thread, range(64))}
    assert len(names) <= 2
    assert all(name.startswith("adapter-pieces") for name in names)
    begun: list[int] = []
    ended: list[int] = []

    def slow(number: int) -> int:
        begun.append(number)
        time.sleep(0.01)
        ended.append(number)
        if number == 1:
            raise ValueError
        return number

    found = workers.in_threads(slow, range(64))
    with pytest.raises(ValueError):  # noqa: PT011 - any
        list(found)
    assert sorted(begun) == sorted(ended)
    assert len(ended) < 10
    found = workers.in_threads(slow, range(2, 64))
    assert next(found) == 2
    found.close()
    assert sorted(begun) == sorted(ended)


def test_a_file_that_changes_while_it_is_read_is_refused(
    base: torch.nn.Module,
    runner: ModelRunner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both have one size, so the header stays right. A file that is replaced is read whole."""
    pairs = draw_pairs(base, targets_of(base), 2), draw_pairs(base, targets_of(base), 2, seed=1)
    path, other = (write_adapter(tmp_path / str(i), pairs[i], 2) / TENSORS for i in range(2))
    os.utime(path, (1, 1))  # long ago: the clock of files is coarse
    monkeypatch.setattr(stored, "PIECE", 1)
    first, second = (runner.adapters.read(str(each.parent)).digest for each in (path, other))
    becomes = tmp_path / "becomes"
    calls: list[object] = []

    def changed(*given: Any) -> ReadPiece:
        calls.append(given)
        if len(calls) == 3 and becomes.exists():
            becomes.replace(path)
        elif len(calls) == 3:
            with path.open("r+b") as file:
                file.write(other.read_bytes())
        return read_piece(*given)

    with monkeypatch.context() as patch:
        patch.setattr(read, "read_piece", changed)
        becomes.write_bytes(path.read_bytes())
        os.utime(becomes, (1, 1))
        assert runner.adapters.read(str(path.parent)).digest == first
        calls.clear()
        with pytest.raises(CheckpointError, match=rf"{TENSORS}: it changed while it was read"):
            runner.adapters.read(str(path.parent))
    assert runner.adapters.read(str(path.parent)).digest == second


def test_digests_say_what_is_computed(
    base: torch.nn.Module, runner: ModelRunner, tmp_path: Path
) -> None:
    def digest(name: str, seed: int = 0, **given: object) -> bytes:
        pairs = draw_pairs(base, ["q_proj"], 2, seed)
        return runner.adapters.read(str(write_adapter(tmp_path / name, pairs, 2, **given))).digest

    same = digest("one")
    assert digest("two", inference_mode=True, lora_dropout=0.1) == same
    assert len({same, digest("three", seed=1), digest("four", lora_alpha=9)}) == 3


def rows(*config: tuple[int, int, int], width: int = 500, at: int = -1) -> LoraTask:
    """Rows of nothing, a 1 at place `at` of the first."""
    weights = np.zeros((len(config), width), np.float16)
    if at >= 0:
        weights[0, at] = 1
    return LoraTask(1, *weights.shape, weights.tobytes(), np.array(config, np.int32).tobytes())


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (rows((9, 0, 2)), "module 9 of layer 0 with rank 2: modules are 0, 1, 2"),
        (rows((1, 2, 2)), "module 1 of layer 2 .* the model has no such matrix"),
        (rows((1, -1, 2)), "layer -1 .* no such matrix"),
        (rows((4, 0, 0)), "with rank 0: ranks are from 1 to 512"),
        (rows((4, 0, 513)), "with rank 513: ranks"),
        (rows((6, 0, 9)), r"720 numbers \(48 inputs, 32 outputs\), lora_weights has 500 in a row"),
        (rows((1, 0, 2), at=128), "lora_weights has numbers behind the 128 of A and B"),
        (rows((1, 0, 2), (1, 0, 2)), r"lora_config\[1\] .* a row before it has that module"),
        (rows((0, 0, 2), (3, 0, 2)), r"lora_config\[1\] is module 3 .* a row before"),
    ],
)
def test_a_malformed_row_is_refused_by_name(runner: ModelRunner, task: LoraTask, why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        runner.adapters.read_task(task)


def test_fused_rows_are_cut_where_the_converter_joins_them(runner: ModelRunner) -> None:
    """Module 0 has q, k and v; a fused module 5 has up before gate."""
    rng = np.random.default_rng(0)
    q_k_v, up_gate = (rng.normal(size=2 * (32 + n)).astype(np.float16) for n in (64, 96))
    weights = np.zeros((2, 300), np.float16)
    weights[0, : len(q_k_v)], weights[1, : len(up_gate)] = q_k_v, up_gate
    config = np.array([[0, 0, 2], [5, 1, 2]], np.int32)
    read = runner.adapters.read_task(LoraTask(1, 2, 300, weights.tobytes(), config.tobytes()))
    (qkv,) = read.terms["model.layers.0.self_attn.q_proj"]
    assert torch.equal(qkv.b.half(), torch.from_numpy(q_k_v[64:]).view(64, 2))
    terms = read.terms["model.layers.1.mlp.gate_proj"]
    b = torch.cat([term.b for term in terms]).half()
    swapped = torch.from_numpy(up_gate[64:]).view(2, 48, 2).flip(0).reshape(96, 2)
    assert torch.equal(b, swapped)


def test_the_head_has_its_names_of_files_and_of_transformers(tmp_path: Path) -> None:
    runner = make_runner(save(make_model("gpt_neox"), tmp_path / "base"))
    pair = (torch.randn(2, 128), torch.randn(1009, 2))
    found = []
    for name in ("lm_head", "embed_out"):
        write_adapter(tmp_path / name, {name: pair}, 2)
        found.append(runner.adapters.read(str(tmp_path / name)))
    first, second = (each.terms["lm_head"][0] for each in found)
    assert torch.equal(first.b, second.b)
    assert all(each.changes_head for each in found)
