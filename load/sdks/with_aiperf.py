"""Checks of aiperf: a load of synthetic prompts on each endpoint, streamed, without errors."""

import json
import tempfile
from pathlib import Path

from checks import Checks, Target
from programs import OUTPUT_TOKENS, PROMPT_TOKENS, REQUESTS, STREAMS, run

ENDPOINTS = ("chat", "completions", "responses")


def checks(target: Target) -> Checks:
    """Return the checks by name."""
    return {f"profile, {each}": lambda each=each: load(target, each) for each in ENDPOINTS}


def load(target: Target, endpoint: str) -> str:
    """Load an endpoint, and check the report."""
    folder = Path(tempfile.mkdtemp(prefix="aiperf-"))
    command = ["-m", "aiperf", "profile", "--ui", "none", "--streaming"]
    command += ["--model", target.model, "--url", target.url, "--api-key", target.key]
    command += ["--endpoint-type", endpoint, "--tokenizer", target.checkpoint]
    command += ["--concurrency", str(STREAMS), "--request-count", str(REQUESTS)]
    command += ["--synthetic-input-tokens-mean", str(PROMPT_TOKENS)]
    command += ["--output-tokens-mean", str(OUTPUT_TOKENS)]
    if endpoint != "responses":  # of a cut answer's `response.incomplete` it reads no usage
        command += ["--use-server-token-count"]
    command += ["--extra-inputs", "ignore_eos:true", "--output-artifact-dir", str(folder)]
    run(command, folder)
    (found,) = folder.rglob("profile_export_aiperf.json")
    report = json.loads(found.read_bytes())
    assert not report.get("error_summary"), report["error_summary"]
    assert report["request_count"]["avg"] == REQUESTS
    length = report["output_sequence_length"]["avg"]
    assert length == OUTPUT_TOKENS or endpoint == "responses", length
    first = report["time_to_first_token"]["p50"]
    rate = report["output_token_throughput"]["avg"]
    return f"{REQUESTS} requests, first token {first:.0f} ms (p50), {rate:.0f} tokens/s"
