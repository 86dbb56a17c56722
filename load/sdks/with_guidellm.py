"""Checks of guidellm: a load of synthetic prompts on each endpoint, streamed, without errors."""

import json
import tempfile
from pathlib import Path

from checks import Checks, Target
from programs import OUTPUT_TOKENS, PROMPT_TOKENS, REQUESTS, STREAMS, run

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


def checks(target: Target) -> Checks:
    """Return the checks by name."""
    return {f"run, {each}": lambda each=each: load(target, each) for each in ENDPOINTS}


def load(target: Target, endpoint: str) -> str:
    """Load an endpoint, and check the report."""
    folder = Path(tempfile.mkdtemp(prefix="guidellm-"))
    report = folder / "report.json"
    backend = f"kind=openai_http,target={target.url},model={target.model},api_key={target.key}"
    data = f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    command = ["-m", "guidellm", "run", "--disable-console"]
    command += ["--backend", f"{backend},request_format={endpoint}", "--data", data]
    command += ["--tokenizer", f"kind=huggingface_auto,model={target.checkpoint}"]
    command += ["--profile", f"kind=concurrent,streams={STREAMS}"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
    run([*command, "--output", f"kind=json,path={report}"], folder, HF_HUB_OFFLINE="1")
    (benchmark,) = json.loads(report.read_bytes())["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"], requests["errored"][0]
    assert len(requests["successful"]) == REQUESTS
    counts = {each["output_metrics"]["text_tokens"] for each in requests["successful"]}
    assert counts == {OUTPUT_TOKENS}, counts
    metrics = benchmark["metrics"]
    first = metrics["time_to_first_token_ms"]["successful"]["median"]
    rate = metrics["output_tokens_per_second"]["successful"]["mean"]
    return f"{REQUESTS} requests, first token {first:.0f} ms (p50), {rate:.0f} tokens/s"
