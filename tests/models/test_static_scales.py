"""Scales of an fp8 cache that a checkpoint brings: what they change, and what is refused."""

import json
import logging
from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import (
    edit_config,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.static_scales import LAYER, SCALES, add, is_near, logits_of, scales
from slipstream.config import EngineConfig
from slipstream.errors import CheckpointError
from slipstream.models.check import check_tensors
from slipstream.models.hf import read_config
from slipstream.models.weights import FileSource
from slipstream.runner.cache_dtype import cache_dtype
from slipstream.runner.plan import resolve

SCHEME = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}
SCHEME |= {"symmetric": True, "observer": "minmax", "group_size": None}
OWN = {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": ["lm_head"]}
SAYS_FP8 = OWN | {"format": "dense", "kv_cache_scheme": SCHEME}
FEW = {"max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.mark.parametrize("options", [{}, {"attention_window": 64, "sink_tokens": 3}])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits(family: str, options: dict[str, object], tmp_path: Path) -> None:
    model = make_model(family)
    path = add(save(model, tmp_path), scales())
    (prompt,) = random_prompts([50])
    runner = make_runner(path, kv_cache_dtype="fp8", block_size=16, **options, **FEW)
    assert is_near(logits_of(runner, prompt), model, prompt)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(make_model(hidden_size=64), tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_spellings(key: str, value: str, checkpoint: Path) -> None:
    add(checkpoint, {name: x.bfloat16() for name, x in scales(key, value).items()})
    check_tensors(checkpoint)
    runner = make_runner(checkpoint, kv_cache_dtype="fp8", block_size=16, **FEW)
    got = [block.attention.static for block in runner._model.blocks]
    assert got == [tuple(torch.tensor(each).bfloat16().tolist()) for each in SCALES]


def test_one_for_both_and_a_layer_without(checkpoint: Path) -> None:
    add(checkpoint, {LAYER.format(1) + "kv_scale": torch.tensor(0.5)})
    runner = make_runner(checkpoint, kv_cache_dtype="fp8", block_size=16, **FEW)
    assert [block.attention.static for block in runner._model.blocks] == [None, (0.5, 0.5)]


K = LAYER.format(1) + "k_scale"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({K: torch.tensor([0.0])}, f"tensor {K} = 0 is not a scale"),
        ({K: torch.tensor([-0.5])}, f"tensor {K} = -0.5 is not a scale"),
        ({K: torch.tensor(torch.nan)}, f"tensor {K} = nan is not a scale"),
        ({K: torch.tensor(torch.inf)}, f"tensor {K} = inf is not a scale"),
        ({K: torch.tensor(1e30)}, "a number of 2 ** -64 to 2 ** 64"),
        ({K: torch.ones(2)}, f"tensor {K} is [2]: a scale is one number"),
        ({K: torch.ones(1, dtype=torch.int32)}, f"tensor {K} is I32: not implemented"),
        ({K: None}, f"tensor {K} is missing"),
        ({LAYER.format(0) + "kv_scale": torch.ones(1)}, "kv_scale (of 1 such) has no place"),
        ({LAYER.format(0) + "q_scale": torch.ones(1)}, "q_scale (of 1 such) has no place"),
    ],
)
def test_refused(changes: dict[str, torch.Tensor | None], words: str, checkpoint: Path) -> None:
    """Whatever the cache is."""
    tensors = scales() | changes
    add(checkpoint, {name: x for name, x in tensors.items() if x is not None})
    for look in (check_tensors, make_runner):
        with pytest.raises(CheckpointError) as caught:
            look(checkpoint)
        assert words in str(caught.value)


def test_unused(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In other formats they change nothing, and one line says so."""
    monkeypatch.setattr(FileSource, "mapped", lambda *_: None)  # its last bits are others
    (prompt,) = random_prompts([50])
    options = {"kv_cache_dtype": "int8", "block_size": 16} | FEW
    want = logits_of(make_runner(checkpoint, **options), prompt)
    add(checkpoint, scales())
    with caplog.at_level(logging.INFO):
        got = logits_of(make_runner(checkpoint, **options), prompt)
        make_runner(checkpoint, kv_cache_dtype="fp8", block_size=16, **FEW)
    assert torch.equal(got, want)
    told = [line for line in caplog.messages if "scales" in line]
    assert told == [
        "the checkpoint's scales of an fp8 KV cache are not used: the cache is int8",
        "KV cache in the checkpoint's scales, of 2 of 2 layers",
    ]


def plan_dtype(checkpoint: Path, **options: object) -> torch.dtype:
    return resolve(EngineConfig(checkpoint=str(checkpoint), device="cpu", **options)).cache_dtype


def test_auto(checkpoint: Path) -> None:
    edit_config(checkpoint, quantization_config=SAYS_FP8)
    assert plan_dtype(checkpoint) == torch.float32  # there are no scales
    add(checkpoint, scales())
    assert plan_dtype(checkpoint) == torch.float8_e4m3fn
    assert "KV cache of fp8, " in resolve(EngineConfig(checkpoint=str(checkpoint))).banner(9)
    assert plan_dtype(checkpoint, kv_cache_dtype="int8") == torch.int8
    assert plan_dtype(checkpoint, block_size=8) == torch.float32
    assert plan_dtype(checkpoint, load_format="random") == torch.float32
    config = EngineConfig(checkpoint=str(checkpoint), attention_window=64)
    model, dtype = read_config(checkpoint), torch.bfloat16
    assert cache_dtype(config, model, torch.device("cuda"), dtype) == dtype
    assert cache_dtype(config, model, torch.device("cpu"), dtype) == torch.float8_e4m3fn
    edit_config(checkpoint, "quantization_config")
    assert plan_dtype(checkpoint) == torch.float32  # nothing says so
    said = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (checkpoint / "hf_quant_config.json").write_text(json.dumps({"producer": {}} | said))
    assert plan_dtype(checkpoint) == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "hqq"}, "quantization_config.quant_method = 'hqq' is not one of"),
        ({"kv_cache_scheme": SCHEME | {"num_bits": 4}}, "kv_cache_scheme.num_bits = 4"),
        ({"kv_cache_scheme": SCHEME | {"type": "int"}}, "kv_cache_scheme.type = 'int'"),
        ({"kv_cache_scheme": SCHEME | {"dynamic": True}}, "kv_cache_scheme.dynamic = True"),
        ({"kv_cache_scheme": SCHEME | {"strategy": "attn_head"}}, "strategy = 'attn_head'"),
        ({"kv_cache_scheme": "NVFP4"}, "kv_cache_scheme = 'NVFP4' is not implemented; FP8 is"),
    ],
)
def test_refused_schemes(changes: dict[str, object], words: str, checkpoint: Path) -> None:
    edit_config(checkpoint, quantization_config=SAYS_FP8 | changes)
    with pytest.raises(CheckpointError) as caught:
        read_config(checkpoint)
    assert words in str(caught.value)
    assert "config.json: quantization_config." in str(caught.value)


def test_weights_that_are_not_what_a_file_says(checkpoint: Path) -> None:
    said = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (checkpoint / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=r"q_proj.weight is F32, but .* quantises"):
        check_tensors(checkpoint)
