"""Attention on a GPU, without one: every pair of features is refused or launches legal kernels.

`jit.launch` is replaced by a double that notes variants; tensors lie on the CPU.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from slipstream.kernels.attention import backend as backends
from slipstream.kernels.attention import decode, decode_shapes, prefill, sinks, table
from slipstream.kernels.attention.backend import PagedCuda, TorchCpu, backend_for
from slipstream.kernels.attention.newest import Newest
from slipstream.kernels.attention.scores import Scores
from slipstream.kernels.attention.spec import AttentionSpec
from slipstream.kernels.attention.table import FEATURES, Feature, pairs, spec_of, tables
from slipstream.kernels.runtime import jit, tensor_map
from slipstream.kernels.runtime.op import KernelError
from slipstream.layers.attention import AttentionInputs, StepRows
from slipstream.layers.chunked import ChunkView
from slipstream.layers.dims import RopeConfig
from slipstream.layers.streaming import Streaming

ROOT = Path(__file__).parents[2]
OPS = ("plan_decode", "prefill_attention", "sink_attention")
NUM_DECODES, CHUNK = 3, 40


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[jit.Variant]]:
    """What launchers launch, on what they take for an H200."""
    variants: list[jit.Variant] = []
    monkeypatch.setattr(jit, "launch", lambda wanted, *_, **__: variants.append(wanted))
    monkeypatch.setattr(jit, "num_multiprocessors", lambda _: 132)
    monkeypatch.setattr(jit, "shared_memory_limit", lambda _: 227 * 1024)
    monkeypatch.setattr(tensor_map, "boxes", lambda *_: None)
    monkeypatch.setattr(prefill, "_counters", lambda _: 0)
    for name in OPS:
        monkeypatch.setattr(backends, name, getattr(backends, name).launcher)
    attend = staticmethod(backends.decode_attention.launcher)
    monkeypatch.setattr(backends.AttentionBackend, "decode", attend)
    decode._device.cache_clear()
    yield variants
    decode._device.cache_clear()


@torch.inference_mode()
def attend(spec: AttentionSpec, window: int) -> None:
    """A step of decodes and a chunk through a backend, up to its launches."""
    backend = PagedCuda(spec)
    count = 0 if spec.deterministic else NUM_DECODES
    n = count + CHUNK
    lengths = torch.tensor([33, 50, 7, 60][-count - 1 :], dtype=torch.int32)
    blocks = torch.arange(len(lengths) * 8, dtype=torch.int32).view(len(lengths), 8)
    every = torch.arange(n)
    starts = torch.tensor([0, CHUNK], dtype=torch.int32)
    rows = StepRows(every, every, blocks, starts, lengths, count, CHUNK)
    cache = backend.kv_spec.allocate(32, torch.device("cpu"))[0]
    if spec.streams:
        inputs = Streaming(RopeConfig(), backend, torch.device("cpu")).inputs(cache, rows)
    else:
        if spec.is_chunked:
            rows, window = ChunkView.of(rows, window, spec.block_size)(rows), 0
        inputs = AttentionInputs.of(backend, cache, rows, window)
    q = torch.zeros(n, spec.num_heads, spec.head_size, dtype=spec.dtype)
    k = torch.zeros(n, spec.num_kv_heads, spec.head_size, dtype=spec.dtype)
    cos_sin, _ = inputs.angles(torch.zeros(64, spec.head_size))
    single = inputs.num_single
    rotates = backend.rotates_decodes and single
    cos_sin = cos_sin[:single] if spec.streams else cos_sin
    newest = Newest(k[:single], k[:single], cos_sin) if rotates else None
    heads = torch.zeros(spec.num_heads)
    slopes, sinks = (heads if has else None for has in (spec.has_slopes, spec.has_sink_scores))
    inputs.attend(q, newest, cache, 0.1, Scores(spec.score_cap, slopes, sinks))


def macros(variant: jit.Variant) -> dict[str, str]:
    return dict(variant.defines)


LEGAL = {*decode.variants(), *prefill.variants(), *sinks.variants()}
COMBINED = [(), *((feature,) for feature in FEATURES), *pairs()]


def supported() -> Iterator[tuple[Feature, ...]]:
    for features in COMBINED:
        if PagedCuda.supports(spec_of("cuda", *features)) is None:
            yield features


@pytest.mark.parametrize("is_hopper", [True, False])
def test_what_is_supported_launches_what_the_table_says(
    is_hopper: bool, launched: list[jit.Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "is_hopper", lambda _: is_hopper)
    for features in supported():
        spec = spec_of("cuda", *features)
        for window in spec.windows:
            launched.clear()
            attend(spec, window)
            name = [feature.name for feature in features]
            assert set(launched) <= LEGAL, name
            choice = PagedCuda.choose(spec, window, is_hopper)
            by_source = {variant.source: macros(variant) for variant in launched}
            wanted = {f"attention/{choice.decode}", f"attention/{choice.prefill}"}
            found = {source.replace("sm90/", "") for source in by_source}
            assert found - {"attention/decode_plan.cu"} == wanted, name
            single = by_source.get("attention/decode.cu", {})
            assert ("SHARES" in single) == (choice.own_prefix is None), name
            assert (single.get("ROTATES") == "1") == (choice.own_rotation is None), name
            whole = by_source.get("attention/sm90/prefill_wgmma.cu", {})
            assert (whole.get("SPLITS") == "1") == (choice.whole_chunks is None), name


def test_refusals_are_no_wider_than_the_kernels() -> None:
    """What endless sequences are refused with on a GPU is what no variant of decode.cu is for."""
    for cached, size in itertools.product((torch.bfloat16, *table.FORMATS.values()), (128, 256)):
        changes = {"cache_dtype": cached, "head_size": size}
        spec = replace(spec_of("cuda"), **changes, stream_window=64)
        mode = {"rotates": False, "window": 1, "cached": cached, "streams": True}
        shape = decode_shapes.shapes(cached, size)[0]
        if PagedCuda.supports(spec) is None:
            assert decode_shapes.attention_variant(spec.dtype, size, shape, **mode) in LEGAL
            continue
        with pytest.raises(KernelError):
            decode_shapes.attention_variant(spec.dtype, size, shape, **mode)


def test_a_backend_for_each_device() -> None:
    assert backend_for(spec_of("cuda")) is PagedCuda
    assert backend_for(spec_of("cpu")) is TorchCpu
    assert backend_for(spec_of("tpu")) == "device = 'tpu' has no attention backend"
    plain = spec_of("cpu")
    odd = replace(plain, num_heads=7, num_kv_heads=2)
    words = "num_attention_heads = 7 is no multiple of num_key_value_heads = 2"
    assert backend_for(odd) == words
    with pytest.raises(AssertionError, match="no multiple"):
        TorchCpu(odd)


def test_sizes_of_the_cache() -> None:
    """By the formats' documentation, a byte at a time."""
    for cached, size in itertools.product(table.FORMATS.values(), (64, 80, 256)):
        spec = replace(spec_of("cpu"), cache_dtype=cached, head_size=size, layers_per_block=3)
        kv = TorchCpu(spec).kv_spec
        groups = -(-size // 64)
        row = size // 2 + 2 * groups if cached == torch.uint8 else size + 1
        assert kv.row_bytes == row
        assert kv.scale_bytes == (2 * groups if cached == torch.uint8 else 1)
        assert kv.token_bytes == 2 * spec.num_kv_heads * row
        assert kv.block_bytes == 3 * spec.block_size * kv.token_bytes
        assert kv.allocate(5, torch.device("cpu")).nbytes == 5 * kv.block_bytes
    assert TorchCpu(spec_of("cpu")).kv_spec.row_bytes == 256


def test_the_page_shows_the_tables() -> None:
    page = (ROOT / "docs" / "attention.md").read_text()
    shown = re.search(r"<!-- attention: [^>]*-->\n(.*?)\n<!--", page, re.S)
    assert shown is not None
    assert shown[1] == tables(), "put `make attention` into docs/attention.md, between its marks"
