"""Requests drawn over the whole contract, on a real tritonserver; and what the judge would find."""

import hashlib
import subprocess
import sys

import pytest
from slipstream_compose.server import repository_root, server_directory
from slipstream_contract.tensors import MODELS

NAMES = ("crashes", "serving", "fuzz_fields", "fuzz_cases", "fuzz_send", "fuzz")


@pytest.mark.triton
def test_2000_requests(load, tmp_path):
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    result = load.fuzz.run(2000, 0, tmp_path / "log")
    assert result["problems"] == []
    assert result["requests"] == 2000
    assert result["canaries"] >= 80
    for model in load.fuzz_cases.GENERATING:
        assert result["ends"][f"{model} served"] > 50
        assert result["ends"][f"{model} refused"] > 50


@pytest.mark.parametrize(
    ("faults", "error", "is_whole", "said"),
    [
        ([], "", True, ""),
        ([], "INVALID_ARGUMENT: top_p is 2", True, "was refused"),
        ([], "", False, "has no end"),
        ([("top_p",)], "INVALID_ARGUMENT: top_p is 2", True, ""),
        ([("top_p",), ("n",)], "INVALID_ARGUMENT: top_p is 2", True, ""),
        ([("top_p",)], "INVALID_ARGUMENT: something", True, "not by name"),
        ([("top_p",)], "", True, "was served"),
        ([("top_p",)], "INTERNAL: top_p", True, "internal"),
        ([("top_p",)], 'top_p: Traceback: File "x.py"', True, "says too much"),
        ([("top_p",)], f"top_p: {repository_root()}", True, "says too much"),
        ([("top_p",)], "top_p " * 200, True, "an error of 1200 characters"),
    ],
)
def test_the_judge(load, faults, error, is_whole, said):
    case = load.fuzz_cases.Case("ensemble", "grpc", faults=faults)
    responses = [] if error else [{"text_output": "a"}]
    outcome = load.fuzz_send.Outcome(error, "", responses, is_whole)
    assert said in load.fuzz.judge(case, outcome)
    assert bool(said) == bool(load.fuzz.judge(case, outcome))


def test_an_answer_for_each_sequence_is_counted(load):
    case = load.fuzz_cases.Case("ensemble", "grpc", size=2, num_sequences=2)
    outcome = load.fuzz_send.Outcome("", "", [{"text_output": "a"}] * 3, is_whole=True)
    assert "too few" in load.fuzz.judge(case, outcome)


def test_every_served_input_of_every_model_comes_up(load):
    """In a field, a flag or as one that asks for nothing; shapes of later work are Triton's."""
    fields = load.fuzz_fields
    for model in (*load.fuzz_cases.GENERATING, *load.fuzz_cases.STAGES):
        known = {*fields.FIELDS[model], *fields.flags(model), *fields.REQUIRED[model]}
        known |= {tensor.name for tensor in fields.later(model)}
        known |= {"stream", "streaming", "stop", "embedding_bias_weights", "sampling_parameters"}
        known |= {"EMBEDDING_BIAS_WEIGHTS", "exclude_input_in_output"}
        known |= {
            f"retention_token_range_{what}" for what in ("ends", "priorities", "durations_ms")
        }
        assert {t.name for t in MODELS[model].inputs if t.neutral is None} <= known


def digest(found: list[object]) -> str:
    return hashlib.sha256(repr(found).encode()).hexdigest()


def test_the_same_number_draws_the_same_requests_in_any_process(load):
    """Here all modules of the suite are imported, whose constants hypothesis would draw."""
    code = (
        "import hashlib, fuzz_cases\n"
        "found = list(fuzz_cases.cases(200, 5))\n"
        "print(hashlib.sha256(repr(found).encode()).hexdigest())"
    )
    folder = repository_root() / "load"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest(list(load.fuzz_cases.cases(200, 5)))


def test_the_same_number_draws_the_same_requests(load):
    first, second = (list(load.fuzz_cases.cases(40, 5)) for _ in range(2))
    assert first == second
    assert first != list(load.fuzz_cases.cases(40, 6))
    assert len(first) == 40
