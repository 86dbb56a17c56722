"""Give the tensors of a GGUF file their Hugging Face names, and say how their values are stored.

A directory refers to a file by `gguf.json`: `file`, its size in `bytes`, and `header_sha256`, by
which a file that was replaced since is found out.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from slipstream_contract.errors import clip

from slipstream.errors import CheckpointError
from slipstream.models.entries import TensorEntry
from slipstream.models.gguf.config import (
    ROPE_FACTORS,
    ROPE_FACTORS_BY_LENGTH,
    family_of_file,
    form_of,
    keys_of,
)
from slipstream.models.gguf.file import GgufFile, GgufTensor
from slipstream.models.gguf.parts import read_gguf
from slipstream.models.gguf_form import JOINED_QKV, GgufForm
from slipstream.models.reader import Reader

REFERENCE = "gguf.json"

# Name in the file -> the decoder's; `post_...` norms are Gemma's.
_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "position_embd": "model.embed_positions",
    "token_embd_norm": "model.embed_norm",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": JOINED_QKV,
    "attn_output": "self_attn.o_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "attention_out_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "mlp_out_norm",
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Of files whose attention and MLP read norms of the same sum.
_TWO_NORMS = {"attn_norm_2": "input_layernorm", "attn_norm": "post_attention_layernorm"}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_OF_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.")
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_0-9]+)\.(weight|bias)")


def reference_to(file: GgufFile, path: str) -> dict[str, object]:
    """Return the contents of `gguf.json`; `path` is absolute or relative to its directory."""
    return {"file": path, "bytes": file.num_bytes, "header_sha256": file.digest}


def referenced_entries(directory: Path, reference: Mapping[str, object]) -> dict[str, TensorEntry]:
    """Return the tensors of the file that `gguf.json` names, by their Hugging Face names.

    Raises `CheckpointError`, if it is not the file from which the directory was made, too.
    """
    reader = Reader(reference, str(directory / REFERENCE))
    name = reader.get("file")
    if not isinstance(name, str) or not name or "\0" in name:
        raise reader.refusal("file", "is not a path")
    file = read_gguf(Path(os.path.normpath(directory / name)))
    for key, found in (("bytes", file.num_bytes), ("header_sha256", file.digest)):
        if reader.get(key) != found:
            raise reader.refusal(
                key, f"is not that of {file.path}, {found}: run `slipstream compose` again"
            )
    return entries(file)


def entries(file: GgufFile) -> dict[str, TensorEntry]:
    """Return the tensors of a file by the names of `GgufForm.tensors`; raises `CheckpointError`."""
    form, keys = form_of(family_of_file(file)), keys_of(file)
    heads = {"q_proj": keys.num_heads, "k_proj": keys.num_kv_heads} if form.pairs_rows else {}
    behind = range(keys.num_layers, keys.whole("block_count"))  # which predict further tokens
    found: dict[str, TensorEntry] = {}
    for stored, tensor in file.tensors.items():
        if stored in (ROPE_FACTORS, *ROPE_FACTORS_BY_LENGTH):
            continue
        block = _BLOCK.fullmatch(stored)
        if (layer := _OF_LAYER.match(stored)) and int(layer[1]) in behind:
            continue
        if block is not None and block[2] in _EXPERTS:
            found |= _experts(file, stored, tensor, f"{block[1]}", _EXPERTS[block[2]], block[3])
            continue
        own = _own_name(file, stored, form)
        paired = _paired_heads(file, stored, tensor, heads.get(own.split(".")[-2], 0))
        added = form.norms_added if own.endswith("norm.weight") else 0.0
        shape = tensor.shape
        if own.endswith("shared_expert_gate.weight") and len(shape) == 1:
            shape = (1, *shape)
        found[_flat(own)] = TensorEntry(
            tensor.path, tensor.type.name, shape, tensor.begin, tensor.end, paired, added
        )
    return found


def _flat(name: str) -> str:
    """Return the name of a tensor that stands in its layer by itself, not below one of its own."""
    name = name.removesuffix(".weight") if name.endswith(".sinks.weight") else name
    return name.replace(".e_score_correction.bias", ".e_score_correction_bias")


def _experts(
    file: GgufFile, stored: str, tensor: GgufTensor, layer: str, name: str, kind: str
) -> dict[str, TensorEntry]:
    """Return the tensor of each expert, which lie behind one another."""
    if len(tensor.shape) != (3 if kind == "weight" else 2):
        raise CheckpointError(
            f"{file.path}: tensor {clip(stored)} is {list(tensor.shape)}: not of experts"
        )
    count, *shape = tensor.shape
    size = (tensor.end - tensor.begin) // max(count, 1)
    return {
        f"model.layers.{layer}.mlp.experts.{i}.{name}.{kind}": TensorEntry(
            tensor.path,
            tensor.type.name,
            tuple(shape),
            tensor.begin + i * size,
            tensor.begin + (i + 1) * size,
        )
        for i in range(count)
    }


def _own_name(file: GgufFile, stored: str, form: GgufForm) -> str:
    """Return the decoder's name of a tensor; refuse one that no family has."""
    outer, _, kind = stored.rpartition(".")
    if outer in _OUTER and kind in ("weight", "bias"):
        return f"{_OUTER[outer]}.{kind}"
    two = _TWO_NORMS if "blk.0.attn_norm_2.weight" in file.tensors else {}
    match, inner = _BLOCK.fullmatch(stored), {**_INNER, **form.names, **two}
    if match is None or match[2] not in inner:
        raise CheckpointError(f"{file.path}: tensor {clip(stored)} is not known")
    return f"model.layers.{match[1]}.{inner[match[2]]}.{match[3]}"


def _paired_heads(file: GgufFile, name: str, tensor: GgufTensor, heads: int) -> int:
    """Return the heads whose rows are in pairs; refuse rows that are not pairs of so many."""
    if heads and tensor.shape[0] % (2 * heads):
        raise CheckpointError(
            f"{file.path}: tensor {clip(name)} has {tensor.shape[0]} rows, which are no pairs for "
            f"{heads} heads"
        )
    return heads
