"""The CPU beside llama.cpp and transformers: `make bench-cpu`, or `python benchmarks/cpu.py`.

One machine, one sitting, the same model, the same bits, the same threads: SmolLM2-135M-Instruct,
the file of `make chat` (Q4_1), and the same values in Q8_0 and F32. Each engine has a process of
its own, which computes only when it is asked; they take turns, and another goes first in each
round. llama.cpp is a package of npm, installed into `.slipstream/bench`; where it cannot be had
the run goes on without it. The last line is one JSON object.
"""

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from cpu_models import TYPES, model_of, weight_bytes
from report import commit
from slipstream_serve.chat_model import fetch

HERE = Path(__file__).resolve().parent
HOME = HERE.parent / ".slipstream"
PEER = "llama.cpp"
ROWS = {  # name -> streams, tokens of each prompt, tokens of each answer
    "decode-1": (1, 16, 49),
    "decode-8": (8, 16, 33),
    "decode-32": (32, 16, 17),
    "prompt-128": (1, 128, 1),
    "prompt-1000": (1, 1000, 1),
}
_COPIED = 1 << 28  # bytes


class Worker:
    """A process of an engine that has a model loaded."""

    def __init__(self, engine: str, command: list[str], threads: int) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(HERE)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.engine = engine
        self.about = self._answer()

    def run(self, row: dict[str, object]) -> Any:
        """Return what the engine measured."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(row) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        """Have it end."""
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.engine} ended with {self._process.wait()}")
        return json.loads(line)


def peer_command() -> list[str] | None:
    """Install llama.cpp apart from our environment; None, with a message, if it cannot be had."""
    node, npm = shutil.which("node"), shutil.which("npm")
    folder = HOME / "bench" / "llama_cpp"
    if node is None or npm is None:
        print(f"without {PEER}: there is no node and npm (apt-get install nodejs npm)", flush=True)
        return None
    folder.mkdir(parents=True, exist_ok=True)
    for path in (HERE / "llama_cpp").iterdir():
        shutil.copy(path, folder)
    if not (folder / "node_modules" / "node-llama-cpp").is_dir():
        print(f"installing {PEER} into {folder}", flush=True)
        install = [npm, "install", "--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund"]
        done = subprocess.run(install, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(folder)
            said = (done.stderr.strip().splitlines() or ["no reason given"])[0]
            print(f"without {PEER}: npm cannot install it: {said}", flush=True)
            return None
    return [node, str(folder / "worker.mjs")]


def workers_of(
    model: Path, threads: int, peer: list[str] | None, has_class: bool = False
) -> list[Worker]:
    """Start the engines that have the model; transformers' class has it in fp32 alone."""
    python = [sys.executable, str(HERE / "cpu_worker.py")]
    commands = {"ours": [*python, "ours"]}
    if peer is not None:
        commands[PEER] = peer
    if has_class:
        commands["transformers"] = [*python, "transformers"]
    return [
        Worker(engine, [*command, str(model), str(threads)], threads)
        for engine, command in commands.items()
    ]


def row_of(name: str) -> dict[str, object]:
    """Return a row with its prompts, which are the same for all engines."""
    streams, length, tokens = ROWS[name]
    draw = random.Random(name)
    prompts = [[draw.randrange(1, 49_000) for _ in range(length)] for _ in range(streams)]
    return {"prompts": prompts, "tokens": tokens}


