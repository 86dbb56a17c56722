"""Prompts over caches in each format: blocks read as they are, and unpacked first, in turns.

    python benchmarks/prefill_cache.py

Microseconds of attention of a layer at Llama-3.1-8B's heads; less than a minute on an H200.
"""

import argparse
from collections.abc import Callable
from statistics import median

import torch
from paged import kv_spec, paged
from slipstream.kernels.attention.backend import Chunks, PagedCuda, Rows
from slipstream.kernels.attention.spec import AttentionSpec
from slipstream.kernels.cache.kv_format import FORMATS
from slipstream.kernels.cache.unpack import is_worth_it, num_seen_blocks
from timing import BLOCK, DTYPE, HEAD_SIZE, KV_HEADS, Q_HEADS, need_gpu, rows, time_graph

MIXES = {  # queries and cached tokens of each chunk
    "2048": [(2048, 2048)],
    "4 x 512": [(512, 512)] * 4,
    "2048 after 16384": [(2048, 18432)],
    "512": [(512, 512)],
    "128": [(128, 128)],
    "16 after 8192": [(16, 8208)],
}
TURNS = 3


def backend_of(name: str) -> PagedCuda:
    """Return the backend of one layer with a cache in this format."""
    cached = kv_spec(name, KV_HEADS, HEAD_SIZE).dtype
    backend = PagedCuda(AttentionSpec("cuda", DTYPE, cached, Q_HEADS, KV_HEADS, HEAD_SIZE, BLOCK))
    backend.reserve(32_768, 1024, torch.device("cuda"))
    return backend


def runs_of(mix: list[tuple[int, int]], name: str, unpacks: bool) -> list[Callable[[], None]]:
    """Return four runs, each over a cache of its own."""
    made: list[Callable[[], None]] = []
    backend, chunks = backend_of(name), [queries for queries, _ in mix]
    starts = torch.tensor([0, *chunks]).cumsum(0).to(torch.int32).cuda()
    count = num_seen_blocks(mix, BLOCK, 0) if unpacks else 0
    for _ in range(4):
        q, (cache, tables, lengths) = (
            rows(sum(chunks), Q_HEADS, HEAD_SIZE),
            paged([length for _, length in mix], name),
        )
        where = (Rows(tables, lengths), Chunks(starts, max(chunks), count), HEAD_SIZE**-0.5)
        out = torch.empty_like(q)

        def run(q=q, cache=cache, where=where, out=out) -> None:  # type: ignore[no-untyped-def]
            backend.prefill(q, cache, *where, out, 0)

        made.append(run)
    return made


def main() -> None:
    """Print a line for each mix and format."""
    argparse.ArgumentParser(description=str(__doc__).partition("\n")[0]).parse_args()
    need_gpu()
    print(f"{torch.cuda.get_device_name()}; us a layer, median of {TURNS} turns")
    for title, mix in MIXES.items():
        ways = {("auto", False): runs_of(mix, "auto", False)}
        ways |= {(name, how): runs_of(mix, name, how) for name in FORMATS for how in (False, True)}
        times: dict[tuple[str, bool], list[float]] = {way: [] for way in ways}
        for _ in range(TURNS):
            for way, runs in ways.items():
                times[way].append(1e6 * time_graph(runs, replays=9))
        plain = median(times["auto", False])
        print(f"{title:18} 16 bits {plain:8.1f}", flush=True)
        chosen = "unpacked" if is_worth_it(mix, Q_HEADS, KV_HEADS, BLOCK, 0) else "packed"
        for name in FORMATS:
            packed, unpacked = (median(times[name, how]) for how in (False, True))
            shares = f"{packed / plain:5.2f} -> {unpacked / plain:5.2f} of 16 bits"
            line = f"packed {packed:8.1f}  unpacked {unpacked:8.1f}  {shares}; chosen: {chosen}"
            print(f"{title:18} {name:7} {line}", flush=True)


if __name__ == "__main__":
    main()
