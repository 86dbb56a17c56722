"""A cache that remembers, ours beside vLLM's: `python benchmarks/reuse.py`.

    reuse.py                            ours and, where vLLM can be imported, vLLM; then the table
    reuse.py ours  OUT [options]        ours alone          (runs of one sitting may be
    reuse.py peer  OUT [options]        vLLM alone           made apart ...)
    reuse.py merge OURS [PEER]          the table            (... and put together here)

With `--tune` our matrix kernels are measured first, as `slipstream tune` does; with `--only` some
of the workloads run.
The workloads are those of `reuse_workloads.py`, both engines have prefix caching on, and each runs
in a process of its own. What reuse costs where nothing can be reused is the rate of the 512-request
workload over that of an engine without it, both in one process by turns. The table is printed, its
last line is the same as one JSON object, which also goes to `--output`.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reuse_workloads import SMALL, Figures, Output, Sizes, Workloads
from side import Side

VOCABULARY = 128_000
WORKLOADS = ("shared", "chat", "mixed")
_CACHE_TOKENS = 335_872  # 256 sequences of 1,280 tokens and more; twice that fits an H200


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: `goal` in its unit, or as a ratio of ours to the peer's."""

    name: str
    label: str
    unit: str
    goal: float
    is_ratio: bool = False
    is_rate: bool = True  # more is better


ROWS = (
    Row("shared-cold", "same 1,024 tokens, 64 own, 64 out: first time", "requests/s", 300),
    Row("shared-warm", "the same, when the beginning is known", "requests/s", 300),
    Row("chat", "64 users, 8 turns of 200 + 200, system 1,000", "requests/s", 1.3, True),
    Row("chat-ttft", "the same: median time to first token", "ms", 0.7, True, False),
    Row("mixed-kept", "512 requests, nothing to reuse: share kept with reuse on", "", 0.99),
)


class OurTarget:
    """Our engine as `reuse_workloads` runs it."""

    def __init__(self, engine: Any, vocabulary: int) -> None:
        from engine import EngineTarget

        self.vocabulary = vocabulary
        self._engine = engine
        self._submit = EngineTarget(engine).submit
        self.num_reused = 0  # blocks

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None:
        """Offer a greedy request."""
        self._submit(number, prompt, max_tokens)

    def step(self) -> list[Output]:
        """One step of the engine."""
        told = self._engine.step().get(b"bench", [])
        self.num_reused += sum(x.finished.perf.kv_reused_blocks for x in told if x.finished)
        return [Output(x.request, x.token_ids, x.finished is not None) for x in told]


class PeerTarget:
    """vLLM's engine as `reuse_workloads` runs it."""

    def __init__(self, llm: Any, vocabulary: int) -> None:
        from peer import PeerTarget as Whole

        self.vocabulary = vocabulary
        self._engine = llm.llm_engine
        self._sampling = Whole(llm).sampling

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None:
        """Offer a greedy request."""
        sampling = self._sampling(max_tokens)
        self._engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)

    def step(self) -> list[Output]:
        """What the engine's process tells next."""
        return [
            Output(int(x.request_id), list(x.outputs[0].token_ids), x.finished)
            for x in self._engine.step()
        ]


def measure(side: Side, loads: Workloads, repeat: int, only: list[str]) -> None:
    """The rows of one engine, after a warm-up of each; kept as soon as they are there."""
    if "shared" in only:
        loads.shared()
        runs = [loads.shared() for _ in range(repeat)]
        _add(side, "shared-cold", [cold for cold, _ in runs])
        _add(side, "shared-warm", [warm for _, warm in runs])
    if "chat" in only:
        loads.chat()
        chats: list[Figures] = []
        for _ in range(repeat):
            chats.append(loads.chat())
            _add(side, "chat", chats)
            side.add("chat-ttft", [chat.first_token_ms for chat in chats])


def _add(side: Side, name: str, runs: list[Figures]) -> None:
    side.add(name, [run.requests_s for run in runs])
    side.about(**{f"{name}, all figures": [list(run) for run in runs]})


def measure_cost(side: Side, loads: list[Workloads], repeat: int, **lengths: int) -> None:
    """The 512-request workload with reuse and without, by turns; one of each does not count."""
    rates: list[list[float]] = [[], []]
    for _ in range(repeat + 1):
        for i, load in enumerate(loads):
            rates[i].append(load.mixed(**lengths).output_tok_s)
    with_reuse, without = (rate[1:] for rate in rates)
    side.about(mixed_tok_s={"reuse": with_reuse, "without": without})
    side.add("mixed-kept", [a / b for a, b in zip(with_reuse, without, strict=True)])


def run_ours(args: argparse.Namespace) -> None:
    """All rows of ours, in this process."""
    import torch
    from engine import build

    if args.tune:
        from step import tune

        tune(args.shape, args.max_num_batched_tokens, ["none"])
    sizes, lengths = Sizes(), {}
    if args.small:
        sizes, lengths = SMALL, {"max_tokens": 6, "shortest": 8, "longest": 60}
    options = {"kv_cache_tokens": args.kv_cache_tokens, "checkpoint": args.checkpoint}
    make: Callable[[bool], Any] = lambda reuses: build(  # noqa: E731 - called twice
        args.shape, "auto", args.max_num_batched_tokens, kv_cache_reuse=reuses, **options
    )
    side = Side(args.files[0], "slipstream")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    side.about(versions=f"torch {torch.__version__}", gpu=name, sizes=asdict(sizes))
    side.about(max_num_batched_tokens=args.max_num_batched_tokens, repetitions=args.repeat)
    side.about(tuned=args.tune)
    target = OurTarget(make(True), args.vocabulary)
    loads = Workloads(target, sizes)
    measure(side, loads, args.repeat, args.only)
    side.about(reused_blocks=target.num_reused)
    if "mixed" in args.only:
        other = OurTarget(make(False), args.vocabulary)
        measure_cost(side, [loads, Workloads(other, sizes)], args.repeat, **lengths)
        side.about(reused_blocks_without=other.num_reused)


