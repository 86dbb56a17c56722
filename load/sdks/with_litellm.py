"""Checks of LiteLLM against a server: its provider of OpenAI-compatible servers."""

from typing import Any

import litellm
from checks import CALLS, CODE, PROMPT, THINK, Answer, Checks, Target, check_call, expect

USER = [{"role": "user", "content": PROMPT}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}


def checks(target: Target) -> Checks:
    """Return the checks by name."""
    each = _Checks(target)
    found: Checks = {
        "completion": each.completion,
        "acompletion, streamed": each.run_async,
        "stream equals completion": each.stream,
        "stream_chunk_builder, usage": each.build,
        "n, log probs": each.n,
        "response_format of a pydantic model": each.form,
        "tools": each.calls,
        "tools, streamed": each.stream_calls,
        "reasoning_content, streamed and not": each.reasoning,
        "text_completion": each.text,
        "extra_body, drop_params": each.extras,
        "embedding refused": each.embedding,
        "exceptions": each.errors,
        "Router": each.router,
    }
    if target.has_tools:
        found |= {"tool_choice required": each.forced}
    return found


class _Checks:
    def __init__(self, target: Target) -> None:
        self.target = target
        self.at: Any = {"api_base": target.base, "api_key": target.key, "max_retries": 0}
        self.fixed: Any = {
            **self.at,
            "model": f"openai/{target.model}",
            "temperature": 0,
            "max_tokens": 24,
        }
        self.call: Any = litellm.completion

    def completion(self) -> str:
        answer = self.call(messages=USER, **self.fixed)
        assert answer.choices[0].message.content
        assert answer.choices[0].finish_reason in ("stop", "length")
        assert answer.usage.completion_tokens <= 24
        return repr(answer.choices[0].message.content[:40])

    async def run_async(self) -> None:
        whole: Any = await litellm.acompletion(messages=USER, **self.fixed)
        stream: Any = await litellm.acompletion(messages=USER, stream=True, **self.fixed)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == whole.choices[0].message.content

    def _chunks(self, **options: Any) -> list[Any]:
        return list(self.call(messages=USER, stream=True, **{**self.fixed, **options}))

    def stream(self) -> None:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in self._chunks())
        assert text == self.call(messages=USER, **self.fixed).choices[0].message.content

    def build(self) -> None:
        chunks = self._chunks(stream_options={"include_usage": True})
        built: Any = litellm.stream_chunk_builder(chunks, messages=USER)
        whole = self.call(messages=USER, **self.fixed)
        assert built.choices[0].message.content == whole.choices[0].message.content
        assert built.choices[0].finish_reason == whole.choices[0].finish_reason
        assert built.usage.completion_tokens == whole.usage.completion_tokens
        assert built.usage.prompt_tokens == whole.usage.prompt_tokens

    def n(self) -> None:
        options = {**self.fixed, "n": 2, "logprobs": True, "top_logprobs": 2}
        answer = self.call(messages=USER, **options)
        assert len(answer.choices) == 2
        assert len(answer.choices[1].logprobs.content[0].top_logprobs) == 2

    def form(self) -> str:
        options = {**self.fixed, "max_tokens": 100, "response_format": Answer}
        text = self.call(messages=USER, **options).choices[0].message.content
        return repr(Answer.model_validate_json(text))

    def calls(self) -> str:
        options = {**self.fixed, "max_tokens": 200, "tools": [TOOL], "extra_body": CALLS}
        choice = self.call(messages=USER, **options).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert len(choice.message.tool_calls) == 2
        for call in choice.message.tool_calls:
            check_call(call.function.name, call.function.arguments)
        return str(choice.message.tool_calls[0].function.arguments)

    def stream_calls(self) -> None:
        options = {"max_tokens": 200, "tools": [TOOL], "extra_body": CALLS}
        whole = self.call(messages=USER, **{**self.fixed, **options}).choices[0].message
        built: Any = litellm.stream_chunk_builder(self._chunks(**options), messages=USER)
        found = built.choices[0].message
        assert found.content == whole.content
        assert [call.function.arguments for call in found.tool_calls] == [
            call.function.arguments for call in whole.tool_calls
        ]
        assert built.choices[0].finish_reason == "tool_calls"

    def reasoning(self) -> str:
        options = {**self.fixed, "max_tokens": 100, "extra_body": THINK}
        message = self.call(messages=USER, **options).choices[0].message
        assert message.reasoning_content
        assert message.content
        chunks = self._chunks(max_tokens=100, extra_body=THINK)
        deltas = [chunk.choices[0].delta for chunk in chunks]
        text = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        assert text == message.reasoning_content
        return repr(text)

    def text(self) -> None:
        fixed = {**self.fixed, "model": f"text-completion-openai/{self.target.model}"}
        call: Any = litellm.text_completion
        whole = call(prompt=CODE, **fixed).choices[0].text
        assert whole
        chunks = call(prompt=CODE, stream=True, **fixed)
        assert "".join(chunk.choices[0].text or "" for chunk in chunks) == whole

    def extras(self) -> None:
        extras = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
        options = {**self.fixed, "seed": 3, "stop": ["zzz"], "user": "u", "extra_body": extras}
        assert self.call(messages=USER, drop_params=True, **options).choices[0].message.content

    def embedding(self) -> str:
        call: Any = litellm.embedding
        model = f"openai/{self.target.model}"
        return expect(
            litellm.BadRequestError,
            lambda: call(model=model, input=["x"], **self.at),
            "embeddings need a pooling model",
        )

    def errors(self) -> str:
        for is_stream in (False, True):
            options = {**self.fixed, "top_p": 2, "stream": is_stream}
            said = expect(
                litellm.BadRequestError, lambda o=options: self.call(messages=USER, **o), "top_p"
            )
        options = {**self.fixed, "model": "openai/none-such"}
        expect(litellm.NotFoundError, lambda: self.call(messages=USER, **options), "none-such")
        wrong = {**self.fixed, "api_key": "wrong"}
        expect(litellm.AuthenticationError, lambda: self.call(messages=USER, **wrong), "key")
        long = [{"role": "user", "content": "x " * 9000}]
        expect(
            litellm.ContextWindowExceededError,
            lambda: self.call(messages=long, **self.fixed),
            "context",
        )
        return said

    def router(self) -> None:
        one = {"model_name": "m", "litellm_params": self.fixed}
        answer: Any = litellm.Router([one]).completion(model="m", messages=USER)  # type: ignore[list-item]
        assert answer.choices[0].message.content

    def forced(self) -> None:
        options = {**self.fixed, "max_tokens": 300, "tools": [TOOL], "tool_choice": "required"}
        options |= {"api_base": self.target.plain_base, "parallel_tool_calls": False}
        call = self.call(messages=USER, **options).choices[0].message.tool_calls[0]
        check_call(call.function.name, call.function.arguments)
