"""Models with mixtures of experts: schemes, refusals, rows alone."""

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    edit_config,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.experts_of_gpu import keep_as_on_hopper
from fixtures.models.parity import EXPERTS, check_against
from safetensors.torch import load_file, save_file
from slipstream.config import EngineConfig
from slipstream.errors import CheckpointError, ConfigError
from slipstream.kernels.cpu.native import library
from slipstream.models.check import check_tensors
from slipstream.models.decoder import build
from slipstream.models.fileless import SizeSource
from slipstream.models.hf import read_config
from slipstream.models.source import Weights
from slipstream.quant.matrix import QuantMatrix, dequantise
from slipstream.quant.rounding import rounded4, rounded8, rounded_for_e4m3
from slipstream.runner.plan import settle

CUDA = torch.device("cuda")


@pytest.mark.parametrize("name", ["qwen2 moe, dense layers", "mixtral"])
def test_deterministic_rows_do_not_depend_on_others(name: str, tmp_path: Path) -> None:
    """Logits bit for bit: alone, and beside others, in chunks of another size."""
    family, overrides = EXPERTS[name]
    save(make_model(family, **overrides), tmp_path)
    prompts = random_prompts([30, 9, 17])
    runs = []
    for group, chunk in ((prompts, 11), (prompts[:1], 30)):
        runner = make_runner(tmp_path, deterministic=True)
        generations = [Generation(prompt, 4) for prompt in group]
        Driver(runner, keep_logits=True).finish(generations, chunk)
        runs.append(generations[0])
    together, alone = runs
    assert together.outputs == alone.outputs
    assert all(map(torch.equal, together.logits, alone.logits))


def test_e4m3_at_load(tmp_path: Path) -> None:
    """Every expert is rounded by rows; every row has all, so that none changes its choice."""
    family, overrides = EXPERTS["qwen3 moe"]
    save(make_model(family, **overrides | {"num_experts_per_tok": 8}), tmp_path)
    prompt, found = random_prompts([30])[0], []
    for scheme in ("none", "fp8"):
        generation, runner = Generation(prompt, 1), make_runner(tmp_path, quantization=scheme)
        Driver(runner, keep_logits=True).finish([generation])
        found.append(generation.logits[0])
        down = runner._model.blocks[0].mlp.down
        assert (down.values.dtype, down.scales is None) == (
            (torch.float32, True) if scheme == "none" else (torch.float8_e4m3fn, False)
        )
    error = float((found[1] - found[0]).norm() / found[0].norm())
    assert 1e-3 < error < 0.2


