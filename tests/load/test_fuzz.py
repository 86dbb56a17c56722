"""Requests drawn over the whole contract, on a real tritonserver; and what the judge would find."""

import hashlib
import json
import subprocess
import sys

import pytest
from slipstream_contract import errors
from slipstream_contract.tensors import MODELS
from slipstream_serve.server import repository_root, server_directory

NAMES = ("crashes", "serving", "fuzz_fields", "fuzz_cases", "fuzz_send", "fuzz_judge", "fuzz")


@pytest.mark.triton
@pytest.mark.beside
@pytest.mark.rest
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
        ([("top_p",)], "top_p is 2", True, "without a code"),
        ([("top_p",)], "INVALID_ARGUMENT: top_p " + "a " * 500, True, "an error of 1024 char"),
    ],
)
def test_the_judge(load, faults, error, is_whole, said):
    case = load.fuzz_cases.Case("ensemble", "grpc", faults=faults)
    responses = [] if error else [{"text_output": "a"}]
    outcome = load.fuzz_send.Outcome(error, "OK", responses, is_whole)
    assert said in load.fuzz.judge(case, outcome)
    assert bool(said) == bool(load.fuzz.judge(case, outcome))


@pytest.mark.parametrize(
    ("wire", "is_streaming", "responses", "allowed"),
    [
        ("grpc", True, 0, {"OK"}),
        ("grpc", True, 1, {"OK"}),
        ("http", False, 0, {"400"}),
        ("http", True, 0, {"400"}),
        ("http", True, 1, {"200", "400"}),  # its status was sent before the error
    ],
)
def test_the_judge_looks_at_the_status_of_a_refusal(load, wire, is_streaming, responses, allowed):
    case = load.fuzz_cases.Case("ensemble", wire, is_streaming=is_streaming, faults=[("top_p",)])
    for status in ("OK", "INTERNAL", "UNKNOWN", "200", "400", "404", "500", "503", ""):
        answers = [{"text_output": "a"}] * responses
        error = "INVALID_ARGUMENT: top_p is 2"
        outcome = load.fuzz_send.Outcome(error, status, answers, is_whole=True)
        said = load.fuzz.judge(case, outcome)
        assert bool(said) == (status not in allowed), status
        assert not said or "has status" in said


def test_what_is_served_or_is_no_json_has_its_status_too(load):
    case = load.fuzz_cases.Case("ensemble", "http")
    served = load.fuzz_send.Outcome("", "500", [{"text_output": "a"}], is_whole=True)
    assert "has status '500'" in load.fuzz.judge(case, served)
    changed = load.fuzz_cases.Case("ensemble", "http", mutation=(0, b"}"))
    refused = load.fuzz_send.Outcome("failed to parse", "500", [], is_whole=True)
    assert load.fuzz.judge(changed, refused) == ""
    assert load.fuzz.judge(case, refused)


@pytest.mark.parametrize("sent", ["y" * 999, "ab\n" * 99, ["y" * 999], {"y" * 999: 1}, 10**99])
def test_the_judge_sees_a_value_that_is_not_cut(load, sent):
    """Whether it is a text, or in a list or an object, however it is written."""
    asked = json.dumps({"seed": sent}).encode()
    tensor = load.fuzz_cases.Given("sampling_parameters", "BYTES", [1], [asked], asked)
    case = load.fuzz_cases.Case("vllm_model", "grpc", tensors=[tensor], faults=[("seed",)])
    for size, is_seen in ((64, False), (80, True)):
        error = f"INVALID_ARGUMENT: seed is {errors.clip(sent, size)}, not a whole number"
        outcome = load.fuzz_send.Outcome(error, "OK", [], is_whole=True)
        assert ("of a value and more" in load.fuzz.judge(case, outcome)) == is_seen, error


def test_long_values_are_drawn(load):
    """Most inputs that an error quotes are drawn with long values."""
    drawn = list(load.fuzz_cases.cases(200, 7))
    long = [case for case in drawn if any(True for _ in load.fuzz_judge.long_values(case))]
    assert len([case for case in long if case.faults]) > 20


def test_an_answer_for_each_sequence_is_counted(load):
    case = load.fuzz_cases.Case("ensemble", "grpc", size=2, num_sequences=2)
    outcome = load.fuzz_send.Outcome("", "OK", [{"text_output": "a"}] * 3, is_whole=True)
    assert "too few" in load.fuzz.judge(case, outcome)


def test_every_served_input_of_every_model_comes_up(load):
    """In a field, a flag or as one that asks for nothing; shapes of later work are Triton's."""
    fields = load.fuzz_fields
    for model in (*load.fuzz_cases.GENERATING, *load.fuzz_cases.STAGES):
        known = {*fields.FIELDS[model], *fields.flags(model), *fields.REQUIRED[model]}
        known |= {tensor.name for tensor in fields.later(model)}
        known |= {"stream", "streaming", "stop", "embedding_bias_weights", "sampling_parameters"}
        known |= {"EMBEDDING_BIAS_WEIGHTS", "exclude_input_in_output", "draft_logits"}
        known |= {"lookahead_window_size", "lookahead_verification_set_size"}
        known |= {"lora_weights", "lora_config"}  # tests/contract/test_lora.py, as what follows
        known |= {"prompt_embedding_table", "prompt_vocab_size", "prompt_table_extra_ids"}
        known |= {"prompt_table_extra_id", "PROMPT_TABLE_EXTRA_ID"}
        known |= {
            f"retention_token_range_{what}" for what in ("ends", "priorities", "durations_ms")
        }
        assert {t.name for t in MODELS[model].inputs if t.neutral is None} <= known


def digest(found: list[object]) -> str:
    return hashlib.sha256(repr(found).encode()).hexdigest()


@pytest.mark.rest
def test_the_same_number_draws_the_same_requests_in_any_process(load):
    """Here all modules of the suite are imported, whose constants hypothesis would draw."""
    code = (
        "import hashlib, fuzz_cases\n"
        "found = list(fuzz_cases.cases(60, 5))\n"
        "print(hashlib.sha256(repr(found).encode()).hexdigest())"
    )
    folder = repository_root() / "load"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest(list(load.fuzz_cases.cases(60, 5)))


def test_the_same_number_draws_the_same_requests(load):
    first, second = (list(load.fuzz_cases.cases(40, 5)) for _ in range(2))
    assert first == second
    assert first != list(load.fuzz_cases.cases(40, 6))
    assert len(first) == 40
