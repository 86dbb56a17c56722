"""Turn a body into requests of the engine: prompts, sampling parameters, and what is shown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from slipstream_contract.errors import ContractError, clip
from slipstream_contract.ids import TokenIds, pack
from slipstream_contract.log_probs import MODES, LogProbs
from slipstream_contract.pairs import check_pairs
from slipstream_contract.request import GenerateRequest, ResponseOptions, Words, split_handling
from slipstream_contract.schemas.vllm import build_request, known_names, read_values

from slipstream_gateway.answer import Parser
from slipstream_gateway.fields import read_flag, read_text, read_whole
from slipstream_gateway.guides import read_response_format
from slipstream_gateway.model_text import ModelText
from slipstream_gateway.sequences import Answering, LogProbReader, PromptPart, whole_text
from slipstream_gateway.value_schemas import MAX_TOP

_HANDLING = ("priority", "timeout_ms", "cache_salt")
_SHOWN = ("logprobs", "prompt_logprobs")  # read here, by OpenAI's rules


@dataclass
class Prompt:
    """A prompt as it came: a text, or token ids."""

    text: str | None = None
    token_ids: TokenIds | None = None
    adds_special_tokens: bool = True
    field: str = "prompt"


@dataclass
class Prepared:
    """A body that the engine can serve.

    Attributes:
        requests: one for each prompt, with token ids.
        answers: `per_prompt` for each prompt.
    """

    requests: list[GenerateRequest]
    answers: list[Answering]
    per_prompt: int
    is_streaming: bool
    is_named_tool: bool = False


def read_log_probs(body: Mapping[str, Any], is_chat: bool) -> LogProbs | None:
    """Return the log probs that a body wants, of answers and of prompts. Raises ContractError."""
    prompt = read_whole(body, "prompt_logprobs", 0, MAX_TOP)
    if is_chat:
        top = read_whole(body, "top_logprobs", 0, MAX_TOP)
        if not read_flag(body, "logprobs"):
            if top:
                raise ContractError(f"top_logprobs is {top}, but logprobs is not true")
            top = None
        else:
            top = top or 0
    else:
        top = read_whole(body, "logprobs", 0, MAX_TOP)
        if top is not None and read_flag(body, "echo"):
            prompt = max(top, prompt or 0)
    if body.get("prompt_logprobs") is not None and body.get("stream"):
        raise ContractError("prompt_logprobs is given and stream is true: they come with a whole")
    mode = read_text(body, "logprobs_mode", MODES) or ""
    return None if top is None and prompt is None else LogProbs(top=top, prompt=prompt, mode=mode)


def read_request(body: Mapping[str, Any], text: ModelText, is_chat: bool) -> GenerateRequest:
    """Return the request but for its prompt, which is a blank. Raises ContractError."""
    asked = {name: body[name] for name in known_names() & body.keys() if name not in _SHOWN}
    asked.pop("logprobs_mode", None)
    asked.pop("add_special_tokens", None)
    for name in ("truncate_prompt_tokens", "store", "service_tier", "metadata"):
        asked.pop(name, None)
    if not read_flag(body, "use_beam_search"):
        asked = {**text.defaults, **{k: v for k, v in asked.items() if v is not None}}
    if body.get("max_tokens") is None and body.get("max_completion_tokens") is None and is_chat:
        asked["max_tokens"] = text.max_model_len
    if asked.get("max_tokens") == 0 and read_flag(body, "echo") and not is_chat:
        asked["max_tokens"] = 1  # the engine makes one, which nobody sees
    given = {name: body[name] for name in _HANDLING if body.get(name) is not None}
    handling, _ = split_handling(given)
    for name in _HANDLING:
        asked.pop(name, None)
    values = read_values(asked)
    guide = read_response_format(body)
    if guide is not None and values.guide() is not None:
        raise ContractError(
            "response_format and structured_outputs are given, but one output has one form"
        )
    options = ResponseOptions(
        is_streaming=read_flag(body, "stream"),
        skip_special_tokens=read_flag(body, "skip_special_tokens", True),
    )
    request = build_request(" ", values, options, None, handling)
    sampling = request.sampling
    wanted = read_log_probs(body, is_chat)
    if sampling.beams is None:
        sampling = msgspec.structs.replace(sampling, values=wanted)
    elif wanted is not None:
        is_plain = not wanted.top and wanted.prompt is None and wanted.mode == ""
        if not is_plain:
            raise ContractError("logprobs: a beam search has log probs of its own tokens alone")
        sampling = msgspec.structs.replace(sampling, log_probs=True)
    if guide is not None:
        sampling = msgspec.structs.replace(sampling, guide=guide)
    request = msgspec.structs.replace(request, sampling=sampling)
    check_pairs(request, "openai")
    return request


def encode(
    request: GenerateRequest, prompt: Prompt, body: Mapping[str, Any], text: ModelText
) -> GenerateRequest:
    """Return the request for one prompt, with token ids for the prompt and the words.

    Raises ContractError, for a prompt that does not fit too.
    """
    encoder = text.encoder
    sampling = request.encoded(encoder.end_ids, encoder.bad_words(request.words.bad))
    token_ids = prompt.token_ids
    if token_ids is None:
        assert prompt.text is not None
        field = prompt.field
        token_ids = pack(encoder.encode(prompt.text, prompt.adds_special_tokens, field))
    token_ids = _truncate(token_ids, body, text.max_model_len - 1)
    room = text.max_model_len - len(token_ids)
    if room < 1:
        raise ContractError(
            f"{prompt.field} has {len(token_ids)} tokens; the context of the model has "
            f"{text.max_model_len}, prompt and answer together"
        )
    if sampling.max_tokens > room:
        if sampling.min_tokens > room:
            raise ContractError(
                f"min_tokens is {sampling.min_tokens}, but the context has room for {room} tokens "
                f"after a {prompt.field} of {len(token_ids)}"
            )
        sampling = msgspec.structs.replace(sampling, max_tokens=room)
    return msgspec.structs.replace(request, prompt=token_ids, sampling=sampling, words=Words())


def _truncate(token_ids: TokenIds, body: Mapping[str, Any], room: int) -> TokenIds:
    side = read_text(body, "truncation_side", ("left", "right")) or "left"
    size = read_whole(body, "truncate_prompt_tokens", -1, (1 << 31) - 1)
    if size is None:
        return token_ids
    if size == 0:
        raise ContractError("truncate_prompt_tokens is 0, which leaves no prompt")
    size = room if size == -1 else size
    return token_ids[-size:] if side == "left" else token_ids[:size]


def make_answers(
    request: GenerateRequest,
    prompt: Prompt,
    body: Mapping[str, Any],
    text: ModelText,
    parsers: Sequence[Parser | None],
) -> list[Answering]:
    """Return the answers to one prompt, of the encoded `request`; `parsers`: one for each."""
    wanted = request.sampling.values
    shows_ids = read_flag(body, "return_tokens_as_token_ids")
    skip_special = request.options.skip_special_tokens is not False
    has_own = (wanted is not None and wanted.top is not None) or request.sampling.log_probs
    top = None if wanted is None else wanted.top
    reader = LogProbReader(text.token_texts, top, shows_ids) if has_own else None
    of_prompt = None
    if wanted is not None and wanted.prompt is not None:
        of_prompt = LogProbReader(text.token_texts, wanted.prompt, shows_ids)
    part = PromptPart(request.token_ids, of_prompt, wanted, text.vocab)
    texts = text.token_texts
    answers = [Answering(texts.decoder(skip_special), part, reader, each) for each in parsers]
    is_echo = read_flag(body, "echo")
    if is_echo and prompt.field == "prompt":
        part.is_echoed = True
        is_cut = body.get("truncate_prompt_tokens") is not None
        own = None if is_cut else prompt.text
        part.text = whole_text(text.vocab, part.token_ids, skip_special) if own is None else own
    for answer in answers:
        answer.is_hidden = is_echo and body.get("max_tokens") == 0
    return answers


def read_prompts(body: Mapping[str, Any], text: ModelText, most: int) -> list[Prompt]:
    """Return the prompts of a completion. Raises ContractError."""
    value = body.get("prompt")
    adds = read_flag(body, "add_special_tokens", True)
    if isinstance(value, str):
        return [_text_prompt("prompt", value, adds)]
    if not isinstance(value, list):
        raise ContractError(f"prompt is {clip(value)}, neither a text nor a list")
    if not value:
        raise ContractError("prompt is empty")
    if isinstance(value[0], int):
        return [_ids_prompt("prompt", value, text)]
    if len(value) > most:
        raise ContractError(f"prompt has {len(value)} entries, at most {most} are served")
    prompts = []
    for place, each in enumerate(value):
        field = f"prompt[{place}]"
        if isinstance(each, str):
            prompts.append(_text_prompt(field, each, adds))
        elif isinstance(each, list):
            prompts.append(_ids_prompt(field, each, text))
        else:
            raise ContractError(f"{field} is {clip(each)}, neither a text nor token ids")
    return prompts


def _text_prompt(field: str, value: str, adds_special_tokens: bool) -> Prompt:
    if not value:
        raise ContractError(f"{field} is empty")
    return Prompt(value, None, adds_special_tokens)


def _ids_prompt(field: str, value: list[Any], text: ModelText) -> Prompt:
    if not value:
        raise ContractError(f"{field} is empty")
    text.check_ids(field, value)
    return Prompt(None, pack(value))


def prepare_completion(body: Mapping[str, Any], text: ModelText, most: int) -> Prepared:
    """Return what a completion asks for. Raises ContractError."""
    prompts = read_prompts(body, text, most)
    plain = read_request(body, text, is_chat=False)
    n = plain.sampling.n
    requests, answers = [], []
    for prompt in prompts:
        request = encode(plain, prompt, body, text)
        requests.append(request)
        answers += make_answers(request, prompt, body, text, [None] * n)
    return Prepared(requests, answers, n, plain.options.is_streaming)
