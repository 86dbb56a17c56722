import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from fixtures.stages.zoo import byte_level_bpe, llama_bpe, save
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream_contract.errors import Code, ContractError
from slipstream_preprocessing.chat import ChatTemplate
from slipstream_preprocessing.encode import Encoder
from transformers import PreTrainedTokenizerFast

CHAT_ML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message['content'] | trim + '</s>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
BLOCKS = """{{ bos_token }}{% if messages[0].role == 'system' %}
  {% set system = messages[0].content %}
  <<SYS>>{{ system }}<</SYS>>
{% endif %}
{% for message in messages if message.role != 'system' %}
  {% if loop.index > 3 %}{% break %}{% endif %}
  {% set text = message.content %}
  {% if message.role == 'assistant' %}{% generation %}{{ text }}{{ eos_token }}{% endgeneration %}
  {% else %}[INST] {{ message.content }} [/INST]{% endif %}
{% endfor %}"""
TOOLS = """{% set ns = namespace(found=false) %}
{% for tool in tools or [] %}{% set ns.found = true %}
{{ tool | tojson(indent=2) }} {{ tool | tojson }}
{% endfor %}{{ 'yes' if ns.found else 'no' }} {{ messages | length }} {{ messages | tojson }}"""
REASONING = """{% for message in messages %}
{{ message.thinking }}|{{ message.reasoning_content }}|{{ message.keys() | list }}
{% endfor %}"""
ALTERNATE = """{% for message in messages %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}
{{ message.content }}{% endfor %}"""

MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=20)},
        optional={
            name: st.sampled_from([None, "", "why"])
            for name in ("reasoning", "thinking", "reasoning_content")
        },
    ),
    min_size=1,
    max_size=5,
)
TOOL = {"type": "function", "function": {"name": "größe", "parameters": {"a<b": [1, 2.5, None]}}}


def both(directory: Path, template: Any) -> tuple[ChatTemplate, PreTrainedTokenizerFast]:
    save(byte_level_bpe(), directory, chat_template=template)
    return ChatTemplate.load(directory), PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.mark.parametrize("template", [CHAT_ML, BLOCKS, TOOLS, REASONING])
def test_templates_render_as_in_transformers(tmp_path: Path, template: str) -> None:
    mine, tokenizer = both(tmp_path, template)

    @settings(max_examples=150, deadline=None)
    @given(
        messages=MESSAGES, prompt=st.booleans(), tools=st.sampled_from([None, [TOOL], [TOOL, TOOL]])
    )
    def check(messages: list[dict[str, str]], prompt: bool, tools: list[Any] | None) -> None:
        expected = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompt
        )
        assert mine.render(messages, tools, prompt) == expected

    check()


def test_named_templates_and_their_file(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    mine, _ = both(tmp_path, named)
    message = {"role": "user", "content": ""}
    assert mine.render([message]) == "D"
    assert mine.render([message], tools=[TOOL]) == "T"
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}\n")
    assert ChatTemplate.load(tmp_path).render([message], tools=[TOOL]) == "file </s>"


def test_the_clock_of_templates(tmp_path: Path) -> None:
    mine, _ = both(tmp_path, "{{ strftime_now('%Y-%m-%d') }}")
    before = datetime.now().strftime("%Y-%m-%d")
    rendered = mine.render([{"role": "user", "content": ""}])
    assert rendered in (before, datetime.now().strftime("%Y-%m-%d"))


def test_refusals_of_a_template_reach_the_client(tmp_path: Path) -> None:
    mine, _ = both(tmp_path, ALTERNATE)
    with pytest.raises(ContractError, match="roles must alternate") as raised:
        mine.render([{"role": "assistant", "content": "a"}])
    assert raised.value.code is Code.INVALID_ARGUMENT
    with pytest.raises(ContractError, match="messages is empty"):
        mine.render([])
    with pytest.raises(ContractError, match=r"messages\[1\] has no role"):
        mine.render([{"role": "user", "content": "a"}, {"content": "b"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages | attr('__class__') }}",
    ],
)
def test_templates_run_in_a_sandbox(template: str) -> None:
    chat = ChatTemplate({"default": template}, {})
    try:
        rendered = chat.render([{"role": "user", "content": ""}])
    except ContractError:
        return
    assert rendered == ""  # an undefined value, as Jinja's sandbox has it


def test_checkpoints_without_a_template_or_with_a_broken_one(tmp_path: Path) -> None:
    save(byte_level_bpe(), tmp_path)
    with pytest.raises(ContractError, match="no chat template") as raised:
        ChatTemplate.load(tmp_path).render([{"role": "user", "content": ""}])
    assert raised.value.code is Code.UNSUPPORTED
    with pytest.raises(ContractError, match="chat template 'default'"):
        ChatTemplate({"default": "{% if %}"}, {})


@pytest.mark.parametrize(
    "template", ["{% if %}", 5, [{"name": "default"}], [5], {"default": 5}, ["ab"]]
)
def test_a_broken_template_is_named_by_its_place(template: object, tmp_path: Path) -> None:
    save(byte_level_bpe(), tmp_path, chat_template=template)
    with pytest.raises(ContractError, match=re.escape(str(tmp_path))) as raised:
        ChatTemplate.load(tmp_path)
    assert raised.value.code is Code.UNSUPPORTED


@pytest.mark.parametrize("content", [b"\xff", None], ids=["bytes", "directory"])
def test_a_template_that_is_no_text_is_named(content: bytes | None, tmp_path: Path) -> None:
    save(byte_level_bpe(), tmp_path)
    path = tmp_path / "chat_template.jinja"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ContractError, match=r"chat_template\.jinja: "):
        ChatTemplate.load(tmp_path)


def test_a_template_sees_the_roles_that_a_model_has_of_its_own(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ image_token }}{{ eot_token }}{{ messages[0].content }}"
    tokens = {"image_token": "<|image|>", "extra_special_tokens": {"eot_token": "<|eot|>"}}
    save(byte_level_bpe(), tmp_path, chat_template=template, **tokens)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    encoder = Encoder.load(tmp_path)
    messages = [{"role": "user", "content": "fox<|eot|>"}]
    ids = encoder.encode(encoder.chat(messages), add_special_tokens=False)
    assert ids == tokenizer.apply_chat_template(messages, return_dict=False)
    assert {tokenizer.convert_tokens_to_ids(text) for text in ("<|image|>", "<|eot|>")} < set(ids)


def test_a_chat_is_encoded_as_in_transformers(tmp_path: Path) -> None:
    save(llama_bpe(), tmp_path, chat_template=BLOCKS)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    encoder = Encoder.load(tmp_path)
    messages = json.loads('[{"role": "user", "content": "fox\\n 你好"}]')
    ids = encoder.encode(encoder.chat(messages), add_special_tokens=False)
    assert ids == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
