"""Host memory behind the KV cache: `python benchmarks/host_tier.py [SUITE ...] [--output FILE]`.

    copies   bandwidth of copies of blocks, as a share of the PCIe bandwidth measured here
    beside   inter-token time of a steady decode while blocks are copied both ways without a pause
    prefix   first token after a long prefix that is computed, in host memory, on the device
    others   inter-token time of a steady decode while prefixes come in from host memory

Without arguments on a GPU: the 8B shape, prefixes of 16,384 tokens. `--small`: a tiny model and
short prefixes, for a CPU: it shows that all of it runs. The last line is one JSON object.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from engine import build
from host_copies import Copies, dma_rates, endless
from slipstream import wire
from slipstream.engine.engine import Engine
from slipstream.kvcache.host import Direction
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams
from workloads import VOCABULARY

BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of the workload; lengths in tokens."""

    shape: str
    prefix: int
    tail: int  # of a prompt, behind the prefix
    num_others: int
    repeat: int
    budget: int  # max_num_batched_tokens
    dma_bytes: int
    num_moved: int  # blocks, in `copies` and `beside`

    @property
    def max_model_len(self) -> int:
        """Room for a prompt, its answer, and for those who decode meanwhile."""
        return self.prefix + self.tail + 8 * BLOCK_SIZE


FULL = Size("llama-3.1-8b", 16_384, 32, 32, 5, 4096, 1 << 30, 256)
SMALL = Size("tiny", 512, 32, 4, 3, 512, 1 << 24, 8)


