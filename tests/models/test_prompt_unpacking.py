"""Chunks over unpacked blocks, through the engine: the tokens of a cache that is read as it is.

The backend has a CPU's operations, and chooses and unpacks as a GPU's does.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fixtures.engine.ticks import ticks
from fixtures.models import phi3small, remote_drawn, static_scales
from fixtures.models.checkpoints import (
    Answer,
    Asker,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.tiers import quick_of
from slipstream.config import EngineConfig
from slipstream.engine.scheduler import Limits
from slipstream.kernels.attention import backend as backends
from slipstream.kernels.attention.backend import PagedCuda, Rows, TorchCpu
from slipstream.kernels.attention.spec import AttentionSpec
from slipstream.kernels.cache.kv_format import FORMATS
from slipstream.runner.plan import resolve
from slipstream_contract.sampling import SamplingParams
from torch import Tensor

BLOCK = 16
SIZES = {"vocab_size": 211, "hidden_size": 64, "intermediate_size": 64, "head_dim": 64}
LOCAL, FULL = "sliding_attention", "full_attention"
LAYERS = {"num_hidden_layers": 3, "layer_types": [LOCAL, FULL, LOCAL], "sliding_window": 20}
CHUNKS = {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "attention_chunk_size": 32}
CASES = {
    "plain": ("llama", {}),
    "windows": ("mistral", {"sliding_window": 20}),
    "two groups of caches": ("gemma3", LAYERS),
    "sinks in the softmax": ("gpt_oss", LAYERS),
    "attention chunks": ("llama4", CHUNKS),
}
PAIRS = [(case, name) for case in CASES for name in FORMATS]
SAMPLING = SamplingParams(max_tokens=6, temperature=0.7, seed=7, log_probs=True)


class Unpacks(TorchCpu, PagedCuda):
    """Unpacks whatever fits; what a step did not unpack is NaN, or no block at all."""

    name = "torch CPU, unpacked"
    counts: Sequence[int] = ()  # blocks of each call

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        return TorchCpu.supports(spec)  # heads of any size

    def _unpack(
        self, cache: Tensor, rows: Rows, starts: Tensor, window: int, num_blocks: int
    ) -> tuple[Tensor, Tensor]:
        scratch = self._scratch
        assert scratch is not None
        scratch._into.fill_(torch.nan)
        scratch._tables.fill_(scratch.num_blocks - 1)
        type(self).counts = [*self.counts, num_blocks]
        return super()._unpack(cache, rows, starts, window, num_blocks)


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> type[Unpacks]:
    monkeypatch.setattr(backends, "BACKENDS", (Unpacks,))
    monkeypatch.setattr(backends, "is_worth_it", lambda *_: True)
    monkeypatch.setattr(Unpacks, "counts", [])
    return Unpacks


def answers(path: Path, vocab_size: int, **options: object) -> list[Answer]:
    """Return what four requests get, of which three begin alike; the cache has too few blocks."""
    few = {"block_size": BLOCK, "kv_cache_tokens": 7 * BLOCK, "dtype": "bfloat16"}
    asker = Asker(make_runner(path, **(few | options)), Limits(4, 24), ticks())
    shared, *ends = random_prompts([40, 3, 9, 1, 21], vocab_size)
    for prompt in (*(shared + end for end in ends[:3]), ends[3]):
        asker.submit(prompt, SAMPLING)
    asker.drain()
    assert asker.engine.status().num_prefix_hits > BLOCK
    return list(asker.answers.values())


def check(path: Path, vocab_size: int, name: str, **options: object) -> None:
    """Compare with a cache that is read as it is."""
    options |= {"kv_cache_dtype": name}
    told = answers(path, vocab_size, **options)
    counts = Unpacks.counts
    assert max(counts) >= 3
    assert told == answers(path, vocab_size, prompt_unpacking="off", **options)
    assert Unpacks.counts is counts


@pytest.mark.parametrize("pair", quick_of(PAIRS, PAIRS[::7]), ids=str)
def test_tokens_are_those_of_packed_blocks(pair: tuple[str, str], tmp_path: Path) -> None:
    case, name = pair
    family, keys = CASES[case]
    save(make_model(family, **(SIZES | keys)), tmp_path)
    check(tmp_path, SIZES["vocab_size"], name)


@pytest.mark.rest
@pytest.mark.parametrize("name", FORMATS)
def test_heads_that_skip_blocks_read_packed_ones(name: str, tmp_path: Path) -> None:
    """Layers that skip none are unpacked for, beside those that do."""
    rng = random.Random(5)
    sizes = remote_drawn.Sizes(rng)
    sizes.layers = 3
    model = phi3small.drawn(rng, sizes, remote_drawn._filled)
    model.keys |= {"dense_attention_every_n_layers": 2}
    model.save(tmp_path)
    check(tmp_path, int(model.config.vocab_size), name)


@pytest.mark.rest
def test_scales_of_a_checkpoint(tmp_path: Path) -> None:
    """They change keys and values between attention and its output, copied or not."""
    save(make_model("llama", **SIZES), tmp_path)
    static_scales.add(tmp_path, static_scales.scales())
    check(tmp_path, SIZES["vocab_size"], "fp8")


@pytest.mark.rest
def test_rows_with_drafts(tmp_path: Path) -> None:
    save(make_model("llama", **SIZES), tmp_path)
    check(tmp_path, SIZES["vocab_size"], "int8", speculation="lookup")


@pytest.mark.parametrize("options", [{"deterministic": True}, {"dtype": "float32"}])
def test_bits_that_may_not_depend_on_neighbours_read_packed_blocks(
    options: dict[str, object], tmp_path: Path
) -> None:
    save(make_model("llama", **SIZES), tmp_path)
    answers(tmp_path, SIZES["vocab_size"], kv_cache_dtype="fp8", **options)
    assert not Unpacks.counts


def test_a_cpu_keeps_no_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The backend as it is: nothing is reserved, and nothing is unpacked."""
    monkeypatch.setattr(backends, "BACKENDS", (TorchCpu,))
    save(make_model("llama", **SIZES), tmp_path)
    options = {"kv_cache_dtype": "fp8", "dtype": "bfloat16", "block_size": BLOCK}
    plan = resolve(EngineConfig(checkpoint=str(tmp_path), device="cpu", **options))
    assert plan.config.prompt_unpacking == "on"
    assert plan.attention.reserve(4096, 100, plan.device) == 0
    assert plan.attention.num_unpacked([(2048, 2048)], 0) == 0
