"""The table of GPU figures: `python benchmarks/step.py` (`make bench-gpu`).

    step.py                          ours and, where vLLM can be imported, vLLM; then the table
    step.py ours  OUT [options]      ours alone          (runs of one sitting may be
    step.py peer  OUT [options]      vLLM alone           made apart and in parts ...)
    step.py merge OURS PEER          the table            (... and put together here)

With `--keep TABLE` the newest table keeps that one's rows that were not measured beside a peer now.
`--plan` prints how long the rows take, and measures nothing (`--plan beside`: vLLM's, too).

Every engine runs in processes of its own, one a precision. Each figure is written to a folder as
soon as it is there; a run that was cut off goes on with that folder as `--parts`. The table goes to
`benchmarks/results/<date>-<commit>-<card>.json` and to `step-<card>.json` beside it, where the card
is one of `limits.CARDS`; its last line is the same as one JSON object. Without a GPU: one line,
exit code 2.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import open_rows
import plan
import saturation
import start
from limits import card
from make_checkpoint import make, usual_place
from plan import SATURATION, SWEEP
from report import NEWEST, RESULTS, commit, keep, merge, show
from rows import BUDGET, MAX_SEQUENCES, ROWS, SHAPE, Row
from shapes import write_config
from side import Side

HERE = Path(__file__).parent


def has_gpu() -> bool:
    """Whether torch sees one."""
    import torch

    return torch.cuda.is_available()


def peer_environment(peer_path: str | None) -> dict[str, str]:
    """With the peer's packages on the path in place of ours, which it does not need."""
    environment = dict(os.environ)
    if peer_path:
        environment["PYTHONPATH"] = peer_path
    return environment


def can_import_peer(environment: dict[str, str]) -> bool:
    """Whether vLLM is there; it is not imported."""
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return (
        subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode
        == 0
    )


def call(script: str, arguments: list[str], environment: dict[str, str]) -> bool:
    """Run a script of this folder, and return whether it ended well; what it wrote stays."""
    environment = environment | {"SLIPSTREAM_BENCH_BEGAN": str(time.time())}
    result = subprocess.run(
        [sys.executable, str(HERE / script), *arguments], env=environment, check=False
    )
    if result.returncode != 0:
        print(f"{script} {' '.join(arguments)} ended with {result.returncode}", flush=True)
    return result.returncode == 0


def precisions(rows: list[Row]) -> list[tuple[list[str], list[str]]]:
    """Options and names of the rows of each process: bf16, fp8."""
    groups = []
    for is_fp8 in (False, True):
        names = [row.name for row in rows if row.is_fp8 == is_fp8]
        if names:
            groups.append((["--fp8"] if is_fp8 else [], names))
    return groups


