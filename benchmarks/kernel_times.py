"""Every kernel at the shapes of Llama-3.1-8B: microseconds, rate, share of the limit.

Times are medians of CUDA graph replays over inputs that together exceed the L2 cache. The limit is
the larger of bytes / read bandwidth and operations / matrix rate; both were measured once on the
device that `LIMITS` names. The last line is one JSON object.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import torch
from slipstream.kernels.elementwise.activation import silu_mul
from slipstream.kernels.elementwise.norm import rms_norm
from slipstream.kernels.elementwise.rope import rope_and_cache
from timing import (
    BLOCK,
    FFN,
    HEAD_SIZE,
    HIDDEN,
    KV_HEADS,
    Q_HEADS,
    Result,
    measure,
    need_gpu,
    rows,
)


def rowwise() -> list[Result]:
    results = []
    for n in (1, 16, 256, 4096):
        weight = rows(HIDDEN)
        size = n * HIDDEN * 2

        def make_norm(n: int = n, w: torch.Tensor = weight) -> Callable[[], object]:
            x = rows(n, HIDDEN)
            return lambda: rms_norm(x, w, 1e-5)

        def make_silu(n: int = n) -> Callable[[], object]:
            x = rows(n, 2 * FFN)
            return lambda: silu_mul(x)

        def make_rope(n: int = n) -> Callable[[], object]:
            qkv = rows(n, (Q_HEADS + 2 * KV_HEADS) * HEAD_SIZE)
            q, k, v = (
                part.unflatten(1, (-1, HEAD_SIZE))
                for part in qkv.split([h * HEAD_SIZE for h in (Q_HEADS, KV_HEADS, KV_HEADS)], 1)
            )
            cos_sin = torch.randn(8192, HEAD_SIZE, device="cuda")
            positions = torch.arange(n, device="cuda")
            cache = rows(n // BLOCK + 1, KV_HEADS, 2, BLOCK, HEAD_SIZE)
            return lambda: rope_and_cache(q, k, v, cos_sin, positions, positions, cache)

        results += [
            measure("rms_norm", f"{n} x {HIDDEN}", make_norm, 2 * size, 0),
            measure("silu_mul", f"{n} x {FFN}", make_silu, 3 * n * FFN * 2, 0),
            measure(
                "rope_and_cache",
                f"{n} tokens",
                make_rope,
                n * HEAD_SIZE * (2 * 2 * (Q_HEADS + 2 * KV_HEADS) + 4),
                0,
            ),
        ]
    return results


def main() -> None:
    """Run the suites named on the command line, all by default."""
    suites = {"rowwise": rowwise}
    for path in sorted(Path(__file__).parent.glob("cases_*.py")):
        suites[path.stem.removeprefix("cases_")] = import_module(path.stem).cases
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", choices=[*suites, []], help="default: all")
    names = parser.parse_args().suites or list(suites)
    need_gpu()
    torch.manual_seed(0)
    results = [result for name in names for result in suites[name]()]
    device = torch.cuda.get_device_name()
    print(json.dumps({"device": device, "results": [asdict(result) for result in results]}))


if __name__ == "__main__":
    main()
