"""EAGLE-3 (Li et al., 2025): one layer over a model's states and its next tokens.

Its input at a place is the model's state there, fused from those of three layers, beside the
embedding of the token behind it. It says the token after that, and goes on from its own states. The
checkpoint is as its authors write it: `fc`, `midlayer` (or `layers.0`), `norm`, `lm_head` over a
draft vocabulary, whose token i is the model's token `i + d2t[i]`.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.fuse.rewrite import fused
from slipstream.layers.attention import Attention, AttentionInputs
from slipstream.layers.embedding import Table
from slipstream.layers.linear import Linear, LinearAdd
from slipstream.layers.mlp import GatedMLP
from slipstream.layers.norm import Norm
from slipstream.layers.residual import Residual
from slipstream.layers.rope import cos_sin_table
from slipstream.models.axes import Activation, Axes, TensorNames
from slipstream.models.entries import TensorEntry
from slipstream.models.files import read_json, tensor_entries
from slipstream.models.hf import read_model
from slipstream.models.model_config import ModelConfig
from slipstream.models.reader import Reader
from slipstream.models.source import Weights

_NAMES = ("LlamaForCausalLMEagle3", "LlamaForCausalLM")
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_INTEGERS = {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """What an EAGLE-3 checkpoint says."""

    model: ModelConfig  # of its layer
    tensors: TensorNames
    draft_vocab_size: int
    layers: tuple[int, int, int]  # of the target, before which its states are taken
    has_embedding: bool


def _layers(config: Reader, count: int) -> tuple[int, int, int]:
    """Return the layers of the target before which states are taken."""
    own = config.child("eagle_config")
    source = own if own.has(_LAYERS) else config
    if not source.has(_LAYERS):
        if count < 4:
            raise CheckpointError(
                f"speculation = eagle3: a target of {count} layers, without {_LAYERS} in the "
                "draft's config.json, has no low, middle and high layer; at least 4 are needed"
            )
        return 2, count // 2, count - 3
    found = source.data[_LAYERS]
    if isinstance(found, list) and all(type(i) is int and 0 <= i < count for i in found):
        layers = tuple(int(i) for i in found)
        if len(layers) == 3:
            return layers
    raise source.refusal(_LAYERS, f"is not a list of three of the target's {count} layers")


def read_eagle3(directory: Path, target: ModelConfig, is_random: bool = False) -> Eagle3Config:
    """Read config.json of an EAGLE-3 draft for this target; raises `CheckpointError`.

    Args:
        directory: the draft's checkpoint.
        target: the model that it drafts for.
        is_random: whether its weights are not read.
    """
    path = directory / "config.json"
    config = Reader(read_json(path), str(path))
    names = config.data.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _NAMES:
        raise config.refusal("architectures", f"is not one of {', '.join(_NAMES)}: no EAGLE-3")
    if not config.has("draft_vocab_size"):
        raise CheckpointError(
            f"{path}: draft_vocab_size is missing: an EAGLE-1 or EAGLE-2 draft, or none; only "
            "EAGLE-3 is implemented"
        )
    d = target.dims
    draft_vocab_size = config.whole("draft_vocab_size", most=d.vocab_size)
    layers = _layers(config, d.num_layers)
    for key, wanted in (("target_hidden_size", d.hidden_size), ("num_hidden_layers", 1)):
        if config.has(key) and config.whole(key) != wanted:
            raise config.refusal(key, f"is not {wanted}")
    for key in ("eagle_config", _LAYERS, "draft_vocab_size", "target_hidden_size"):
        config.data = {name: value for name, value in config.data.items() if name != key}
    model = read_model(config, "LlamaForCausalLM", directory)
    for key in ("hidden_size", "vocab_size"):
        if getattr(model.dims, key) != getattr(d, key):
            raise config.refusal(key, f"is not the target's, {getattr(d, key)}")
    if model.dims.num_layers != 1:
        raise config.refusal("num_hidden_layers", "is not 1")
    entries = {} if is_random else tensor_entries(directory)
    fc = entries.get("fc.weight")
    if fc is not None and fc.shape == (d.hidden_size, 2 * d.hidden_size):
        raise CheckpointError(
            f"{fc.file}: tensor fc.weight is {list(fc.shape)}: an EAGLE-1 or EAGLE-2 draft; only "
            "EAGLE-3 is implemented"
        )
    own = {"midlayer": "layers.0"} if any(n.startswith("layers.0.") for n in entries) else {}
    tensors = TensorNames(own, (".rotary_emb.inv_freq", "d2t", "t2d"))
    return Eagle3Config(model, tensors, draft_vocab_size, layers, "embed_tokens.weight" in entries)


def _integers(entry: TensorEntry) -> Tensor:
    """Read a tensor of integers."""
    if entry.dtype not in _INTEGERS or not math.prod(entry.shape):
        raise CheckpointError(f"{entry.file}: d2t or t2d is {entry.dtype} {list(entry.shape)}")
    with entry.file.open("rb") as file:
        file.seek(entry.begin)
        data = bytearray(file.read(entry.end - entry.begin))
    return torch.frombuffer(data, dtype=_INTEGERS[entry.dtype]).reshape(entry.shape).long()


def read_draft_ids(directory: Path, draft_vocab_size: int, vocab_size: int) -> Tensor | None:
    """Return the model's token of each draft token, `[draft vocab] i64`; None: the same.

    Raises `CheckpointError` where d2t is missing, leaves the vocabulary, gives a token twice, or
    contradicts t2d.
    """
    entries = tensor_entries(directory)
    d2t, t2d = entries.get("d2t"), entries.get("t2d")
    if d2t is None:
        if draft_vocab_size != vocab_size:
            raise CheckpointError(
                f"{directory}: tensor d2t is missing, but draft_vocab_size = {draft_vocab_size} "
                f"is not the vocabulary's {vocab_size}"
            )
        return None
    if d2t.shape != (draft_vocab_size,):
        raise CheckpointError(
            f"{d2t.file}: tensor d2t is {list(d2t.shape)}, not [{draft_vocab_size}]"
        )
    draft_ids = _integers(d2t) + torch.arange(draft_vocab_size)
    if not 0 <= int(draft_ids.min()) <= int(draft_ids.max()) < vocab_size:
        raise CheckpointError(f"{d2t.file}: tensor d2t leaves a vocabulary of {vocab_size}")
    if len(set(draft_ids.tolist())) != draft_vocab_size:
        raise CheckpointError(f"{d2t.file}: tensor d2t gives a token twice")
    if t2d is not None:
        said = torch.zeros(vocab_size, dtype=torch.bool)
        said[draft_ids] = True
        if t2d.shape != (vocab_size,) or not torch.equal(_integers(t2d).bool(), said):
            raise CheckpointError(f"{t2d.file}: tensor t2d contradicts d2t")
    return draft_ids


class _Beside:
    """The norms of an embedding and of a state, `[n, 2 hidden]`, each of its half."""

    def __init__(self, of_embedding: Norm, of_state: Norm) -> None:
        self._norms = (of_embedding, of_state)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise the halves."""
        parts = [part.contiguous() for part in x.chunk(2, dim=-1)]
        return torch.cat([norm(part) for norm, part in zip(self._norms, parts, strict=True)], -1)


