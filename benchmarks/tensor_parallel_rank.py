"""A rank of `tensor_parallel.py`: sums by size, checked and timed, or steps of an engine."""

import argparse
import gc
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import driving
import msgspec
import torch
import workloads
from engine import EngineTarget
from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.kernels.comm.all_reduce import ROOM_BYTES, total
from slipstream.kernels.comm.device import DeviceRanks
from slipstream.kernels.comm.ranks import HostRanks, Ranks
from slipstream.kernels.elementwise.norm import RmsNorm, rms_norm
from slipstream.runner.joining import start
from slipstream.runner.plan import resolve
from slipstream.runner.ranks import Follower
from slipstream_runtime.ranks import EXCHANGE_BYTES, RankMemory

_SUMS, _REPLAYS, _STEPS = 20, 15, 60  # of a graph; of it; newest steps whose idle time is measured
_HIDDEN = 4096


def time_sums(run: Callable[[], object], is_cuda: bool) -> float:
    """Return the median microseconds of a sum: on GPUs of `_SUMS` in a graph, all ranks alike."""
    run()
    if not is_cuda:
        took = []
        for _ in range(_REPLAYS):
            begin = time.perf_counter()
            run()
            took.append(time.perf_counter() - begin)
        return 1e6 * statistics.median(took)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_SUMS):
            run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_REPLAYS)]
    for begun, ended in events:
        begun.record()
        graph.replay()
        ended.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in events) * 1e3 / _SUMS


def symmetric(rank: int, size: int, folder: Path) -> Callable[[torch.Tensor], Any] | None:
    """Return torch's sum in symmetric memory without multicast; None: torch has none here."""
    try:
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as memory

        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size)
        name = dist.group.WORLD.group_name

        def of(like: torch.Tensor) -> Callable[[], object]:
            own = memory.empty(like.numel(), dtype=like.dtype, device=like.device)
            memory.rendezvous(own, name)
            own.copy_(like.flatten())
            if like.nbytes <= 512 << 10:
                return lambda: torch.ops.symm_mem.one_shot_all_reduce(own, "sum", name)
            return lambda: torch.ops.symm_mem.two_shot_all_reduce_(own, "sum", name)

        return of
    except (ImportError, RuntimeError, AttributeError) as error:
        print(f"rank {rank}: no symmetric memory: {error}", flush=True)
        return None


def gloo(rank: int, size: int, folder: Path) -> Callable[[torch.Tensor], None]:
    """Return gloo's sum in place, over the loopback."""
    import torch.distributed as dist

    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return lambda x: dist.all_reduce(x)


def leave_gloo() -> None:
    """End gloo's threads when no rank needs them: they abort a process that exits beside them."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def copy_rate(rank: int, size: int) -> float:
    """Return bytes a second of a copy from a peer's memory."""
    other = torch.device("cuda", (rank + 1) % size)
    source = torch.empty(256 << 20, dtype=torch.uint8, device=other)
    into = torch.empty_like(source, device=torch.device("cuda", rank))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    into.copy_(source)
    events[0].record()
    into.copy_(source)
    events[1].record()
    torch.cuda.synchronize()
    return source.nbytes / (events[0].elapsed_time(events[1]) / 1e3)


def width_of(count: int) -> int:
    """Return the longest row, of whole packs of 16 bytes, in which so many elements lie."""
    return max(n for n in range(8, _HIDDEN + 1, 8) if count % n == 0)


def check(ranks: Ranks, host: HostRanks, x: torch.Tensor) -> bool:
    """Whether a sum has the oracle's bits, of what the host has gathered; with and without a norm.

    A sum by NCCL, in the order that it likes, is near.
    """
    step = EXCHANGE_BYTES // x.itemsize
    pieces = [
        [part.clone() for part in host.parts(piece)] for piece in x.cpu().flatten().split(step)
    ]
    parts = [torch.cat(piece).view(x.shape) for piece in zip(*pieces, strict=True)]
    before = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    wanted, weight = total(parts, before), torch.ones(x.shape[1]).bfloat16()
    values, other = before.clone().to(x.device), before.clone().to(x.device)
    ranks.add_sum(values, x)
    normed = ranks.add_sum_norm(other, x, RmsNorm(weight.to(x.device), 1e-5))
    near = torch.allclose(normed.cpu().float(), rms_norm(wanted, weight, 1e-5).float(), rtol=0.02)
    if x.nbytes > ROOM_BYTES:
        return torch.allclose(values.cpu().float(), wanted.float(), rtol=0.02, atol=0.05)
    return near and all(torch.equal(each.cpu(), wanted) for each in (values, other))


