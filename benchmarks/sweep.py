"""Times a decode step at every number of rows: where does it fall behind its limit?

    sweep.py OUT [--shape S] [--rows 1 2 ... ] [--tokens 20]     # OUT.json, and OUT.svg beside it

Prompts are found in the cache, so that rows alone are timed. The limit is that of `limits.py`. What
is shown of each number of rows: the median time of a step, its share of the limit, and that share
over the mean of its eight neighbours' (the goal: 0.85 at least, anywhere). OUT.json is written
after each number.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import ceilings
import driving
import limits
import torch
import workloads
from engine import EngineTarget, build
from report import commit
from rows import BUDGET, SHAPE
from shapes import SHAPES
from slipstream_client.bench.plots import Axis, Line, plot
from timing import need_gpu

PROMPT = 129  # four blocks, and the token that is computed
NEIGHBOURS = 4  # to each side
LEAST = 0.85  # of the mean of the neighbours' shares


def measure(
    target: driving.Target, rows: list[int], num_tokens: int, prompt: int = PROMPT
) -> Iterator[tuple[int, float]]:
    """Yield rows and ms a step, from the most to the fewest: so the load is steady."""
    whole = workloads.decode(max(rows), num_tokens, prompt)
    driving.run(target, whole)
    for count in sorted(rows, reverse=True):
        part = workloads.Workload(whole.name, whole.prompts[:count], num_tokens)
        gaps = driving.run(target, part).gaps_ms
        yield count, round(statistics.median(gaps[1:]), 4)


def shares(found: dict[int, float], model: limits.Model, num_tokens: int) -> dict[int, float]:
    """Return the limit over the time, by rows."""
    context = PROMPT + num_tokens / 2
    return {
        rows: 1e3 * sum(w.seconds for w in limits.decode_work(model, rows, context)) / ms
        for rows, ms in found.items()
    }


def beside(share: dict[int, float]) -> dict[int, float]:
    """Return each share over the mean of its neighbours', of those that were measured."""
    order = sorted(share)
    found = {}
    for at, rows in enumerate(order):
        near = order[max(0, at - NEIGHBOURS) : at] + order[at + 1 : at + 1 + NEIGHBOURS]
        if near:
            found[rows] = share[rows] / statistics.fmean(share[each] for each in near)
    return found


def picture(title: str, share: dict[int, float]) -> str:
    """SVG text: the share of the limit by rows."""
    most = max(share)
    ticks = [tick for tick in (1, 32, 64, 96, 128, 160, 192, 224, 256, 384, 512) if tick <= most]
    x_axis = Axis("rows", 1, max(2, most), ticks, str)
    y_axis = Axis("% of the limit", 0, 100, (0, 25, 50, 75, 100), str)
    points = [(rows, 100 * share[rows]) for rows in sorted(share)]
    return plot(title, x_axis, y_axis, [Line("decode", "#1f6fb4", points)])


def write(output: Path, result: Mapping[str, object]) -> None:
    """Write what there is to OUT.json."""
    path = output.with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--shape", default=SHAPE, choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="+", default=list(range(1, 257)))
    parser.add_argument("--tokens", type=int, default=20)
    args = parser.parse_args()
    need_gpu()
    most = max(args.rows)
    engine = build(args.shape, "auto", BUDGET, kv_cache_reuse=True, max_num_seqs=most)
    gpu = torch.cuda.get_device_name()
    rates = limits.rates_of(gpu, ceilings.measure() if limits.card(gpu) is None else {})
    model, found = limits.Model(SHAPES[args.shape], rates), dict[int, float]()
    facts = {"shape": args.shape, "gpu": gpu, "commit": commit()}
    for rows, ms in measure(EngineTarget(engine), args.rows, args.tokens):
        found[rows] = ms
        share = shares(found, model, args.tokens)
        print(f"{rows:5} {ms:9.3f} ms {share[rows]:6.1%}", flush=True)
        write(args.output, facts | {"ms": found, "share": share})
    print("with each share over the mean of its neighbours':")
    ratio = beside(share)
    for rows in sorted(found):
        print(f"{rows:5} {found[rows]:9.3f} ms {share[rows]:6.1%} {ratio.get(rows, 1.0):6.3f}")
    low = [rows for rows, value in ratio.items() if value < LEAST]
    print(f"lowest beside its neighbours: {min(ratio.values(), default=1.0):.3f}; below: {low}")
    args.output.with_suffix(".svg").write_text(picture(f"{args.shape}, {gpu}", share))
    return 0


if __name__ == "__main__":
    sys.exit(main())
