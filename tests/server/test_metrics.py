"""What a real server's metrics and request log say is what was done to it."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator

import pytest
from fixtures.server.metrics_page import Page, settled, wait_for_page
from fixtures.server.support import (
    CONTEXT,
    GPU_HOUR_PRICE,
    KV_CACHE_TOKENS,
    LONG,
    PROMPT,
    Client,
    RequestError,
    lasting,
)
from slipstream_client import SlipstreamClient
from slipstream_client.commands.health import health_report
from slipstream_serve.probe import first_token

pytestmark = pytest.mark.triton

BLS, VLLM, ENSEMBLE = "tensorrt_llm_bls", "vllm_model", "ensemble"
NUM_BLOCKS = KV_CACHE_TOKENS // 32
TRT_LLM = {
    "nv_trt_llm_request_metrics": ("request_type", "active max scheduled context waiting"),
    "nv_trt_llm_runtime_memory_metrics": ("memory_type", "cpu gpu pinned"),
    "nv_trt_llm_kv_cache_block_metrics": (
        "kv_cache_block_type",
        "max free used tokens_per reused fraction",
    ),
    "nv_trt_llm_inflight_batcher_metrics": (
        "inflight_batcher_specific_metric",
        "total_context_tokens generation_requests micro_batch_id paused_requests",
    ),
    "nv_trt_llm_general_metrics": ("general_type", "timestamp iteration_counter"),
    "nv_trt_llm_disaggregated_serving_metrics": (
        "disaggregated_serving_type",
        "kv_cache_transfer_ms request_count",
    ),
}
VLLM_SINGLE = (
    "num_requests_running num_requests_waiting kv_cache_usage_perc gpu_cache_usage_perc "
    "prompt_tokens_total generation_tokens_total num_preemptions_total "
    "prefix_cache_queries_total prefix_cache_hits_total spec_decode_num_drafts_total "
    "spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total"
)
VLLM_HISTOGRAMS = (
    "time_to_first_token_seconds inter_token_latency_seconds time_per_output_token_seconds "
    "request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds "
    "request_prefill_time_seconds request_decode_time_seconds request_inference_time_seconds "
    "request_prompt_tokens request_generation_tokens request_max_num_generation_tokens "
    "request_params_n request_params_max_tokens iteration_tokens_total"
)


@pytest.fixture
def url(idle: Client) -> str:
    """Return the URL of a page that has the engine's metrics up to this test."""
    url = idle.server.endpoints.metrics
    settled(url, lambda page: "slipstream_running_sequences" in page.names)
    return url


def ends(page: Page) -> float:
    return page.get("slipstream_finished_sequences_total")


def begun(page: Page) -> float:
    return page.get("slipstream_requests_total")


@contextlib.contextmanager
def running(client: Client, model: str, **inputs) -> Iterator[Iterator[dict]]:
    """A stream that has begun, and is left by its client at the end."""
    responses = client.iterate(model, **lasting(model), **inputs)
    try:
        next(responses)
        yield responses
    finally:
        responses.close()


def test_every_name_and_label_of_the_older_servers_is_there(idle, url):
    page = Page(url)
    triton = {"model": "tensorrt_llm", "version": "1"}
    for name, (label, words) in TRT_LLM.items():
        found = page.labels(name)
        assert {labels.pop(label) for labels in found} == set(words.split())
        assert found == [triton] * len(words.split())
    for side in ("input", "output"):
        labels = triton | {"response_metric_type": f"total_{side}_tokens"}
        name = f"nv_llm_{side}_token_len"
        bounds = {found["le"] for found in page.labels(f"{name}_bucket")}
        assert bounds == {"10", "50", "100", "500", "1000", "+Inf"}
        assert page.labels(f"{name}_sum") == page.labels(f"{name}_count") == [labels]
    vllm = {"engine": "0", "model": "vllm_model", "version": "1"}
    model_name = idle.health()["model"]
    for name in VLLM_SINGLE.split():
        assert page.labels(f"vllm:{name}") == [vllm | {"model_name": model_name}]
    for name in VLLM_HISTOGRAMS.split():
        assert page.labels(f"vllm:{name}_count") == [vllm | {"model_name": model_name}]
    reasons = {found["finished_reason"] for found in page.labels("vllm:request_success_total")}
    assert reasons == {"stop", "length", "abort", "error"}
    [cache] = page.labels("vllm:cache_config_info")
    assert (cache["block_size"], cache["num_gpu_blocks"]) == ("32", str(NUM_BLOCKS))


