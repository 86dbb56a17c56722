"""Time steps with adapters beside steps without: `python benchmarks/lora.py`.

For each row of the table: milliseconds of a step of the 8B shape in bf16 (random weights), by the
median of steps that are launched one after another and awaited, with adapters of rank 16 on all
linear layers, and the goal beside. Steps have CUDA graphs; `--torch` adds the terms by torch,
without graphs. Of a mixture (`--shape qwen3-30b-a3b`) adapters have one A and B for all experts of
a layer; `--targets experts` has these alone, `--targets dense` all others. Tokens differ, so that
rows choose as many experts as they would. The last line is the table as JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from shapes import write_config
from slipstream.config import EngineConfig
from slipstream.core.batch import Batch, Row
from slipstream.layers.adapted import Term
from slipstream.layers.adapted_experts import DOWN, GATE_UP
from slipstream.models.adapters.read import AdapterWeights
from slipstream.models.adapters.targets import Targets
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

# Rows, tokens of each, adapters; how much longer the step may take.
CASES = {
    (1, 1, 1): 0.04,
    (32, 1, 8): 0.08,
    (128, 1, 8): 0.06,
    (128, 1, 128): 0.45,
    (1, 2048, 1): 0.04,
}
PACKED = {(1, 1, 1): 0.08}  # over weights of 4 bits
# With terms of experts: 1.26 GB an adapter of Qwen3-30B-A3B. Distinct experts of rows that choose
# alike are 79 MB, 2.3, 6.5 and 1.3 GB: 0.02, 0.5, 1.4 and 0.3 ms of an H200.
MIXED = {(1, 1, 1): 0.20, (32, 1, 8): 0.10, (128, 1, 8): 0.20, (1, 2048, 1): 0.10}
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
CONTEXT = 128  # tokens before those of a decode


def draw(
    targets: Targets, rank: int, dtype: torch.dtype, device: torch.device, seed: int, which: str
) -> AdapterWeights:
    """An adapter of all linear layers of blocks, or the dense ones, or experts alone."""
    rng = torch.Generator(device).manual_seed(seed)
    terms: dict[str, tuple[Term, ...]] = {}

    def normal(*sizes: int, scale: float) -> torch.Tensor:
        return torch.randn(sizes, generator=rng, device=device, dtype=dtype) * scale

    for part in targets.all():
        is_of_experts = part.place.endswith((GATE_UP, DOWN))
        if ".layers." not in part.place or which == ("dense" if is_of_experts else "experts"):
            continue
        if is_of_experts:
            if part.first == 0:
                mixture = targets.mixture(part.name.rsplit(".", 2)[0])
                assert mixture is not None, "it has the part"
                count, outputs = mixture.count, part.outputs * (1 + part.place.endswith(GATE_UP))
                a = normal(count, rank, part.inputs, scale=part.inputs**-0.5)
                terms[part.place] = (Term(0, a, normal(count, outputs, rank, scale=0.01)),)
            continue
        a = normal(rank, part.inputs, scale=part.inputs**-0.5)
        b = normal(part.outputs, rank, scale=0.01)
        terms[part.place] = (*terms.get(part.place, ()), Term(part.first, a, b))
    return AdapterWeights(terms, seed.to_bytes(16), rank)


def batch_of(runner: ModelRunner, num_rows: int, num_tokens: int, adapters: list[int]) -> Batch:
    """Rows of one token behind `CONTEXT`, or of a prompt; adapters by turns."""
    start = CONTEXT if num_tokens == 1 else 0
    size = -(-(start + num_tokens) // runner.block_size)
    rows = []
    for i in range(num_rows):
        tables = ([*range(i * size, (i + 1) * size)],)
        adapter = adapters[i % len(adapters)] if adapters else 0
        ids = pack([1 + (i * num_tokens + j) % 4096 for j in range(num_tokens)])
        rows.append(Row(i, i, ids, start, tables, True, GREEDY, 0, 1, adapter=adapter))
    return Batch(tuple(rows), num_rows if num_tokens == 1 else 0)


def median_ms(runner: ModelRunner, batch: Batch, repeat: int) -> float:
    """The median time of a step, after two that do not count."""
    times = []
    for _ in range(repeat + 2):
        begin = time.perf_counter()
        runner.run(batch)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[2:])


def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    """The rows of the table."""
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        write_config(args.shape, Path(folder))
        config = EngineConfig(
            checkpoint=folder,
            load_format="random",
            quantization=args.quantization,
            kv_cache_tokens=65_536,
        )
        plan = resolve(config)
        runner = ModelRunner(plan)
    targets = runner.adapters.targets
    assert targets is not None, "a family's model serves adapters"
    if args.torch:
        runner.adapters.by_tables = False
    cases = PACKED if args.quantization == "int4" else CASES
    if any(part.place.endswith(DOWN) for part in targets.all()):
        cases = MIXED
    cases = {case: goal for case, goal in cases.items() if case[0] * case[1] <= args.most}
    given = args.rank, plan.dtype, plan.device
    drawn = [
        draw(targets, *given, seed, args.targets)
        for seed in range(max(count for _, _, count in cases))
    ]
    numbers = [runner.adapters.add(each) for each in drawn]
    rows: list[dict[str, object]] = []
    for (num_rows, num_tokens, num_adapters), goal in cases.items():
        base = median_ms(runner, batch_of(runner, num_rows, num_tokens, []), args.repeat)
        chosen = numbers[:num_adapters]
        own = median_ms(runner, batch_of(runner, num_rows, num_tokens, chosen), args.repeat)
        row = {"rows": num_rows, "tokens": num_tokens, "adapters": num_adapters}
        rows.append(row | {"base_ms": base, "ms": own, "goal": goal})
        print(
            f"{num_rows:4} rows of {num_tokens:4}, {num_adapters:3} adapters: {own:8.3f} ms, "
            f"without {base:8.3f} ms ({own / base - 1:+.1%}; goal {goal:+.0%})",
            flush=True,
        )
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--quantization", default="none", help="of the base: none, fp8, int8, int4")
    parser.add_argument("--targets", default="all", choices=["all", "dense", "experts"])
    parser.add_argument("--most", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--torch", action="store_true", help="add terms by torch")
    args = parser.parse_args()
    print(json.dumps(vars(args) | {"table": measure(args)}))


if __name__ == "__main__":
    main()