def copy_bandwidth(threads: int) -> float:
    """Bytes a second that copies read and write together, by so many threads: the best of five."""
    from concurrent.futures import ThreadPoolExecutor

    sources = [np.ones(_COPIED // threads, np.uint8) for _ in range(threads)]
    targets = [np.empty_like(each) for each in sources]
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(6):
            began = time.perf_counter()
            list(pool.map(np.copyto, targets, sources))
            seconds.append(time.perf_counter() - began)
    return 2 * _COPIED / min(seconds[1:])


def measure(running: list[Worker], names: list[str], rounds: int) -> dict[str, Any]:
    """Return row -> engine -> a list of wall and processor seconds, one for each round."""
    found: dict[str, Any] = {name: {each.engine: [] for each in running} for name in names}
    for worker in running:
        worker.run(row_of("decode-1"))
    for number in range(rounds):
        for name in names:
            turn = number % len(running)
            for worker in running[turn:] + running[:turn]:
                answer = worker.run(row_of(name))
                part = "first" if name.startswith("prompt") else "then"
                found[name][worker.engine].append(answer[part])
    return found


def figures(name: str, times: list[dict[str, float]]) -> dict[str, float]:
    """Return medians and spreads of one engine on one row."""
    streams, length, tokens = ROWS[name]
    count = length if name.startswith("prompt") else streams * (tokens - 1)
    out = {"tokens": float(count)}
    for kind in ("wall", "cpu"):
        seconds = [each[kind] for each in times]
        middle = statistics.median(seconds)
        out[f"{kind}_s"] = round(middle, 4)
        out[f"{kind}_spread"] = round((max(seconds) - min(seconds)) / middle, 3)
        out[f"per_{kind}_s"] = round(count / middle, 1)
    return out


def table(rows: dict[str, Any]) -> str:
    """Return the rows of one number of bits as text."""
    head = f"{'row':12} {'engine':13} {'tok/cpu s':>10} {'tok/s':>9} {'cpu s':>8} {'wall s':>8}"
    lines = [f"{head}  spread  ours / it"]
    for name, engines in rows.items():
        for engine, each in engines.items():
            ratio = rows[name]["ours"]["per_cpu_s"] / each["per_cpu_s"]
            wall = rows[name]["ours"]["per_wall_s"] / each["per_wall_s"]
            beside = "" if engine == "ours" else f"{ratio:8.2f} ({wall:.2f} by wall)"
            lines.append(
                f"{name:12} {engine:13} {each['per_cpu_s']:10,.1f} {each['per_wall_s']:9,.1f} "
                f"{each['cpu_s']:8.3f} {each['wall_s']:8.3f} {each['cpu_spread']:7.0%} {beside}"
            )
    return "\n".join(lines)


def processor() -> str:
    """Return what /proc/cpuinfo calls it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all that was asked for."""
    peer, source = peer_command(), fetch(HOME / "chat")
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": [round(each, 1) for each in os.getloadavg()],
        "threads": args.threads,
        "rounds": args.rounds,
        "bits": {},
    }
    for bits in args.bits:
        running = workers_of(model_of(source, bits), args.threads, peer, bits == "fp32")
        about = {each.engine: each.about for each in running}
        rows = figures_of(running, args.rows, args.rounds)
        result["bits"][bits] = {"type": TYPES[bits], "about": about, "rows": rows}
        print(f"\n{bits} ({TYPES[bits]}), {args.threads} threads\n{table(rows)}", flush=True)
    result["copy_bytes_s"] = round(copy_bandwidth(args.threads))
    found = result["bits"].get("int4", {}).get("rows", {}).get("decode-1")
    if found is not None:
        read = weight_bytes(model_of(source, "int4"))
        rate = found["ours"]["per_wall_s"] * read / result["copy_bytes_s"]
        result["share_of_copy_wall"] = round(rate, 3)
        print(
            f"\none stream, int4: weights are read at {result['share_of_copy_wall']:.0%} of the "
            f"bytes that a copy reads and writes, {result['copy_bytes_s'] / 1e9:.1f} GB/s"
        )
    return result


def figures_of(
    running: list[Worker], names: list[str], rounds: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Measure rows with workers by turns, and end these; return figures by row and engine."""
    times = measure(running, names, rounds)
    for each in running:
        each.end()
    return {
        name: {engine: figures(name, found) for engine, found in engines.items()}
        for name, engines in times.items()
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1, help="of each engine (1)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bits", nargs="+", default=list(TYPES), choices=TYPES)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--output", type=Path, help="a file that gets the JSON object, too")
    args = parser.parse_args()
    if not 1 <= args.threads <= len(os.sched_getaffinity(0)):
        parser.error(f"--threads {args.threads} is not 1 to {len(os.sched_getaffinity(0))}")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} is below 1")
    result = run(args)
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
