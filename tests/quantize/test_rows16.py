"""`--rows16`: whose rows stay in 16 bits beside weights in e4m3, in the file and for readers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.quantize import tiny
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from slipstream.errors import ConfigError
from slipstream.models.axes import TensorNames
from slipstream.models.weights import FileSource
from slipstream_client.cli import main
from slipstream_quantize import rows16
from slipstream_quantize.observe import ROUNDINGS
from slipstream_quantize.opened import Opened
from slipstream_quantize.recipe import RECIPES
from slipstream_quantize.rows16 import RowCosts, fewest, rows16_of

TEXT = torch.arange(4 * 64).view(4, 64) * 7 % 256


def made(folder: Path, family: str, *asked: str) -> tuple[int, Path]:
    """Quantise a model of two blocks; return the exit code and what was written."""
    original = tiny.checkpoint(folder / "original", family)
    how = ["quantize", "--checkpoint", str(original), "--output", str(folder / "out")]
    how += ["--scheme", "fp8", "--device", "cpu", "--no-measure"]
    return main([*how, *asked]), folder / "out"


def groups_of(output: Path) -> list[tuple[list[str], Any]]:
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    return [(g["targets"], g["input_activations"]) for g in config["config_groups"].values()]


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 9)), min_size=1, max_size=12),
    st.floats(0, 2),
    st.floats(0, 1),
)
def test_the_fewest_are_chosen(found: list[tuple[float, int]], whole: float, most: float) -> None:
    costs, sizes = [cost for cost, _ in found], [size for _, size in found]
    chosen, left = fewest(costs, sizes, whole, most)
    kept = [i for i in range(len(costs)) if i not in chosen]
    rates = [cost / size for cost, size in found]
    assert all(rates[i] >= rates[j] for i in chosen for j in kept)
    assert left <= most + 1e-9 or all(costs[i] <= 0 for i in kept)
    total = sum(costs) or 1.0
    assert left == pytest.approx(max(0.0, whole * (1 - sum(costs[i] for i in chosen) / total)))
    if chosen:  # the last one was needed
        last = min(chosen, key=lambda i: rates[i])
        assert left + whole * costs[last] / total > most - 1e-9


@pytest.mark.parametrize(("family", "down"), [("llama", "down_proj"), ("phi3", "down_proj")])
def test_rows_are_those_that_the_file_names(family: str, down: str, tmp_path: Path) -> None:
    """By whole names in both groups; weights are those of a file that rounds all rows."""
    code, output = made(tmp_path, family, "--rows16", down)
    assert code == 0
    (rounded, scheme), (kept, none) = groups_of(output)
    assert kept == [f"model.layers.{i}.mlp.{down}" for i in range(2)]
    assert (scheme["strategy"], none) == ("token", None)
    source = FileSource(output, torch.device("cpu"), TensorNames())
    tensors = load_file(output / "model.safetensors")
    for name in (*rounded, *kept):
        matrix = source.quantized(name, *tensors[f"{name}.weight"].shape)
        assert matrix is not None
        assert matrix.row_type == ("" if name in kept else "e4m3")
    report = json.loads((output / "quantize_report.json").read_text())["rows16"]
    assert report["names"] == kept
    sizes = {name: tensors[f"{name}.weight"].numel() for name in (*rounded, *kept)}
    assert report["share"] == pytest.approx(sum(sizes[n] for n in kept) / sum(sizes.values()))
    whole = tmp_path / "whole"
    assert made(whole, family)[0] == 0
    for name, tensor in load_file(whole / "out" / "model.safetensors").items():
        assert torch.equal(tensor.float(), tensors[name].float())
    assert [targets for targets, _ in groups_of(whole / "out")] == [["Linear"]]


def test_all_rows_may_stay(tmp_path: Path) -> None:
    assert made(tmp_path, "llama", "--rows16", "re:.*")[0] == 0
    assert groups_of(tmp_path / "out") == [(["Linear"], None)]


def test_what_is_measured_rounds_the_others(tmp_path: Path) -> None:
    opened = tiny.quantised(tiny.small(tmp_path), tiny.FORMATS["fp8"], rows16=[tiny.DOWN])
    kept = [name for probe in opened.probes if probe.rounding is None for name in probe.names]
    assert kept == [tiny.DOWN]


def test_the_reference_rounds_the_rows_that_were_meant() -> None:
    """compressed-tensors in transformers: `fixtures/quantize/read.py` made the file."""
    read, (of_key, of_down) = load_file(tiny.READ), ("self_attn.k_proj", "mlp.down_proj")
    assert int(read[f"{tiny.ROWS16}.{of_key}.rows"]) == 8
    assert int(read[f"{tiny.ROWS16}.{of_down}.rows"]) == 16
    for name in (of_key, of_down):
        assert torch.equal(read[f"{tiny.ROWS16}.{name}"], read[f"fp8.{name}"])


def test_costs_are_those_of_whole_passes(tmp_path: Path) -> None:
    """Each GEMM's from its own block on is that of the whole model with it alone rounded."""
    opened = Opened(tiny.checkpoint(tmp_path, "gemma3"), "cpu")
    costs = RowCosts(opened, ROUNDINGS["e4m3"], TEXT)
    each = list(costs.of_units())
    units = [unit for units in opened.units for unit in units]
    assert len(each) == len(units) == 8
    for cost, unit in zip(each, units, strict=True):
        assert cost > 0
        assert costs.of(iter(unit)) == pytest.approx(cost, rel=1e-3, abs=1e-9)
    assert costs.of(iter([])) == pytest.approx(0, abs=1e-9)
    assert 0 < costs.nats < 20
    assert all(probe.rounding is None for probe in opened.probes)


