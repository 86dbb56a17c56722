"""Checks of langchain-openai, chat model and completion model, against a server."""

from typing import Any

from checks import CALL, CALLS, CODE, PROMPT, THINK, Answer, Checks, Target, check_call, expect
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


def checks(target: Target) -> Checks:
    """Return the checks by name."""
    each = _Checks(target)
    found: Checks = {
        "invoke": each.invoke,
        "ainvoke, astream": each.run_async,
        "stream equals invoke": each.stream,
        "usage_metadata, streamed and not": each.usage,
        "batch": each.batch,
        "chain of a prompt template": each.chain,
        "log probs": each.log_probs,
        "with_structured_output, json_schema": each.structured,
        "bind_tools": each.calls,
        "bind_tools, streamed": each.stream_calls,
        "result of a tool": each.tool_result,
        "reasoning is no text": each.reasoning,
        "stop, seed, extra_body": each.sampling,
        "completion model, streamed and not": each.completions,
        "embeddings refused": each.embeddings,
        "errors": each.errors,
    }
    if target.has_tools:
        found |= {"tool_choice any and named": each.forced}
    return found


class _Checks:
    def __init__(self, target: Target) -> None:
        self.target = target

    def _chat(self, **options: Any) -> ChatOpenAI:
        target = self.target
        kept: Any = {
            "base_url": target.base,
            "temperature": 0,
            "max_completion_tokens": 24,
            "max_retries": 0,
            **options,
        }
        return ChatOpenAI(api_key=target.key, model=target.model, **kept)

    def invoke(self) -> str:
        answer = self._chat().invoke(PROMPT)
        assert answer.content
        assert answer.response_metadata["finish_reason"] in ("stop", "length")
        assert answer.response_metadata["model_name"] == self.target.model
        return repr(answer.content[:40])

    async def run_async(self) -> None:
        chat = self._chat()
        whole = await chat.ainvoke(PROMPT)
        text = "".join([str(chunk.content) async for chunk in chat.astream(PROMPT)])
        assert text == whole.content

    def stream(self) -> None:
        chat = self._chat()
        text = "".join(str(chunk.content) for chunk in chat.stream(PROMPT))
        assert text == chat.invoke(PROMPT).content

    def usage(self) -> None:
        chat = self._chat(stream_usage=True)
        whole: Any = chat.invoke(PROMPT).usage_metadata
        assert whole["total_tokens"] == whole["input_tokens"] + whole["output_tokens"]
        folded = self._fold(chat)
        assert folded.usage_metadata is not None
        assert folded.usage_metadata["output_tokens"] == whole["output_tokens"]
        assert folded.usage_metadata["input_tokens"] == whole["input_tokens"]

    def _fold(self, chat: Any) -> AIMessageChunk:
        chunks = list(chat.stream(PROMPT))
        folded = chunks[0]
        for chunk in chunks[1:]:
            folded += chunk
        return folded

    def batch(self) -> None:
        prompts = [PROMPT, "Say a word.", "import os"]
        chat = self._chat()
        found = [each.content for each in chat.batch(prompts)]
        assert found == [chat.invoke(prompt).content for prompt in prompts]

    def chain(self) -> None:
        template = ChatPromptTemplate.from_messages([("system", "Be {how}."), ("user", "{what}")])
        chain = template | self._chat()
        assert chain.invoke({"how": "brief", "what": PROMPT}).content

    def log_probs(self) -> None:
        answer = self._chat(logprobs=True, top_logprobs=2).invoke(PROMPT)
        entries = answer.response_metadata["logprobs"]["content"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)

    def structured(self) -> str:
        chat = self._chat(max_completion_tokens=100)
        made = chat.with_structured_output(Answer, method="json_schema").invoke(PROMPT)
        assert isinstance(made, Answer)
        return repr(made)

    def calls(self) -> str:
        chat = self._chat(max_completion_tokens=200, extra_body=CALLS).bind_tools([get_weather])
        answer: Any = chat.invoke(PROMPT)
        assert answer.response_metadata["finish_reason"] == "tool_calls"
        assert len(answer.tool_calls) == 2
        assert not answer.invalid_tool_calls
        for call in answer.tool_calls:
            check_call(call["name"], call["args"])
        return str(answer.tool_calls[0]["args"])

    def stream_calls(self) -> None:
        chat = self._chat(max_completion_tokens=200, extra_body=CALLS).bind_tools([get_weather])
        whole: Any = chat.invoke(PROMPT)
        folded = self._fold(chat)
        found = [(call["name"], call["args"]) for call in folded.tool_calls]
        assert found == [(call["name"], call["args"]) for call in whole.tool_calls]
        assert folded.content == whole.content

    def tool_result(self) -> None:
        asking = self._chat(max_completion_tokens=200, extra_body=CALL).bind_tools([get_weather])
        first: Any = asking.invoke(PROMPT)
        (call,) = first.tool_calls
        result: ToolMessage = get_weather.invoke(call)
        last = self._chat().bind_tools([get_weather]).invoke([HumanMessage(PROMPT), first, result])
        assert last.content

    def reasoning(self) -> None:
        answer: Any = self._chat(max_completion_tokens=100, extra_body=THINK).invoke(PROMPT)
        assert answer.content
        assert "think" not in answer.content
        details = answer.response_metadata["token_usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] > 0

    def sampling(self) -> None:
        extras = {"top_k": 20, "min_p": 0.01}
        chat = self._chat(temperature=1, seed=3, extra_body=extras)
        texts = {str(chat.invoke(PROMPT).content) for _ in "ab"}
        (text,) = texts
        word = text[len(text) // 2 :][:4]
        assert chat.invoke(PROMPT, stop=[word]).content == text[: text.index(word)]

    def completions(self) -> None:
        target = self.target
        fixed: Any = {"temperature": 0, "max_tokens": 24, "max_retries": 0}
        model = OpenAI(base_url=target.base, api_key=target.key, model=target.model, **fixed)
        whole = model.invoke(CODE)
        assert whole
        assert "".join(model.stream(CODE)) == whole
        made = model.generate([CODE, "class A:\n"])
        assert made.generations[0][0].text == whole

    def embeddings(self) -> str:
        target = self.target
        made: Any = OpenAIEmbeddings(
            base_url=target.base,
            api_key=target.key,
            model=target.model,
            check_embedding_ctx_length=False,
            max_retries=0,
        )
        return expect(Exception, lambda: made.embed_query("x"), "embeddings need a pooling model")

    def errors(self) -> str:
        return expect(
            Exception, lambda: self._chat(top_p=2.0).invoke(PROMPT), "top_p is 2"
        ) + expect(Exception, lambda: list(self._chat(top_p=2.0).stream(PROMPT)), "top_p is 2")

    def forced(self) -> None:
        for choice in ("any", "get_weather"):
            chat = self._chat(max_completion_tokens=300, base_url=self.target.plain_base)
            bound = chat.bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
            answer: Any = bound.invoke(PROMPT)
            check_call(answer.tool_calls[0]["name"], answer.tool_calls[0]["args"])