class Drive:
    """Requests, stepped through an engine; when tokens came."""

    def __init__(self, engine: Engine, size: Size) -> None:
        self.engine = engine
        self._size = size
        self._rng = np.random.default_rng(7)
        self._next = 0
        self.first: dict[int, float] = {}  # request -> seconds since it was submitted
        self.num_tokens: dict[int, int] = {}
        self.ended: set[int] = set()
        self._began: dict[int, float] = {}
        self.steps: list[float] = []  # when each ended

    def tokens(self, length: int) -> list[int]:
        """A prompt that nobody had before."""
        ids: list[int] = self._rng.integers(0, VOCABULARY, length).tolist()
        return ids

    def submit(self, prompt: list[int], max_tokens: int) -> int:
        """A greedy request that ends at its length."""
        number = self._next
        self._next += 1
        sampling = SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens, temperature=0.0)
        self._began[number] = time.perf_counter()
        self.num_tokens[number] = 0
        self.engine.submit(
            b"bench", wire.Submit(number, pack(prompt), sampling, time.monotonic_ns())
        )
        return number

    def step(self) -> None:
        """One step of the engine."""
        outputs = self.engine.step().get(b"bench", [])
        now = time.perf_counter()
        self.steps.append(now)
        for tokens in outputs:
            if tokens.token_ids:
                self.first.setdefault(tokens.request, now - self._began[tokens.request])
                self.num_tokens[tokens.request] += len(tokens.token_ids)
            if tokens.finished is not None:
                self.ended.add(tokens.request)

    def ask(self, prompt: list[int], max_tokens: int = 1) -> float:
        """Seconds to the first token of a request, which is brought to its end."""
        number = self.submit(prompt, max_tokens)
        while number not in self.ended:
            self.step()
        return self.first[number]

    def crowd_out(self, num_tokens: int) -> None:
        """So many tokens of other prompts: what was cached before makes room."""
        length = self._size.prefix
        for _ in range(-(-num_tokens // length)):
            self.ask(self.tokens(length))

    def begin_others(self) -> list[int]:
        """A steady decode, with all prompts computed."""
        room = self._size.max_model_len - 130
        others = [self.submit(self.tokens(128), room) for _ in range(self._size.num_others)]
        while not all(self.num_tokens[number] for number in others):
            self.step()
        for _ in range(20):
            self.step()
        return others

    def end(self) -> None:
        """Wait for the end of all copies in flight."""
        self.engine.cancel_bridge(b"bench")
        while self.engine.has_work:
            self.step()

    def moved(self) -> dict[str, float]:
        """Bytes that went each way so far."""
        counters = self.engine.figures().counters
        return {way: counters[f"moved_bytes:{way}"] for way in ("out", "in")}


def make(size: Size, num_prefixes: float, on_host: bool = True) -> Drive:
    """An engine whose device holds about so many prefixes, and host memory for ten."""
    blocks = -(-size.max_model_len // BLOCK_SIZE)
    probe = build(size.shape, "auto", size.budget, max_model_len=size.max_model_len, max_num_seqs=8)
    block_bytes = probe._runner._cache[:, 0].nbytes
    del probe
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    engine = build(
        size.shape,
        "auto",
        size.budget,
        max_model_len=size.max_model_len,
        max_num_seqs=size.num_others + 4,
        kv_cache_reuse=True,
        kv_cache_tokens=int(num_prefixes * blocks) * BLOCK_SIZE,
        kv_cache_host_bytes=10 * blocks * block_bytes if on_host else 0,
    )
    drive = Drive(engine, size)
    drive.crowd_out(size.prefix)  # kernels, graphs
    return drive


def cache_of(size: Size) -> torch.Tensor:
    """A cache of the shape's, large enough that its blocks lie apart."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers, heads, d = (32, 8, 128) if size is FULL else (2, 1, 64)
    shape = (layers, 2 * size.num_moved, heads, 2, BLOCK_SIZE, d)
    return torch.zeros(shape, dtype=torch.bfloat16, device=device)


def copies(size: Size) -> dict[str, object]:
    """Each direction alone."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    peak = dma_rates(size.dma_bytes, device)
    moved = Copies(cache_of(size), size.num_moved)
    rows: dict[str, object] = {}
    for direction in Direction:
        rate, on_host = moved.figures(direction)
        rows[str(direction)] = {
            "pcie_gb_s": peak[direction] / 1e9,
            "gb_s": rate / 1e9,
            "share": rate / peak[direction],
            "host_us_per_block": on_host / size.num_moved * 1e6,
        }
        print(
            f"{direction:3} {rate / 1e9:.1f} GB/s, {rate / peak[direction]:.0%} of PCIe's; a block "
            f"costs the host {on_host / size.num_moved * 1e6:.1f} us",
            flush=True,
        )
    return rows


def gaps_ms(times: list[float]) -> tuple[float, float]:
    """Median and mean between steps."""
    gaps = [(b - a) * 1e3 for a, b in pairwise(times)]
    return statistics.median(gaps), statistics.fmean(gaps)


def beside(size: Size) -> dict[str, object]:
    """A decode while blocks of another cache are copied both ways without a pause, and without."""
    drive = make(size, size.num_others / 2 + 2, on_host=False)
    moved = Copies(cache_of(size), size.num_moved)
    drive.begin_others()
    num_steps = min(150, (size.max_model_len - 300) // (2 * size.repeat))
    gaps: dict[str, list[tuple[float, float]]] = {"alone": [], "beside": []}
    for _ in range(size.repeat):
        first = len(drive.steps)
        for _ in range(num_steps):
            drive.step()
        gaps["alone"].append(gaps_ms(drive.steps[first + 5 :]))
        first = len(drive.steps)
        with endless(moved) as feed:
            for _ in range(num_steps):
                feed()
                drive.step()
            gaps["beside"].append(gaps_ms(drive.steps[first + 5 :]))
    drive.end()
    middle = {name: statistics.median(each for each, _ in runs) for name, runs in gaps.items()}
    mean = {name: statistics.median(each for _, each in runs) for name, runs in gaps.items()}
    slower = mean["beside"] / mean["alone"] - 1
    for name in gaps:
        print(f"{name:6} {middle[name]:.3f} ms a step (median), {mean[name]:.3f} (mean)")
    print(f"beside copies {slower:+.1%}", flush=True)
    return {"median_ms": middle, "mean_ms": mean, "slower": slower}


def prefix(size: Size) -> dict[str, object]:
    """First tokens, with nothing else running."""
    drive = make(size, 2.5)
    times: dict[str, list[float]] = {"computed": [], "device": [], "host": []}
    before = drive.moved()
    for _ in range(size.repeat):
        prompt = drive.tokens(size.prefix)
        times["computed"].append(drive.ask(prompt + drive.tokens(size.tail)))
        times["device"].append(drive.ask(prompt + drive.tokens(size.tail)))
        drive.crowd_out(4 * size.prefix)
        begun = drive.moved()["in"]
        times["host"].append(drive.ask(prompt + drive.tokens(size.tail)))
        if drive.moved()["in"] == begun:
            print("the prefix did not come from host memory", flush=True)
            times["host"][-1] = float("nan")
    rows: dict[str, object] = {
        f"{name}_ms": statistics.median(values) * 1e3 for name, values in times.items()
    }
    share = statistics.median(times["host"]) / statistics.median(times["computed"])
    moved = {way: count - before[way] for way, count in drive.moved().items()}
    rows |= {"host_share_of_computed": share, "bytes": moved}
    print(", ".join(f"{name} {rows[f'{name}_ms']:.1f} ms" for name in times), flush=True)
    print(f"from host memory: {share:.3f} of the time of computing (goal: 0.2)", flush=True)
    return rows


def _window(drive: Drive, prompts: list[list[int]]) -> tuple[float, int]:
    """Seconds and steps while these prompts are served one after another."""
    begin, first = time.perf_counter(), len(drive.steps)
    for prompt in prompts:
        drive.ask(prompt + drive.tokens(drive._size.tail))
    return time.perf_counter() - begin, len(drive.steps) - first


def others(size: Size) -> dict[str, object]:
    """Steps of a decode while prefixes come in from host memory.

    Beside what the same requests take with their prefixes on the device, and steps of the decode
    alone for the rest of the steps: what is above that is due to the copies.
    """
    drive = make(size, 8)
    prompts = [drive.tokens(size.prefix) for _ in range(14)]  # the least lately used comes first
    for prompt in prompts:
        drive.ask(prompt)
    drive.begin_others()
    slower, alone_ms = [], []
    for _ in range(size.repeat):
        first = len(drive.steps)
        for _ in range(20):
            drive.step()
        alone = gaps_ms(drive.steps[first:])[1] / 1e3
        alone_ms.append(alone * 1e3)
        on_device = _window(drive, prompts[-2:])
        prompts = prompts[2:] + prompts[:2]
        before = drive.moved()
        in_host = _window(drive, prompts[-2:])
        moved = {way: (count - before[way]) / 1e9 for way, count in drive.moved().items()}
        expected = on_device[0] + (in_host[1] - on_device[1]) * alone
        slower.append(in_host[0] / expected - 1)
        print(
            f"{in_host[1]} steps in {in_host[0] * 1e3:.1f} ms instead of {expected * 1e3:.1f}: "
            f"{slower[-1]:+.1%}; {moved['out']:.1f} GB moved out, {moved['in']:.1f} in",
            flush=True,
        )
    drive.end()
    rows: dict[str, object] = {
        "alone_ms": statistics.median(alone_ms),
        "slower": statistics.median(slower),
    }
    print(
        f"steps of {size.num_others} others, {rows['alone_ms']:.3f} ms alone, take "
        f"{rows['slower']:+.1%} while prefixes come in (goal: 3 %)",
        flush=True,
    )
    return rows


SUITES = {"copies": copies, "beside": beside, "prefix": prefix, "others": others}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", choices=[*SUITES, []], help="default: all")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    size = SMALL if args.small else FULL
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    result: dict[str, object] = {"device": device, "shape": size.shape, "prefix": size.prefix}
    for name in args.suites or SUITES:
        print(f"--- {name}", flush=True)
        result[name] = SUITES[name](size)
        gc.collect()
    line = json.dumps(result)
    print(line)
    if args.output:
        args.output.write_text(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
