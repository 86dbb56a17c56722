"""Guides are read from every contract's words, and each refusal names field, value and bound."""

import json

import numpy as np
import pytest
from slipstream_contract.errors import ContractError
from slipstream_contract.guide import (
    MAX_CHOICES,
    MAX_GUIDE_BYTES,
    MAX_GUIDE_NESTING,
    Guide,
    GuideKind,
    GuideOptions,
    check_guide,
)
from slipstream_contract.sampling import SamplingParams, check_sampling
from slipstream_contract.schemas.llmapi import llmapi_request
from slipstream_contract.schemas.trtllm import llm_request, text_request
from slipstream_contract.schemas.vllm import vllm_request

SCHEMA = '{"type": "object"}'


def text(*words: str) -> np.ndarray:
    return np.array([word.encode() for word in words], np.object_)


def trtllm(kind: str | None = None, guide: str | None = None) -> Guide | None:
    inputs = {"text_input": text("hi"), "max_tokens": np.array([4], np.int32)}
    if kind is not None:
        inputs["guided_decoding_guide_type"] = text(kind)
    if guide is not None:
        inputs["guided_decoding_guide"] = text(guide)
    asked = text_request(inputs, {}).sampling.guide
    of_ids = {name: array for name, array in inputs.items() if name.startswith("guided")}
    of_ids |= {
        "input_ids": np.array([1, 2], np.int32),
        "input_lengths": np.array([2], np.int32),
        "request_output_len": np.array([4], np.int32),
    }
    assert llm_request(of_ids, {}).sampling.guide == asked
    return asked


def vllm(**parameters: object) -> Guide | None:
    inputs = {"text_input": text("hi"), "sampling_parameters": text(json.dumps(parameters))}
    asked = vllm_request(inputs, {}).sampling.guide
    as_llmapi = {"text_input": text("hi")}
    assert llmapi_request(as_llmapi, parameters).sampling.guide == asked
    return asked


@pytest.mark.parametrize(
    ("kind", "guide", "expected"),
    [
        (None, None, None),
        ("", "", None),
        ("json", None, Guide(GuideKind.JSON)),
        ("json", "", Guide(GuideKind.JSON)),
        ("json_schema", SCHEMA, Guide(GuideKind.JSON_SCHEMA, SCHEMA)),
        ("regex", "a+", Guide(GuideKind.REGEX, "a+")),
        ("ebnf_grammar", 'root ::= "a"', Guide(GuideKind.GRAMMAR, 'root ::= "a"')),
        ("structural_tag", '{"a": 1}', Guide(GuideKind.STRUCTURAL_TAG, '{"a": 1}')),
    ],
)
def test_the_two_inputs_of_tensorrt_llm(kind, guide, expected):
    assert trtllm(kind, guide) == expected


@pytest.mark.parametrize(
    ("kind", "guide", "error"),
    [
        ("xml", "x", "guided_decoding_guide_type is 'xml', not one of json, json_schema, regex"),
        ("choice", "[]", "type is 'choice', not one of .*, ebnf_grammar, structural_tag$"),
        ("structural_tag", None, "guided_decoding_guide is empty: structural_tag needs a text"),
        ("structural_tag", "[1]", r"guided_decoding_guide is '\[1\]', not a JSON object"),
        (None, "a", "guided_decoding_guide is 'a' without a guided_decoding_guide_type"),
        ("json", SCHEMA, "guided_decoding_guide is .*json_schema takes a schema"),
        ("regex", "", "guided_decoding_guide is empty: regex needs a text"),
        ("json_schema", None, "guided_decoding_guide is empty"),
        ("json_schema", "{", "guided_decoding_guide is not JSON: .* at character 1"),
        ("json_schema", "[]", r"guided_decoding_guide is '\[\]', not a JSON schema"),
        ("json_schema", '{"minimum": NaN}', "guided_decoding_guide is not JSON: .*NaN"),
        ("json_schema", '{"a":' * 65 + "1" + "}" * 65, "nested too deeply, at most 64 levels"),
        ("json_schema", "[" * 100_000, "guided_decoding_guide is n"),
        ("regex", "a" * (MAX_GUIDE_BYTES + 1), "has 1048577 bytes, at most 1048576 are served"),
    ],
)
def test_refusals_of_tensorrt_llm(kind, guide, error):
    with pytest.raises(ContractError, match=error):
        trtllm(kind, guide)


def test_nesting_up_to_its_bound_is_served():
    most = '{"a":' * MAX_GUIDE_NESTING + "1" + "}" * MAX_GUIDE_NESTING
    assert trtllm("json_schema", most) == Guide(GuideKind.JSON_SCHEMA, most)


# A tool that a client names becomes a schema in the whole struct of vLLM: Triton's OpenAI frontend
# sends all of its fields.
_STRUCT = {"json": SCHEMA, "disable_fallback": False, "disable_any_whitespace": False}
_STRUCT |= {"disable_additional_properties": False}
_STRUCT |= dict.fromkeys(
    ("regex", "choice", "grammar", "json_object", "whitespace_pattern", "structural_tag")
)
STRUCT_OF_0_9 = _STRUCT | {"backend": None, "backend_was_auto": False}
STRUCT_OF_0_12 = _STRUCT | {"_backend": None, "_backend_was_auto": False}


