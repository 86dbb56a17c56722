"""`slipstream bench`: load a running server and report what clients saw (docs/bench.md)."""

import argparse
import datetime
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from slipstream_contract.arguments import port
from slipstream_contract.deployment import role_of
from slipstream_contract.errors import ContractError, clip
from tqdm import tqdm

from slipstream_client.bench import openai
from slipstream_client.bench.figures import Objectives, figures
from slipstream_client.bench.load import (
    ARRIVALS,
    Prompt,
    RequestMaker,
    lengths,
    make_prompts,
    make_text,
    read_prompts,
    schedule,
)
from slipstream_client.bench.messages import Job, Progress
from slipstream_client.bench.price import price_per_hour
from slipstream_client.bench.protocols import GRPC, HTTP, OPENAI, PROTOCOLS
from slipstream_client.bench.report import columns, page
from slipstream_client.bench.runner import Clients, LoadSpec, Outcome, Target, default_processes
from slipstream_client.client import DEFAULT_MODEL
from slipstream_client.codec import STREAMED, TENSORRT_LLM, VLLM
from slipstream_client.commands.common import MODEL_HELP, add_connection, add_field
from slipstream_client.release import release

_PROBE_WORDS = 200
_MAX_PROMPTS = 1000  # distinct prompts of a load with --seconds; then they repeat
_EXIT_FAILED = 1
_SAMPLING = ("temperature", "top_k", "top_p")
_MODEL_HELP = (
    f"{MODEL_HELP % {'default': DEFAULT_MODEL}}; over openai any that the server lists (the first)"
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its options."""
    parser = subparsers.add_parser(
        "bench",
        help="load a running server and report what its clients saw",
        description="Exit code 0 only if no request failed; refused ones have not failed.",
    )
    add_connection(parser, timeout_s=300.0)
    add = parser.add_argument
    add("--http-port", type=port, default=8000, metavar="N", help="(%(default)s)")
    add("--openai-port", type=port, default=9000, metavar="N", help="(%(default)s)")
    add("--protocol", choices=PROTOCOLS, default=GRPC, help="(%(default)s)")
    add("--model", help=_MODEL_HELP)
    load = parser.add_mutually_exclusive_group()
    _number_list(load, "--concurrency", int, "closed loop: requests in flight (8)")
    _number_list(load, "--rates", float, "open loop: requests a second, whatever the server does")
    add("--arrivals", choices=ARRIVALS, default="poisson", help="with --rates (%(default)s)")
    add("--burst", type=int, default=8, metavar="N", help="requests a burst (%(default)s)")
    add("--requests", type=int, metavar="N", help="requests of each load (64, unless --seconds)")
    add("--seconds", type=float, metavar="S", help="start no request of a load later than this")
    add("--ramp", type=float, default=0.0, metavar="S", help="leave the first seconds out (0)")
    add("--warm-up", type=int, default=8, metavar="N", help="requests before each load (8)")
    add("--input-len", default="64", metavar="DIST", help="tokens: N, uniform:LOW:HIGH, ...")
    add("--output-len", default="64", metavar="DIST", help="... or lognormal:MEDIAN:SIGMA[:MAX]")
    add("--prompts", type=Path, metavar="FILE", help="JSON lines: prompt or input_ids, max_tokens")
    add("--vocabulary", type=int, default=256, metavar="N", help="random ids are below N (256)")
    add("--keep-end", action="store_true", help="let the model end before --output-len")
    for name in _SAMPLING:
        add_field(parser, name)
    add("--seed", type=int, default=0, help="seed of times, lengths, prompts (%(default)s)")
    add("--goodput", nargs="+", default=[], metavar="NAME:MS", help="ttft:200 itl:30 e2e:3000")
    add("--retries", type=int, default=0, metavar="N", help="retries of a refused request")
    add("--processes", type=int, default=default_processes(), help="of clients (%(default)s)")
    add("--price-per-hour", type=float, metavar="X", help="for the cost (default: the server's)")
    add("--metrics-port", type=port, metavar="N", help="of that price (8002; openai: none)")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add("--html", type=Path, metavar="FILE", help="write a page with plots")


def _number_list(parser: Any, name: str, kind: type[int] | type[float], help_text: str) -> None:
    def parse(text: str) -> list[int] | list[float]:
        values = [kind(word) for word in text.split(",")]
        if not all(0 < value < 1e6 for value in values):
            raise ValueError
        return values

    parse.__name__ = "list of numbers above 0"  # argparse prints it in its error
    parser.add_argument(name, type=parse, metavar="A,B,...", help=help_text)


def run(args: argparse.Namespace) -> int:
    """Run every load, print a table, write the reports; return 1 if a request failed."""
    ports = {GRPC: args.grpc_port, HTTP: args.http_port, OPENAI: args.openai_port}
    address = f"{args.host}:{ports[args.protocol]}"
    _check(args)
    if args.model is None:
        args.model = openai.first_model(address) if args.protocol == OPENAI else DEFAULT_MODEL
    objectives = Objectives.parse(args.goodput)
    begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    target = Target(args.protocol, address, args.model, args.timeout, args.retries)
    price = _price(args)
    points: list[dict[str, Any]] = []
    report = {
        "version": release(),
        "commit": _commit(),
        "begun": begun,
        "command": ["slipstream", *sys.argv[1:]],
        "machine": _machine(),
        "target": {"protocol": args.protocol, "address": address, "model": args.model},
        "options": {name: _plain(value) for name, value in vars(args).items()},
        "loads": points,
    }
    with Clients(args.processes) as clients:
        maker = _Maker(args, clients, target)
        for concurrency, rate in _levels(args):
            load = maker.load(concurrency, rate)
            name = f"{rate:g}/s" if rate else f"{concurrency} at once"
            outcome = _run_one(clients, target, load, name)
            found = figures(outcome.records, outcome.window, objectives, price)
            what = {"rate": rate} if rate else {"concurrency": concurrency}
            points.append({"load": name, **what, **found, "clients": outcome.clients})
            _write(args, report)  # after each load: an interrupted sweep keeps its results
    print(table(points), flush=True)
    for point in points:
        _print_warnings(point)
    return _EXIT_FAILED if any(point["failed"] for point in points) else 0


def _price(args: argparse.Namespace) -> float | None:
    """Return what a GPU hour costs; None: not known."""
    given: float | None = args.price_per_hour
    if given is not None:
        return given
    if args.protocol == OPENAI and args.metrics_port is None:
        return None  # at the usual port another server may answer than the one that is measured
    return price_per_hour(f"http://{args.host}:{args.metrics_port or 8002}/metrics")


def _write(args: argparse.Namespace, report: dict[str, Any]) -> None:
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.html:
        args.html.write_text(page(report))


def _check(args: argparse.Namespace) -> None:
    """Raise ContractError for values out of range."""
    least = {"requests": 1, "warm_up": 0, "retries": 0, "processes": 1, "burst": 1, "vocabulary": 1}
    for name, low in least.items():
        value = getattr(args, name)
        if value is not None and value < low:
            raise ContractError(f"--{name.replace('_', '-')} is {value}, not at least {low}")
    if not 0 < args.timeout < float("inf"):
        raise ContractError(f"--timeout is {args.timeout:g}, not a number of seconds above 0")
    if args.seconds is not None and not 0 < args.seconds < float("inf"):
        raise ContractError(f"--seconds is {args.seconds:g}, not a number above 0")
    if not 0 <= args.ramp < (float("inf") if args.seconds is None else args.seconds):
        raise ContractError(f"--ramp is {args.ramp:g}, which leaves no time that counts")
    if args.price_per_hour is not None and not 0 <= args.price_per_hour < float("inf"):
        raise ContractError(f"--price-per-hour is {args.price_per_hour:g}, not 0 or above")
    is_named = args.protocol != OPENAI and args.model is not None
    if is_named and role_of(args.model) not in STREAMED:
        raise ContractError(f"--model {clip(args.model)} is none of those that stream tokens")
    for file in filter(None, (args.json, args.html)):
        if not file.parent.is_dir():
            raise ContractError(f"{clip(str(file))}: its directory does not exist")


def _levels(args: argparse.Namespace) -> list[tuple[int, float]]:
    """Return (concurrency, rate) of each load; one of the two is 0."""
    if args.rates:
        return [(0, rate) for rate in args.rates]
    return [(concurrency, 0.0) for concurrency in args.concurrency or [8]]


class _Maker:
    """Makes the requests of the loads; all loads send the same requests."""

    def __init__(self, args: argparse.Namespace, clients: Clients, target: Target) -> None:
        self._args = args
        given = {name: getattr(args, name) for name in _SAMPLING}
        sampling = {name: value for name, value in given.items() if value is not None}
        self._maker = RequestMaker(args.protocol, args.model, sampling, args.keep_end)
        self._input = lengths("--input-len", args.input_len)
        self._output = lengths("--output-len", args.output_len)
        self._prompts: list[Prompt] = []
        self._tokens_per_word = 1.0
        # What prompts may be: a text, but for the model that takes ids.
        self._kind = VLLM if args.protocol == OPENAI else args.model
        if args.prompts:
            self._prompts = read_prompts(args.prompts, self._kind)
        elif role_of(self._kind) != TENSORRT_LLM:
            text = make_text(np.random.default_rng([args.seed, 2]), _PROBE_WORDS)
            record = clients.probe(target, self._maker.payload(text, 1, "probe"))
            if record.num_input_tokens > 0:
                self._tokens_per_word = record.num_input_tokens / _PROBE_WORDS

    def load(self, concurrency: int, rate: float) -> LoadSpec:
        """Return a load with `concurrency` users, or at `rate` requests a second if not 0."""
        args = self._args
        due = self._due(rate)
        size = len(due) if rate else args.requests or (_MAX_PROMPTS if args.seconds else 64)
        payloads = self._payloads(size, args.seed)
        offsets = due.tolist() if rate else [-1] * size
        jobs = [Job(i, offset, payloads[i]) for i, offset in enumerate(offsets)]
        warm_up = self._payloads(args.warm_up, args.seed + 1)
        return LoadSpec(jobs, warm_up, concurrency, args.seconds, args.ramp)

    def _due(self, rate: float) -> NDArray[np.int64]:
        args = self._args
        if not rate:
            return np.zeros(0, np.int64)
        size = args.requests or (64 if args.seconds is None else 1024)
        while True:
            rng = np.random.default_rng([args.seed, 3])
            due = schedule(args.arrivals, rate, args.burst, size, rng)
            if args.seconds is None:
                return due
            if args.requests or due[-1] >= args.seconds * 1e9:
                return cast("NDArray[np.int64]", due[due < args.seconds * 1e9])
            size *= 2

    def _payloads(self, size: int, seed: int) -> list[bytes]:
        args = self._args
        rng = np.random.default_rng([seed, 0])
        inputs, outputs = self._input.sample(rng, size), self._output.sample(rng, size)
        if self._prompts:
            prompts = [self._prompts[i % len(self._prompts)] for i in range(size)]
        else:
            prompts = make_prompts(self._kind, inputs, args.vocabulary, self._tokens_per_word, seed)
        return [
            self._maker.payload(prompt.content, prompt.max_tokens or int(length), f"bench-{i}")
            for i, (prompt, length) in enumerate(zip(prompts, outputs, strict=True))
        ]


def _run_one(clients: Clients, target: Target, load: LoadSpec, name: str) -> Outcome:
    """Run one load, with a progress bar if stderr is a terminal."""
    is_counted = load.seconds is None or not load.num_users
    with tqdm(total=len(load.jobs) if is_counted else None, desc=name, disable=None) as bar:

        def show(progress: Progress) -> None:
            bar.set_postfix(
                running=progress.running,
                refused=progress.refused,
                failed=progress.failed,
                refresh=False,
            )
            bar.update(progress.ended - bar.n)

        return clients.run(target, load, show)


def table(points: Sequence[dict[str, Any]]) -> str:
    """Return the loads as the rows of a text table."""
    rows = [columns(point) for point in points]
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]
    return "\n".join(lines)


def _print_warnings(point: dict[str, Any]) -> None:
    """Print what needs attention to stderr."""
    if not point["requests"]:
        print(f"{point['load']}: no request was due in the time that counts", file=sys.stderr)
    if point["clients"]["limit"]:
        print(
            f"{point['load']}: the tool may be the limit: {point['clients']['limit']}",
            file=sys.stderr,
        )
    if point["failed"]:
        counts = ", ".join(f"{count} {code}" for code, count in point["errors"].items())
        print(f"{point['load']}: failed: {counts}: {point['first_error']}", file=sys.stderr)


def _commit() -> str | None:
    """Return the commit of the checkout that this file lies in; None outside of git."""
    git = shutil.which("git")
    folder = Path(__file__).resolve().parent
    if git is None:
        return None
    command = [git, "-C", str(folder), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(names) or None
    return {"cpu": names[0] if names else platform.machine(), "cores": f"{cores} cores"}


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | list | None) else str(value)
