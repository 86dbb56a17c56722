"""Writes a real checkpoint of random bf16 weights: `python benchmarks/make_checkpoint.py DIR`.

Sharded as checkpoints are. What is written is noise of one block over and over: how fast weights
are read does not depend on them. A checkpoint that is there already is kept.
"""

import argparse
import functools
import json
import math
import os
import struct
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from shapes import SHAPES, tensor_shapes, write_config

SHARD_BYTES = 5_000_000_000
NOISE_BYTES = 32 << 20
INDEX = "model.safetensors.index.json"


@functools.cache
def noise(std: float, mean: float) -> memoryview:
    """A block of bf16 normal numbers."""
    numbers = np.random.default_rng(0).normal(mean, std, NOISE_BYTES // 2).astype(np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).data


def shards(shape: str) -> list[dict[str, tuple[int, ...]]]:
    """The tensors, divided into files of at most `SHARD_BYTES`."""
    files: list[dict[str, tuple[int, ...]]] = [{}]
    used = 0
    for name, size in tensor_shapes(shape).items():
        num_bytes = 2 * math.prod(size)
        if files[-1] and used + num_bytes > SHARD_BYTES:
            files.append({})
            used = 0
        files[-1][name] = size
        used += num_bytes
    return files


def write_tensor(descriptor: int, begin: int, num_bytes: int, block: memoryview) -> None:
    """Fill bytes `begin ..` of a file with the block, repeated."""
    at, end = begin, begin + num_bytes
    while at < end:
        offset = (at - begin) % len(block)
        at += os.pwrite(descriptor, block[offset : offset + end - at], at)


def write_shard(path: Path, tensors: dict[str, tuple[int, ...]], pool: ThreadPoolExecutor) -> int:
    """One safetensors file; returns the bytes of its tensors."""
    header, at = {}, 0
    for name, size in tensors.items():
        end = at + 2 * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    blocks = {1: noise(0.02, 1.0), 2: noise(0.02, 0.0)}  # norms, matrices
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
    try:
        os.pwrite(descriptor, struct.pack("<Q", len(text)) + text, 0)
        jobs = [
            (8 + len(text) + spec["data_offsets"][0], 2 * math.prod(size), blocks[len(size)])
            for (_, size), spec in zip(tensors.items(), header.values(), strict=True)
        ]
        list(pool.map(lambda job: write_tensor(descriptor, *job), jobs))
    finally:
        os.close(descriptor)
    return at


def usual_place(shape: str) -> Path:
    """Where every benchmark looks for, or makes, the checkpoint of a shape."""
    return Path(tempfile.gettempdir()) / shape


def make(shape: str, directory: Path) -> None:
    """Write the checkpoint, its index last: whoever finds that finds all."""
    if (directory / INDEX).is_file():
        return
    begin, total = time.perf_counter(), 0
    write_config(shape, directory)
    files, weight_map = shards(shape), {}
    with ThreadPoolExecutor(8) as pool:
        for i, tensors in enumerate(files, 1):
            name = f"model-{i:05}-of-{len(files):05}.safetensors"
            total += write_shard(directory / name, tensors, pool)
            weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index))
    seconds = time.perf_counter() - begin
    print(f"{directory}: {total / 1e9:.2f} GB written in {seconds:.1f} s")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    args = parser.parse_args()
    make(args.shape, args.directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