@pytest.mark.parametrize("field", ["structured_outputs", "guided_decoding"])
@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"json": {"type": "object"}}, Guide(GuideKind.JSON_SCHEMA, SCHEMA)),
        ({"json": SCHEMA}, Guide(GuideKind.JSON_SCHEMA, SCHEMA)),
        ({"regex": "a+"}, Guide(GuideKind.REGEX, "a+")),
        ({"choice": ["a", "b"]}, Guide(GuideKind.CHOICE, '["a", "b"]')),
        ({"grammar": "start: /a/"}, Guide(GuideKind.GRAMMAR, "start: /a/")),
        ({"json_object": True}, Guide(GuideKind.JSON_OBJECT)),
        ({"structural_tag": {"a": 1}}, Guide(GuideKind.STRUCTURAL_TAG, '{"a": 1}')),
        (
            {"json": SCHEMA, "disable_any_whitespace": True, "disable_additional_properties": True},
            Guide(
                GuideKind.JSON_SCHEMA, SCHEMA, GuideOptions(is_compact=True, is_closed=True)
            ),
        ),
        (
            {"json": SCHEMA, "regex": None, "whitespace_pattern": " ?"},
            Guide(GuideKind.JSON_SCHEMA, SCHEMA, GuideOptions(whitespace_pattern=" ?")),
        ),
        (STRUCT_OF_0_9, Guide(GuideKind.JSON_SCHEMA, SCHEMA)),
        (STRUCT_OF_0_12, Guide(GuideKind.JSON_SCHEMA, SCHEMA)),
        ({}, None),
    ],
)  # fmt: skip
def test_structured_outputs_of_vllm(field, as_text, asked, expected):
    assert vllm(**{field: json.dumps(asked) if as_text else asked}) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"guided_json": {"type": "object"}}, Guide(GuideKind.JSON_SCHEMA, SCHEMA)),
        ({"guided_json": {}}, Guide(GuideKind.JSON_SCHEMA, "{}")),
        ({"guided_regex": "a"}, Guide(GuideKind.REGEX, "a")),
        ({"guided_choice": ["a"]}, Guide(GuideKind.CHOICE, '["a"]')),
        ({"guided_grammar": "x"}, Guide(GuideKind.GRAMMAR, "x")),
        ({"guided_json": None, "guided_choice": None}, None),
        ({"guided_json": False}, Guide(GuideKind.JSON_SCHEMA, "false")),  # that nothing follows
        ({"guided_json_object": False}, None),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " "},
            Guide(GuideKind.JSON_SCHEMA, SCHEMA, GuideOptions(whitespace_pattern=" ")),
        ),
    ],
)
def test_the_older_names_of_vllm(asked, expected):
    assert vllm(**asked) == expected


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (
            {"structured_outputs": {"json": "{}", "regex": "a"}},
            "structured_outputs.json and structured_outputs.regex given, exactly one of",
        ),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "none given, exactly one of json"),
        ({"structured_outputs": {"yaml": "a"}}, "structured_outputs.'yaml' is not known, but json"),
        ({"structured_outputs": "{"}, "structured_outputs is not JSON"),
        ({"structured_outputs": [1]}, r"structured_outputs is \[1\], not an object"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex is 1, not a text"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice is not JSON"),
        ({"structured_outputs": {"choice": []}}, r"choice has 0 texts, not from 1 to 10000"),
        ({"structured_outputs": {"choice": ["a", 1]}}, r"choice\[1\] is 1, not a text"),
        ({"structured_outputs": {"json_object": 1}}, "json_object is 1, not true"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json is '3', not a JSON schema"),
        (
            {"structured_outputs": {"json": "{}", "disable_any_whitespace": "yes"}},
            "structured_outputs.disable_any_whitespace is 'yes', neither true nor false",
        ),
        (
            {"guided_decoding": {"json": "{}"}, "structured_outputs": {"json": "{}"}},
            "structured_outputs and guided_decoding are given but mean the same",
        ),
        (
            {"guided_json": "{}", "structured_outputs": {"json": "{}"}},
            "structured_outputs and guided_json are given but mean the same",
        ),
        ({"guided_json": "{}", "guided_regex": "a"}, "guided_json and guided_regex given"),
        ({"guided_json": 3}, "guided_json is '3', not a JSON schema"),
        ({"guided_regex": False}, "guided_regex is False, not a text"),
        ({"structured_outputs": {"choice": False}}, "structured_outputs.choice is False, not a"),
    ],
)
def test_refusals_of_vllm(asked, error):
    with pytest.raises(ContractError, match=error):
        vllm(**asked)


def test_a_beam_search_may_have_a_guide():
    inputs = {"text_input": text("hi"), "max_tokens": np.array([4], np.int32)}
    inputs |= {"beam_width": np.array([2], np.int32), "guided_decoding_guide_type": text("json")}
    parameters = {"use_beam_search": True, "n": 2, "guided_regex": "a"}
    asked = {"text_input": text("hi"), "sampling_parameters": text(json.dumps(parameters))}
    for request in (text_request(inputs, {}), vllm_request(asked, {})):
        check_sampling(request.sampling)
        assert request.sampling.beams is not None
        assert request.sampling.guide is not None


def test_the_engine_checks_the_same_bounds():
    too_many = json.dumps(["a"] * (MAX_CHOICES + 1))
    for guide, error in [
        (Guide(GuideKind.CHOICE, too_many), "guide has 10001 texts"),
        (Guide(GuideKind.REGEX, "a" * (MAX_GUIDE_BYTES + 1)), "guide has 1048577 bytes"),
        (
            Guide(GuideKind.JSON, options=GuideOptions(whitespace_pattern=" ", is_compact=True)),
            "whitespace_pattern and disable_any_whitespace contradict",
        ),
    ]:
        with pytest.raises(ContractError, match=error):
            check_guide("guide", guide)
        with pytest.raises(ContractError, match=error):
            check_sampling(SamplingParams(max_tokens=1, guide=guide))