def run_peer(args: argparse.Namespace) -> None:
    """All rows of vLLM's, in this process."""
    from make_checkpoint import make, usual_place
    from peer import facts, start
    from rows import SHAPE

    checkpoint = usual_place(SHAPE)
    make(SHAPE, checkpoint)
    side = Side(args.files[0], "vllm")
    llm = start(checkpoint, is_fp8=False, reuses=True)
    side.about(**facts(llm))
    loads = Workloads(PeerTarget(llm, args.vocabulary), Sizes())
    measure(side, loads, args.repeat, args.only)


def merge(ours: dict[str, Any], peer: dict[str, Any] | None) -> dict[str, Any]:
    """Medians of both, their ratio, and whether the goal is reached; null where not measured."""
    lines = []
    for row in ROWS:
        mine, theirs = (
            statistics.median(side["rows"][row.name])
            if side is not None and row.name in side["rows"]
            else None
            for side in (ours, peer)
        )
        ratio = mine / theirs if mine is not None and theirs is not None else None
        judged = ratio if row.is_ratio else mine
        reached = None
        if judged is not None:
            reached = judged >= row.goal if row.is_rate else judged <= row.goal
        lines.append(
            {"row": row.name, "unit": row.unit, "ours": mine, "peer": theirs}
            | {"ratio": ratio, "goal": row.goal, "of_ratio": row.is_ratio, "reached": reached}
        )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": ours["commit"],
        "gpu": ours["about"].get("gpu"),
        "ours": ours["about"],
        "peer": None if peer is None else peer["about"],
        "rows": lines,
    }


def show(table: dict[str, Any]) -> str:
    """Format as text, a line a row."""
    text = lambda x: "-" if x is None else f"{x:,.3f}" if x < 10 else f"{x:,.1f}"  # noqa: E731
    lines = [f"{table['gpu']}, commit {table['commit']}"]
    lines.append(f"{'':58} {'ours':>9} {'vLLM':>9} {'ratio':>7}  goal")
    for row, line in zip(ROWS, table["rows"], strict=True):
        goal = f"{'>=' if row.is_rate else '<='} {row.goal}{' x vLLM' if row.is_ratio else ''}"
        told = {None: "", True: "reached", False: "missed"}[line["reached"]]
        name = f"{row.label} ({row.unit})" if row.unit else row.label
        figures = f"{text(line['ours']):>9} {text(line['peer']):>9} {text(line['ratio']):>7}"
        lines.append(f"{name:58} {figures}  {goal} {told}".rstrip())
    return "\n".join(lines)


def finish(ours: Path, peer: Path | None, output: Path | None) -> None:
    """Print and keep the table of what was measured."""
    sides = [json.loads(p.read_text()) if p and p.is_file() else None for p in (ours, peer)]
    table = merge(*sides)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(table, indent=1) + "\n")
    print(show(table))
    print(json.dumps(table))


def run_all(args: argparse.Namespace, options: list[str]) -> None:
    """Each side in a process of its own."""
    from step import call, can_import_peer, peer_environment

    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        ours, peer = Path(folder) / "ours.json", Path(folder) / "peer.json"
        call("reuse.py", ["ours", str(ours), *options], dict(os.environ))
        environment = peer_environment(args.peer_path)
        if can_import_peer(environment):
            call("reuse.py", ["peer", str(peer), *options], environment)
        finish(ours, peer, args.output)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = {"all": (0,), "ours": (1,), "peer": (1,), "merge": (1, 2)}
    parser.add_argument("action", nargs="?", default="all", choices=actions)
    parser.add_argument("files", nargs="*", type=Path, help="OUT, or OURS PEER")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--shape", default="llama-3.1-8b", help="ours; random weights")
    parser.add_argument("--checkpoint", help="ours: this one, not random weights of a shape")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096, help="ours")
    parser.add_argument("--kv-cache-tokens", type=int, default=_CACHE_TOKENS, help="ours")
    parser.add_argument("--tune", action="store_true", help="ours: measure matrix kernels first")
    parser.add_argument("--only", nargs="+", default=WORKLOADS, choices=WORKLOADS)
    parser.add_argument("--small", action="store_true", help="ours: a few requests of few tokens")
    parser.add_argument("--output", type=Path, help="where the table is kept")
    parser.add_argument("--peer-path", help="where the peer's packages lie, if not on the path")
    args = parser.parse_args()
    if len(args.files) not in actions[args.action]:
        parser.error(f"{args.action} takes {actions[args.action][-1]} files")
    return args


def main() -> int:
    """The exit code."""
    args = parse()
    if args.action == "merge":
        finish(*[*args.files, None][:2], args.output)
    elif args.action == "ours":
        run_ours(args)
    elif args.action == "peer":
        run_peer(args)
    else:
        run_all(args, [option for option in sys.argv[1:] if option != "all"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