def test_auto_leaves_what_costs_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny.checkpoint(tmp_path, "llama")
    recipe = RECIPES["fp8"]
    found = rows16_of(Opened(directory, "cpu"), "fp8", recipe, ["auto"], TEXT)
    assert found.cost is not None
    assert found.cost < rows16.AIM
    assert (found.names, found.left) == ([], found.cost)
    monkeypatch.setattr(rows16, "AIM", found.cost * 0.7)
    opened = Opened(directory, "cpu")
    some = rows16_of(opened, "fp8", recipe, ["auto"], TEXT)
    assert some.left is not None
    assert some.left <= found.cost * 0.7
    rates = {n: cost / opened.num_weights([n]) for n, cost in some.costs.items()}
    taken = {name for name in rates if name in some.names}
    assert taken
    assert min(rates[n] for n in taken) >= max(rates[n] for n in rates if n not in taken)


@pytest.mark.parametrize(
    ("scheme", "asked", "message"),
    [
        (
            "int8",
            "down_proj",
            "--rows16: --scheme int8 has no rows in e4m3 by token; fp8 and fp8-g",
        ),
        ("fp8-block", "auto", "--rows16: --scheme fp8-block has no rows"),
        ("fp8", "auto down_proj", "--rows16 auto: stands alone"),
        ("fp8", "q_proj", "--rows16: names model.layers.0.self_attn.q_proj but not"),
        ("fp8", "dow", "--rows16 dow: names no linear layer; there are "),
    ],
)
def test_wrong_options(scheme: str, asked: str, message: str, tmp_path: Path) -> None:
    opened = Opened(tiny.checkpoint(tmp_path, "llama"), "cpu")
    with pytest.raises(ConfigError, match=message):
        rows16_of(opened, scheme, RECIPES[scheme], asked.split(), TEXT)


def test_mixtures_are_refused(tmp_path: Path) -> None:
    opened = Opened(tiny.small(tmp_path, "mixtral"), "cpu")
    with pytest.raises(ConfigError, match="--rows16: not implemented for mixtures"):
        rows16_of(opened, "fp8", RECIPES["fp8"], ["down_proj"], None)
