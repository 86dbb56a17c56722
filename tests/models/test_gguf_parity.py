"""GGUF files of every family and of every type of blocks: logits are transformers'."""

import logging
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fixtures.models.checkpoints import (
    LLAMA3,
    YARN,
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    sizes_of,
)
from fixtures.models.gguf_files import LATENT_SIZES, SIZES, unpacked, write_gguf
from fixtures.models.parity import ALPHA, MIXED_LONGROPE
from fixtures.models.remote_drawn import REMOTE
from fixtures.tiers import quick_of
from slipstream.kernels.cpu.native import library
from slipstream.models.gguf.types import BLOCK_TYPES

LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
CASES = {
    "llama": ("llama", {}, {}),
    "llama, biases, tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {},
    ),
    "llama, factors of each frequency": ("llama", {"rope_parameters": LLAMA3}, {}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}, {}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}, {}),
    "llama, a number for each layer": (
        "llama",
        {},
        {"attention.head_count": [4, 4], "attention.head_count_kv": [2, 2]},
    ),
    "mistral, a window": ("mistral", {"sliding_window": 24}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "gemma3": ("gemma3", {"num_hidden_layers": 7, "sliding_window": 16}, {}),
    "gemma3, a window by layers": (
        "gemma3",
        {
            "num_hidden_layers": 2,
            "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        {"attention.sliding_window_pattern": [False, True]},
    ),
}
_PART = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 40 for i in range(32)],
    "long_factor": [2.0 + i for i in range(32)],
    "attention_factor": 1.3,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ORIGINAL = "original_max_position_embeddings"
