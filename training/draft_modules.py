"""Medusa heads and an EAGLE-3 head in plain torch, and their checkpoints' layouts."""

import json
from pathlib import Path

import torch
from model import GatedMLP, Norm, Shape, rotary_tables, rotate
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F


class MedusaHeads(nn.Module):
    """Heads on the target's last state: head i says the token i + 2 places behind it.

    A head is one residual block before the target's own output layer (Cai et al., 2024).
    """

    def __init__(self, num_heads: int, hidden_size: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_heads))
        for block in self.blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)

    def forward(self, last: Tensor) -> list[Tensor]:
        """States [..., h] to one for each head."""
        return [last + F.silu(block(last)) for block in self.blocks]


class Eagle3(nn.Module):
    """One layer over (state of the target, next token); it goes on from its own states (Li, 2025).

    Args:
        shape: of the target.
        draft_ids: the tokens that it can say, by rising id.
        embedding: the target's, which stays as it is.
    """

    draft_ids: Tensor

    def __init__(self, shape: Shape, draft_ids: Tensor, embedding: Tensor) -> None:
        super().__init__()
        self.shape, hidden = shape, shape.hidden_size
        query, shared = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        self.register_buffer("draft_ids", draft_ids)
        self.embedding = [embedding]
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.input_layernorm, self.hidden_norm = (Norm(hidden, shape.eps) for _ in range(2))
        self.post_attention_layernorm = Norm(hidden, shape.eps)
        self.q_proj = nn.Linear(2 * hidden, query, bias=False)
        self.k_proj = nn.Linear(2 * hidden, shared, bias=False)
        self.v_proj = nn.Linear(2 * hidden, shared, bias=False)
        self.o_proj = nn.Linear(query, hidden, bias=False)
        self.mlp = GatedMLP(shape)
        self.norm = Norm(hidden, shape.eps)
        self.lm_head = nn.Linear(hidden, len(draft_ids), bias=False)
        self.lm_head.weight.data.copy_(embedding[draft_ids])
        for linear in (self.o_proj, self.mlp.down_proj):
            nn.init.normal_(linear.weight, std=0.01)

    def steps(self, taps: Tensor, token_ids: Tensor, count: int) -> list[Tensor]:
        """Logits [batch, n - 1 - i, draft vocabulary] of the drafts i = 0, 1, ...

        `taps [batch, n, 3 h]` are the target's states. Draft i of place p has as its input the
        state that draft i - 1 of place p - 1 made, and sees of what lies i or more places before
        it the keys and values of draft 0, whose states are the target's.
        """
        embedded = F.embedding(token_ids[:, 1:], self.embedding[0])
        hidden, found = self.fc(taps[:, :-1]), []
        keys: list[tuple[Tensor, Tensor]] = []
        for number in range(count):
            states = self._layer(hidden, embedded[:, number:], keys, number)
            found.append(self.lm_head(self.norm(states)))
            hidden = states[:, :-1]
        return found

    def _layer(
        self, hidden: Tensor, embedded: Tensor, keys: list[tuple[Tensor, Tensor]], number: int
    ) -> Tensor:
        """The layer on places `number ..`; its keys and values are added to `keys`."""
        x = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), -1)
        batch, count, _ = x.shape
        size = self.shape.head_size
        cos, sin = rotary_tables(self.shape, x.device)
        cos, sin = cos[number : number + count], sin[number : number + count]
        q, k, v = (
            projection(x).view(batch, count, -1, size).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        groups = self.shape.num_heads // self.shape.num_kv_heads
        q, k = rotate(q, cos, sin), rotate(k, cos, sin).repeat_interleave(groups, 1)
        keys.append((k, v.repeat_interleave(groups, 1)))
        # Of places that lie before all that is its own: the keys of the target's states.
        length = number + count
        scores = q @ keys[0][0].mT * size**-0.5
        rows = torch.arange(number, length, device=x.device)[:, None]
        scores = scores.masked_fill(
            torch.arange(length, device=x.device) > rows - number, float("-inf")
        )
        # Of draft i, whose first place is i, a query sees what lies `number - i` places before it.
        own = [(q * key[:, :, :count]).sum(-1, keepdim=True) * size**-0.5 for key, _ in keys[1:]]
        weights = torch.cat((scores, *own), -1).softmax(-1)
        mixed = weights[..., :length] @ keys[0][1]
        for i, (_, value) in enumerate(keys[1:]):
            mixed = mixed + weights[..., length + i, None] * value[:, :, :count]
        hidden = hidden + self.o_proj(mixed.transpose(1, 2).reshape(batch, count, -1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def save_medusa(heads: MedusaHeads, directory: Path) -> None:
    """Writes config.json and medusa_lm_head.safetensors (bf16), without output layers."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"medusa_num_heads": len(heads.blocks), "medusa_num_layers": 1}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {
        f"{number}.0.linear.{name}": tensor.detach().to(torch.bfloat16).contiguous().cpu()
        for number, block in enumerate(heads.blocks)
        for name, tensor in block.state_dict().items()
    }
    _write(tensors, directory / "medusa_lm_head.safetensors")


def save_eagle3(head: Eagle3, directory: Path) -> None:
    """Writes config.json and model.safetensors (bf16) as EAGLE-3's own checkpoints have them."""
    directory.mkdir(parents=True, exist_ok=True)
    shape = head.shape
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": len(head.draft_ids),
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.intermediate_size,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.eps,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {}
    for name, tensor in head.state_dict().items():
        if name == "draft_ids":
            continue
        if name.startswith(("q_", "k_", "v_", "o_")):
            name = f"midlayer.self_attn.{name}"
        elif name.startswith(("mlp", "input", "hidden", "post")):
            name = f"midlayer.{name}"
        tensors[name] = tensor.detach().to(torch.bfloat16).contiguous().cpu()
    draft_ids = head.draft_ids.cpu()
    tensors["d2t"] = draft_ids - torch.arange(len(draft_ids))
    tensors["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool)
    tensors["t2d"][draft_ids] = True
    _write(tensors, directory / "model.safetensors")


def _write(tensors: dict[str, Tensor], file: Path) -> None:
    save_file(tensors, file, {"format": "pt"})
    file.chmod(0o644)  # safetensors makes it private