def tunings(args: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """Return tokens of a step and sequences for each quantisation that the rows run in."""
    is_full = any(name.startswith(SATURATION) for name in args.rows)
    found = {}
    if any(not name.startswith(("fp8-", SATURATION)) for name in args.rows):
        found["none"] = (args.max_num_batched_tokens, MAX_SEQUENCES)
    if is_full or any(name.startswith("fp8-") for name in args.rows):
        full = (8192, 1024)  # of `--profile throughput`
        found["fp8"] = full if is_full else (args.max_num_batched_tokens, MAX_SEQUENCES)
    return found


def tune(args: argparse.Namespace) -> None:
    """Measure matrix kernels for the rows, as `slipstream tune` does."""
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        write_config(args.shape, Path(folder))
        for quantization, (budget, sequences) in tunings(args).items():
            config = {
                "checkpoint": folder,
                "load_format": "random",
                "quantization": quantization,
                "max_num_batched_tokens": budget,
                "max_num_seqs": sequences,
            }
            command = [sys.executable, "-m", "slipstream.runner.tune"]
            result = subprocess.run(
                command, input=json.dumps(config), stdout=subprocess.PIPE, text=True, check=False
            )
            print("\n".join(result.stdout.splitlines()[-1:]), flush=True)


def missing(output: Path, rows: list[Row], repeat: int) -> list[Row]:
    """Return the rows of which a file lacks repetitions. Raises SystemExit: another commit's."""
    if not output.is_file():
        return rows
    data = json.loads(output.read_text())
    if data["commit"] != commit():
        raise SystemExit(f"{output} has figures of {data['commit']}, this is {commit()}")
    kept = data["rows"]
    left = [row for row in rows if len(kept.get(row.name, ())) < _repetitions(row, repeat)]
    print(f"{output}: {len(rows) - len(left)} of {len(rows)} rows are there", flush=True)
    return left


def _repetitions(row: Row, repeat: int) -> int:
    return max(1, int(repeat * row.runs_a_repetition)) if row.runs_a_repetition > 1 else repeat


def run_ours(output: Path, rows: list[Row], args: argparse.Namespace) -> None:
    """Measure those of our rows that the file lacks."""
    rows = missing(output, rows, args.repeat)
    if not rows:
        return
    if ROWS["start"] in rows:
        make(args.shape, args.checkpoint)
        figures = start.measure(args.checkpoint, args.repeat)
        uncached = figures["uncached"]
        Side(output, "slipstream").add("start", figures["cached"], start_uncached=uncached)
    budget = str(args.max_num_batched_tokens)
    common = ["--repeat", str(args.repeat), "--shape", args.shape]
    common += ["--max-num-batched-tokens", budget]
    for options, names in precisions([row for row in rows if row.make is not None]):
        call("ours.py", [str(output), *options, *common, "--rows", *names], dict(os.environ))


def run_peer(output: Path, rows: list[Row], args: argparse.Namespace) -> None:
    """Measure those of vLLM's rows that the file lacks; its start is that of its bf16 process."""
    rows = missing(output, rows, args.repeat)
    environment = peer_environment(args.peer_path)
    make(args.shape, args.checkpoint)
    common = ["--checkpoint", str(args.checkpoint), "--repeat", str(args.repeat)]
    for options, names in precisions(rows):
        call("peer.py", [str(output), *options, *common, "--rows", *names], environment)


def save(table: dict[str, Any], folder: Path, old: Path | None) -> None:
    """One file a run; it is the card's newest, with rows of `old` that it does not have."""
    folder.mkdir(parents=True, exist_ok=True)
    newest = table if old is None else keep(table, json.loads(old.read_text()))
    name, kind = f"{table['date']}-{table['commit']}", card(table["gpu"])
    if kind is not None:
        name += f"-{kind.lower()}"
        (folder / NEWEST[kind].name).write_text(json.dumps(newest, indent=1) + "\n")
    (folder / f"{name}.json").write_text(json.dumps(table, indent=1) + "\n")


def finish(ours: Path, peer: Path | None, folder: Path, old: Path | None) -> None:
    """Print and keep the table of what was measured."""
    sides = (path if path is not None and path.is_file() else None for path in (ours, peer))
    table = merge(*(None if path is None else json.loads(path.read_text()) for path in sides))
    save(table, folder, old)
    print(show(table))
    print(json.dumps(table))


def run_open(args: argparse.Namespace) -> bool:
    """Measure the open rows that are named; they have a table and a file of their own.

    Returns False if they failed.
    """
    names = [name for name in args.rows if name in open_rows.LOADS]
    if not names:
        return True
    environment = peer_environment(args.peer_path)
    has_peer = can_import_peer(environment)
    if has_peer:
        make(args.shape, args.checkpoint)
    checkpoint = args.checkpoint if has_peer else None
    sides = open_rows.Sides(names, args.shape, args.parts, os.environ, checkpoint, environment)
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / f"{time.strftime('%Y-%m-%d')}-{commit()}-{args.shape}-open.json"

    def keep(table: dict[str, Any]) -> None:
        path.write_text(json.dumps(table, indent=1) + "\n")
        print(open_rows.show(table), flush=True)

    result = open_rows.measure(sides, keep)
    print(json.dumps(result))
    return bool(result)


def run_saturation(args: argparse.Namespace) -> bool:
    """Measure the saturation rows that are named, ours alone: what is beside them is published.

    Returns False if they failed.
    """
    names = [name.removeprefix(SATURATION) for name in args.rows if name.startswith(SATURATION)]
    if not names:
        return True
    args.results.mkdir(parents=True, exist_ok=True)
    stem = f"{time.strftime('%Y-%m-%d')}-{commit()}-{args.shape}-saturation"
    output = args.results / f"{stem}.json"
    options = ["--shape", args.shape, "--rows", *names]
    return call("saturation.py", [str(output), *options], dict(os.environ))


def run_sweep(args: argparse.Namespace) -> bool:
    """Time steps of every number of rows, if that is named; its files are its own.

    Returns False if it failed.
    """
    if SWEEP not in args.rows:
        return True
    output = args.results / f"{time.strftime('%Y-%m-%d')}-{commit()}-{args.shape}-sweep.json"
    return call("sweep.py", [str(output), "--shape", args.shape], dict(os.environ))


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "action", nargs="?", default="all", choices=["all", "ours", "peer", "merge"]
    )
    parser.add_argument("files", nargs="*", type=Path, help="OUT, or OURS PEER")
    apart = [SWEEP, *open_rows.LOADS, *(SATURATION + name for name in saturation.ROWS)]
    names = [*ROWS, *apart, SATURATION.rstrip("-")]
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=names)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tune", action="store_true", help="measure matrix kernels first (ours)")
    parser.add_argument("--shape", default=SHAPE, help=argparse.SUPPRESS)
    parser.add_argument("--max-num-batched-tokens", type=int, default=BUDGET, help="ours")
    parser.add_argument("--checkpoint", type=Path, help="made if need be; default: one a shape")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the table is kept")
    parser.add_argument("--keep", type=Path, help="an earlier table, for rows not measured now")
    parser.add_argument("--parts", type=Path, help="of figures as they come; goes on with them")
    parser.add_argument(
        "--plan",
        nargs="?",
        const="here",
        choices=("here", "alone", "beside"),
        help="print how long the rows take; beside vLLM as it is found here, or as this says",
    )
    parser.add_argument("--peer-path", help="where the peer's packages lie, if not on the path")
    args = parser.parse_args()
    args.checkpoint = args.checkpoint or usual_place(args.shape)
    args.parts = args.parts or HERE / "out" / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{commit()}"
    if SATURATION.rstrip("-") in args.rows:  # all of them
        args.rows = [row for row in args.rows if not row.startswith("saturation")]
        args.rows += [SATURATION + name for name in saturation.ROWS]
    if args.action != "all" and set(args.rows) & set(apart):
        parser.error("open and saturation rows and the sweep are measured by `all`")
    expected = {"all": (0,), "ours": (1,), "peer": (1,), "merge": (1, 2)}[args.action]
    if len(args.files) not in expected:
        parser.error(f"{args.action} takes {expected[-1]} files")
    if missing := [path for path in args.files if args.action == "merge" and not path.is_file()]:
        parser.error(f"{missing[0]}: no such file")
    return args


