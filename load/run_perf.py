"""perf_analyzer against a server, and a report with what it does not print: TTFT and ITL.

perf_analyzer reports the latency of whole requests. The times of single responses are in its
profile export, from which this computes the time to the first response and between responses.
A response may hold several tokens, so the time between responses is an upper bound of that between
tokens.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from serving import LOADS, REPORTS, add_arguments, fields, prompts, serving
from slipstream_serve.server import server_directory, server_environment, stub_directory


def input_data(model: str, max_tokens: int, load: str = "plain", given: str = "") -> dict[str, Any]:
    """perf_analyzer's input file: one entry a prompt; none ends early unless it is guided."""
    flags = ("stream", "exclude_input_in_output", "return_num_input_tokens")
    rest: dict[str, Any] = {name: [True] for name in (*flags, "return_num_output_tokens")}
    if model == "vllm_model":
        sampling = {"temperature": 0} | fields(model, load, max_tokens, given)
        rest |= {"sampling_parameters": [json.dumps(sampling)]}
    else:
        rest |= {name: [v] for name, v in fields(model, load, max_tokens, given).items()}
    return {"data": [{"text_input": [prompt], **rest} for prompt in prompts(load)]}


def measure(args: argparse.Namespace, grpc: str, concurrency: int, folder: Path) -> dict[str, Any]:
    """One load level: the figures of its requests. Raises SystemExit with perf_analyzer's word."""
    data, profile = folder / "input.json", folder / f"profile-{concurrency}.json"
    data.write_text(json.dumps(input_data(args.model, args.max_tokens, args.load, args.fields)))
    profile.unlink(missing_ok=True)  # perf_analyzer writes over none
    server = server_directory()
    command = [
        str(server / "bin" / "perf_analyzer"),
        *("-m", args.model, "-u", grpc, "-i", "grpc", "--streaming", "--async"),
        *("--input-data", str(data), "--concurrency-range", str(concurrency)),
        *("--request-count", str(args.requests), "--profile-export-file", str(profile)),
        *(["-b", "1"] if args.model != "vllm_model" else []),
    ]
    environment = server_environment(server, stub_directory())
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not profile.exists():
        raise SystemExit(f"perf_analyzer: {reason(done.stdout + done.stderr)}")
    requests = json.loads(profile.read_text())["experiments"][0]["requests"]
    return {"concurrency": concurrency} | figures(requests, args.max_tokens)


def reason(output: str) -> str:
    """What went wrong, from output that may end with the whole usage."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = [line for line in lines if re.match(r"(error|failed)\b", line, re.IGNORECASE)]
    return (said or lines[-1:] or ["no output"])[0]


def figures(requests: list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
    """Figures of one load level from the times (ns) of its requests and their responses."""
    answered = [request for request in requests if request["response_timestamps"]]
    if not answered:
        raise SystemExit("perf_analyzer: no request was answered")
    starts = np.array([request["timestamp"] for request in answered])
    firsts = np.array([request["response_timestamps"][0] for request in answered])
    lasts = np.array([request["response_timestamps"][-1] for request in answered])
    gaps = [np.diff(request["response_timestamps"]) for request in answered]
    seconds = float(lasts.max() - starts.min()) / 1e9
    return {
        "requests": len(answered),
        "unanswered": len(requests) - len(answered),
        "requests_per_s": round(len(answered) / seconds, 2),
        "at_most_tokens_per_s": round(len(answered) * max_tokens / seconds, 1),
        "responses_per_s": round(sum(len(gap) + 1 for gap in gaps) / seconds, 1),
        "ttft_mean_ms": round(float((firsts - starts).mean()) / 1e6, 3),
        "request_mean_ms": round(float((lasts - starts).mean()) / 1e6, 3),
        "ttft_ms": percentiles((firsts - starts) / 1e6),
        "between_responses_ms": percentiles(np.concatenate(gaps) / 1e6),
        "request_ms": percentiles((lasts - starts) / 1e6),
    }


def percentiles(values: np.ndarray) -> dict[str, float]:
    """Median, 90th and 99th percentile; empty for no values."""
    if not len(values):
        return {}
    return {f"p{p}": round(float(np.percentile(values, p)), 2) for p in (50, 90, 99)}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    columns = ("concurrency", "requests", "requests_per_s", "responses_per_s")
    times = ("ttft_ms", "between_responses_ms", "request_ms")
    head = [*columns, *(f"{name} p50/p90/p99" for name in times)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [str(row[name]) for name in columns]
        cells += ["/".join(f"{value:g}" for value in row[name].values()) for name in times]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measures every level and writes perf_analyzer.{json,md}."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add_arguments(parser)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--requests", type=int, default=48, help="a level (%(default)s)")
    args = parser.parse_args()
    REPORTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, serving(args) as (_, grpc):
        rows = [measure(args, grpc, level, Path(folder)) for level in args.concurrency]
    about = {"model": args.model, "max_tokens": args.max_tokens, "cores": os.cpu_count()}
    about |= {"load": args.load, "fields": args.fields}
    (REPORTS / "perf_analyzer.json").write_text(json.dumps(about | {"rows": rows}, indent=2) + "\n")
    title = f"# perf_analyzer on `{args.model}`, {args.max_tokens} tokens a request, gRPC streams"
    title += f", {args.load}" * (args.load != LOADS[0])
    (REPORTS / "perf_analyzer.md").write_text(f"{title}\n\n{table(rows)}\n")
    print(table(rows))
    print(f"report: {REPORTS / 'perf_analyzer.md'}", file=sys.stderr)
    print(json.dumps(about | {"rows": rows}))


if __name__ == "__main__":
    main()
