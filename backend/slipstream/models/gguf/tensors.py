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
from slipstream.models.gguf.config import ROPE_FACTORS, family_of_file, form_of, keys_of
from slipstream.models.gguf.file import GgufFile, GgufTensor
from slipstream.models.gguf.parts import read_gguf
from slipstream.models.reader import Reader

REFERENCE = "gguf.json"

# Name in the file -> the decoder's; `post_...` norms are Gemma's.
_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "attention_out_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "mlp_out_norm",
}
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")


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
    """Return the tensors of a file by their Hugging Face names; raises `CheckpointError`."""
    family = family_of_file(file)
    form, keys = form_of(family), keys_of(file)
    heads = {"q_proj": keys.num_heads, "k_proj": keys.num_kv_heads} if form.pairs_rows else {}
    found: dict[str, TensorEntry] = {}
    for stored, tensor in file.tensors.items():
        if stored != ROPE_FACTORS:
            own = _own_name(file, stored)
            entry = TensorEntry(
                tensor.path,
                tensor.type.name,
                tensor.shape,
                tensor.begin,
                tensor.end,
                _paired_heads(file, stored, tensor, heads.get(own.split(".")[-2], 0)),
                form.norms_added if own.endswith("norm.weight") else 0.0,
            )
            found[family.tensors.stored(own)] = entry
    return found


def _own_name(file: GgufFile, stored: str) -> str:
    """Return the decoder's name of a tensor; refuse one that no family has."""
    outer, _, kind = stored.rpartition(".")
    if outer in _OUTER and kind in ("weight", "bias"):
        return f"{_OUTER[outer]}.{kind}"
    match = _BLOCK.fullmatch(stored)
    if match is None or match[2] not in _INNER:
        raise CheckpointError(f"{file.path}: tensor {clip(stored)} is not known")
    return f"model.layers.{match[1]}.{_INNER[match[2]]}.{match[3]}"


def _paired_heads(file: GgufFile, name: str, tensor: GgufTensor, heads: int) -> int:
    """Return the heads whose rows are in pairs; refuse rows that are not pairs of so many."""
    if heads and tensor.shape[0] % (2 * heads):
        raise CheckpointError(
            f"{file.path}: tensor {clip(name)} has {tensor.shape[0]} rows, which are no pairs for "
            f"{heads} heads"
        )
    return heads
