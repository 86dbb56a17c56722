"""Guided output of the served default model: at every model name, streamed and not."""

import json
import re

import numpy as np
import pytest
from fixtures.bridge.texts import TEXT
from fixtures.server.support import TEXT_MODELS, RequestError

pytestmark = pytest.mark.triton

PROMPT = "A person: "
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [7, 70]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LETTERS = {"type": "regex", "pattern": "[a-c]{3}"}
TAG = {"format": {"type": "tag", "begin": "<", "content": LETTERS, "end": ">"}}
OLD = [
    ("json_schema", json.dumps(SCHEMA)),
    ("regex", "[a-c]{5}"),
    ("ebnf_grammar", 'root ::= "x" [0-9] [0-9]'),
    ("structural_tag", json.dumps(TAG)),
]
NEW = [
    {"json": SCHEMA},
    {"regex": "[a-c]{5}"},
    {"choice": ["yes", "no"]},
    {"grammar": 'root ::= "x" [0-9] [0-9]'},
]


def check(asked: object, text: str) -> None:
    if "json" in str(asked):
        value = json.loads(text)
        assert set(value) == {"name", "age"}
        assert value["age"] in (7, 70)
    elif "structural_tag" in str(asked):
        assert re.fullmatch("<[a-c]{3}>", text)
    elif "choice" in str(asked):
        assert text in ("yes", "no")
    elif "a-c" in str(asked):
        assert len(text) == 5
        assert set(text) <= set("abc")
    else:
        assert text[0] == "x"
        assert text[1:].isdigit()
        assert len(text) == 3


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("model", [*TEXT_MODELS, "tensorrt_llm"])
@pytest.mark.parametrize("asked", OLD, ids=[kind for kind, _ in OLD])
def test_the_two_inputs(idle, model, asked, stream):
    inputs = {"text_input": PROMPT, "max_tokens": 200, "stream": stream}
    if model == "tensorrt_llm":
        ids = TEXT.encode(PROMPT)
        inputs = {
            "input_ids": np.array([ids], np.int32), "input_lengths": len(ids), "end_id": 0,
            "request_output_len": 200, "streaming": stream,
        }  # fmt: skip
    kind, guide = asked
    guided = {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide}
    responses = idle.stream(model, **inputs, **guided, exclude_input_in_output=True)
    if model == "tensorrt_llm":
        ids = [i for r in responses for i in np.asarray(r["output_ids"]).reshape(-1).tolist()]
        text = b"".join(TEXT.vocab.raw(i) for i in ids).decode()
    else:
        text = b"".join(np.asarray(r["text_output"]).reshape(-1)[0] for r in responses).decode()
    check(asked, text)


@pytest.mark.parametrize("asked", NEW, ids=[next(iter(each)) for each in NEW])
def test_structured_outputs(idle, asked):
    sampling = {"max_tokens": 200, "temperature": 0.8, "seed": 3, "structured_outputs": asked}
    answer = idle.generate(
        "vllm_model",
        text_input=PROMPT,
        sampling_parameters=json.dumps(sampling),
        exclude_input_in_output=True,
    )
    check(asked, str(answer["text_output"]))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"guided_decoding_guide_type": "xml"}, "guided_decoding_guide_type is 'xml', not one of"),
        (
            {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "("},
            "INVALID_ARGUMENT: the guide is refused: .*unclosed group",
        ),
        (
            {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "false"},
            "INVALID_ARGUMENT: the guide is refused: ",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_bad_guides(idle, model, fields, error):
    with pytest.raises(RequestError, match=error):
        idle.generate(model, text_input=PROMPT, max_tokens=8, **fields)
    with pytest.raises(RequestError, match=error):
        idle.stream(model, text_input=PROMPT, max_tokens=8, **fields)
