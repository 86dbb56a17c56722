"""Read adapters with some numbers of threads: `python benchmarks/adapter_reads.py --threads 1 8`.

Neither weights nor a GPU are needed: adapters of a shape (`--shape`, in bf16, all linear layers)
are read from files in the page cache, and laid out as for a GPU; on a machine with one they are
copied to it, too. Numbers of threads take turns. Another thread wakes up every half a millisecond
meanwhile, as an engine does between launches: how late it is says how long others had the
interpreter's lock, or its core. Columns are milliseconds, medians of loads but for `late`; `own` is
processor time of the thread that loads, `all` that of all threads. The last line is all as JSON.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save
from shapes import write_config
from slipstream.config import EngineConfig
from slipstream.models.adapters import workers
from slipstream.models.adapters.read import read_adapter
from slipstream.models.adapters.targets import Targets
from slipstream.runner.adapter_places import places_of
from slipstream.runner.adapter_tables import AdapterTables, TileLayout
from slipstream.runner.plan import settle_here

DTYPE = torch.bfloat16
EVERY_S = 5e-4
PARTS = ("read", "laid out", "copied", "dropped")


class Sampler:
    """A thread that wakes up every half a millisecond."""

    def __init__(self) -> None:
        self.late: list[float] = []  # seconds
        self._ended = threading.Event()

    def _run(self) -> None:
        while not self._ended.is_set():
            begin = time.perf_counter()
            time.sleep(EVERY_S)
            self.late.append(time.perf_counter() - begin - EVERY_S)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Sample while what is inside runs."""
        self._ended.clear()
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def said(self) -> dict[str, float]:
        """Milliseconds of the last samples, which are discarded."""
        cuts, longest = statistics.quantiles(self.late, n=100), max(self.late)
        self.late = []
        return {"p50": 1e3 * cuts[49], "p99": 1e3 * cuts[98], "max": 1e3 * longest}


class Loads:
    """Adapters of a shape in files, which are read and laid out."""

    def __init__(self, args: argparse.Namespace, root: Path) -> None:
        folder = root / "model"
        folder.mkdir()
        write_config(args.shape, folder)
        plan = settle_here(EngineConfig(checkpoint=str(folder), load_format="random"))
        is_gpu = plan.device.type == "cuda"
        places = places_of(plan.model, DTYPE)
        layout = TileLayout(places, False, DTYPE)
        self._targets = Targets(places, plan.model.tensors, DTYPE, torch.device("meta"))
        self._tables = AdapterTables(layout, layout.page_bytes, plan.device, 64)
        self._stream = torch.cuda.Stream() if is_gpu else None  # type: ignore[no-untyped-call]
        self._folders = [root / f"a{number}" for number in range(args.files)]
        self._write(args.rank)

    def _write(self, rank: int) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for part in self._targets.all():
            if ".layers." in part.place:
                module = f"base_model.model.{part.name}"
                tensors[f"{module}.lora_A.weight"] = torch.randn(rank, part.inputs).to(DTYPE)
                tensors[f"{module}.lora_B.weight"] = torch.randn(part.outputs, rank).to(DTYPE)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
        for number, folder in enumerate(self._folders):
            folder.mkdir()
            for tensor in tensors.values():
                tensor[0, 0] = number + 1
            (folder / "adapter_model.safetensors").write_bytes(save(tensors))
            (folder / "adapter_config.json").write_text(json.dumps(config))

    @torch.inference_mode()
    def load(self, number: int) -> dict[str, float]:
        """Load one of the adapters; return milliseconds."""
        folder = self._folders[number % len(self._folders)]
        ends, own, whole = [time.perf_counter()], time.thread_time(), time.process_time()
        weights = read_adapter(folder, self._targets, DTYPE)
        ends.append(time.perf_counter())
        host = self._tables.lay_out(weights.terms)
        assert host is not None, "kernels take linear layers"
        ends.append(time.perf_counter())
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                self._tables.place(host)
                self._stream.synchronize()
        ends.append(time.perf_counter())
        del weights, host
        ends.append(time.perf_counter())
        parts = [1e3 * (end - begin) for begin, end in pairwise(ends)]
        spent = 1e3 * (time.thread_time() - own), 1e3 * (time.process_time() - whole)
        return dict(zip((*PARTS, "own", "all"), (*parts, *spent), strict=True))


def main() -> None:
    """Print a row for each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--loads", type=int, default=8, help="of each number of threads and round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found: dict[int, list[dict[str, float]]] = {count: [] for count in args.threads}
    late: dict[int, list[dict[str, float]]] = {count: [] for count in args.threads}
    sampler = Sampler()
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as root:
        loads = Loads(args, Path(root))
        for _ in range(args.rounds):
            for count in args.threads:
                workers.num_cores = lambda: 2 * count  # noqa: B023 - of this turn
                loads.load(0)  # not counted: threads start, memory is new
                with sampler.beside():
                    found[count] += [loads.load(number) for number in range(args.loads)]
                late[count].append(sampler.said())
    table = {}
    for count in args.threads:
        names = found[count][0]
        row = {name: statistics.median(each[name] for each in found[count]) for name in names}
        of_late = {n: statistics.median(each[n] for each in late[count]) for n in ("p99", "max")}
        table[count] = row | {f"late {name}": ms for name, ms in of_late.items()}
        said = ", ".join(f"{name} {ms:.1f}" for name, ms in table[count].items())
        print(f"{count:3} threads: {said}", flush=True)
    print(json.dumps(vars(args) | {"table": table}))


if __name__ == "__main__":
    main()
