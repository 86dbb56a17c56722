"""Checks of chat completions and completions with openai's SDK, and of what else it offers here."""

import asyncio
import contextlib
import threading
from typing import Any

import openai
from checks import (
    CALL,
    CALLS,
    CODE,
    PARAMETERS,
    PROMPT,
    THINK,
    Answer,
    Checks,
    Target,
    check_call,
    expect,
    raised,
)

USER: Any = [{"role": "user", "content": PROMPT}]
FUNCTION = {"name": "get_weather", "description": "Get the weather", "parameters": PARAMETERS}
TOOL: Any = {"type": "function", "function": FUNCTION}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
STREAMS = 24  # more than run and wait at once
FLOOD_TOKENS = 40


def checks(target: Target) -> Checks:
    """Return the checks by name."""
    chat, rest, limits = _Chat(target), _Rest(target), _Limits(target)
    found: Checks = {
        "chat": chat.create,
        "chat, async client": chat.run_async,
        "chat, streamed, equals chat": chat.stream_equals_create,
        "usage chunk": chat.usage,
        "n": chat.n,
        "log probs, streamed and not": chat.log_probs,
        "chat.completions.parse(), json_schema": chat.parse,
        "chat.completions.stream() with a form": chat.stream_form,
        "calls of tools": chat.calls,
        "calls of tools, streamed, folded by stream()": chat.stream_calls,
        "result of a tool": chat.tool_result,
        "reasoning fields": chat.reasoning,
        "seed, stop, logit_bias": chat.sampling,
        "extra_body": chat.extras,
        "completions, streamed and not": rest.completions,
        "completions, prompts and token ids": rest.prompts,
        "completions, echo and log probs": rest.echo,
        "models": rest.models,
        "embeddings refused": rest.embeddings,
        "errors": rest.errors,
        "wrong key": rest.key,
        "429 without retries": limits.refused,
        "429, retried": limits.retried,
        "timeout": limits.timeout,
        "cancel in mid-stream": limits.cancel,
        "async cancel of an answer that is not streamed": limits.cancel_async,
    }
    if target.has_tools:
        found |= {"tool_choice required and named": chat.forced}
    return found


class _Base:
    def __init__(self, target: Target) -> None:
        self.target = target
        self.client = openai.OpenAI(base_url=target.base, api_key=target.key, max_retries=0)
        self.fixed: Any = {"model": target.model, "temperature": 0, "max_tokens": 24}
        self.create_chat: Any = self.client.chat.completions.create


