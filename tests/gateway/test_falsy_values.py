"""Values that are false, but not nothing: they count, or are refused by name."""

from types import SimpleNamespace

import pytest
from slipstream_contract.schemas.vllm import refused_names
from slipstream_gateway.dialects.openai_fields import CHAT, TABLES
from slipstream_gateway.fields import Use
from slipstream_gateway.prepare import read_request


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_salt", []),
        ("cache_salt", {}),
        ("priority", False),
        ("temperature", True),
        ("top_p", True),
        ("length_penalty", True),
        ("max_tokens", True),
        ("seed", True),
        ("logit_bias", {"5": True}),
        ("timeout_ms", 0),
        ("ignore_eos", 0),
        ("include_stop_str_in_output", 1),
        ("use_beam_search", []),
        ("return_token_ids", {}),
        ("return_token_ids", 0),
        ("logprobs_mode", "zz"),
        ("logprobs_mode", ""),
        ("truncation_side", "up"),
        ("logit_bias", {"4096": 1}),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_wrong_value_is_refused(gateway, path, field, value):
    messages = [{"role": "user", "content": "a"}]
    prompt = {"messages": messages} if "chat" in path else {"prompt": "a"}
    found = gateway.post(path, {**prompt, "max_tokens": 2, field: value})
    assert found.status == 400, found.data
    assert found.error["param"] == field


def test_priority_0_is_the_first_one():
    text = SimpleNamespace(defaults={}, max_model_len=100)
    request = read_request({"prompt": "a", "priority": 0}, text, False)
    assert request.urgency.priority == 0


def test_the_table_says_of_no_field_that_it_works_if_the_contract_refuses_it():
    wrong = [name for name in refused_names() if TABLES[CHAT][name].use is not Use.REFUSED]
    assert wrong == ["truncate_prompt_tokens"]  # served here, and not by `vllm_model`


def test_a_timeout_in_other_units_is_not_read():
    """`timeout` is what SDKs have for seconds; the contract's is in microseconds."""
    text = SimpleNamespace(defaults={}, max_model_len=100)
    request = read_request({"prompt": "a", "timeout": 30}, text, False)
    assert request.urgency.timeout_ns == 0