@pytest.mark.parametrize(
    ("scheme", "rounded"),
    [
        ("int8", rounded8),
        ("int4", rounded4),
        ("w4a8", rounded_for_e4m3),
        ("w8a8", partial(rounded8, row_type="int8")),
    ],
)
@pytest.mark.parametrize("family", ["qwen3 moe", "gpt-oss"])
def test_codes_at_load(
    family: str,
    scheme: str,
    rounded: Callable[[torch.Tensor], QuantMatrix],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As matrices of linear layers are rounded; rows stay in 16 bits, which the start says."""
    name, overrides = EXPERTS[family]
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 64}
    model = make_model(name, **overrides | sizes)
    save(model, tmp_path)
    keep_as_on_hopper(monkeypatch)
    with caplog.at_level(logging.INFO):
        runner = make_runner(tmp_path, quantization=scheme)
    weights = model.model.layers[1].mlp.experts.down_proj.detach()
    down = runner._model.blocks[1].mlp.down
    for expert, weight in enumerate(weights):
        expected = dequantise(rounded(weight.T if name == "gpt_oss" else weight))
        torch.testing.assert_close(down.of(expert)[0], expected, rtol=1e-6, atol=0.0)
    kind = str(rounded(weights[0].T if name == "gpt_oss" else weights[0]))
    assert f"experts of {kind}: kept packed, multiplied with 16-bit rows" in caplog.text
    Driver(runner).finish([Generation(random_prompts([30])[0], 3)], 11)


def checkpoint(tmp_path: Path, **changes: object) -> Path:
    family, overrides = EXPERTS["qwen3 moe"]
    save(make_model(family, **overrides), tmp_path)
    edit_config(tmp_path, **changes)
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"dtype": "float32"}, "needs dtype float16 or bfloat16, not torch.float32"),
        ({"dtype": "bfloat16"}, "multiples of 8: config.json has intermediate_size = 177"),
    ],
)
def test_what_kernels_lack_is_refused_by_name(
    settings: dict[str, str], why: str, tmp_path: Path
) -> None:
    config = EngineConfig(checkpoint=str(checkpoint(tmp_path)), device="cuda", **settings)
    with pytest.raises(ConfigError, match=why):
        settle(config, CUDA)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_experts": 7, "num_local_experts": 8}, "num_experts"),
        ({"num_local_experts": 513}, "num_local_experts = 513 is above 512"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is above num_local_experts = 8"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers .* is not a list of whole numbers"),
        ({"norm_topk_prob": 1}, "norm_topk_prob = 1 is neither true nor false"),
        ({"use_sliding_window": True, "sliding_window": 9}, "sliding_window = 9 is in use, but"),
    ],
)
def test_refused_configurations(changes: dict[str, object], why: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=why):
        read_config(checkpoint(tmp_path, **changes))


def test_tensors_of_every_expert_are_checked(tmp_path: Path) -> None:
    check_tensors(checkpoint(tmp_path))
    edit_config(tmp_path, num_local_experts=9)
    with pytest.raises(CheckpointError, match=r"mlp.gate.weight is \[8, 128\], not \[9, 128\]"):
        check_tensors(tmp_path)
    edit_config(tmp_path, num_local_experts=7)
    with pytest.raises(CheckpointError, match="not \\[7, 128\\]"):
        check_tensors(tmp_path)


def test_names_of_older_files(tmp_path: Path) -> None:
    """The hub's files of these families have `num_experts`."""
    checkpoint(tmp_path)
    edit_config(tmp_path, "num_local_experts", num_experts=8)
    check_tensors(tmp_path)


def test_quantised_experts_that_no_kernel_takes_are_dequantised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks of 128 by 128 in e4m3, as Qwen's own files have them; attention stays as it was."""
    family, overrides = EXPERTS["qwen3 moe"]
    model = make_model(family, **overrides)
    save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [each for each in tensors if ".experts." in each]:
        scale = tensors[name].abs().max() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        blocks = [-(-size // 128) for size in tensors[name].shape]
        tensors[f"{name}_scale_inv"] = scale.expand(*blocks).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    kept = [f"model.layers.{i}.{part}" for i in range(2) for part in ("self_attn", "mlp.gate")]
    how = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    edit_config(tmp_path, quantization_config=how | {"modules_to_not_convert": ["lm_head", *kept]})
    with torch.no_grad():
        for layer in model.model.layers:
            for weights in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                halves = 2 if weights is layer.mlp.experts.gate_up_proj else 1
                for part in weights.unflatten(1, (halves, -1)).flatten(0, 1):
                    scale = part.abs().max() / 448
                    part.copy_((part / scale).to(torch.float8_e4m3fn).float() * scale)
    with caplog.at_level(logging.INFO):
        driver = Driver(make_runner(tmp_path), keep_logits=True)
    assert "experts of e4m3 by a row for rows in e4m3: dequantised to float32" in caplog.text
    generation = Generation(random_prompts([30])[0], 3)
    driver.finish([generation])
    check_against(model, generation, 1e-4)


_QWEN = {"vocab_size": 151936, "hidden_size": 2048, "tie_word_embeddings": False}
PUBLISHED = {
    "Mixtral 8x7B": (
        "MixtralForCausalLM",
        46.7,
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8}
        | {"num_experts_per_tok": 2, "vocab_size": 32000, "sliding_window": None}
        | {"output_router_logits": False, "router_aux_loss_coef": 0.02, "rope_theta": 1e6},
    ),
    "Qwen1.5-MoE-A2.7B": (
        "Qwen2MoeForCausalLM",
        14.3,
        _QWEN
        | {"intermediate_size": 5632, "moe_intermediate_size": 1408, "num_hidden_layers": 24}
        | {"shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4}
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "norm_topk_prob": False}
        | {"max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": False},
    ),
    "Qwen3-30B-A3B": (
        "Qwen3MoeForCausalLM",
        30.5,
        _QWEN
        | {"intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48}
        | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
        | {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
        | {"mlp_only_layers": [], "decoder_sparse_step": 1, "rope_scaling": None}
        | {"max_window_layers": 48, "sliding_window": None, "use_sliding_window": False},
    ),
    "OLMoE-1B-7B": (
        "OlmoeForCausalLM",
        6.9,
        {"hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16}
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64}
        | {"num_experts_per_tok": 8, "norm_topk_prob": False, "clip_qkv": None}
        | {"vocab_size": 50304, "router_aux_loss_coef": 0.01, "attention_bias": False},
    ),
    "gpt-oss-20b": (
        "GptOssForCausalLM",
        20.9,
        {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
        | {"num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4}
        | {"vocab_size": 201088, "sliding_window": 128, "swiglu_limit": 7.0}
        | {"layer_types": ["sliding_attention", "full_attention"] * 12}
        | {"initial_context_length": 4096, "attention_bias": True, "rope_theta": 150000}
        | {
            "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0}
            | {"original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False}
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_sizes(name: str, tmp_path: Path) -> None:
    """In 1e9 weights of matrices, as their authors round them."""
    architecture, billions, keys = PUBLISHED[name]
    config = keys | {"architectures": [architecture], "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = SizeSource()
    weights = Weights(source, torch.device("meta"), torch.bfloat16)
    build(read_config(tmp_path), weights, max_model_len=1)
    assert round(sum(source.elements.values()) / 1e9, 1) == billions


def as_mxfp4(shape: tuple[int, int, int], seed: int) -> tuple[torch.Tensor, ...]:
    """Random experts `[e, n, k]`: blocks, scales, and the numbers that they are."""
    generator = torch.Generator().manual_seed(seed)
    count, outputs, inputs = shape
    codes = torch.randint(16, shape, generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 125, (count, outputs, inputs // 32), generator=generator)
    pairs = codes.view(count, outputs, inputs // 32, 16, 2)
    blocks = pairs[..., 0] | pairs[..., 1] << 4
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = table[(codes & 7).long()] * (1 - 2.0 * (codes >> 3))
    numbers = numbers * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
    return blocks, scales.to(torch.uint8), numbers


@pytest.mark.parametrize("on_gpu", [False, True])
def test_experts_in_mxfp4(
    on_gpu: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As gpt-oss is published: gates and ups take turns among the rows of blocks."""
    model = make_model("gpt_oss", intermediate_size=64)
    save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for i, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        for name, weights in (
            ("gate_up_proj", experts.gate_up_proj),
            ("down_proj", experts.down_proj),
        ):
            count, inputs, outputs = weights.shape
            blocks, scales, numbers = as_mxfp4((count, outputs, inputs), seed=i)
            weights.data.copy_(numbers.transpose(1, 2))
            stored = f"model.layers.{i}.mlp.experts.{name}"
            del tensors[stored]
            tensors |= {f"{stored}_blocks": blocks, f"{stored}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    how = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    edit_config(tmp_path, quantization_config=how)
    check_tensors(tmp_path)
    generation = Generation(random_prompts([30])[0], 3)
    kept = "dequantised to float32" if library() is None else "multiplied as they are by the CPU"
    if on_gpu:
        keep_as_on_hopper(monkeypatch)
        kept = "kept packed, multiplied with 16-bit rows"
    with caplog.at_level(logging.INFO):
        driver = Driver(make_runner(tmp_path), keep_logits=True)
    assert f"experts of e2m1 by 32 inputs: {kept}" in caplog.text
    driver.finish([generation], 11)
    check_against(model, generation, 1e-4 if on_gpu else 1e-3)  # a CPU rounds rows to 16 bits
    blocks = tensors["model.layers.1.mlp.experts.down_proj_blocks"]
    tensors["model.layers.1.mlp.experts.down_proj_blocks"] = blocks[:, :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj_blocks is \[6, 127, 2, 16\], not"):
        check_tensors(tmp_path)


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        (
            "deepseek_v2",
            {"device": "cuda", "dtype": "bfloat16", "kv_cache_dtype": "fp8"},
            "DeepseekV2ForCausalLM has latent .*: a cache of latents has the dtype of activations",
        ),
        ("deepseek_v2", {"device": "cpu", "attention_window": 64}, "has latent attention"),
        ("gpt_oss", {"device": "cpu", "attention_window": 64}, "attention_window = 64: GptOss"),
    ],
)
def test_attention_is_refused_by_name_where_nothing_has_it(
    family: str, settings: dict[str, object], why: str, tmp_path: Path
) -> None:
    sizes = {"moe_intermediate_size": 64, "num_experts_per_tok": 2, "n_routed_experts": 4}
    own = {"intermediate_size": 64} | (sizes if family == "deepseek_v2" else {})
    save(make_model(family, **own), tmp_path)
    config = EngineConfig(checkpoint=str(tmp_path), **settings)
    with pytest.raises(ConfigError, match=why):
        settle(config, torch.device(str(settings["device"])))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"n_group": 5}, "n_group = 5 does not divide 12 experts"),
        ({"n_group": 65}, "n_group = 65 is above 64"),
        ({"n_group": 12}, "n_group = 12 leaves groups of one expert"),
        ({"topk_group": 4}, "topk_group = 4 is above 3"),
        ({"topk_group": 1, "num_experts_per_tok": 5}, "topk_group = 1 leaves fewer than 5"),
        ({"n_group": 1, "num_experts_per_tok": 13}, "num_experts_per_tok = 13 is above 12"),
    ],
)
def test_groups_that_no_kernel_chooses_are_refused(
    changes: dict[str, object], why: str, tmp_path: Path
) -> None:
    save(make_model("dots1"), tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=why):
        read_config(tmp_path)
