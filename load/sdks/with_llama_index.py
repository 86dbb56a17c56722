"""Checks of llama_index's OpenAILike against a server."""

from typing import Any

from checks import CODE, PROMPT, THINK, Checks, Target, check_call, expect
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


def checks(target: Target) -> Checks:
    """Return the checks by name."""
    each = _Checks(target)
    return {
        "chat": each.chat,
        "stream_chat equals chat": each.stream,
        "achat, astream_chat": each.run_async,
        "complete, stream_complete": each.complete,
        "complete by a chat model": each.complete_by_chat,
        "log probs": each.log_probs,
        "chat_with_tools": each.calls,
        "stream_chat_with_tools": each.stream_calls,
        "reasoning is no text": each.reasoning,
        "additional_kwargs, stop": each.sampling,
        "errors": each.errors,
    }


class _Checks:
    def __init__(self, target: Target) -> None:
        self.target = target
        self.messages = [ChatMessage(role="user", content=PROMPT)]
        self.tool = FunctionTool.from_defaults(get_weather)

    def _model(self, is_chat: bool = True, **options: Any) -> OpenAILike:
        kept: Any = {
            "api_base": self.target.base,
            "temperature": 0,
            "max_tokens": 24,
            "max_retries": 0,
            **options,
        }
        return OpenAILike(
            model=self.target.model,
            api_key=self.target.key,
            is_chat_model=is_chat,
            is_function_calling_model=True,
            context_window=2048,
            **kept,
        )

    def _forced(self, **extra: Any) -> OpenAILike:
        return self._model(max_tokens=200, additional_kwargs={"extra_body": extra})

    def chat(self) -> str:
        answer = self._model().chat(self.messages)
        assert answer.message.content
        assert answer.raw is not None
        return repr(answer.message.content[:40])

    def stream(self) -> None:
        model = self._model()
        parts = list(model.stream_chat(self.messages))
        whole = model.chat(self.messages).message.content
        assert "".join(part.delta or "" for part in parts) == whole
        assert parts[-1].message.content == whole

    async def run_async(self) -> None:
        model = self._model()
        whole = await model.achat(self.messages)
        stream = await model.astream_chat(self.messages)
        text = "".join([part.delta or "" async for part in stream])
        assert text == whole.message.content

    def complete(self) -> None:
        model = self._model(is_chat=False)
        whole = model.complete(CODE).text
        assert whole
        assert "".join(part.delta or "" for part in model.stream_complete(CODE)) == whole

    def complete_by_chat(self) -> None:
        assert self._model().complete(PROMPT).text

    def log_probs(self) -> None:
        answer = self._model(logprobs=True, top_logprobs=2).chat(self.messages)
        assert answer.logprobs
        assert all(len(tops) == 2 for tops in answer.logprobs)

    def calls(self) -> str:
        model = self._model(strict=True, max_tokens=300, api_base=self.target.plain_base)
        answer = model.chat_with_tools([self.tool], user_msg=PROMPT, tool_required=True)
        (call,) = model.get_tool_calls_from_response(answer)
        check_call(call.tool_name, call.tool_kwargs)
        return str(call.tool_kwargs)

    def stream_calls(self) -> None:
        model = self._model(strict=True, max_tokens=300, api_base=self.target.plain_base)
        *_, last = model.stream_chat_with_tools([self.tool], user_msg=PROMPT, tool_required=True)
        (call,) = model.get_tool_calls_from_response(last)
        check_call(call.tool_name, call.tool_kwargs)

    def reasoning(self) -> None:
        answer = self._forced(**THINK).chat(self.messages)
        assert answer.message.content
        assert "think" not in answer.message.content

    def sampling(self) -> None:
        model = self._model(additional_kwargs={"seed": 3, "extra_body": {"top_k": 5}})
        text = model.chat(self.messages).message.content
        assert text
        word = text[len(text) // 2 :][:4]
        cut = model.chat(self.messages, stop=[word]).message.content
        assert cut == text[: text.index(word)]

    def errors(self) -> str:
        model = self._model(additional_kwargs={"top_p": 2})
        return expect(Exception, lambda: model.chat(self.messages), "top_p is 2")
