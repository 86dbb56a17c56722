"""The models that are measured, as the config.json of a checkpoint."""

import json
from pathlib import Path
from typing import Any

_COMMON = {
    "max_position_embeddings": 32768,
    "rope_theta": 500000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
_LLAMA = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": _LLAMA
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "tie_word_embeddings": True,
    },
    "llama-small": _LLAMA  # of the default model, for a CPU
    | {
        "vocab_size": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": 256,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 560,
        "tie_word_embeddings": True,
    },
    "llama-14b": _LLAMA
    | {
        "vocab_size": 151936,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 17408,
        "tie_word_embeddings": False,
    },
    "llama-3.3-70b": _LLAMA
    | {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 28672,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": _COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "small-mixture": _COMMON  # for a processor
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 8192,
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 3072,
        "moe_intermediate_size": 384,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "mixtral-8x7b": _COMMON
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "swiglu_limit": 7.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
        "rope_theta": 150000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "tiny": _LLAMA  # eight ranks can divide its heads, four stages its layers
    | {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 256,
        "tie_word_embeddings": True,
    },
}


def write_config(shape: str, directory: Path) -> None:
    """Write `config.json` of the shape."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SHAPES[shape], indent=2))


def tensor_shapes(shape: str) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, in the order in which a model saves them; no experts'."""
    s = SHAPES[shape]
    assert not {"num_experts", "num_local_experts"} & s.keys(), f"{shape} has experts"
    hidden, inner, vocab = s["hidden_size"], s["intermediate_size"], s["vocab_size"]
    queries = s["num_attention_heads"] * s["head_dim"]
    keys = s["num_key_value_heads"] * s["head_dim"]
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(s["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (hidden,),
            "mlp.down_proj.weight": (hidden, inner),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
        }
        tensors |= {f"model.layers.{i}.{name}": size for name, size in layer.items()}
    tensors["model.norm.weight"] = (hidden,)
    if not s["tie_word_embeddings"]:
        tensors["lm_head.weight"] = (vocab, hidden)
    return tensors
