"""How fast weights are read, beside what the page cache gives: `python benchmarks/load.py DIR`.

For each number of threads: plain reads of all files into one small buffer a thread (what the page
cache can give), and the engine's reader into tensors of the device. Files are read once before.
"""

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from slipstream.models import reading
from slipstream.models.entries import TensorEntry
from slipstream.models.files import tensor_entries
from slipstream.models.reading import Region, TensorReader, num_threads

_BUFFER_BYTES = 4 << 20  # stays in a cache of the processor: the reads are at their best


def plain_read(files: list[Path], threads: int) -> float:
    """Seconds to read the files in pieces."""
    begin = time.perf_counter()

    def read(job: tuple[Path, int]) -> None:
        path, worker = job
        memory = bytearray(_BUFFER_BYTES)
        descriptor = os.open(path, os.O_RDONLY)
        for at in range(worker * _BUFFER_BYTES, path.stat().st_size, threads * _BUFFER_BYTES):
            os.preadv(descriptor, [memory], at)
        os.close(descriptor)

    with ThreadPoolExecutor(threads) as pool:
        for path in files:
            list(pool.map(read, [(path, worker) for worker in range(threads)]))
    return time.perf_counter() - begin


def load(entries: dict[str, TensorEntry], device: torch.device, threads: int) -> float:
    """Seconds until every tensor is on the device, memory for them taken before."""
    outs = [torch.empty(e.shape, dtype=torch.bfloat16, device=device) for e in entries.values()]
    if device.type == "cuda":
        torch.cuda.synchronize()
    reader = TensorReader(device, threads)
    begin = time.perf_counter()
    for (name, entry), out in zip(entries.items(), outs, strict=True):
        reader.read([Region(name, entry.file, entry.begin, torch.bfloat16)], [out])
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    reader.close()
    return seconds


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--piece-mb", type=int, nargs="+", default=[reading.PIECE_BYTES >> 20])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, 4, 8, num_threads()}))
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    entries = tensor_entries(args.directory)
    files = sorted({entry.file for entry in entries.values()})
    size = sum(entry.end - entry.begin for entry in entries.values()) / 1e9
    plain_read(files, num_threads())
    rows = []
    for threads in args.threads:
        plain = size / plain_read(files, threads)
        for piece in args.piece_mb:
            reading.PIECE_BYTES = piece << 20
            ours = size / load(entries, device, threads)
            rows.append(
                {"threads": threads, "piece_mb": piece, "plain_gb_s": plain, "load_gb_s": ours}
            )
            print(
                f"{threads:3} threads, {piece:3} MB: page cache {plain:5.1f} GB/s, "
                f"weights to {device.type} {ours:5.1f} GB/s ({ours / plain:.0%})",
                flush=True,
            )
    print(json.dumps({"gb": round(size, 3), "device": device.type, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
