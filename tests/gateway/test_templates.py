"""Chat templates: the operator's, and those of requests, which are code of strangers."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fixtures.gateway.served import Gateway, serving
from slipstream_contract.errors import ContractError
from slipstream_gateway.errors import ApiError
from slipstream_gateway.foreign import ForeignTemplate
from slipstream_gateway.parsing.detect import choose
from slipstream_gateway.parsing.format import AddedTokens
from slipstream_gateway.prepare_chat import prepare_chat
from slipstream_preprocessing.chat import ChatTemplate

SMALL = {"defaults": {}, "max_model_len": 100}
MESSAGES = [{"role": "user", "content": "import os"}]


@pytest.fixture(scope="module")
def open_to_templates(gateway_repository: Path, tmp_path_factory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("templates")
    (folder / "own.jinja").write_text("{{ messages[0].content }}\n")
    options = ("--allow-request-templates", "--chat-template", str(folder / "own.jinja"))
    with serving(gateway_repository, folder / "log", *options) as gateway:
        yield gateway


@pytest.mark.rest
def test_what_may_loop_for_ever_is_killed():
    template = ForeignTemplate("{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3, {})
    begin = time.monotonic()
    with pytest.raises(ContractError, match="chat_template"):
        template.render(MESSAGES)
    assert time.monotonic() - begin < 20


def test_what_wants_all_memory_is_refused():
    with pytest.raises(ContractError, match="chat_template"):
        ForeignTemplate("{{ 'a' * 10000000000 }}", {}).render(MESSAGES)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ ''.__class__.__mro__ }}", "chat_template: .*unsafe"),
        ("{{ 1 / 0 }}", "chat_template: .*division by zero"),
        ("{% for i in range(10 ** 6) %}{% endfor %}", "chat_template: .*Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat_template: .*recursion"),
        ("{{ '\\ud800' }}", "chat_template made what is no text: surrogates not allowed"),
        ("{% if %}", "chat_template: "),
        ("{{ raise_exception('x') }}", "chat_template: .*x"),
    ],
)
def test_what_leaves_the_sandbox_or_fails_is_refused(source: str, said: str):
    with pytest.raises(ContractError, match=said):
        ForeignTemplate(source, {}).render(MESSAGES)


def test_variables_may_have_any_name():
    """A variable called `self` was an internal error."""
    given = {"self": 1, "name": 2, "template": 3, "context": 4, "messages": 5, "": 6}
    source = "{{ name }}{{ template }}{{ context }}{{ messages[0].role }}"
    for template in (ChatTemplate({"default": source}, {}), ForeignTemplate(source, {})):
        assert template.render(MESSAGES, variables=given) == "234user"


def test_a_model_without_a_template_says_what_helps():
    text = SimpleNamespace(can_chat=False, answers=choose(None, AddedTokens()), **SMALL)
    with pytest.raises(ApiError, match="--chat-template gives it one") as caught:
        prepare_chat({"messages": MESSAGES}, text, has_request_templates=False)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_templates_of_operator_and_request(open_to_templates: Gateway):
    own = open_to_templates.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})
    assert own.json["usage"]["prompt_tokens"] == 2
    body = {"messages": MESSAGES, "max_tokens": 1, "chat_template": "{{ bos_token }}x{{ y }}"}
    foreign = open_to_templates.post(
        "/v1/chat/completions",
        {**body, "chat_template_kwargs": {"y": "z"}, "return_token_ids": True},
    )
    assert foreign.status == 200, foreign.data
    ids = foreign.json["prompt_token_ids"]
    shown = open_to_templates.post("/detokenize", {"tokens": ids}).json["prompt"]
    assert shown == "<|endoftext|>xz"
    bad = open_to_templates.post("/v1/chat/completions", {**body, "chat_template": "{{"})
    assert (bad.status, bad.error["param"]) == (400, "chat_template")
