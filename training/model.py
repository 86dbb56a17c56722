"""A Llama in plain torch, with the parameter names of transformers' LlamaForCausalLM.

Grouped-query attention, rotary positions (halves rotated, as transformers does it), RMSNorm, gated
SiLU, tied embeddings. What is trained here loads there unchanged; `evaluate.py` checks that the
logits agree.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

NAME = "pystdlib-5m"  # of the model, shown to users


@dataclass(frozen=True)
class Shape:
    """What fixes the parameters: all sizes, and the base of the rotary angles."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 7
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    intermediate_size: int = 560
    context: int = 2048
    rope_theta: float = 10000.0
    eps: float = 1e-5


def rotary_tables(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [context, head_size] in fp32, the two halves alike."""
    exponents = torch.arange(0, shape.head_size, 2, device=device) / shape.head_size
    angles = torch.outer(torch.arange(shape.context, device=device), shape.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [batch, heads, tokens, head_size]."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Norm(nn.Module):
    """RMSNorm, accumulated in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Causal self-attention; query heads share key and value heads in groups."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        query, shared = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shared, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shared, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, tokens, hidden] -> the same."""
        batch, tokens, _ = x.shape
        query, key, value = (
            projection(x).view(batch, tokens, -1, self.shape.head_size).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, tokens, hidden] -> the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer: both halves normalise their input and add to the residual stream."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.eps)
        self.mlp = GatedMLP(shape)
        self.dropout = dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, tokens, hidden] -> the same."""
        attended = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + F.dropout(attended, self.dropout, self.training)
        gated = self.mlp(self.post_attention_layernorm(x))
        return x + F.dropout(gated, self.dropout, self.training)


class Trunk(nn.Module):
    """Embeddings, layers and the last norm; named as transformers' `model.`."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape, dropout) for _ in range(shape.num_layers))
        self.norm = Norm(shape.hidden_size, shape.eps)


class Llama(nn.Module):
    """The whole model; the output matrix is the embedding matrix."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape, dropout)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.num_layers) ** 0.5
                                if last else 0.02)  # fmt: skip

    def hidden(self, token_ids: Tensor) -> Tensor:
        """token_ids [batch, tokens] -> normalised states [batch, tokens, hidden]."""
        cos, sin = rotary_tables(self.shape, token_ids.device)
        cos, sin = cos[: token_ids.shape[1]], sin[: token_ids.shape[1]]
        x = self.model.embed_tokens(token_ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x)

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [batch, tokens] -> logits [batch, tokens, vocab]."""
        return F.linear(self.hidden(token_ids), self.model.embed_tokens.weight)


def save(model: Llama, directory: Path, end_id: int) -> None:
    """Writes config.json, generation_config.json and model.safetensors (bf16)."""
    directory.mkdir(parents=True, exist_ok=True)
    shape = model.shape
    config = {
        "_name_or_path": NAME,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.intermediate_size,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "torch_dtype": "bfloat16",
    }
    generation = {"bos_token_id": end_id, "eos_token_id": end_id, "pad_token_id": end_id}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tensors = {name: tensor.to(torch.bfloat16).contiguous().cpu()
               for name, tensor in model.state_dict().items()}  # fmt: skip
    file = directory / "model.safetensors"
    save_file(tensors, file, {"format": "pt"})
    file.chmod(0o644)  # safetensors makes it private


def load(directory: Path, device: torch.device) -> Llama:
    """The model that `save` wrote, in fp32."""
    config = json.loads((directory / "config.json").read_text())
    shape = Shape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_size=config["head_dim"],
        intermediate_size=config["intermediate_size"],
        context=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        eps=config["rms_norm_eps"],
    )
    model = Llama(shape)
    tensors = load_file(directory / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model.to(device).eval()


def describe(shape: Shape) -> str:
    """One line with the sizes."""
    return ", ".join(f"{name} {value}" for name, value in asdict(shape).items())
