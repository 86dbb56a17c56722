"""`slipstream bench` with its client processes, against real gRPC."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures.waiting import wait_for
from slipstream_client.cli import main
from slipstream_client.commands import bench


@pytest.fixture
def prompts(tmp_path: Path):
    """A file with the prompts given."""

    def write(*texts: str) -> str:
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        return str(file)

    return write


@pytest.fixture
def bench_run(served, tmp_path: Path):
    """Runs the command; its exit code and its loads."""

    def run(*options: str) -> tuple[int, list[dict[str, Any]]]:
        file = tmp_path / "report.json"
        port = served[1].rpartition(":")[2]
        common = ("--grpc-port", port, "--json", str(file), "--processes", "2")
        code = main(["bench", *common, *options])
        return code, json.loads(file.read_text())["loads"]

    return run


def test_closed_loop_sends_every_prompt_once(bench_run, prompts, served, tmp_path, capsys):
    file = prompts("say a", "say a b", "say a b c")
    page = tmp_path / "report.html"
    options = ("--prompts", file, "--requests", "9", "--warm-up", "2", "--html", str(page))
    code, loads = bench_run(*options, "--concurrency", "1,3", "--goodput", "e2e:60000")
    assert code == 0
    assert [load["concurrency"] for load in loads] == [1, 3]
    for load in loads:
        assert (load["requests"], load["completed"], load["failed"]) == (9, 9, 0)
        assert load["output_tokens"]["mean"] == 2.0
        assert load["input_tokens"]["mean"] == 5.0
        assert load["goodput"]["share"] == 1.0
        assert load["tokens_per_s"] / load["requests_per_s"] == pytest.approx(2, rel=0.01)
        assert 0 < load["ttft_ms"]["p50"] <= load["e2e_ms"]["p50"]
    assert len(served[0].requests) == 2 * (9 + 2)
    assert capsys.readouterr().out.count("at once") == 2
    text = page.read_text()
    assert text.count("<svg") >= 5
    assert "<script" not in text
    assert "prefers-color-scheme: dark" in text
    assert [part for part in text.split('"') if "://" in part] == [
        "http://www.w3.org/2000/svg"
    ] * text.count("<svg")


@pytest.mark.rest
def test_open_loop_measures_from_the_intended_time(bench_run, prompts):
    """80 requests a second at a server that can do 40: a closed loop would never see the queue."""
    file = prompts("slow 0.2")
    options = ("--prompts", file, "--requests", "80", "--warm-up", "0", "--arrivals", "even")
    code, [load] = bench_run(*options, "--rates", "80")
    assert (code, load["completed"]) == (0, 80)
    assert load["e2e_ms"]["max"] > 700
    assert load["ttft_ms"]["max"] > 700


def test_seconds_end_a_load_and_what_runs_is_waited_for(bench_run, prompts):
    file = prompts("slow 0.3")
    options = ("--prompts", file, "--seconds", "1", "--warm-up", "0")
    code, [load] = bench_run(*options, "--concurrency", "4")
    assert (code, load["seconds"]) == (0, 1.0)
    assert 1 <= load["completed"] <= 16
    assert load["completed"] == load["requests"]
    assert load["requests_per_s"] <= load["completed"]  # the last ones may end after it


def test_refusals_are_no_errors(bench_run, prompts):
    file = prompts("full 1", "say a")
    options = ("--prompts", file, "--requests", "8", "--warm-up", "0", "--concurrency", "2")
    code, [load] = bench_run(*options)
    assert code == 0
    assert (load["refused"], load["completed"], load["failed"]) == (4, 4, 0)
    assert load["refusal_ms"]["p50"] > 0
    assert load["retries"] == 0


@pytest.mark.rest
def test_retry_after_is_waited_for_and_counts(bench_run, prompts):
    options = ("--requests", "1", "--warm-up", "0", "--concurrency", "1", "--retries", "5")
    code, [load] = bench_run("--prompts", prompts("full 3"), *options)
    assert (code, load["completed"], load["retries"]) == (0, 1, 3)
    assert load["ttft_ms"]["p50"] >= 150


def test_errors_are_counted_printed_and_set_the_exit_code(bench_run, prompts, capsys):
    file = prompts("refuse INVALID_ARGUMENT INVALID_ARGUMENT: top_p is 2", "fail INTERNAL: no")
    options = ("--prompts", file, "--requests", "4", "--warm-up", "0", "--concurrency", "2")
    code, [load] = bench_run(*options)
    assert code == 1
    assert load["errors"] == {"INVALID_ARGUMENT": 2, "INTERNAL": 2}
    assert "top_p is 2" in load["first_error"] or "no" in load["first_error"]
    assert "failed: " in capsys.readouterr().err


@pytest.mark.rest
def test_a_request_that_takes_too_long_has_failed(bench_run, prompts, served):
    options = ("--prompts", prompts("silent"), "--requests", "2", "--warm-up", "0")
    code, [load] = bench_run(*options, "--concurrency", "2", "--timeout", "0.5")
    assert (code, load["errors"]) == (1, {"DEADLINE_EXCEEDED": 2})
    assert all(event.wait(120) for event in served[0].cancelled.values())


def test_a_warm_up_that_fails_says_why(bench_run, prompts, capsys):
    file = prompts("fail INVALID_ARGUMENT: max_tokens is 0")
    assert main(["bench", "--prompts", file, "--grpc-port", "1", "--processes", "1"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--concurrency", "0"], "list of numbers above 0"),
        (["--concurrency", "1", "--rates", "2"], "not allowed with"),
        (["--rates", "fast"], "list of numbers above 0"),
        (["--timeout", "0"], "--timeout: '0' is not a number of seconds above 0 to 86400"),
        (["--http-port", "65536"], "--http-port: '65536' is not a whole number from 1 to 65535"),
    ],
)
def test_options_that_the_parser_refuses(options, said, capsys):
    with pytest.raises(SystemExit):
        main(["bench", *options])
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--requests", "0"], "--requests is 0, not at least 1"),
        (["--processes", "0"], "--processes is 0"),
        (["--seconds", "0"], "--seconds is 0"),
        (["--seconds", "1", "--ramp", "1"], "--ramp is 1"),
        (["--price-per-hour", "-1"], "--price-per-hour is -1"),
        (["--model", "llmapi_model"], "--model 'llmapi_model' is none of those that stream"),
        (["--input-len", "x"], "--input-len is 'x'"),
        (["--goodput", "ttft"], "goodput has 'ttft'"),
        (["--json", "/nowhere/x.json"], "'/nowhere/x.json': its directory does not exist"),
    ],
)
def test_options_that_cannot_be_meant(options, said, capsys):
    assert main(["bench", *options]) == 1
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1


def test_the_clients_end_with_the_command(served, prompts):
    """SIGKILL of the command while a stream runs that never ends: no client stays behind."""
    port = served[1].rpartition(":")[2]
    command = [sys.executable, "-m", "slipstream_client.cli", "bench", "--grpc-port", port]
    command += ["--prompts", prompts("forever"), "--warm-up", "0", "--requests", "1"]
    process = subprocess.Popen([*command, "--concurrency", "1", "--processes", "1"])
    try:
        triton = served[0]
        wait_for(lambda: triton.requests)
    finally:
        process.kill()
        process.wait(120)
    assert triton.cancelled[triton.requests[0].id].wait(120)


def test_the_same_seed_makes_the_same_load():
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    args = parser.parse_args(["bench", "--rates", "5", "--seconds", "20", "--input-len", "8"])
    args.model, args.protocol = "tensorrt_llm", "grpc"

    def jobs(seed: int) -> list[Any]:
        args.seed = seed
        return list(bench._Maker(args, None, None).load(0, 5.0).jobs)

    assert jobs(3) == jobs(3)
    assert [job.payload for job in jobs(3)] != [job.payload for job in jobs(4)]
    assert all(0 <= job.offset_ns < 20e9 for job in jobs(3))
    assert len(jobs(3)) == pytest.approx(100, abs=40)
