"""What the host takes to launch a step's blocks, without a GPU: `python benchmarks/launch_host.py`.

The real path of Python over a driver that does nothing (`tests/fixtures/kernels/driverless.py`), so
a launch lacks the 2 to 3 us of the driver. For each step the least and the median of milliseconds
of processor time, blocks repeated and one by one in turns, and microseconds a launch. `--profile`
prints where the host's time goes, one by one.
"""

import argparse
import cProfile
import pstats
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from shapes import SHAPES, write_config

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fixtures.kernels.driverless import HOPPER, Driver, driverless
from slipstream.config import EngineConfig
from slipstream.fuse.adapt import adapt
from slipstream.fuse.repeat import Repeating
from slipstream.layers.adapted import StepGroups
from slipstream.layers.attention import AttentionInputs, StepRows
from slipstream.layers.decoder import InTurn, one_by_one
from slipstream.layers.residual import Residual
from slipstream.models.decoder import build
from slipstream.models.fileless import SizeSource
from slipstream.models.source import Weights
from slipstream.runner.plan import settle

CPU, TABLE = torch.device("cpu"), 512
STEPS = {  # decodes, tokens of a prompt
    "600 tokens": (0, 600),
    "2,048 tokens": (0, 2048),
    "600 decodes": (600, 0),
    "64 decodes, 1,000 tokens": (64, 1000),
}


class Blocks:
    """The blocks of a shape, whose weights have addresses and no numbers."""

    def __init__(self, shape: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            write_config(shape, Path(folder))
            given = EngineConfig(checkpoint=folder, device="cuda", load_format="random")
            self._plan = plan = settle(given, torch.device("cuda"))
        self._model = build(plan.model, Weights(SizeSource(), CPU, plan.dtype, target=HOPPER), 8192)
        adapt(self._model, StepGroups(), plan.model.dims.vocab_size)  # as engines do
        d = plan.model.dims
        size = (TABLE, d.num_kv_heads, 2, plan.block_size, d.head_size)
        self._caches = [torch.empty(size, dtype=plan.dtype) for _ in self._model.blocks]

    def run(self, apply: InTurn, decodes: int, chunk: int) -> float:
        """Launch a step, and return its milliseconds."""
        plan, n, count = self._plan, decodes + chunk, decodes + (chunk > 0)
        every, lengths = torch.zeros(n, dtype=torch.int64), torch.zeros(count, dtype=torch.int32)
        starts = torch.zeros(1 + (chunk > 0), dtype=torch.int32)
        tables = torch.zeros((count, TABLE), dtype=torch.int32)
        rows = StepRows(every, every, tables, starts, lengths, decodes, chunk)
        residual = Residual(torch.empty((n, plan.model.dims.hidden_size), dtype=plan.dtype))
        begin = time.thread_time()
        inputs = [AttentionInputs.of(plan.attention, self._caches[0], rows, 0)] * len(self._caches)
        apply(self._model.blocks, residual, inputs, self._caches)
        return 1e3 * (time.thread_time() - begin)


def show(shape: str, driver: Driver, count: int, is_profiled: bool) -> None:
    """Print the figures of a shape."""
    blocks = Blocks(shape)
    ways: dict[str, InTurn] = {"one by one": one_by_one, "repeated": Repeating("cpu")}
    for name, step in STEPS.items():
        for apply in ways.values():
            blocks.run(apply, *step)
        driver.launches.clear()
        blocks.run(one_by_one, *step)
        number = len(driver.launches)
        tries = [{way: blocks.run(f, *step) for way, f in ways.items()} for _ in range(count)]
        for way in ways:
            times = [each[way] for each in tries]
            least, median = min(times), statistics.median(times)
            each = f"{number} launches, {1e3 * least / number:.1f} us each"
            print(
                f"{shape:14} {name:26} {way:12} {least:7.2f} {median:7.2f} ms, {each}", flush=True
            )
    if is_profiled:
        with cProfile.Profile() as profile:
            for _ in range(count):
                blocks.run(one_by_one, 0, 2048)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["llama-3.1-8b"], choices=SHAPES)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    with driverless(mixes=False) as driver, torch.inference_mode():
        for shape in args.shapes:
            show(shape, driver, args.repeat, args.profile)


if __name__ == "__main__":
    main()
