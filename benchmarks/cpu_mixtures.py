"""Mixtures of experts on a CPU beside llama.cpp, of published sizes but with few layers.

    python benchmarks/cpu_mixtures.py [--models NAME ...] [--threads N] [--rows NAME ...]

Files are made of random blocks in `.slipstream/bench`, with the vocabulary of `make chat`. Engines
take turns as in `cpu.py`. The last line is one JSON object.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cpu import HOME, copy_bandwidth, figures_of, peer_command, table, workers_of
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from report import commit
from slipstream_serve.chat_model import fetch

Shape = tuple[int, ...]


class Model(NamedTuple):
    """Sizes of a model, and the types of its matrices."""

    architecture: str
    hidden: int
    heads: int
    kv_heads: int
    head: int
    experts: int
    top_k: int
    inner: int
    of_experts: str
    of_others: str
    layers: int


MODELS = {
    "qwen3moe": Model("qwen3moe", 2048, 32, 4, 128, 128, 8, 768, "Q4_0", "Q4_0", 6),
    "gpt-oss": Model("gpt-oss", 2880, 64, 8, 64, 32, 4, 2880, "MXFP4", "Q8_0", 3),
}


def tensors_of(m: Model, vocab: int) -> Iterator[tuple[str, Shape, str]]:
    """List tensors: name, shape as torch has it, type."""
    q, kv = m.heads * m.head, m.kv_heads * m.head
    yield "token_embd.weight", (vocab, m.hidden), m.of_others
    yield "output.weight", (vocab, m.hidden), m.of_others
    yield "output_norm.weight", (m.hidden,), "F32"
    for layer in range(m.layers):
        at = f"blk.{layer}."
        for name, outputs, inputs in (
            ("attn_q", q, m.hidden),
            ("attn_k", kv, m.hidden),
            ("attn_v", kv, m.hidden),
            ("attn_output", m.hidden, q),
        ):
            yield f"{at}{name}.weight", (outputs, inputs), m.of_others
            if m.architecture == "gpt-oss":
                yield f"{at}{name}.bias", (outputs,), "F32"
        yield f"{at}ffn_gate_inp.weight", (m.experts, m.hidden), "F32"
        yield f"{at}attn_norm.weight", (m.hidden,), "F32"
        for name, outputs, inputs in (
            ("gate", m.inner, m.hidden),
            ("up", m.inner, m.hidden),
            ("down", m.hidden, m.inner),
        ):
            yield f"{at}ffn_{name}_exps.weight", (m.experts, outputs, inputs), m.of_experts
            if m.architecture == "gpt-oss":
                yield f"{at}ffn_{name}_exps.bias", (m.experts, outputs), "F32"
        if m.architecture == "gpt-oss":
            yield f"{at}post_attention_norm.weight", (m.hidden,), "F32"
            yield f"{at}attn_sinks.weight", (m.heads,), "F32"
            yield f"{at}ffn_gate_inp.bias", (m.experts,), "F32"
        else:
            yield f"{at}ffn_norm.weight", (m.hidden,), "F32"
            yield f"{at}attn_q_norm.weight", (m.head,), "F32"
            yield f"{at}attn_k_norm.weight", (m.head,), "F32"


def random_values(rng: np.random.Generator, name: str, shape: Shape, kind: str) -> np.ndarray:
    """Return values of fp32, or random blocks whose scales make values of 0.02 or so."""
    if kind == "F32":
        if name.endswith("norm.weight"):
            return np.ones(shape, np.float32)
        return rng.normal(0, 0.02, shape).astype(np.float32)
    elements, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    count = int(np.prod(shape)) // elements
    blocks = rng.integers(0, 256, (count, num_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = 127 - 7
    else:
        scale = np.float16(0.005 if kind == "Q4_0" else 0.0003)
        blocks[:, :2] = np.full(count, scale).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*shape[:-1], -1)


def keys_of(m: Model) -> dict[str, Any]:
    """Return the metadata below the architecture's name."""
    found: dict[str, Any] = {
        "block_count": m.layers,
        "context_length": 8192,
        "embedding_length": m.hidden,
        "feed_forward_length": m.inner,
        "expert_feed_forward_length": m.inner,
        "attention.head_count": m.heads,
        "attention.head_count_kv": m.kv_heads,
        "attention.key_length": m.head,
        "attention.value_length": m.head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        "expert_count": m.experts,
        "expert_used_count": m.top_k,
    }
    if m.architecture == "gpt-oss":
        found |= {"attention.sliding_window": 128}
    return found


def file_of(name: str, source: Path) -> Path:
    """Return the model's file, made if it is not there; its vocabulary is that of `source`."""
    m, path = MODELS[name], HOME / "bench" / f"{name}.gguf"
    if path.is_file():
        return path
    reader, draft = GGUFReader(source), path.with_suffix(".draft")
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(draft, m.architecture)
    for key, field in reader.fields.items():
        if key.startswith("tokenizer."):
            of = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], of)
    for key, value in keys_of(m).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{m.architecture}.{key}", value)
    rng = np.random.default_rng(0)
    vocab = len(reader.fields["tokenizer.ggml.tokens"].data)
    listed = list(tensors_of(m, vocab))
    for own, shape, kind in listed:
        elements, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        stored = shape if kind == "F32" else (*shape[:-1], shape[-1] // elements * num_bytes)
        size = int(np.prod(shape)) // elements * num_bytes
        dtype = np.dtype(np.float32 if kind == "F32" else np.uint8)
        writer.add_tensor_info(own, stored, dtype, size, GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for own, shape, kind in listed:
        writer.write_tensor_data(random_values(rng, own, shape, kind))
    writer.close()
    draft.rename(path)
    return path


def bytes_of_step(m: Model, path: Path) -> int:
    """Count the bytes of a file that a step of one row reads."""
    total = 0
    for tensor in GGUFReader(path).tensors:
        share = m.top_k / m.experts if "_exps" in tensor.name else 1
        total += 0 if tensor.name.startswith("token_embd") else int(tensor.n_bytes * share)
    return total


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", nargs="+", default=["decode-1", "decode-8", "prompt-128"])
    args = parser.parse_args()
    peer, source = peer_command(), fetch(HOME / "chat")
    rate = copy_bandwidth(args.threads)
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "commit": commit()}
    result |= {"load": os.getloadavg(), "threads": args.threads, "copy_bytes_s": round(rate)}
    for name in args.models:
        path = file_of(name, source)
        running = workers_of(path, args.threads, peer)
        rows = figures_of(running, args.rows, args.rounds)
        limit = bytes_of_step(MODELS[name], path) / rate
        about = {each.engine: each.about for each in running}
        result[name] = {"about": about, "rows": rows, "limit_ms": round(limit * 1e3, 3)}
        print(f"\n{name}, {args.threads} threads: one row reads for {limit * 1e3:.2f} ms")
        print(table(rows), flush=True)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
