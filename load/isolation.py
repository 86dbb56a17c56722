"""What one long prompt, or one of 27 MB, does to the streams beside it.

Some users stream all the time. Meanwhile prompts of the longest length come, one after the other;
the users' times between tokens from the sending of such a prompt to its first token are compared
with those when nothing else happens. Then texts and ids of 27 MB go to every model over gRPC and
HTTP: each must be refused within a second, and the users must not see it either. The same to a
model that is not there, which tritonserver refuses by itself, shows how much of it is the server's.
"""

import argparse
import itertools
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from overload import serving
from serving import REPORTS, about
from slipstream_client import SlipstreamClient
from slipstream_client.bench.figures import Trace
from slipstream_client.bench.load import RequestMaker, make_prompts
from slipstream_client.bench.messages import Job, Record
from slipstream_client.bench.runner import Clients, LoadSpec, Target
from slipstream_client.client import CHANNEL_OPTIONS
from slipstream_serve.triton import Endpoints
from tritonclient.grpc import service_pb2, service_pb2_grpc

MODELS = ("ensemble", "tensorrt_llm_bls", "vllm_model", "tensorrt_llm")
NOBODY = "nobody"  # a model that is not there
STRETCH = 2.0  # p99 between tokens, at most, as a multiple of the usual
REFUSAL_S = 1.0
_PAUSE_S = 1.0  # between two long prompts: the usual time
_AFTER_S = 0.1  # what came late
_RAMP_S = 2.0
_ANSWER_S = 600.0


@dataclass(frozen=True)
class Span:
    """A time, in ns of CLOCK_MONOTONIC, and what went on."""

    what: str
    begin_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """Return its length."""
        return (self.end_ns - self.begin_ns) / 1e9