def test_what_was_done_is_what_all_of_them_say(idle, url):
    before = Page(url)
    want = begun(before) + 6
    num_bls = len(idle.stream(BLS, text_input=PROMPT, max_tokens=9, stream=True))
    num_ensemble = len(idle.stream(ENSEMBLE, text_input=PROMPT, max_tokens=4, stream=True))
    idle.stream(BLS, text_input=PROMPT, max_tokens=5, num_return_sequences=2)
    options = json.dumps({"max_tokens": 3, "temperature": 0, "ignore_eos": True})
    idle.stream(VLLM, text_input=PROMPT, sampling_parameters=options)
    with pytest.raises(RequestError, match="top_p"):
        idle.stream(BLS, text_input=PROMPT, max_tokens=3, top_p=7.0, stream=True)
    with pytest.raises(RequestError, match="DEADLINE"):
        idle.stream(BLS, parameters={"timeout_ms": 80}, **lasting(BLS))
    with running(idle, BLS):
        pass
    after = settled(url, lambda page: ends(page) >= ends(before) + 7 and begun(page) >= want)

    def grown(name: str, **labels: str) -> float:
        return after.get(name, **labels) - before.get(name, **labels)

    assert grown("slipstream_requests_total", model=BLS) == 4
    assert grown("slipstream_requests_total", model="tensorrt_llm") == 1
    assert grown("slipstream_requests_total", model=VLLM) == 1
    assert grown("slipstream_responses_total", model="tensorrt_llm") == num_ensemble
    assert grown("slipstream_responses_total", model=BLS) >= num_bls + 2 + 1
    assert grown("slipstream_response_tokens_total", model="tensorrt_llm") == 4
    assert grown("slipstream_refusals_total", model=BLS, reason="invalid_argument") == 1
    assert grown("slipstream_refusals_total") == 1
    assert grown("slipstream_cancels_total", cause="client") == 1
    assert grown("slipstream_cancels_total", cause="deadline") == 1
    assert grown("slipstream_cancels_total") == 2
    assert grown("slipstream_cancel_to_free_seconds_count") == 2
    assert grown("slipstream_finished_sequences_total", reason="cancelled") == 1
    assert grown("slipstream_finished_sequences_total", reason="deadline") == 1
    assert grown("slipstream_finished_sequences_total") == 7
    assert grown("vllm:request_success_total", finished_reason="abort") == 2
    assert grown("vllm:request_success_total") == 7
    assert grown("slipstream_request_cost_count") == 6

    num_tokens = grown("slipstream_output_tokens_total")
    assert num_tokens >= 9 + 4 + 2 * 5 + 3
    assert grown("vllm:generation_tokens_total") == num_tokens
    assert grown("vllm:request_generation_tokens_sum") == num_tokens
    assert grown("nv_llm_output_token_len_sum") == num_tokens
    assert grown("vllm:request_params_max_tokens_sum") == 9 + 4 + 5 + 3 + LONG + LONG
    assert grown("slipstream_steps_total") == grown("vllm:iteration_tokens_total_count")
    assert grown("slipstream_step_seconds_total", part="host") > 0
    assert grown("slipstream_step_seconds_total", part="device") > 0
    seconds = grown("slipstream_step_seconds_total")
    cost = grown("slipstream_cost_total")
    assert cost == pytest.approx(seconds * GPU_HOUR_PRICE / 3600, rel=0.01)
    for name in VLLM_HISTOGRAMS.split():
        check_histogram(after, f"vllm:{name}")
    state = idle.health()
    assert after.get("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="max") == NUM_BLOCKS
    assert after.get("slipstream_kv_blocks", state="free") == state["kv_blocks_free"] == NUM_BLOCKS
    assert after.get("slipstream_gpu_hour_price") == GPU_HOUR_PRICE


def test_probes_are_counted_apart(idle, url):
    before = Page(url)
    log = idle.server.repository.parent / "requests.jsonl"
    num_lines = len(log.read_text().splitlines()) if log.exists() else 0
    for model in (BLS, ENSEMBLE, BLS, ENSEMBLE, BLS):
        idle.stream(model, text_input=PROMPT, max_tokens=20, end_id=-1, stream=True)
    first_token(idle.http, [ENSEMBLE])
    with SlipstreamClient(idle.address) as client:
        reports = [health_report(client, 60.0) for _ in range(2)]
    assert all(report["ok"] and "token_s" in report for report in reports)
    with pytest.raises(RequestError, match="max_tokens is 2, at most 1 where probe is 'token'"):
        idle.stream(BLS, text_input=PROMPT, max_tokens=2, parameters={"probe": "token"})
    want = before.get("slipstream_probes_total") + 3
    refused = before.get("slipstream_probe_refusals_total") + 1
    after = settled(
        url,
        lambda page: (
            begun(page) >= begun(before) + 5
            and ends(page) >= ends(before) + 5
            and page.get("slipstream_probes_total") >= want
            and page.get("slipstream_probe_refusals_total") >= refused
        ),
    )

    def grown(name: str, **labels: str) -> float:
        return after.get(name, **labels) - before.get(name, **labels)

    assert grown("vllm:generation_tokens_total") == grown("slipstream_output_tokens_total") == 100
    assert grown("vllm:request_generation_tokens_sum") == 100
    assert grown("nv_llm_output_token_len_sum") == 100
    assert grown("vllm:request_success_total") == 5
    assert grown("vllm:time_to_first_token_seconds_count") == 5
    assert grown("vllm:prompt_tokens_total") == grown("vllm:request_prompt_tokens_sum")
    assert grown("slipstream_requests_total") == 5
    assert grown("slipstream_refusals_total") == 0
    assert grown("slipstream_request_cost_count") == 5
    seconds = grown("slipstream_step_seconds_total")
    cost = grown("slipstream_cost_total")
    assert cost == pytest.approx(seconds * GPU_HOUR_PRICE / 3600, rel=0.01)
    assert grown("slipstream_probes_total", reason="length") == 3
    assert grown("slipstream_probe_tokens_total", kind="output") == 3
    assert grown("slipstream_probe_tokens_total", kind="prompt") >= 3
    assert grown("slipstream_probe_requests_total") >= 3  # those that cost no token too
    assert grown("slipstream_probe_refusals_total") == 1
    for name in ("cost_total", "seconds_total", "step_seconds_total"):
        assert grown(f"slipstream_probe_{name}") > 0
    assert len(log.read_text().splitlines()) == num_lines + 5


def check_histogram(page: Page, name: str) -> None:
    """Cumulative, and as many values as are counted."""
    pairs = [
        (float(labels["le"]), page.get(f"{name}_bucket", le=labels["le"]))
        for labels in page.labels(f"{name}_bucket")
    ]
    values = [value for _, value in sorted(pairs)]
    assert values == sorted(values)
    assert values[-1] == page.get(f"{name}_count") > 0
    assert page.get(f"{name}_sum") >= 0


def test_a_line_of_the_request_log_for_each_request_that_was_taken(idle, url):
    path = idle.server.repository.parent / "requests.jsonl"
    num_before = len(path.read_text().splitlines())
    before = Page(url).get("slipstream_refusals_total", model=BLS, reason="invalid_argument")
    for refused in (
        {"top_p": 7.0},
        {"text_input": PROMPT * CONTEXT},
    ):  # by the model, by the engine
        with pytest.raises(RequestError, match="INVALID_ARGUMENT"):
            idle.stream(BLS, "refused", **{"text_input": PROMPT, "max_tokens": 3} | refused)
    secret = "correct_horse_battery"
    text = {"text_input": secret + PROMPT, "stream": True}
    idle.stream(BLS, 'log "1"\n', max_tokens=3, num_return_sequences=2, **text)
    idle.stream(ENSEMBLE, "log-2", max_tokens=4, **text)
    options = json.dumps({"max_tokens": 3, "temperature": 0, "ignore_eos": True})
    idle.stream(VLLM, "log-3", text_input=secret, sampling_parameters=options)
    with running(idle, BLS, request_id="log-4"):
        pass
    deadline = time.monotonic() + 120
    while len(lines := path.read_text().splitlines()[num_before:]) < 4:
        assert time.monotonic() < deadline, lines
        time.sleep(0.05)
    found = {line["id"]: line for line in map(json.loads, lines)}
    assert len(lines) == len(found)
    refusals = settled(url).get("slipstream_refusals_total", model=BLS, reason="invalid_argument")
    assert refusals - before == 2
    assert set(found) == {'log "1"\n', "log-2", "log-3", "log-4"}
    models = [found[name]["model"] for name in sorted(found)]
    assert models == [BLS, "tensorrt_llm", VLLM, BLS]
    assert found['log "1"\n']["num_output_tokens"] == [3, 3]
    assert found["log-2"]["finish_reasons"] == ["length"]
    assert found["log-4"]["finish_reasons"] == ["cancelled"]
    assert found["log-4"]["cancel_cause"] == "client"
    for line in found.values():
        assert 0 <= line["queue_s"] <= line["first_token_s"] <= line["end_to_end_s"]
        assert 0 < line["cost"] == pytest.approx(line["device_s"] * GPU_HOUR_PRICE / 3600, abs=1e-8)
    assert secret not in path.read_text()
    assert "horse" not in path.read_text()


def test_an_engine_that_stands_still_is_seen_while_it_does(idle, url):
    with running(idle, BLS):
        stopped, engine = Page(url), idle.health()["engine_pid"]
        os.kill(engine, signal.SIGSTOP)
        try:
            page = wait_for_page(
                url,
                lambda page: (
                    page.get("slipstream_engine_answer_age_seconds") > 2
                    and page.get("slipstream_last_step_age_seconds") > 2
                ),
            )
        finally:
            os.kill(engine, signal.SIGCONT)
        told = "slipstream_metrics_update_time_seconds"
        assert page.get(told) > stopped.get(told)
    page = wait_for_page(
        url,
        lambda page: (
            page.get("slipstream_engine_answer_age_seconds") < 1
            and page.get("slipstream_last_step_age_seconds") == 0
        ),
    )
    restarts = "slipstream_engine_restarts_total"
    assert page.get(restarts) == stopped.get(restarts)
