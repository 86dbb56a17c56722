"""Parameters of config.pbtxt: honoured, without effect, or the model does not load."""

import json

import pytest
from slipstream_contract.options import NEUTRAL, SERVED, refuse_unserved
from slipstream_contract.parameters import StageParameters


def arguments(**parameters: str) -> dict[str, str]:
    values = {name: {"string_value": value} for name, value in parameters.items()}
    config = {"parameters": values}
    return {
        "model_config": json.dumps(config),
        "model_repository": "/models/m",
        "model_version": "1",
        "model_name": "m",
    }


def test_placeholders_and_nothing_are_defaults():
    placeholders = {name: f"${{{name}}}" for name in (*SERVED, *NEUTRAL, "lora_cache_max", "any")}
    refuse_unserved("m", placeholders, {}, "FILE")
    refuse_unserved("m", dict.fromkeys(placeholders, ""), {}, "FILE")
    parameters = StageParameters(arguments(skip_special_tokens="${skip_special_tokens}"))
    assert parameters.flag("skip_special_tokens", True)


def test_what_asks_for_nothing_loads():
    for name, values in NEUTRAL.items():
        for value in values:
            refuse_unserved("m", {name: value}, {}, "FILE")
    refuse_unserved("m", {"EXECUTION_ENV_PATH": "/env", "max_beam_width": "1"}, {}, "FILE")


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("max_beam_width", "64", "only 1 or 2 or 3 "),
        ("gpt_model_type", "V1", "only inflight_fused_batching or inflight_batching"),
        ("enable_kv_cache_reuse", "false", "set kv_cache_reuse in tensorrt_llm/1/model.json"),
        ("REPORT_CUSTOM_METRICS", "yes", "only no or false"),
        (
            "max_tokens_in_paged_kv_cache",
            "4096",
            "set kv_cache_tokens in tensorrt_llm/1/model.json",
        ),
        ("sink_token_length", "4", "set sink_tokens in tensorrt_llm/1/model.json"),
        ("max_attention_window_size", "64", "set attention_window in tensorrt_llm/1/model.json"),
        (
            "kv_cache_host_memory_bytes",
            "1000000000",
            "set kv_cache_host_bytes in tensorrt_llm/1/model.json",
        ),
        ("skip_special_token", "true", "do you mean skip_special_tokens"),
        ("medusa_choices", "[[0]]", "set the same medusa_choices in tensorrt_llm/1/model.json"),
        ("decoding_mode", "redrafter", "only auto or top_k or .* or lookahead is served"),
        ("decoding_mode", "Medusa", "set speculation to medusa in tensorrt_llm/1/model.json"),
        ("decoding_mode", "eagle", "set speculation to eagle3 in tensorrt_llm/1/model.json"),
        (
            "tensorrt_llm_draft_model_name",
            "small",
            "set speculation to draft, and draft_checkpoint",
        ),
        ("lookahead_window_size", "4", "set speculation and num_draft_tokens in tensorrt_llm/1"),
        ("lora_cache_max", "4", "not served, leave it out"),
    ],
)
def test_what_is_not_done_keeps_a_model_from_loading(name, value, advice):
    with pytest.raises(ValueError, match=f"m: parameter {name} is .*{advice}"):
        StageParameters(arguments(**{name: value}))


@pytest.mark.parametrize(
    ("speculation", "name", "value"),
    [
        ("medusa", "decoding_mode", "medusa"),
        ("eagle3", "decoding_mode", "eagle"),
        ("draft", "tensorrt_llm_draft_model_name", "tensorrt_llm_draft"),
        ("medusa", "medusa_choices", "{0},{0,0}"),
        ("eagle3", "eagle_choices", "{0}, {0, 0}"),
    ],
)
def test_what_the_engine_does_loads(speculation, name, value, tmp_path):
    """By the settings of the model beside it."""
    engine = {"speculation": speculation, "checkpoint": "c"}
    if name.endswith("choices"):
        engine[name] = "{0}, {0, 0}"
    folder = tmp_path / "tensorrt_llm" / "1"
    folder.mkdir(parents=True)
    (folder / "model.json").write_text(json.dumps({"wiring": "composed", "engine": engine}))
    given = arguments(**{name: value}) | {"model_repository": str(tmp_path / "tensorrt_llm_bls")}
    assert StageParameters(given).text(name) == value
    engine["speculation"] = engine[name] = "none"
    (folder / "model.json").write_text(json.dumps({"wiring": "composed", "engine": engine}))
    with pytest.raises(ValueError, match=f"parameter {name} is .*: set "):
        StageParameters(given)


def test_advice_names_the_file_of_a_named_deployment(tmp_path):
    model = tmp_path / "chat_tensorrt_llm"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.json").write_text('{"engine": {}}')
    config = {"parameters": {"sink_token_length": {"string_value": "4"}}}
    given = {
        "model_config": json.dumps(config),
        "model_repository": str(model),
        "model_version": "1",
        "model_name": "chat_tensorrt_llm",
    }
    with pytest.raises(ValueError, match=r"set sink_tokens in chat_tensorrt_llm/1/model\.json"):
        StageParameters(given)