class Disturber:
    """What is done to the users, one after the other, each with its span."""

    def __init__(self, args: argparse.Namespace, endpoints: Endpoints) -> None:
        self.spans: list[Span] = []
        self.answers: list[tuple[str, float, str]] = []  # of the big ones: what, seconds, error
        self._args = args
        self._endpoints = endpoints
        self._random = np.random.default_rng(1)

    def run(self) -> None:
        """All of it."""
        with SlipstreamClient(self._endpoints.grpc, timeout_s=_ANSWER_S) as client:
            for _ in range(self._args.repeat):
                self._usual()
                # Another one each time: what the cache remembers is not computed.
                ids = self._random.integers(10, 4000, self._args.prompt_tokens).tolist()
                begin_ns = time.monotonic_ns()
                client.complete(ids, model="tensorrt_llm", max_tokens=1)
                self._add("long", begin_ns)
            ways = (("grpc", self._over_grpc), ("http", self._over_http))
            everywhere = itertools.product((*MODELS, NOBODY), ways)
            for model, (protocol, ask) in list(everywhere) * self._args.rounds:
                payload = self._big(model, protocol)
                self._usual()
                begin_ns = time.monotonic_ns()
                error = ask(model, payload)
                span = self._add(NOBODY if model == NOBODY else "big", begin_ns)
                self.answers.append((f"{model} {protocol}", span.seconds, error))

    def _usual(self) -> None:
        time.sleep(_AFTER_S)
        begin_ns = time.monotonic_ns()
        time.sleep(_PAUSE_S)
        self._add("usual", begin_ns)

    def _add(self, what: str, begin_ns: int) -> Span:
        span = Span(what, begin_ns, time.monotonic_ns())
        self.spans.append(span)
        return span

    def _big(self, model: str, protocol: str) -> bytes:
        """A request of about as many bytes as asked for."""
        maker = RequestMaker(protocol, MODELS[1] if model == NOBODY else model, {}, has_end=True)
        if model != "tensorrt_llm":
            text = "word and " * (self._args.bytes // 9)
            return maker.payload(text, 4, "")
        size = self._args.bytes // (4 if protocol == "grpc" else 5)
        return maker.payload([999] * size, 4, "")

    def _over_grpc(self, model: str, payload: bytes) -> str:
        request = service_pb2.ModelInferRequest.FromString(payload)
        request.model_name = model
        with grpc.insecure_channel(self._endpoints.grpc, options=CHANNEL_OPTIONS) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for response in stub.ModelStreamInfer(iter([request])):
                return str(response.error_message)
        return "no answer"

    def _over_http(self, model: str, payload: bytes) -> str:
        url = f"{self._endpoints.http}/v2/models/{model}/generate_stream"
        request = urllib.request.Request(url, payload, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request) as reply:
                return reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.read().decode()


# --- figures --------------------------------------------------------------------------------------


def between_tokens(records: Sequence[Record]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """List each token but a stream's first: its time (ns), and the time since the one before."""
    ends, times = [np.zeros(0, np.int64)], [np.zeros(0)]
    for trace in map(Trace.of, records):
        ends.append(np.repeat(trace.times_ns[1:], trace.counts[1:]))
        times.append(trace.itl_ms)
    return np.concatenate(ends), np.concatenate(times)


def figures(records: Sequence[Record], spans: Sequence[Span], what: str) -> dict[str, float]:
    """Times between the users' tokens, in ms, of those that came while it went on."""
    ends, times = between_tokens(records)
    late_ns = int(_AFTER_S / 2 * 1e9)
    inside = np.zeros(len(ends), np.bool_)
    chosen = [span for span in spans if span.what == what]
    for span in chosen:
        inside |= (ends >= span.begin_ns) & (ends < span.end_ns + late_ns * (what != "usual"))
    found = times[inside]
    if not len(found):
        return {"tokens": 0}
    names = {"p50": 50, "p99": 99, "max": 100}
    result = {name: round(float(np.percentile(found, p)), 2) for name, p in names.items()}
    seconds = [span.seconds for span in chosen]
    return {"tokens": len(found), **result, "span_s": round(float(np.median(seconds)), 3)}


def measure(args: argparse.Namespace, endpoints: Endpoints) -> dict[str, Any]:
    """The users, and what happens beside them."""
    addresses = {"grpc": endpoints.grpc, "http": endpoints.http.removeprefix("http://")}
    target = Target(args.protocol, addresses[args.protocol], args.model, _ANSWER_S, 0)
    maker = RequestMaker(args.protocol, args.model, {"temperature": 0.0}, has_end=False)
    prompts = make_prompts(args.model, np.full(args.users, 16), 4096, 1.0, 0)
    payloads = [maker.payload(prompt.content, args.max_tokens, "") for prompt in prompts]
    jobs = [Job(index, -1, payload) for index, payload in enumerate(payloads)]
    disturber = Disturber(args, endpoints)
    per_long = 2 * _PAUSE_S + args.long_s
    num_bodies = args.rounds * 2 * (len(MODELS) + 1)
    seconds = _RAMP_S + args.repeat * per_long + num_bodies * (_PAUSE_S + 1.5)
    failed: list[BaseException] = []
    begun = threading.Event()

    def disturb() -> None:
        begun.wait()
        time.sleep(_RAMP_S)
        try:
            disturber.run()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=disturb)
    with Clients(1) as clients:
        thread.start()
        warm_up = [maker.payload(prompts[0].content, 4, "")]
        load = LoadSpec(jobs, warm_up, args.users, seconds, 0.0)
        outcome = clients.run(target, load, lambda progress: begun.set())
        thread.join()
    if failed:
        raise failed[0]
    names = ("usual", "long", "big", NOBODY) if args.rounds else ("usual", "long")
    found = {name: figures(outcome.records, disturber.spans, name) for name in names}
    result = conclude(args, found, disturber.answers)
    result["problems"] += [
        f"a user's answer: {record.code}: {record.message}"
        for record in outcome.records
        if record.code
    ]
    bodies = [span for span in disturber.spans if span.what in ("big", NOBODY)]
    worst_ms = result["worst_ms"]
    for (what, *_), span in zip(disturber.answers, bodies, strict=True):
        longest = figures(outcome.records, [span], span.what).get("max", 0.0)
        worst_ms[what] = max(worst_ms.get(what, 0.0), longest)
    return result


def conclude(
    args: argparse.Namespace,
    found: dict[str, dict[str, float]],
    answers: list[tuple[str, float, str]],
) -> dict[str, Any]:
    """The JSON of the run."""
    problems = []
    usual = found["usual"].get("p99", 0.0)
    for name in found.keys() - {"usual", NOBODY}:
        p99 = found[name].get("p99")
        if p99 is None:
            problems.append(f"{name}: no token came meanwhile")
        elif p99 > STRETCH * usual:
            problems.append(f"{name}: {p99:.1f} ms between tokens (p99), usually {usual:.1f}")
    for what, seconds, error in answers:
        if seconds > REFUSAL_S:
            problems.append(f"{what}: refused after {seconds:.2f} s")
        if ("unknown model" if what.startswith(NOBODY) else "INVALID_ARGUMENT") not in error:
            problems.append(f"{what}: {error[:200]!r} is no refusal")
    return {
        "model": args.model,
        "protocol": args.protocol,
        "users": args.users,
        "prompt_tokens": args.prompt_tokens,
        "long_prompt_tokens": args.long_prompt_tokens,
        "between_tokens_ms": found,
        "stretch": {
            name: round(found[name]["p99"] / usual, 2)
            for name in found
            if name != "usual" and usual and "p99" in found[name]
        },
        "refusals_s": {
            what: round(max(seconds for name, seconds, _ in answers if name == what), 3)
            for what in dict.fromkeys(name for name, *_ in answers)
        },
        "worst_ms": {},
        "problems": problems,
    }


def table(result: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{'ms between tokens':<20}{'p50':>8}{'p99':>8}{'max':>8}{'tokens':>9}{'each s':>8}"]
    for name, row in result["between_tokens_ms"].items():
        if row["tokens"]:
            lines.append(
                f"{name:<20}{row['p50']:>8.1f}{row['p99']:>8.1f}{row['max']:>8.1f}"
                f"{row['tokens']:>9}{row['span_s']:>8.2f}"
            )
    lines += [
        f"refused {what:<26}{seconds:>8.2f} s, {result['worst_ms'].get(what)} ms, at most"
        for what, seconds in result["refusals_s"].items()
    ]
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--model", default="tensorrt_llm_bls", help="that the users ask (%(default)s)")
    add("--protocol", choices=("grpc", "http"), default="grpc", help="of theirs (%(default)s)")
    add("--users", type=int, default=4, help="(%(default)s)")
    add("--max-tokens", type=int, default=1500, help="of a user's request (%(default)s)")
    add("--prompt-tokens", type=int, default=2046, help="of the long prompt (%(default)s)")
    add("--repeat", type=int, default=10, help="long prompts (%(default)s)")
    add("--long-s", type=float, default=2.0, help="for which the users go on (%(default)s)")
    add("--bytes", type=int, default=27_000_000, help="of a large body (%(default)s)")
    add("--rounds", type=int, default=3, help="of such bodies, each to every model both ways")
    add("--long-prompt-tokens", type=int, help="as `slipstream compose`")
    add("--max-num-seqs", type=int, help="as `slipstream compose`")
    add("--max-waiting", type=int, help="as `slipstream compose`")
    add("--model-repository", type=Path, help="serve this one (default: the default model)")
    add("--output", type=Path, help="write the JSON here")
    return parser.parse_args(arguments)


def main() -> int:
    """0 where nothing is wrong."""
    args = parse()
    with serving(args, REPORTS / "isolation-tritonserver.log") as server:
        result = about() | measure(args, server.endpoints)
    print(table(result))
    for line in result["problems"]:
        print(f"isolation: {line}", file=sys.stderr)
    print(json.dumps(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