class _Chat(_Base):
    def create(self) -> str:
        chat = self.create_chat(messages=USER, **self.fixed)
        (choice,) = chat.choices
        assert choice.message.content
        assert choice.finish_reason in ("stop", "length")
        assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
        assert chat.model == self.target.model
        return repr(choice.message.content[:40])

    async def run_async(self) -> None:
        async with openai.AsyncOpenAI(base_url=self.target.base, api_key=self.target.key) as client:
            create: Any = client.chat.completions.create
            whole = await create(messages=USER, **self.fixed)
            stream = await create(messages=USER, stream=True, **self.fixed)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == whole.choices[0].message.content

    def stream_equals_create(self) -> str:
        whole = self.create_chat(messages=USER, **self.fixed)
        chunks = list(self.create_chat(messages=USER, stream=True, **self.fixed))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
        assert chunks[0].choices[0].delta.role == "assistant"
        finishes = [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason]
        assert finishes == [whole.choices[0].finish_reason]
        assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
        return f"{len(chunks)} chunks"

    def usage(self) -> None:
        options = {"include_usage": True}
        chunks = list(
            self.create_chat(messages=USER, stream=True, stream_options=options, **self.fixed)
        )
        assert chunks[-1].choices == []
        assert chunks[-1].usage == self.create_chat(messages=USER, **self.fixed).usage.copy(
            update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
        )
        assert all(chunk.usage is None for chunk in chunks[:-1])
        unasked = list(self.create_chat(messages=USER, stream=True, **self.fixed))
        assert all(chunk.choices and chunk.usage is None for chunk in unasked)

    def n(self) -> None:
        options: Any = {**self.fixed, "temperature": 1, "seed": 5, "n": 3}
        whole = self.create_chat(messages=USER, **options)
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        texts = ["", "", ""]
        for chunk in self.create_chat(messages=USER, stream=True, **options):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [choice.message.content for choice in whole.choices]
        assert len(set(texts)) > 1

    def log_probs(self) -> None:
        options: Any = {**self.fixed, "logprobs": True, "top_logprobs": 3}
        whole = self.create_chat(messages=USER, **options)
        entries = whole.choices[0].logprobs.content
        assert len(entries) == whole.usage.completion_tokens
        assert all(len(e.top_logprobs) == 3 and e.logprob <= 0 for e in entries)
        joined = b"".join(bytes(e.bytes) for e in entries).decode(errors="replace")
        assert joined == whole.choices[0].message.content
        streamed = []
        for chunk in self.create_chat(messages=USER, stream=True, **options):
            of_chunk = chunk.choices[0].logprobs
            streamed += of_chunk.content if of_chunk else []
        assert [e.token for e in streamed] == [e.token for e in entries]
        assert all(
            abs(a.logprob - b.logprob) < 1e-3 for a, b in zip(streamed, entries, strict=True)
        )

    def parse(self) -> str:
        options = {**self.fixed, "max_tokens": 100}
        chat = self.client.chat.completions.parse(messages=USER, response_format=Answer, **options)
        parsed = chat.choices[0].message.parsed
        assert isinstance(parsed, Answer)
        return repr(parsed)

    def stream_form(self) -> None:
        options = {**self.fixed, "max_tokens": 100}
        with self.client.chat.completions.stream(
            messages=USER, response_format=Answer, **options
        ) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert {"chunk", "content.delta", "content.done"} <= kinds, kinds
        assert isinstance(final.choices[0].message.parsed, Answer)

    def calls(self) -> str:
        options: Any = {**self.fixed, "max_tokens": 200, "tools": [TOOL]}
        chat = self.create_chat(messages=USER, extra_body=CALLS, **options)
        message = chat.choices[0].message
        assert chat.choices[0].finish_reason == "tool_calls"
        assert len(message.tool_calls) == 2
        assert message.content
        for call in message.tool_calls:
            check_call(call.function.name, call.function.arguments)
        assert len({call.id for call in message.tool_calls}) == 2
        plain = self.create_chat(messages=USER, **self.fixed).choices[0].message
        assert plain.tool_calls is None
        return message.tool_calls[0].function.arguments

    def stream_calls(self) -> None:
        options: Any = {**self.fixed, "max_tokens": 200, "tools": [TOOL]}
        whole = self.create_chat(messages=USER, extra_body=CALLS, **options)
        wanted = [call.function for call in whole.choices[0].message.tool_calls]
        with self.client.chat.completions.stream(
            messages=USER, extra_body=CALLS, **options
        ) as stream:
            kinds = {event.type for event in stream}
            final: Any = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.done" in kinds, kinds
        assert final.finish_reason == "tool_calls"
        found = [call.function for call in final.message.tool_calls]
        assert [(f.name, f.arguments) for f in found] == [(f.name, f.arguments) for f in wanted]
        assert final.message.content == whole.choices[0].message.content
        firsts = []
        for chunk in self.create_chat(messages=USER, stream=True, extra_body=CALLS, **options):
            firsts += [c for c in chunk.choices[0].delta.tool_calls or [] if c.id or c.type]
        assert [(c.index, c.type, c.function.name) for c in firsts] == [
            (0, "function", "get_weather"),
            (1, "function", "get_weather"),
        ]

    def tool_result(self) -> None:
        first = self.create_chat(
            messages=USER, tools=[TOOL], extra_body=CALL, **{**self.fixed, "max_tokens": 200}
        )
        message = first.choices[0].message
        result = {
            "role": "tool",
            "tool_call_id": message.tool_calls[0].id,
            "content": [{"type": "text", "text": "sunny"}],
        }
        second = self.create_chat(messages=[*USER, message, result], tools=[TOOL], **self.fixed)
        assert second.usage.prompt_tokens > first.usage.prompt_tokens
        assert second.choices[0].message.content

    def reasoning(self) -> str:
        options: Any = {**self.fixed, "max_tokens": 100, "extra_body": THINK}
        whole = self.create_chat(messages=USER, **options)
        message = whole.choices[0].message
        assert message.reasoning == message.reasoning_content
        assert message.reasoning
        assert "think" not in message.content
        texts = {"reasoning": "", "reasoning_content": "", "content": ""}
        for chunk in self.create_chat(messages=USER, stream=True, **options):
            for name in texts:
                texts[name] += getattr(chunk.choices[0].delta, name, None) or ""
        assert texts == {name: getattr(message, name) for name in texts}
        assert whole.usage.completion_tokens_details.reasoning_tokens > 0
        return repr(message.reasoning)

    def sampling(self) -> None:
        free: Any = {**self.fixed, "temperature": 1, "top_p": 0.9, "seed": 11}
        texts = {self.create_chat(messages=USER, **free).choices[0].message.content for _ in "ab"}
        assert len(texts) == 1
        (text,) = texts
        word = text[len(text) // 2 :][:4]
        cut = self.create_chat(messages=USER, stop=[word], **free).choices[0]
        assert cut.finish_reason == "stop"
        assert cut.message.content == text[: text.index(word)]
        biased = self.create_chat(
            messages=USER,
            logit_bias={"42": 100},
            extra_body={"return_token_ids": True},
            **{**self.fixed, "max_tokens": 3},
        )
        assert biased.choices[0].token_ids == [42, 42, 42]

    def extras(self) -> str:
        extras = {
            "min_p": 0.05,
            "top_k": 20,
            "repetition_penalty": 1.1,
            "stop_token_ids": [7],
            "cache_salt": "a",
            "priority": 3,
            "min_tokens": 2,
            "chat_template_kwargs": {"enable_thinking": False},
            "none_such": 1,
        }
        raw = self.client.chat.completions.with_raw_response.create(
            messages=USER, extra_body=extras, user="u", metadata={"a": "b"}, **self.fixed
        )
        chat: Any = raw.parse()
        assert chat.choices[0].message.content
        ignored = raw.headers["x-slipstream-ignored"]
        assert "none_such" in ignored
        assert "top_k" not in ignored
        longer = self.create_chat(
            messages=USER,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
            **self.fixed,
        )
        plain = self.create_chat(messages=USER, **self.fixed)
        assert longer.usage.prompt_tokens > plain.usage.prompt_tokens
        return ignored

    def forced(self) -> None:
        client = self.client.with_options(base_url=self.target.plain_base)
        create: Any = client.chat.completions.create
        options: Any = {**self.fixed, "max_tokens": 300, "tools": [TOOL]}
        options["parallel_tool_calls"] = False
        for choice, finish in (("required", "tool_calls"), (NAMED, "stop")):
            answer = create(messages=USER, tool_choice=choice, **options).choices[0]
            call = answer.message.tool_calls[0].function
            check_call(call.name, call.arguments)
            assert answer.finish_reason == finish


class _Rest(_Base):
    def completions(self) -> str:
        whole = self.client.completions.create(prompt=CODE, **self.fixed)
        stream = self.client.completions.create(
            prompt=CODE, stream=True, stream_options={"include_usage": True}, **self.fixed
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].text
        assert chunks[-1].usage is not None
        return repr(text[:40])

    def prompts(self) -> None:
        prompts = [CODE, "class A:\n"]
        both = self.client.completions.create(prompt=prompts, n=2, **self.fixed)
        assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
        each = [self.client.completions.create(prompt=p, **self.fixed) for p in prompts]
        wanted = [one.choices[0].text for one in each for _ in "ab"]
        assert [choice.text for choice in both.choices] == wanted
        tokens: Any = self.client.post(
            f"{self.target.url}/tokenize",
            cast_to=object,
            body={"prompt": CODE, "model": self.target.model},
        )
        by_ids = self.client.completions.create(prompt=[tokens["tokens"]], **self.fixed)
        assert by_ids.choices[0].text == wanted[0]

    def echo(self) -> None:
        options = {**self.fixed, "max_tokens": 1}
        answer = self.client.completions.create(prompt=CODE, echo=True, logprobs=1, **options)
        (choice,) = answer.choices
        assert choice.text.startswith(CODE)
        found: Any = choice.logprobs
        assert found.token_logprobs[0] is None
        assert all(value <= 0 for value in found.token_logprobs[1:])
        assert answer.usage is not None
        assert len(found.tokens) == answer.usage.total_tokens
        assert "".join(found.tokens) == choice.text
        assert found.text_offset[0] == 0

    def models(self) -> str:
        names = [model.id for model in self.client.models.list()]
        assert self.target.model in names
        assert self.client.models.retrieve(self.target.model).id == self.target.model
        expect(openai.NotFoundError, lambda: self.client.models.retrieve("none"), "none")
        return ", ".join(names)

    def embeddings(self) -> str:
        create = self.client.embeddings.create
        return expect(
            openai.BadRequestError,
            lambda: create(model=self.target.model, input="x"),
            "embeddings need a pooling model",
        )

    def errors(self) -> str:
        for field, value, status in (
            ("temperature", -1, openai.BadRequestError),
            ("top_logprobs", 99, openai.BadRequestError),
            ("stop", [1], openai.BadRequestError),
            ("n", 0, openai.BadRequestError),
            ("response_format", {"type": "json_schema"}, openai.BadRequestError),
            ("model", "none-such", openai.NotFoundError),
        ):
            for is_stream in (False, True):
                options: Any = {**self.fixed, field: value, "stream": is_stream}
                error: Any = raised(status, lambda o=options: self.create_chat(messages=USER, **o))
                assert error.param == field, (field, error.param)
                assert isinstance(error.body, dict)
                assert error.type == "invalid_request_error"
        long: Any = [{"role": "user", "content": "x " * 9000}]
        error = raised(
            openai.BadRequestError, lambda: self.create_chat(messages=long, **self.fixed)
        )
        assert error.code == "context_length_exceeded"
        return str(error.message)

    def key(self) -> None:
        wrong = openai.OpenAI(base_url=self.target.base, api_key="wrong", max_retries=0)
        expect(openai.AuthenticationError, wrong.models.list, "key")


class _Limits(_Base):
    def _flood(self, max_retries: int) -> tuple[int, list[openai.APIStatusError]]:
        """Return how many of many answers came, and the errors of the others."""
        client = self.client.with_options(max_retries=max_retries)
        errors: list[openai.APIStatusError] = []
        served = []

        def one() -> None:
            try:
                options = {**self.fixed, "max_tokens": FLOOD_TOKENS}
                chat: Any = client.chat.completions.create(
                    messages=USER, extra_body={"ignore_eos": True}, **options
                )
                served.append(chat.usage.completion_tokens)
            except openai.APIStatusError as error:
                errors.append(error)

        threads = [threading.Thread(target=one) for _ in range(STREAMS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(served) <= {FLOOD_TOKENS}, served
        return len(served), errors

    def refused(self) -> str:
        served, errors = self._flood(0)
        assert errors, "the queue took all requests"
        for error in errors:
            assert isinstance(error, openai.RateLimitError), error
            assert error.code == "rate_limit_exceeded"
            assert float(error.response.headers["retry-after-ms"]) > 0
        self.target.wait_idle()
        return f"{served} served, {len(errors)} refused"

    def retried(self) -> str:
        served, errors = self._flood(30)
        assert not errors, errors[0]
        assert served == STREAMS
        return f"{served} served"

    def timeout(self) -> None:
        client = self.client.with_options(timeout=0.5)
        options: Any = {**self.fixed, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
        expect(
            openai.APITimeoutError,
            lambda: client.chat.completions.create(messages=USER, **options),
            "timed out",
        )
        self.target.wait_idle()

    def cancel(self) -> None:
        options: Any = {**self.fixed, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
        with self.create_chat(messages=USER, stream=True, **options) as stream:
            for _, _chunk in zip(range(4), stream, strict=False):
                pass
        self.target.wait_idle()

    async def cancel_async(self) -> None:
        options: Any = {**self.fixed, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
        async with openai.AsyncOpenAI(base_url=self.target.base, api_key=self.target.key) as client:
            create: Any = client.chat.completions.create
            task = asyncio.create_task(create(messages=USER, **options))
            await asyncio.sleep(0.4)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await asyncio.to_thread(self.target.wait_idle)
