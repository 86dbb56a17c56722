"""Checks of `vllm bench serve`: its client alone, on both of OpenAI's endpoints."""

import json
import tempfile
from pathlib import Path

from checks import Checks, Target
from programs import OUTPUT_TOKENS, PROMPT_TOKENS, REQUESTS, STREAMS, run

BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
# What `vllm bench serve` does, without the command line that imports all engines.
PROGRAM = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def checks(target: Target) -> Checks:
    """Return the checks by name."""
    return {f"bench serve, {each}": lambda each=each: load(target, each) for each in BACKENDS}


def load(target: Target, backend: str) -> str:
    """Load an endpoint, and check the report."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-"))
    command = ["-c", PROGRAM, "--backend", backend, "--base-url", target.url]
    command += ["--endpoint", BACKENDS[backend], "--model", target.model]
    command += ["--tokenizer", target.checkpoint, "--dataset-name", "random"]
    command += ["--random-input-len", str(PROMPT_TOKENS), "--random-output-len"]
    command += [str(OUTPUT_TOKENS), "--num-prompts", str(REQUESTS), "--ignore-eos"]
    command += ["--max-concurrency", str(STREAMS), "--save-result", "--save-detailed"]
    command += ["--result-filename", "report.json", "--disable-tqdm"]
    run(command, folder, OPENAI_API_KEY=target.key, HF_HUB_OFFLINE="1", VLLM_TARGET_DEVICE="cpu")
    report = json.loads((folder / "report.json").read_bytes())
    assert report["completed"] == REQUESTS, report.get("errors")
    assert not any(report["errors"]), report["errors"]
    assert set(report["output_lens"]) == {OUTPUT_TOKENS}, report["output_lens"]
    return (
        f"{REQUESTS} requests, first token {report['median_ttft_ms']:.0f} ms (p50), "
        f"{report['output_throughput']:.0f} tokens/s"
    )