_PLAIN = {"rope_type": "default", "rope_theta": 1e4}
_GROWS = {"llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 1.0}
_STRETCHED_THETA = {"rope.freq_base": 1e4 * 30.0 ** (64 / 62), "rope.scaling.type": "none"}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
CASES |= {
    "arcee": ("arcee", {"hidden_act": "relu2"}, {}),
    "bloom": ("bloom", {}, {}),
    "command-r": ("cohere", {}, {}),
    "command-r, norms of heads": ("cohere", {"use_qk_norm": True}, {}),
    "cohere2": ("cohere2", {"num_hidden_layers": 5, "sliding_window": 12}, {}),
    "falcon": ("falcon", {"multi_query": True}, {}),
    "falcon, groups": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, {}),
    "falcon, groups, one norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        {},
    ),
    "gemma": ("gemma", {}, {}),
    "gemma2": ("gemma2", {"sliding_window": 12, "query_pre_attn_scalar": 64}, {}),
    "glm4": ("glm4", {"rope_parameters": _PART | {"partial_rotary_factor": 0.5}}, {}),
    "gpt2": ("gpt2", {}, {}),
    "starcoder": ("gpt_bigcode", {}, {}),
    "gptneox": ("gpt_neox", {"rope_parameters": _PART}, {}),
    "gptneox, serial": ("gpt_neox", {"use_parallel_residual": False}, {}),
    "gpt-oss": ("gpt_oss", {"rope_parameters": YARN | {"truncate": False}} | _LOCAL, {}),
    "jais2": ("jais2", {}, {}),
    "glm4moe": (
        "glm4_moe",
        {"use_qk_norm": True, "rope_parameters": _PART | {"partial_rotary_factor": 0.5}},
        {},
    ),
    "glm4moe, no groups, no scores named": (
        "glm4_moe",
        {"n_group": 1, "topk_group": 1, "attention_bias": True, "routed_scaling_factor": 2.5},
        {"expert_gating_func": None, "expert_group_count": None, "expert_group_used_count": None},
    ),
    "dots1": ("dots1", {}, {}),
    "ernie4_5": ("ernie4_5", {"use_bias": True}, {}),
    "ernie4_5-moe": (
        "ernie4_5_moe",
        {"num_hidden_layers": 4, "moe_layer_start_index": 1, "moe_layer_interval": 2},
        {},
    ),
    "exaone4": ("exaone4", {"num_hidden_layers": 4, "sliding_window": 11}, {}),
    "exaone-moe": (
        "exaone_moe",
        {"num_hidden_layers": 4, "sliding_window": 11, "head_dim": 64}
        | {"num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 64},
        {},
    ),
    "exaone4, no window": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "head_dim": 64}
        | {"rope_parameters": LLAMA3},
        {},
    ),
    "olmo3": ("olmo3", {"num_hidden_layers": 4, "sliding_window": 14}, {}),
    "granitemoe": ("granitemoeshared", {"shared_intermediate_size": 0} | _LOCAL, {}),
    "granitemoe, shared": (
        "granitemoeshared",
        {"shared_intermediate_size": 64, "logits_scaling": 3.0} | _LOCAL,
        {},
    ),
    "minimax-m2": (
        "minimax_m2",
        {"rope_parameters": _PART | {"partial_rotary_factor": 0.5}} | _LOCAL,
        {},
    ),
    "hunyuan-dense": ("hunyuan_v1_dense", {"rope_parameters": ALPHA}, _STRETCHED_THETA),
    "hunyuan-moe": (
        "hunyuan_v1_moe",
        {"num_experts": 4, "moe_topk": 2, "rope_parameters": ALPHA},
        _STRETCHED_THETA | {"expert_used_count": 2, "expert_shared_count": 1},
    ),
    "mistral3": (
        "ministral3",
        {"rope_parameters": YARN | _GROWS | {ORIGINAL: 16}},
        {"attention.temperature_scale": 0.4, "rope.scaling.yarn_log_multiplier": 1.0},
    ),
    "mistral3, no growth": (
        "ministral3",
        {"rope_parameters": _PLAIN | {ORIGINAL: 16, "llama_4_scaling_beta": 0.0}},
        {"attention.temperature_scale": 0.0},
    ),
    "phimoe": ("phimoe", {"attention_bias": True, "lm_head_bias": True} | _LOCAL, {}),
    "phimoe, factors by length": (
        "phimoe",
        {"rope_parameters": MIXED_LONGROPE, "original_max_position_embeddings": 256} | _LOCAL,
        {"rope.scaling.attn_factor": 1.25, "rope.scaling.original_context_length": 256},
    ),
    "granite": ("granite", {"attention_multiplier": 0.1, "logits_scaling": 3.0}, {}),
    "mixtral": ("mixtral", _LOCAL, {}),
    "mpt": ("mpt", {"attn_config": {"clip_qkv": 0.9}}, {}),
    "nemotron": ("nemotron", {"rope_parameters": _PART | {"partial_rotary_factor": 0.5}}, {}),
    "olmo": ("olmo", {"clip_qkv": 0.8}, {}),
    "olmo2": ("olmo2", {}, {}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}, {}),
    "phi2": ("phi", {"rope_parameters": _PART | {"partial_rotary_factor": 0.5}}, {}),
    "phi3": ("phi3", {"sliding_window": 17}, {}),
    "phi3, factors by length": (
        "phi3",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 4},
        {"rope.scaling.attn_factor": 1.3, "rope.scaling.original_context_length": 4},
    ),
    "qwen2moe": ("qwen2_moe", {"shared_expert_intermediate_size": 64} | _MOE, {}),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True} | _MOE, {}),
    "seed_oss": ("seed_oss", {}, {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}, {}),
    "stablelm": ("stablelm", {"rope_parameters": _PART, "use_qkv_bias": True}, {}),
    "stablelm, norms of heads": (
        "stablelm",
        {"rope_parameters": _PART, "use_parallel_residual": True, "qk_layernorm": True},
        {},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 12}, {}),
}
_STRETCHED = {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}
_GREEDY = {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
_LIMITED = {"q_lora_rank": 96, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
# Files of before keys' and values' matrices were apart, and before they said how scores are made.
_TOGETHER = {
    "attention.head_count_kv": 4,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "attention.key_length_mla": None,
    "attention.value_length_mla": None,
}
CASES |= {
    "deepseek2, v2": ("deepseek_v2", LATENT_SIZES | _GREEDY, {}),
    "deepseek2, v2, groups, yarn": ("deepseek_v2", LATENT_SIZES | _LIMITED | _STRETCHED, {}),
    "deepseek2, v2, matrices in one": (
        "deepseek_v2",
        LATENT_SIZES | _GREEDY,
        _TOGETHER | {"expert_gating_func": None},
    ),
    "deepseek2, v3": (
        "deepseek_v3",
        LATENT_SIZES | _STRETCHED | {"q_lora_rank": 96, "n_group": 3, "topk_group": 2},
        {},
    ),
}
QUICK = ("llama", "gemma3", "falcon, groups", "gpt-oss", "phi3", "deepseek2, v3")
# Blocks of matrices whose rows are moved, and of experts.
MOVED = {
    "gpt2": ("gpt2", "Q8_0"),
    "falcon": ("falcon, groups", "Q4_K"),
    "phi3": ("phi3", "Q4_1"),
    "command-r": ("command-r", "Q4_0"),
    "gpt-oss": ("gpt-oss", "MXFP4"),
    "qwen3moe": ("qwen3moe", "Q8_0"),
    "deepseek2": ("deepseek2, v3", "Q8_0"),
    "deepseek2, in one": ("deepseek2, v2, matrices in one", "Q4_0"),
}
TYPES = [kind.name for kind in BLOCK_TYPES.values()]


def check(model: torch.nn.Module, directory: Path) -> None:
    driver = Driver(make_runner(directory), keep_logits=True)
    generation = Generation(random_prompts([40], model.config.vocab_size)[0], 4)
    driver.finish([generation], 13)
    with torch.no_grad():
        truth = model(torch.tensor([generation.tokens])).logits[0]
    for i, logits in enumerate(generation.logits):
        expected = truth[len(generation.prompt) - 1 + i]
        assert (logits - expected).abs().max() <= 1e-3 * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("name", quick_of(CASES, QUICK))
def test_families(name: str, tmp_path: Path) -> None:
    check_case(name, "F32", tmp_path)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """As in files of GLM-4.5, whose last layer has norms and a matrix beside those of others."""
    layers, hidden = 3, SIZES["hidden_size"]
    model = make_model("glm4_moe", **sizes_of("glm4_moe", **SIZES, num_hidden_layers=layers))
    keys = {"block_count": layers + 1, "nextn_predict_layers": 1}
    behind = {
        "nextn.enorm": (hidden,),
        "nextn.eh_proj": (hidden, 2 * hidden),
        "attn_norm": (hidden,),
    }
    extra = {f"blk.{layers}.{name}.weight": shape for name, shape in behind.items()}
    path = write_gguf(model, "glm4_moe", tmp_path / "model.gguf", extra=extra, **keys)
    check(model, unpacked(path, tmp_path / "checkpoint"))


@pytest.mark.parametrize("name", quick_of(MOVED, {"phi3"}))
def test_blocks_that_move(name: str, tmp_path: Path) -> None:
    check_case(*MOVED[name], tmp_path)


def check_case(name: str, kind: str, tmp_path: Path) -> None:
    family, overrides, keys = CASES[name]
    base = sizes_of(family, **SIZES) | ({"query_pre_attn_scalar": 64} if family == "gemma3" else {})
    model = make_model(family, **(base | overrides))
    path = write_gguf(model, family, tmp_path / "model.gguf", kind, **keys)
    check(model, unpacked(path, tmp_path / "checkpoint"))


@pytest.mark.parametrize("kind", quick_of(TYPES, {"BF16", "Q4_1", "Q3_K", "Q6_K"}))
def test_types(kind: str, tmp_path: Path) -> None:
    model = make_model("llama", **SIZES)
    path = write_gguf(model, "llama", tmp_path / "model.gguf", kind)
    check(model, unpacked(path, tmp_path / "checkpoint"))


def test_types_that_differ_within_a_gemm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in files named Q4_K_M."""
    model, others = make_model("llama", **SIZES), {"v_proj": "Q6_K", "up_proj": "Q5_1"}
    path = write_gguf(model, "llama", tmp_path / "model.gguf", "Q4_K", others=others)
    with caplog.at_level(logging.INFO):
        check(model, unpacked(path, tmp_path / "checkpoint"))
    if library() is not None:
        said = "multiplied as they are by the CPU kernels"
        assert f"weights of 8 bits by 16 inputs with minimums: {said} (2)" in caplog.text
        assert f"weights of 4 bits by 32 inputs with minimums: {said} (4)" in caplog.text


def parts_of(stem: str, whole: torch.Tensor, heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """q, k and v of one matrix in blocks, by the names that the converter has."""
    size = len(whole) // (heads + 2 * kv_heads)
    parts = torch.split(whole, [heads * size, kv_heads * size, kv_heads * size])
    name = "w{}" if stem.endswith("attention") else "{}_proj"
    return {f"{stem}.{name.format(x)}.weight": y for x, y in zip("qkv", parts, strict=True)}


REMOTES = {"chatglm": 1, "internlm2": 2, "baichuan": 3, "exaone": 1, "minicpm": 4}


@pytest.mark.parametrize("name", quick_of(REMOTES, {"chatglm"}))
def test_families_that_transformers_lacks(name: str, tmp_path: Path) -> None:
    """Drawn models are read alike; files of the last two families have q, k and v apart."""
    model = REMOTE[name](random.Random(REMOTES[name]))
    heads = int(str(model.keys["num_attention_heads"]))
    kv = "multi_query_group_num" if name == "chatglm" else "num_key_value_heads"
    kv_heads = int(str(model.keys.get(kv, heads)))
    hidden = int(str(model.keys["hidden_size"]))
    stored: dict[str, torch.Tensor] = {}
    for full, tensor in model.tensors.items():
        stem, suffix = full.rsplit(".", 1)
        if full.endswith("inv_freq"):
            continue
        if not stem.endswith(("wqkv", "W_pack")):
            stored[full] = tensor
            continue
        whole = tensor
        if name == "internlm2":
            groups = tensor.view(
                kv_heads, heads // kv_heads + 2, hidden // heads, *tensor.shape[1:]
            )
            parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
            whole = torch.cat([part.flatten(0, 2) for part in parts])
        found = parts_of(stem.rsplit(".", 1)[0], whole, heads, kv_heads)
        stored |= {key.replace("weight", suffix): x for key, x in found.items()}
    names = {"ffn_hidden_size": "intermediate_size", "num_layers": "num_hidden_layers"}
    names |= {"seq_length": "max_position_embeddings", "layernorm_epsilon": "rms_norm_eps"}
    names |= {"layer_norm_epsilon": "rms_norm_eps"}
    keys = {names.get(key, key): value for key, value in model.keys.items()}
    keys |= {
        "num_key_value_heads": kv_heads,
        "vocab_size": model.config.vocab_size,
        "head_dim": hidden // heads if name == "exaone" else None,
    }
    factors = {}
    if name == "minicpm":
        depth = float(str(keys["num_hidden_layers"]))
        factors = {
            "embedding_scale": float(str(keys["scale_emb"])),
            "residual_scale": float(str(keys["scale_depth"])) / depth**0.5,
            "logit_scale": hidden / float(str(keys["dim_model_base"])),
        }
    theta = 1e4 * float(str(keys.get("rope_ratio", 1)))
    rope = {"rope_theta": float(str(keys.get("rope_theta", theta)))}
    rope |= {"partial_rotary_factor": 0.5} if name == "chatglm" else {}
    rope |= model.keys.get("rope_scaling") or {} if name == "exaone" else {}
    file = SimpleNamespace(
        config=SimpleNamespace(**{**keys, "rope_parameters": rope}),
        named_parameters=lambda: stored.items(),
        named_buffers=tuple,
    )
    path = write_gguf(file, name, tmp_path / "model.gguf", **factors)
    check(model, unpacked(path, tmp_path / "checkpoint"))