class Eagle3:
    """The layer, what is fused into its input, and its output layer.

    Args:
        w: its weights.
        config: what its checkpoint says.
        embedding: the target's, `[vocab, hidden]`, where it has none of its own.
        draft_ids: `[draft vocab] i64`; None: its tokens are the target's.
        num_positions: of the longest sequence.
    """

    def __init__(
        self,
        w: Weights,
        config: Eagle3Config,
        embedding: Table,
        draft_ids: Tensor | None,
        num_positions: int,
    ) -> None:
        d, axes = config.model.dims, config.model.axes
        self.draft_ids, self.vocab_size = draft_ids, d.vocab_size
        self.embedding = embedding
        if config.has_embedding:
            self.embedding = Table(w.tensor("embed_tokens.weight", d.vocab_size, d.hidden_size))
        self._fc = Linear.read(w, ("fc",), (d.hidden_size,), 3 * d.hidden_size)
        layer = w.at("midlayer")

        def norm(name: str, source: Weights = layer) -> Norm:
            return Norm(source.at(name), d.hidden_size, d.eps)

        self._norms = _Beside(norm("input_layernorm"), norm("hidden_norm"))
        self.attention = Attention(
            layer.at("self_attn"),
            d,
            cos_sin_table(config.model.rope, d.head_size, num_positions, w.device),
            axes.qkv_bias,
            axes.out_bias,
            inputs=2 * d.hidden_size,
        )
        assert axes == Axes(
            qkv_bias=axes.qkv_bias, out_bias=axes.out_bias, mlp_bias=axes.mlp_bias
        ), "an axis of Llama's that is not here"
        assert axes.activation is Activation.SILU
        self._mlp_norm = norm("post_attention_layernorm")
        self._mlp = GatedMLP(layer.at("mlp"), d, axes.mlp_bias)
        self._norm = norm("norm", w)
        self._output = Linear.read(w, ("lm_head",), (config.draft_vocab_size,), d.hidden_size)
        self._fuse()

    def _fuse(self) -> None:
        """Fuse the places whose stages GEMMs know."""
        out, down = fused(self.attention.out), fused(self._mlp.down)
        assert isinstance(out, LinearAdd)
        assert isinstance(down, LinearAdd)
        self.attention.out, self._mlp.down = out, down

    def fuse_states(self, states: Tensor) -> Tensor:
        """The target's states before the three layers, `[n, 3 hidden]`, to one `[n, hidden]`."""
        return self._fc(states)

    def __call__(
        self, token_ids: Tensor, states: Tensor, inputs: AttentionInputs, cache: Tensor
    ) -> Tensor:
        """Return its states `[n, hidden]`, from `states [n, hidden]` and the tokens behind them.

        Writes keys and values at the places of the states.
        """
        embedded = self.embedding.rows(token_ids)
        beside = Residual(torch.cat((embedded, states), dim=-1))
        residual = Residual(states.clone())
        projected = self.attention.project(self._norms, beside)
        self.attention.add(projected, residual, inputs, cache)
        self._mlp(self._mlp_norm, residual)
        return residual.values

    def logits(self, states: Tensor) -> Tensor:
        """Logits `[n, vocab]` of the target's tokens; -inf of those that it cannot say."""
        logits = self._output(self._norm(states))
        if self.draft_ids is None:
            return logits
        shape = (len(logits), self.vocab_size)
        full = torch.full(shape, -torch.inf, dtype=logits.dtype, device=logits.device)
        full[:, self.draft_ids] = logits
        return full
