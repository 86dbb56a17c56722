"""What the load tests report, from numbers that can be checked by hand."""

import re

import pytest

NAMES = ("serving", "run_perf", "run_locust", "run_agreement")


def test_perf_figures(load):
    ms = 1_000_000
    requests = [
        {"timestamp": 0, "response_timestamps": [10 * ms, 20 * ms, 40 * ms]},
        {"timestamp": 1000 * ms, "response_timestamps": [1030 * ms, 2000 * ms]},
        {"timestamp": 5 * ms, "response_timestamps": []},
    ]
    found = load.run_perf.figures(requests, max_tokens=8)
    assert found["requests"] == 2
    assert found["unanswered"] == 1
    assert found["requests_per_s"] == 1.0
    assert found["at_most_tokens_per_s"] == 8.0
    assert found["responses_per_s"] == 2.5
    assert found["ttft_ms"]["p50"] == 20.0
    assert found["between_responses_ms"]["p50"] == 20.0
    assert found["request_ms"]["p50"] == 520.0
    assert (found["ttft_mean_ms"], found["request_mean_ms"]) == (20.0, 520.0)
    row = load.run_perf.table([{"concurrency": 3} | found]).splitlines()[-1]
    assert row.startswith("| 3 | 2 | 1.0 | 2.5 | 20/")


def test_perf_without_an_answer_is_an_error(load):
    with pytest.raises(SystemExit, match="no request was answered"):
        load.run_perf.figures([{"timestamp": 0, "response_timestamps": []}], max_tokens=1)


def test_requests_name_tensors_that_the_model_has(load):
    from slipstream_contract.tensors import MODELS

    for model in ("ensemble", "tensorrt_llm_bls", "vllm_model"):
        names = {tensor.name for tensor in MODELS[model].inputs}
        for entry in load.run_perf.input_data(model, 8)["data"]:
            assert set(entry) <= names


def test_every_load_has_its_prompts_and_fields(load):
    serving = load.serving
    for model in ("ensemble", "vllm_model"):
        plain = serving.fields(model, "plain", 8, '{"temperature": 0.5}')
        assert plain["temperature"] == 0.5
        assert serving.fields(model, "repeating", 8) == serving.fields(model, "plain", 8)
        guided = serving.fields(model, "guided", 8)
        assert not {"end_id", "ignore_eos"} & guided.keys(), "a guided answer has an end"
        for kind in serving.LOADS:
            entries = load.run_perf.input_data(model, 8, kind, '{"seed": 5}')["data"]
            assert [each["text_input"][0] for each in entries] == list(serving.prompts(kind))
            assert re.search(r"seed\W+5\b", str(entries[0]))
    assert len(set(serving.REPEATING)) == 4
    assert all(prompt.count("self.assertEqual") > 1 for prompt in serving.REPEATING)


def test_locust_percentiles_are_those_of_the_histogram(load):
    percentiles = load.run_locust.percentiles
    assert percentiles({}) == {}
    assert percentiles({5.0: 1}) == {"p50_ms": 5.0, "p90_ms": 5.0, "p99_ms": 5.0}
    counts = {float(value): 1 for value in range(1, 101)}
    assert percentiles(counts) == {"p50_ms": 50.0, "p90_ms": 90.0, "p99_ms": 99.0}


def test_locust_rows(load):
    stats = [
        {
            "method": "gRPC",
            "name": "ttft",
            "num_requests": 4,
            "num_failures": 1,
            "total_response_time": 18.5,
            "response_times": {"3": 3, "9.5": 1},
        }
    ]
    [row] = load.run_locust.rows_of(stats, seconds=2)
    assert (row["per_s"], row["mean_ms"]) == (2.0, 4.625)
    assert (row["p50_ms"], row["p99_ms"]) == (3.0, 9.5)
    assert load.run_locust.table([row]).splitlines()[1].split()[:2] == ["gRPC", "ttft"]


def test_perf_analyzer_says_why_it_failed(load):
    usage = "Error: Failed to parse --x\nUsage: perf_analyzer\n\n\t-v\n"
    assert load.run_perf.reason(usage) == "Error: Failed to parse --x"
    assert load.run_perf.reason("no such model\n") == "no such model"
    assert load.run_perf.reason("") == "no output"


def test_agreement_of_medians(load):
    def figures(rate: float, ms: float) -> dict[str, float]:
        return {"requests_per_s": rate, "request_ms": ms}

    rounds = [
        {"bench": figures(10, 100), "perf_analyzer": figures(10, 100), "locust": figures(9, 104)},
        {"bench": figures(10, 100), "perf_analyzer": figures(90, 100), "locust": figures(10, 104)},
        {"bench": figures(10, 100), "perf_analyzer": figures(10, 100), "locust": figures(10, 104)},
    ]
    found = load.run_agreement.compared(rounds, 0.05)
    assert found["differences"]["perf_analyzer"] == {"requests_per_s": 0, "request_ms": 0}
    assert (found["worst"], found["do_agree"]) == (pytest.approx(0.04), True)
    assert not load.run_agreement.compared(rounds, 0.03)["do_agree"]
    row = load.run_agreement.table(found).splitlines()[-1]
    assert row == "| whole request, mean ms | 100 | 100 (+0.0%) | 104 (+4.0%) |"
    assert "| - |" in load.run_agreement.table(found).splitlines()[-2]


def test_locusts_rate_counts_from_its_first_user(load):
    stats = [
        {"name": "connect", "start_time": 100.0},
        {"name": "ttft", "num_requests": 20, "total_response_time": 200.0},
        {
            "name": "request",
            "start_time": 101.0,  # its first answer
            "last_request_timestamp": 110.0,
            "num_requests": 20,
            "total_response_time": 2000.0,
        },
    ]
    assert load.run_agreement.of_locust(stats) == {
        "requests_per_s": 2.0,
        "ttft_ms": 10.0,
        "request_ms": 100.0,
    }