def main() -> int:
    """The exit code."""
    args = parse()
    if args.action == "merge":
        finish(*[*args.files, None][:2], args.results, args.keep)
        return 0
    if args.plan:
        has_peer = args.plan == "beside"
        if args.plan == "here":
            has_peer = can_import_peer(peer_environment(args.peer_path))
        print(plan.show(plan.jobs(args.rows, args.repeat, has_peer, args.tune)))
        return 0
    if not has_gpu():
        print("bench-gpu: torch sees no GPU on this machine", file=sys.stderr)
        return 2
    rows = [ROWS[name] for name in args.rows if name in ROWS]
    print(f"figures as they come: {args.parts} (--parts goes on there)", flush=True)
    if args.tune and args.action != "peer":
        tune(args)
    apart = [each(args) for each in (run_open, run_saturation, run_sweep)]
    if not all(apart):
        return 1
    if not rows:
        return 0
    if args.action == "ours":
        run_ours(args.files[0], rows, args)
    elif args.action == "peer":
        run_peer(args.files[0], rows, args)
    else:
        ours, peer = args.parts / "ours.json", args.parts / "peer.json"
        run_ours(ours, rows, args)
        if can_import_peer(peer_environment(args.peer_path)):
            run_peer(peer, rows, args)
        finish(ours, peer, args.results, args.keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
