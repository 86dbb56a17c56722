"""Ten times more than fits, for two minutes: what is still served, and how the rest is refused.

First the peak: as many users as keep every place busy, one request after the other each. Then
requests at random times (Poisson), at ten times the rate that the peak completed, whatever becomes
of those before them. Then the peak again: the speed of a machine that others share drifts, and what
was served meanwhile is held against the mean of both. Checked: the server goes on at nearly its
peak, refuses the rest at once, ends whatever it accepted in time or with an error, and takes no
more memory for it.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from serving import REPORTS, about
from slipstream_client.bench.figures import MeasuredWindow, Trace
from slipstream_client.bench.load import RequestMaker, make_prompts, schedule
from slipstream_client.bench.messages import Job, Record
from slipstream_client.bench.runner import Clients, LoadSpec, Outcome, Target
from slipstream_compose.compose import compose
from slipstream_compose.writing import write
from slipstream_runtime.processes import num_cores
from slipstream_serve.probe import first_token
from slipstream_serve.server import repository_root
from slipstream_serve.triton import Endpoints, TritonServer, check_repository
from soak_watch import Held, held

CHECKPOINT = repository_root() / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
LEAST_GOODPUT = 0.9  # of the peak
_MANY_CORES = 16
_REFUSAL_MS = {True: 50.0, False: 150.0}  # p99; with many cores, and with few
_SLACK_S = 1.0  # from a deadline to its error, or the last token, at the client
_RAMP_S = 8.0  # does not count
_SAMPLE_S = 2.0
_GROWTH_MIB, _GROWTH = 6.0, 0.03  # of a process, between the second and the last quarter
_NUM_PARTS = 10
_NUM_PROMPTS = 64  # distinct ones
_ANSWER_S = 120.0
_START_S = 900.0  # of a server that loads a large model
_BOUNDS = ("max_num_seqs", "max_waiting", "long_prompt_tokens")


@dataclass(frozen=True)
class Limits:
    """What a run must keep."""

    goodput: float
    refusal_ms: float
    timeout_s: float


class Watch:
    """Takes the figures of a server's processes until it is told to end."""

    def __init__(self, server: TritonServer) -> None:
        self.samples: list[tuple[Held, dict[str, float]]] = []
        self._server = server
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No more samples."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        engine = engine_pid(self._server)
        is_closed = False
        while not is_closed:
            self.samples.append((held(self._server, engine), cpu_s(self._server, engine)))
            is_closed = self._closed.wait(_SAMPLE_S)

    def growth(self) -> tuple[list[str], dict[str, tuple[float, float, float]]]:
        """What is wrong; and of each process its RSS, early and late, and the cores it used."""
        problems, rows = [], {}
        quarter = max(1, len(self.samples) // 4)
        early, late = self.samples[quarter : 2 * quarter], self.samples[-quarter:]
        seconds = (len(self.samples) - 1) * _SAMPLE_S
        for name in self.samples[0][0].processes:
            before, after = _rss(early, name), _rss(late, name)
            used = self.samples[-1][1].get(name, 0.0) - self.samples[0][1].get(name, 0.0)
            rows[name] = (before, after, used / max(1.0, seconds))
            if after - before > max(_GROWTH_MIB, _GROWTH * before):
                problems.append(f"{name}: grew from {before:.1f} to {after:.1f} MiB")
            if any(name not in sample.processes for sample, _ in self.samples):
                problems.append(f"{name}: ended")
        return problems, rows


def _rss(samples: Sequence[tuple[Held, dict[str, float]]], name: str) -> float:
    found = [s.processes[name].rss_mib for s, _ in samples if name in s.processes]
    return statistics.median(found) if found else 0.0


def engine_pid(server: TritonServer) -> int:
    """The process that has the engine's module on its command line."""
    for pid in server.processes():
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"slipstream.engine.process" in command:
            return pid
    return 0


def cpu_s(server: TritonServer, engine: int) -> dict[str, float]:
    """CPU seconds that each process has used so far, by the names of `held`."""
    stubs, found = server.stubs(), {}
    for pid in server.processes():
        name = stubs.get(pid, "").removesuffix("_0_0") or "supervisor"
        name = {server.pid: "tritonserver", engine: "engine"}.get(pid, name)
        try:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks = int(words[11]) + int(words[12])
        found[name] = found.get(name, 0.0) + ticks / os.sysconf("SC_CLK_TCK")
    return found


# --- figures --------------------------------------------------------------------------------------


def goodput(records: Sequence[Record], window: MeasuredWindow, timeout_s: float) -> list[float]:
    """Tokens a second, in each tenth of the window, of the answers that became whole in time."""
    num_tokens = np.zeros(_NUM_PARTS)
    for trace in map(Trace.of, records):
        if trace.is_whole and took_s(trace.record) <= timeout_s + _SLACK_S:
            parts = _part(trace.times_ns, window)
            inside = (parts >= 0) & (parts < _NUM_PARTS)
            num_tokens += np.bincount(parts[inside], trace.counts[inside], _NUM_PARTS)
    return [float(num) for num in num_tokens / (window.seconds / _NUM_PARTS)]


def refusal_tenths(records: Sequence[Record], window: MeasuredWindow) -> list[float]:
    """Return the p99 of the refusals' time in each tenth of the window, ms."""
    parts: list[list[float]] = [[] for _ in range(_NUM_PARTS)]
    for record in records:
        part = _part(record.sent_ns, window)
        if record.is_refused and 0 <= part < _NUM_PARTS:
            parts[part].append(took_s(record) * 1e3)
    return [round(_percentile(part, 99), 1) for part in parts]


def _part(time_ns: Any, window: MeasuredWindow) -> Any:
    """In which tenth of the window that is, one time or many; outside it below 0 or too large."""
    return (time_ns - window.begin_ns) * _NUM_PARTS // (window.end_ns - window.begin_ns)


def took_s(record: Record) -> float:
    """From sending to its end."""
    return (record.ended_ns - record.sent_ns) / 1e9


def judge(
    peak: float, records: Sequence[Record], window: MeasuredWindow, limits: Limits
) -> tuple[dict[str, Any], list[str]]:
    """Figures of an overload, and what is wrong with them."""
    refused = sorted(took_s(r) * 1e3 for r in records if r.is_refused)
    accepted = [r for r in records if not r.is_refused]
    late = [r for r in accepted if took_s(r) > limits.timeout_s + _SLACK_S]
    codes = Counter(r.code or "whole" for r in accepted)
    others = {code: n for code, n in codes.items() if code not in ("whole", "DEADLINE_EXCEEDED")}
    parts = goodput(records, window, limits.timeout_s)
    got = statistics.fmean(parts)
    result: dict[str, Any] = {
        "offered": len(records),
        "accepted": len(accepted),
        "refused": len(refused),
        "ends": dict(codes),
        "late": len(late),
        "goodput_tokens_per_s": round(got, 1),
        "goodput_tenths": [round(each) for each in parts],
        "share_of_peak": round(got / peak, 4) if peak else 0.0,
        "refusal_ms": {f"p{p}": round(_percentile(refused, p), 1) for p in (50, 90, 99, 100)},
        "refusal_p99_tenths_ms": refusal_tenths(records, window),
        "accepted_s": {
            f"p{p}": round(_percentile(sorted(map(took_s, accepted)), p), 2) for p in (50, 99, 100)
        },
    }
    problems = []
    if got < limits.goodput * peak:
        problems.append(f"goodput {got:.0f} tok/s is {got / peak:.1%} of the peak of {peak:.0f}")
    if not refused:
        problems.append("nothing was refused: that was no overload")
    if (p99 := _percentile(refused, 99)) > limits.refusal_ms:
        problems.append(f"refusals took {p99:.0f} ms (p99), not {limits.refusal_ms:.0f}")
    if late:
        problems.append(f"{len(late)} accepted requests went past their deadline")
    if others:
        first = next(r for r in accepted if r.code in others)
        problems.append(f"errors of accepted requests: {others}, the first: {first.message}")
    return result, problems


def _percentile(values: Sequence[float], percent: int) -> float:
    return float(np.percentile(values, percent)) if values else 0.0


# --- the run --------------------------------------------------------------------------------------


def requests(args: argparse.Namespace) -> list[bytes]:
    """Distinct ones; each has a deadline, and never ends before its last token."""
    sampling = {"temperature": 0.0, "timeout_ms": args.timeout_ms}
    maker = RequestMaker(args.protocol, args.model, sampling, has_end=False)
    sizes = np.full(_NUM_PROMPTS, args.prompt_tokens)
    prompts = make_prompts(args.model, sizes, 4096, 1.0, args.seed)
    return [maker.payload(prompt.content, args.max_tokens, "") for prompt in prompts]


def measure(args: argparse.Namespace, server: TritonServer) -> dict[str, Any]:
    """Peak and overload on a server that has just been started."""
    ends = server.endpoints
    address = ends.grpc if args.protocol == "grpc" else ends.http.removeprefix("http://")
    target = Target(args.protocol, address, args.model, _ANSWER_S, 0)
    payloads = requests(args)
    with Clients(args.processes) as clients:
        done_s, before = _peak(args, clients, target, payloads)
        rate = args.factor * done_s
        print(
            f"overload: peak {done_s:.1f} requests/s, {before:.0f} tok/s; "
            f"now {rate:.0f} requests/s for {args.seconds:.0f} s",
            file=sys.stderr,
        )
        watch = Watch(server)
        outcome = clients.run(target, _open(args, payloads, rate))
        watch.close()
        _, after = _peak(args, clients, target, payloads)
    return conclude(args, [before, after], rate, outcome, watch)


def _peak(
    args: argparse.Namespace, clients: Clients, target: Target, payloads: list[bytes]
) -> tuple[float, float]:
    """Requests and tokens a second with users who ask one after the other."""
    # They come at once, and before the first step all of them wait.
    users = args.users or min(args.max_num_seqs + args.max_waiting // 2, args.max_waiting)
    jobs = [Job(index, -1, payload) for index, payload in enumerate(payloads)]
    found = clients.run(
        target, LoadSpec(jobs, payloads[: min(8, users)], users, args.peak_seconds, _RAMP_S)
    )
    ended = [t for t in map(Trace.of, found.records) if t.is_whole]
    ended = [t for t in ended if found.window.contains(int(t.times_ns[-1]))]
    if not ended:
        raise SystemExit("overload: nothing was completed at the peak; give --peak-seconds")
    parts = goodput(found.records, found.window, args.timeout_ms / 1e3)
    return len(ended) / found.window.seconds, statistics.fmean(parts)


def _open(args: argparse.Namespace, payloads: list[bytes], rate: float) -> LoadSpec:
    rng = np.random.default_rng(args.seed)
    times = schedule("poisson", rate, 1, int(rate * args.seconds), rng)
    jobs = [Job(i, int(t), payloads[i % len(payloads)]) for i, t in enumerate(times)]
    return LoadSpec(jobs, [], 0, args.seconds, _RAMP_S)


def conclude(
    args: argparse.Namespace, peaks: list[float], rate: float, outcome: Outcome, watch: Watch
) -> dict[str, Any]:
    """The JSON of the run."""
    limits = Limits(LEAST_GOODPUT, args.refusal_ms, args.timeout_ms / 1e3)
    peak = statistics.fmean(peaks)
    result, problems = judge(peak, outcome.records, outcome.window, limits)
    grown, rows = watch.growth()
    return {
        "model": args.model,
        "protocol": args.protocol,
        "seconds": args.seconds,
        "factor": args.factor,
        "offered_per_s": round(rate, 1),
        "peak_tokens_per_s": round(peak, 1),
        "peaks_tokens_per_s": [round(each, 1) for each in peaks],
        **result,
        "limits": dataclasses.asdict(limits),
        "processes": {
            name: {"rss_mib": [round(a, 1), round(b, 1)], "cores": round(used, 3)}
            for name, (a, b, used) in rows.items()
        },
        "clients": outcome.clients,
        "problems": problems + grown,
    }


def table(result: dict[str, Any]) -> str:
    """For people."""
    ms, s = result["refusal_ms"], result["accepted_s"]
    lines = [
        f"offered   {result['offered']:>8}  {result['offered_per_s']:.1f} a second",
        f"accepted  {result['accepted']:>8}  p50 {s['p50']:.2f} s, p99 {s['p99']:.2f} s: "
        + ", ".join(f"{n} {code}" for code, n in result["ends"].items()),
        f"refused   {result['refused']:>8}  p50 {ms['p50']:.1f} ms, p99 {ms['p99']:.1f} ms, "
        f"worst {ms['p100']:.1f} ms",
        f"p99 ms    {' '.join(map(str, result['refusal_p99_tenths_ms']))}  (refusals, by tenths)",
        f"goodput   {result['goodput_tokens_per_s']:>8.0f}  tok/s, "
        f"{result['share_of_peak']:.1%} of the peak of {result['peak_tokens_per_s']:.0f}",
        f"tenths    {' '.join(map(str, result['goodput_tenths']))}  (peaks: "
        + ", ".join(f"{peak:.0f}" for peak in result["peaks_tokens_per_s"])
        + ")",
        "",
        f"{'process':<20}{'cores':>8}{'RSS MiB':>18}",
    ]
    for name, row in result["processes"].items():
        before, after = row["rss_mib"]
        lines.append(f"{name:<20}{row['cores']:>8.2f}{before:>9.1f} ->{after:>7.1f}")
    lines.append(f"{'clients':<20}{result['clients']['cores']:>8.2f}")
    return "\n".join(lines)


@contextmanager
def serving(args: argparse.Namespace, log: Path) -> Iterator[TritonServer]:
    """A server on the given repository, else on the default model with small bounds."""
    with tempfile.TemporaryDirectory() as folder:
        repository = args.model_repository
        if repository is None:
            repository = Path(folder) / "models"
            options = {name: getattr(args, name, None) for name in _BOUNDS}
            write(compose(CHECKPOINT, repository, options, cores=num_cores()))
        with TritonServer(repository, Endpoints.free(), log).running(_START_S) as server:
            first_token(server.endpoints.http, check_repository(repository))
            yield server


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--model", default="ensemble", help="(%(default)s)")
    add("--protocol", choices=("grpc", "http"), default="grpc", help="(%(default)s)")
    add("--seconds", type=float, default=120.0, help="of the overload (%(default)s)")
    add("--peak-seconds", type=float, default=30.0, help="before and after (%(default)s)")
    add("--factor", type=float, default=10.0, help="offered: so many times the peak (%(default)s)")
    add("--prompt-tokens", type=int, default=32, help="about (%(default)s)")
    add("--max-tokens", type=int, default=256, help="a request (%(default)s)")
    add("--timeout-ms", type=int, default=30_000, help="a request's deadline (%(default)s)")
    add("--max-num-seqs", type=int, default=16, help="as `slipstream compose` (%(default)s)")
    add("--max-waiting", type=int, default=32, help="as `slipstream compose` (%(default)s)")
    add(
        "--users",
        type=int,
        help="of the peak (default: max-num-seqs + max-waiting / 2, at most max-waiting)",
    )
    add("--processes", type=int, default=1, help="of clients (%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    many = (os.cpu_count() or 1) >= _MANY_CORES
    add("--refusal-ms", type=float, default=_REFUSAL_MS[many], help="p99 (here %(default)s)")
    add(
        "--model-repository",
        type=Path,
        help="serve this one; then give its --max-num-seqs and --max-waiting too",
    )
    add("--output", type=Path, help="write the JSON here")
    return parser.parse_args(arguments)


def main() -> int:
    """0 where nothing is wrong."""
    args = parse()
    where = about()
    with serving(args, REPORTS / "overload-tritonserver.log") as server:
        result = where | measure(args, server)
    print(table(result))
    for line in result["problems"]:
        print(f"overload: {line}", file=sys.stderr)
    text = json.dumps(result)
    print(text)
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
