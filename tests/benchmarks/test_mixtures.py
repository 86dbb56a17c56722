"""The benchmark of mixtures: its bytes are the model's, and its runs are decodes."""

from pathlib import Path

import pytest
import torch
from slipstream.config import EngineConfig
from slipstream.runner import load_weights
from slipstream.runner.plan import resolve

NAMES = ("shapes", "workloads", "limits", "driving", "packed_weights", "engine", "mixtures")


@pytest.mark.parametrize(
    ("name", "scheme", "of_attention", "of_experts"),
    [
        ("qwen3-30b-a3b", "none", 2, 2),
        ("qwen3-30b-a3b", "int4", 0.515625, 0.515625),
        ("mixtral-8x7b", "fp8", 1, 1),
        ("gpt-oss-20b", "mxfp4", 2, 0.53125),
    ],
)
def test_bytes_of_all_experts_are_those_of_the_model(
    bench, name: str, scheme: str, of_attention: float, of_experts: float, tmp_path: Path
) -> None:
    """So many rows that every expert is chosen; routers and head have 16 bits."""
    mixtures = bench.mixtures
    bench.shapes.write_config(name, tmp_path)
    how = {"dtype": "bfloat16", "load_format": "random", "device": "cpu"}
    plan = resolve(EngineConfig(checkpoint=str(tmp_path), **how))
    dims, experts = plan.model.dims, plan.model.axes.experts
    assert experts is not None
    routers = dims.num_layers * dims.hidden_size * experts.routing.num_experts
    all_experts = dims.num_layers * experts.routing.num_experts
    all_experts *= 3 * dims.hidden_size * experts.inner_size
    attention = plan.block_elements - routers - all_experts
    expected = attention * of_attention + all_experts * of_experts + 2 * routers
    expected += 2 * dims.vocab_size * dims.hidden_size
    found = mixtures.bytes_of_step(name, scheme, 1_000_000, 0)
    assert found.cache == 0
    # What is left are the weights of norms, and biases.
    assert found.whole * 1e9 == pytest.approx(expected, rel=2e-3)
    # One row reads as many experts as it chooses.
    one = mixtures.bytes_of_step(name, scheme, 1, 0).experts
    share = experts.routing.top_k / experts.routing.num_experts
    assert one == pytest.approx(found.experts * share, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("int4", 4.125),
        ("fp8-weights", 8 + 16 / 512),
        ("fp8-blocks", 8.25),
        ("mxfp4", 4.5),
        ("nvfp4", 5),
    ],
)
def test_experts_as_a_gpu_keeps_them(bench, name: str, bits: float) -> None:
    """Numbers of about 1 / sqrt(inputs), in the bits that a layer's benchmark counts."""
    matrix = bench.packed_weights.packed_experts(name, 3, 64, 512, torch.device("cpu"))
    assert (len(matrix.values), matrix.outputs, matrix.inputs) == (3, 64, 512)
    values = torch.stack([matrix.of(expert)[0] for expert in range(3)])
    assert 0.2 < float(values.std()) * 512**0.5 < 2
    assert abs(float(values.mean())) < 0.02 * float(values.std())  # or all rows become alike
    own = (matrix.values, matrix.groups.scales)
    assert sum(x.numel() * x.element_size() for x in own) * 8 / values.numel() == bits


@pytest.mark.parametrize(
    ("shape", "scheme", "kept"),
    [
        ("mixtral-8x7b", "none", ""),
        ("mixtral-8x7b", "int4", "experts of 4 bits by 128 inputs"),
        ("qwen3-30b-a3b", "fp8-blocks", "experts of e4m3 by 128 inputs"),
        ("gpt-oss-20b", "mxfp4", "experts of e2m1 by 32 inputs"),
        ("llama-3.1-8b", "nvfp4", "weights of e2m1 by 16 inputs"),
    ],
)
def test_a_small_one_runs(
    bench, shape: str, scheme: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts come in the form of a file; attention of MXFP4 does not."""
    mixtures, shapes, packed = bench.mixtures, bench.shapes.SHAPES, bench.packed_weights
    small = {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 64}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300}
    small |= {"eos_token_id": 2, "bos_token_id": 1} if shape == "llama-3.1-8b" else {}
    small |= {"moe_intermediate_size": 64} if shape == "qwen3-30b-a3b" else {}
    if "layer_types" in shapes[shape]:
        small["layer_types"] = shapes[shape]["layer_types"][:2]
    monkeypatch.setitem(shapes, "small", shapes[shape] | small)
    monkeypatch.setattr(load_weights, "RandomSource", load_weights.RandomSource)
    notes: list[str] = []
    monkeypatch.setattr(packed.PackedSource, "note", lambda _, text: notes.append(text))
    monkeypatch.setattr(mixtures, "ROWS", (1, 3))
    monkeypatch.setattr(mixtures, "NUM_OUTPUT", 4)
    found = mixtures.ours("small", scheme, repeat=1)
    assert found.keys() == {"1", "3"}
    assert all(milliseconds > 0 for milliseconds in found.values())
    assert any(kept in note for note in notes) == bool(kept)
    assert any("weights of" in note for note in notes) == (scheme not in ("none", "mxfp4"))