def measure_sums(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Check and time sums of every size, and what stands beside them."""
    memory = RankMemory(args.ranks, args.size, args.rank)
    is_cuda, host = args.device == "cuda", HostRanks(memory)
    device = torch.device("cuda", args.rank) if is_cuda else torch.device("cpu")
    ranks: Any = host
    made, rate, least_us = None, 0.0, 0.0
    if is_cuda:
        torch.cuda.set_device(device)
        ranks = DeviceRanks(memory, device, keeps_bits=False)
        rate = copy_rate(args.rank, args.size)
        word = torch.zeros(8, dtype=torch.bfloat16, device=device)
        least_us = time_sums(lambda: ranks.sum(word), is_cuda)
        made = symmetric(args.rank, args.size, args.config.parent)
    else:
        torch.set_num_threads(1)  # as an engine's: threads of several ranks would share the cores
        beside = gloo(args.rank, args.size, args.config.parent)
    rows = []
    for size in args.sizes:
        generator = torch.Generator().manual_seed(size + args.rank)
        x = torch.randn(size // 2, generator=generator).bfloat16().to(device)
        x = x.view(-1, width_of(x.numel()))
        row: dict[str, Any] = {"bytes": size, "is_right": check(ranks, host, x)}
        row["us"] = round(time_sums(lambda x=x: ranks.sum(x), is_cuda), 2)
        if not is_cuda:
            other = x.clone()
            row["gloo_us"] = round(time_sums(lambda other=other: beside(other), is_cuda), 2)
        else:
            row["link_us"] = round(least_us + 1e6 * size * (args.size - 1) / rate, 2)
            out = torch.empty_like(x)
            if (nccl := ranks.nccl) is not None:
                run = lambda x=x, out=out: nccl.sum(x, out)  # noqa: E731
                row["nccl_us"] = round(time_sums(run, is_cuda), 2)
            if made is not None:
                try:
                    row["symmetric_us"] = round(time_sums(made(x), is_cuda), 2)
                except (RuntimeError, AttributeError) as error:  # on all ranks alike
                    print(f"symmetric memory, {size} bytes: {error}", flush=True)
                    made = None
        rows.append(row)
    if not is_cuda:
        leave_gloo()
    return rows


class Timed:
    """A graph, between events that all of a runner's graphs note."""

    def __init__(self, graph: Any, notes: deque[tuple[Any, Any]]) -> None:
        self._graph, self._notes = graph, notes

    def replay(self) -> None:
        """Launch it."""
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        self._graph.replay()
        ended.record()
        self._notes.append((begun, ended))


def watch(runner: Any) -> deque[tuple[Any, Any]]:
    """Note when the newest graphs of a runner begin and end."""
    notes: deque[tuple[Any, Any]] = deque(maxlen=_STEPS)
    graphs = {} if runner._graphs is None else runner._graphs._graphs
    for shape, captured in list(graphs.items()):
        graphs[shape] = captured._replace(graph=Timed(captured.graph, notes))
    return notes


def idle_share(notes: deque[tuple[Any, Any]]) -> float | None:
    """Return the share of time in which the device had no graph; None: none ran.

    Waits for other ranks within a graph are not idle time.
    """
    if len(notes) < 2:
        return None
    torch.cuda.synchronize()
    steps = list(notes)
    whole = steps[0][0].elapsed_time(steps[-1][0])
    return round(1 - sum(begun.elapsed_time(ended) for begun, ended in steps[:-1]) / whole, 4)


def measure_engine(args: argparse.Namespace) -> dict[str, Any]:
    """Load the model with all other ranks; time workloads on rank 0."""
    config = msgspec.json.decode(args.config.read_bytes(), type=EngineConfig)
    began = time.perf_counter()
    runner: Any
    if args.size == 1:
        from slipstream.runner.model_runner import ModelRunner

        runner = ModelRunner(resolve(config))
    else:
        memory = RankMemory.alive(args.ranks, config.num_ranks, args.rank)
        runner, _ = start(resolve(config, args.rank), memory)
    found: dict[str, Any] = {"start_s": round(time.perf_counter() - began, 1)}
    notes = watch(runner)
    if isinstance(runner, Follower):
        runner.follow()
        return found | {"idle": idle_share(notes)}
    bounds = config.max_num_seqs, config.max_num_batched_tokens, config.max_waiting
    limits = Limits(*bounds, num_stages=config.pipeline_parallel, kv_cache_reuse=False)
    engine = Engine(limits, runner, None, args.config.stem)
    target = EngineTarget(engine)
    gc.collect()
    gc.freeze()
    driving.run(target, workloads.decode(1, 2))
    print("ready", flush=True)
    if args.what == "serve":
        while True:
            driving.run(target, workloads.decode(8, 64))
    sizes = args.tokens, args.prompt, args.requests
    found |= driving.best_of_two(target, args.batches, *sizes)
    driving.run(target, workloads.decode(args.batches[-1], args.tokens + 8))
    found["idle"] = idle_share(notes)
    if args.size > 1:
        runner.stop()
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["sums", "engine", "serve"])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    for name in ("--rank", "--size", "--ranks", "--tokens", "--prompt", "--requests"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--batches", nargs="+", type=int, required=True)
    parser.add_argument("--sizes", nargs="+", type=int, required=True)
    args = parser.parse_args()
    found = measure_sums(args) if args.what == "sums" else measure_engine(args)
    args.output.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
