"""What the Triton side adds to a stream: `python benchmarks/streams.py [--rows 64x100 ...]`.

A real tritonserver on the default repository, with `paced_engine.py` in the engine's place: nothing
is computed, every stream is owed one token a step, and what is late was made late between the
engine's socket and the client: bridge, Triton, and in the ensemble `postprocessing`. The stubs are
as they are served but for notes of when they handed tokens over (`noting_bridge.py`,
`noting_postprocessing.py`). The clients are processes of their own on the same machine; they only
note times and bytes while streams run, a gRPC connection for every 64 streams.

`stream_figures.py` defines the figures and holds the goals. Figures are of the window in which
every stream runs. A row fails if a text is not the one that was made, token for token, or if a
count is wrong. Exit code 1: something grows.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import handover_journal
from paced_engine import write_python
from report import RESULTS, commit
from slipstream_compose.compose import compose
from slipstream_compose.writing import write
from slipstream_runtime.processes import num_cores
from slipstream_serve.server import repository_root, server_directory
from slipstream_serve.triton import Endpoints, TritonServer
from stream_clients import Load, Prompt, Received, lengths_of, receive
from stream_figures import (
    ROWS,
    Handed,
    fault,
    figures,
    first_figures,
    has_many_cores,
    judge,
    memory,
    num_kept,
    read_handovers,
    read_journal,
)
from stream_picture import picture

MODELS = {"fused": "tensorrt_llm_bls", "composed": "ensemble"}
NOTES_OF = {"fused": "tensorrt_llm_bls", "composed": "postprocessing"}  # who hands over last
COLUMNS = {
    "wiring": "wiring",
    "streams": "streams",
    "rate": "tok/s each",
    "made_tok_s": "made tok/s",
    "tok_s": "handed over",
    "tok_resp": "tok/resp",
    "p50_ms": "delay p50 ms",
    "p99_ms": "p99",
    "client_p50_ms": "client p50",
    "client_p99_ms": "p99",
    "added_p50_ms": "added to the first",
    "is_growing": "grows",
    "server_cpu": "server cores",
    "stubs_cpu": "stubs",
    "client_cpu": "clients",
    "others_cpu": "others",
}
CHECKPOINT = repository_root() / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
OUT = repository_root() / "benchmarks" / "out"
_PROMPT = "def main():\n    "
_WARM_SEED, _WARM_TOKENS = 1 << 20, 8  # of a first request that no figure counts
_PROBE_SEED, _NUM_PROBES = 1 << 21, 100  # short streams one after the other, in a row of one stream
_OPENING_S = 3.0  # for the clients' imports, before they open their streams together
_SESSION_S, _MANY_SESSIONS = 20, 5  # of a stream; of so many the server's memory is judged
_NS = 1_000_000_000


@contextlib.contextmanager
def serving(step_s: float, scratch: Path, log: Path) -> Iterator[TritonServer]:
    """The default model with a source of that step; its journals are in `scratch`."""
    python = scratch / "python"
    write_python(python, step_s, scratch / "journal")
    environment = {
        "SLIPSTREAM_PYTHON": str(python),
        "SLIPSTREAM_SERVER": str(_noting_server(scratch / "server")),
        handover_journal.VARIABLE: str(scratch),
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    repository = scratch / "models"
    write(compose(CHECKPOINT, repository, {}, cores=num_cores()))
    try:
        with TritonServer(repository, Endpoints.free(), log).running() as server:
            yield server
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _noting_server(directory: Path) -> Path:
    """The installed server, by links, with backends that note what they hand over."""
    installed, here = server_directory(), Path(__file__).resolve().parent
    backends = directory / "backends"
    backends.mkdir(parents=True)
    for entry in [*installed.iterdir(), *(installed / "backends").iterdir()]:
        if entry.name != "backends":
            (directory / entry.relative_to(installed)).symlink_to(entry.resolve())
    for name, script in (
        ("slipstream", "noting_bridge.py"),
        ("slipstream_postprocessing", "noting_postprocessing.py"),
    ):
        (backends / name).unlink()
        (backends / name).mkdir()
        (backends / name / "model.py").symlink_to(here / script)
        (backends / name / "handover_journal.py").symlink_to(here / "handover_journal.py")
    return directory


def cpu_seconds(server: TritonServer) -> dict[str, float]:
    """CPU seconds so far: of tritonserver, of all stubs and each, the source, and the machine."""
    stubs = server.stubs()
    tick = os.sysconf("SC_CLK_TCK")
    lines = Path("/proc/stat").read_text().splitlines()
    idle, waiting = map(int, lines[0].split()[4:6])
    num_cores = sum(line.startswith("cpu") for line in lines) - 1
    found = {"machine": num_cores * time.monotonic() - (idle + waiting) / tick}
    found |= {"server": 0.0, "stubs": 0.0, "source": 0.0}
    for pid in server.processes():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            seconds = (int(words[11]) + int(words[12])) / tick
            if pid in stubs:
                found[stubs[pid]] = seconds
                found["stubs"] += seconds
            elif pid == server.pid:
                found["server"] = seconds
            elif b"slipstream.engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found["source"] = seconds
    return found


class Memory:
    """Samples of the time and of what server and stubs have resident, twice a second, in MB."""

    def __init__(self, server: TritonServer) -> None:
        self.samples: list[dict[str, float]] = []
        self._pids = {"server": [server.pid], "stubs": list(server.stubs())}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> list[dict[str, float]]:
        """All samples."""
        self._closed.set()
        self._thread.join()
        return self.samples

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # a process has ended, and the row with it
            while not self._closed.wait(0.5):
                found = {name: sum(map(_resident_mb, pids)) for name, pids in self._pids.items()}
                self.samples.append({"time_ns": time.time_ns(), **found})


def _resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


@dataclass(frozen=True)
class Plan:
    """What a row asks for: streams side by side, each followed by others where it is a long row."""

    wiring: str
    num_streams: int
    rate: int
    slots: list[list[Prompt]]
    probes: list[Prompt]

    @classmethod
    def of(cls, wiring: str, row: str, seconds: float) -> "Plan":
        """Streams last 20 s at most: then their slot begins the next one, each at another time."""
        num_streams, rate = map(int, row.split("x"))
        total, longest = round(seconds * rate), round(_SESSION_S * rate)
        slots = []
        for number in range(num_streams):
            lengths = lengths_of(number, num_streams, total, longest)
            slots.append(
                [
                    Prompt(number + num_streams * turn, _PROMPT, length)
                    for turn, length in enumerate(lengths)
                ]
            )
        num_probes = _NUM_PROBES if num_streams == 1 else 0
        probes = [Prompt(_PROBE_SEED + number, _PROMPT, 2) for number in range(num_probes)]
        return cls(wiring, num_streams, rate, slots, probes)

    def faults(self, streams: list[Received], handovers: dict[int, Handed]) -> list[str]:
        """What is wrong with any of them."""
        prompts = [prompt for slot in [*self.slots, self.probes] for prompt in slot]
        wanted = {prompt.seed: prompt.max_tokens for prompt in prompts}
        assert wanted.keys() == {stream.seed for stream in streams}
        told = [
            fault(stream, handovers.get(stream.seed), wanted[stream.seed]) for stream in streams
        ]
        return [text for text in told if text]


def measure(wiring: str, row: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row on a server of its own. Raises SystemExit for the first streams that are wrong."""
    plan = Plan.of(wiring, row, args.seconds)
    spawn = multiprocessing.get_context("spawn")
    num_clients = min(args.clients, plan.num_streams)
    with (
        tempfile.TemporaryDirectory(prefix="slipstream-paced-") as directory,
        ProcessPoolExecutor(num_clients, spawn) as pool,
    ):
        with serving(1 / plan.rate, Path(directory), OUT / "streams-server.log") as server:
            about = (server.endpoints.grpc, MODELS[wiring])
            begin_ns = time.time_ns() + round(_OPENING_S * _NS)
            warm = [[Prompt(_WARM_SEED, _PROMPT, _WARM_TOKENS)]]
            pool.submit(receive, Load(*about, warm, 0, 60.0, args.counts)).result()
            timeout_s = 4 * args.seconds + 60
            parts = [plan.slots[number::num_clients] for number in range(num_clients)]
            loads = [Load(*about, part, begin_ns, timeout_s, args.counts) for part in parts]
            running = [pool.submit(receive, load) for load in loads]
            time.sleep(max(0.0, (begin_ns - time.time_ns()) / _NS))
            before, resident = cpu_seconds(server), Memory(server)
            time.sleep(args.seconds)
            samples, after = resident.close(), cpu_seconds(server)
            seconds = (time.time_ns() - begin_ns) / _NS
            results = [each.result() for each in running]
            probe = Load(*about, [plan.probes], 0, 60.0, args.counts)
            probed = pool.submit(receive, probe).result()[0]
        journal = read_journal(Path(directory, "journal"))
        handovers = read_handovers(Path(directory), NOTES_OF[wiring])
    streams = [stream for found, _ in results for stream in found]
    if faults := plan.faults(streams + probed, handovers):
        raise SystemExit(f"{wiring} {row}: {len(faults)} wrong streams: " + "; ".join(faults[:3]))
    by_seed = {stream.seed: stream for stream in streams}
    slots = [[by_seed[prompt.seed] for prompt in slot] for slot in plan.slots]
    found = {"wiring": wiring, "streams": plan.num_streams, "rate": plan.rate}
    found |= {"num_clients": num_clients} | figures(slots, journal, handovers)
    if probed:
        found |= first_figures(probed, journal, handovers)
    judged = ("stubs", "server") if args.seconds >= _MANY_SESSIONS * _SESSION_S else ("stubs",)
    client_s = sum(cpu_s for _, cpu_s in results)
    kept = num_kept(streams, [round(sample["time_ns"]) for sample in samples])
    return found | memory(samples, kept, judged) | _cores(before, after, client_s, seconds)


