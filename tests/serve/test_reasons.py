"""What a tritonserver's log says of models that it could not load, in one line."""

import pytest
from slipstream_serve.reasons import reason_of

USUAL = 'E1130 11:36:08.360712 7148 server.cc:241] "CudaDriverHelper has not been initialized."\n'
LOADED = "| postprocessing    | 1       | READY  |\n"
END = "error: creating server: Internal - failed to load all models\n"
MANAGER = "E1130 11:36:08.362122 7148 model_repository_manager.cc"
UNREADABLE = (
    f"{MANAGER}:1460] \"Poll failed for model directory 'pre': failed to read text proto from "
    '/m/pre/config.pbtxt"\n'
)
AMBIGUOUS = "ensemble ensemble contains models that are not available or ambiguous: pre"
FEWER = f'{MANAGER}:703] "Invalid argument: {AMBIGUOUS}"\n'
BACKEND = (
    "E1130 11:36:50.286399 1 model_lifecycle.cc:642] \"failed to load 'pre' version 1: Invalid "
    "argument: unable to find backend library for backend 'nope'\"\n"
)
RAISED = (
    "E1130 11:36:50.286399 1 model_lifecycle.cc:642] \"failed to load 'pre' version 1: Internal: "
    'ValueError: no tokenizer\\n\\nAt:\\n  model.py(3): initialize\\n"\n'
)
ANEW = "; `slipstream compose` writes it anew"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            UNREADABLE + FEWER,
            f"pre/config.pbtxt: failed to read text proto from /m/pre/config.pbtxt{ANEW}",
        ),
        (
            FEWER,
            f"ensemble ensemble contains models that are not available or ambiguous: pre{ANEW}",
        ),
        (BACKEND + FEWER, "pre: unable to find backend library for backend 'nope'"),
        (RAISED, "pre: no tokenizer"),
        ("", None),
    ],
    ids=["unreadable", "without a step", "no such backend", "an error of ours", "nothing"],
)
def test_the_first_model_that_fails_is_named(lines: str, said: str | None) -> None:
    assert reason_of(USUAL + lines + LOADED + END) == said
