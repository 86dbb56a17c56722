"""Turn the body of a chat completion into a prompt, and then into requests of the engine."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from slipstream_contract.errors import ContractError, clip
from slipstream_contract.guide import GuideKind, GuideOptions, check_guide
from slipstream_contract.request import GenerateRequest
from slipstream_preprocessing.chat import ChatTemplate

from slipstream_gateway.answer import Parser
from slipstream_gateway.errors import ApiError
from slipstream_gateway.fields import read_flag, read_object, read_text
from slipstream_gateway.foreign import ForeignTemplate
from slipstream_gateway.history import prepare_messages
from slipstream_gateway.model_text import ModelText
from slipstream_gateway.parsing.answers import Answers
from slipstream_gateway.parsing.choice import ToolChoice, read_choice, shown_tools
from slipstream_gateway.parsing.detect import NONE
from slipstream_gateway.prepare import (
    Prepared,
    Prompt,
    encode,
    make_answers,
    read_request,
)

_OWN = ("messages", "tools", "documents", "add_generation_prompt")  # of the template, from us
_CALL = 1024  # tokens that thinking leaves to a call, at most; of few tokens half


def prepare_chat(body: Mapping[str, Any], text: ModelText, has_request_templates: bool) -> Prepared:
    """Return what a chat completion asks for. Raises ContractError, ApiError."""
    messages = prepare_messages(body.get("messages"))
    choice = _read_tools(body, text)
    plain = read_request(body, text, is_chat=True)
    chat = _template(body, text, has_request_templates)
    shown = render(body, messages, chat)
    plain = _guided(plain, text.answers, choice, shown)
    prompt = Prompt(shown, None, read_flag(body, "add_special_tokens"), "messages")
    request = leave_room(encode(plain, prompt, body, text), choice, text)
    n = plain.sampling.n
    parsers: list[Parser | None] = [None] * n
    if plain.options.skip_special_tokens and text.answers.format.name != NONE:
        has_guide = plain.sampling.guide is not None
        parsers = [text.answers.parser(choice, shown, has_guide=has_guide) for _ in range(n)]
    answers = make_answers(request, prompt, body, text, parsers)
    for answer in answers:
        answer.hides_reasoning = not read_flag(body, "include_reasoning", True)
    if read_flag(body, "echo") and messages[-1]["role"] == "assistant":
        for answer in answers:
            answer.prompt.text = messages[-1]["content"]
            answer.prompt.is_echoed = True
    is_named = choice.mode == "named"
    return Prepared([request], answers, n, plain.options.is_streaming, is_named)


def _read_tools(body: Mapping[str, Any], text: ModelText) -> ToolChoice:
    """Return what may be called. Raises ApiError for what the model cannot do."""
    choice = read_choice(
        body.get("tools"), body.get("tool_choice"), body.get("parallel_tool_calls")
    )
    if choice.mode == "none":
        return choice
    if not text.answers.has_calls:
        message = (
            "tools: the model's chat template shows no known form of calls; "
            "the server's option --tool-call-parser names one"
        )
        raise ApiError(400, message, "tools", "unsupported_parameter")
    if body.get("skip_special_tokens") is False:
        message = "skip_special_tokens is false: such a text is not parsed for calls of tools"
        raise ApiError(400, message, "skip_special_tokens")
    return choice


def _guided(
    request: GenerateRequest, answers: Answers, choice: ToolChoice, shown: str
) -> GenerateRequest:
    """Return the request with the grammar of its calls. Raises ContractError, ApiError.

    Where calls may come and the text is JSON of a schema, an answer is the one or the other.
    """
    own = request.sampling.guide
    schema: Any = None
    if own is not None and choice.mode == "auto" and own.options == GuideOptions():
        if own.kind is GuideKind.JSON_SCHEMA:
            schema = json.loads(own.text)
        elif own.kind is GuideKind.JSON_OBJECT:
            schema = {"type": "object"}
    guide = answers.guide(choice, shown, answer=schema)
    if guide is None:
        return request
    if own is not None and schema is None:
        raise ContractError(
            "tools whose calls follow a grammar and response_format or structured_outputs are "
            "given, but one output has one form"
        )
    check_guide("tools", guide)
    sampling = msgspec.structs.replace(request.sampling, guide=guide)
    return msgspec.structs.replace(request, sampling=sampling)


def leave_room(request: GenerateRequest, choice: ToolChoice, text: ModelText) -> GenerateRequest:
    """Return the request with an end of thinking that leaves room for a call that must come.

    A weak model would think until `max_tokens`. What a request says of its thinking holds.
    """
    sampling = request.sampling
    must_call = choice.mode in ("required", "named") and sampling.guide is not None
    if not (must_call and text.has_thinking) or sampling.thinking_token_budget is not None:
        return request
    budget = sampling.max_tokens - min(sampling.max_tokens // 2, _CALL)
    sampling = msgspec.structs.replace(sampling, thinking_token_budget=budget)
    return msgspec.structs.replace(request, sampling=sampling)


def render(
    body: Mapping[str, Any], messages: list[dict[str, Any]], chat: ChatTemplate | ForeignTemplate
) -> str:
    """Return the prompt of a conversation. Raises ContractError."""
    goes_on = read_flag(body, "continue_final_message")
    opens = read_flag(body, "add_generation_prompt", not goes_on)
    if goes_on and opens:
        raise ContractError(
            "continue_final_message and add_generation_prompt are true: the answer either goes on "
            "with the last message or is a new one"
        )
    variables = read_object(body, "chat_template_kwargs")
    for name in _OWN:
        if name in variables:
            raise ContractError(f"chat_template_kwargs.{name}: {name} is a field of its own")
    effort = read_text(body, "reasoning_effort")
    if effort is not None:
        own = {"reasoning_effort": effort}
        if effort == "none":
            own["enable_thinking"] = False  # type: ignore[assignment]
        variables = {**own, **variables}
    tools, documents = shown_tools(body.get("tools")), body.get("documents")
    if documents is not None and not isinstance(documents, list):
        raise ContractError(f"documents is {clip(documents)}, not a list")
    if body.get("tool_choice") == "none":
        tools = None
    prompt = chat.render(messages, tools, opens, documents, variables)
    return _cut(prompt, messages[-1]["content"]) if goes_on else prompt


def _cut(prompt: str, last: str) -> str:
    """Return the prompt up to the end of the last message. Raises ContractError."""
    for end in (last, last.strip()):  # templates strip messages
        place = prompt.rfind(end)
        if end and place >= 0:
            return prompt[: place + len(end)]
    raise ContractError(
        "continue_final_message is true, but the prompt does not hold the last message as it is"
    )


def _template(
    body: Mapping[str, Any], text: ModelText, has_request_templates: bool
) -> ChatTemplate | ForeignTemplate:
    source = read_text(body, "chat_template")
    if source is None:
        if not text.can_chat:
            message = (
                "messages: the checkpoint has no chat template; the server's option "
                "--chat-template gives it one, and /v1/completions needs none"
            )
            raise ApiError(400, message, "messages", "no_chat_template")
        return text.chat
    if not has_request_templates:
        message = "chat_template: this server does not run templates of requests"
        raise ApiError(400, message, "chat_template", "unsupported_parameter")
    return ForeignTemplate(source, text.chat.variables)