def _cores(
    before: dict[str, float], after: dict[str, float], client_s: float, seconds: float
) -> dict[str, float]:
    """Return the processor time of each process, in cores."""
    shares = {f"{name}_cpu": round((after[name] - before[name]) / seconds, 2) for name in after}
    shares["client_cpu"] = round(client_s / seconds, 2)
    known = sum(shares[f"{name}_cpu"] for name in ("server", "stubs", "source", "client"))
    shares["others_cpu"] = round(shares.pop("machine_cpu") - known, 2)
    return shares


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, CPU in cores; then the goals."""
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(str(row[name]) for name in COLUMNS) + " |" for row in rows]
    lines.append("")
    for row in rows:
        for goal in row["goals"]:
            reached = "reached" if goal["is_reached"] else "MISSED"
            name = f"{row['wiring']} {row['streams']}x{row['rate']} {goal['figure']}"
            lines.append(f"{reached:8} {name}: {row[goal['figure']]}, goal {goal['goal']}")
    return "\n".join(lines)


def main() -> int:
    """Command line; not 0 where something grows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    cores = os.cpu_count() or 1
    rows = ROWS[has_many_cores(cores)]
    parser.add_argument("--rows", nargs="+", default=list(rows), metavar="STREAMSxRATE")
    parser.add_argument("--wirings", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seconds", type=float, default=10.0, help="of each row (%(default)s)")
    clients = max(1, min(8, cores // 4))
    parser.add_argument("--clients", type=int, default=clients, help="processes (%(default)s)")
    parser.add_argument("--counts", action="store_true", help="ask for token counts, as the SDK")
    parser.add_argument("--name", help="keep the result in benchmarks/results/ under this name")
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    found = []
    for wiring in args.wirings:
        for row in args.rows:
            figures_of = measure(wiring, row, args)
            found.append(figures_of | {"goals": judge(figures_of, cores)})
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    about = {
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "cores": cores,
        "machine": platform.machine(),
        "seconds": args.seconds,
        "counts": args.counts,
    }
    result = about | {"rows": found}
    for path in [OUT / "streams", *([RESULTS / args.name] if args.name else [])]:
        path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        path.with_suffix(".svg").write_text(picture(result))
    print(table(found))
    print(json.dumps(result))
    return 1 if any(row["is_growing"] or row["is_memory_growing"] for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
