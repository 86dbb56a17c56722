"""The benchmark of mixtures: its bytes are the model's, and its runs are decodes."""

from pathlib import Path

import pytest
from fixtures.scripts import scripts
from slipstream.config import EngineConfig
from slipstream.runner.plan import resolve
from slipstream_serve.server import repository_root

FOLDER = repository_root() / "benchmarks"
NAMES = ("shapes", "workloads", "limits", "driving", "engine", "mixtures")


@pytest.fixture(scope="module")
def bench():
    with scripts(FOLDER, NAMES) as found:
        yield found


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "mixtral-8x7b"])
def test_bytes_of_all_experts_are_those_of_the_model(bench, name: str, tmp_path: Path) -> None:
    """So many rows that every expert is chosen; routers and head have 16 bits."""
    mixtures = bench.mixtures
    bench.shapes.write_config(name, tmp_path)
    how = {"dtype": "bfloat16", "load_format": "random", "device": "cpu"}
    plan = resolve(EngineConfig(checkpoint=str(tmp_path), **how))
    dims, experts = plan.model.dims, plan.model.axes.experts
    assert experts is not None
    routers = dims.num_layers * dims.hidden_size * experts.routing.num_experts
    size = 1 if mixtures.CASES[name] == "fp8" else 2
    expected = (plan.block_elements - routers) * size + 2 * routers
    expected += 2 * dims.vocab_size * dims.hidden_size
    found = mixtures.bytes_of_step(name, 1_000_000, 0)
    assert found.cache == 0
    # What is left are the weights of norms.
    assert found.whole * 1e9 == pytest.approx(expected, rel=1e-3)
    # One row reads as many experts as it chooses.
    one = mixtures.bytes_of_step(name, 1, 0).experts
    share = experts.routing.top_k / experts.routing.num_experts
    assert one == pytest.approx(found.experts * share, rel=1e-6)


def test_a_small_one_runs(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    mixtures, shapes = bench.mixtures, bench.shapes.SHAPES
    small = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300}
    monkeypatch.setitem(shapes, "small", shapes["mixtral-8x7b"] | small)
    monkeypatch.setitem(mixtures.CASES, "small", "none")
    monkeypatch.setattr(mixtures, "ROWS", (1, 3))
    monkeypatch.setattr(mixtures, "NUM_OUTPUT", 4)
    found = mixtures.ours("small", repeat=1)
    assert found.keys() == {"1", "3"}
    assert all(milliseconds > 0 for milliseconds in found.values())
