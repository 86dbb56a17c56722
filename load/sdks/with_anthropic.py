"""Checks of `/v1/messages` and `count_tokens` with anthropic's SDK."""

import json
from typing import Any

import anthropic
from checks import PARAMETERS, PROMPT, Answer, Checks, Target, expect

TOOL: Any = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "input_schema": PARAMETERS,
}


def checks(target: Target) -> Checks:
    """Return the checks by name."""
    each = _Checks(target)
    found: Checks = {
        "create": each.create,
        "messages.stream() equals create": each.stream_equals_create,
        "async client, streamed": each.run_async,
        "beta client": each.beta,
        "count_tokens": each.count,
        "stop_sequences": each.stop,
        "output_config.format": each.schema,
        "thinking": each.thinking,
        "what Claude Code sends": each.claude_code,
        "cancel in mid-stream": each.cancel,
        "refusals": each.refusals,
    }
    if target.has_tools:
        found |= {
            "tool_choice any": each.tools,
            "tools, streamed": each.stream_tools,
            "result of a tool": each.tool_result,
        }
    return found


class _Checks:
    def __init__(self, target: Target) -> None:
        self.target = target
        self.client = anthropic.Anthropic(base_url=target.url, api_key=target.key, max_retries=0)
        self.user: Any = [{"role": "user", "content": PROMPT}]
        # The SDK's signature has no sampling parameters any more.
        self.fixed: Any = {
            "model": target.model,
            "max_tokens": 24,
            "extra_body": {"temperature": 0},
        }

    def create(self) -> str:
        message = self.client.messages.create(messages=self.user, **self.fixed)
        text = "".join(block.text for block in message.content if block.type == "text")
        assert text
        assert message.stop_reason in ("end_turn", "max_tokens")
        assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) > 0
        return repr(text[:60])

    def stream_equals_create(self) -> str:
        whole = self.client.messages.create(messages=self.user, system="Be brief.", **self.fixed)
        with self.client.messages.stream(
            messages=self.user, system="Be brief.", **self.fixed
        ) as stream:
            texts = list(stream.text_stream)
            final = stream.get_final_message()
        blocks = [block.to_dict() for block in final.content]
        for block in blocks:
            block.pop("parsed_output", None)
        assert blocks == [block.to_dict() for block in whole.content]
        assert final.stop_reason == whole.stop_reason
        assert final.usage.output_tokens == whole.usage.output_tokens
        return f"{len(texts)} texts"

    async def run_async(self) -> None:
        async with anthropic.AsyncAnthropic(
            base_url=self.target.url, api_key=self.target.key
        ) as client:
            stream = await client.messages.create(messages=self.user, stream=True, **self.fixed)
            kinds = [event.type async for event in stream]
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"

    def beta(self) -> None:
        message = self.client.beta.messages.create(
            messages=self.user, betas=["interleaved-thinking-2025-05-14"], **self.fixed
        )
        assert message.role == "assistant"

    def count(self) -> str:
        counted = self.client.messages.count_tokens(model=self.target.model, messages=self.user)
        message = self.client.messages.create(messages=self.user, **self.fixed)
        usage = message.usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        more = self.client.messages.count_tokens(
            model=self.target.model, messages=self.user, system="Be brief. " * 20
        )
        assert more.input_tokens > counted.input_tokens
        return f"{counted.input_tokens} tokens"

    def stop(self) -> str:
        whole = self.client.messages.create(messages=self.user, **self.fixed)
        text = "".join(block.text for block in whole.content if block.type == "text")
        word = text[len(text) // 2 :][:3]
        cut = self.client.messages.create(messages=self.user, stop_sequences=[word], **self.fixed)
        assert cut.stop_reason == "stop_sequence"
        assert cut.stop_sequence == word
        return repr(word)

    def schema(self) -> str:
        message = self.client.messages.create(
            messages=self.user,
            output_config={"format": {"type": "json_schema", "schema": Answer.model_json_schema()}},
            **{**self.fixed, "max_tokens": 100},
        )
        text = "".join(block.text for block in message.content if block.type == "text")
        return repr(Answer.model_validate(json.loads(text)))

    def thinking(self) -> str:
        message = self.client.messages.create(
            messages=self.user,
            thinking={"type": "enabled", "budget_tokens": 1024},
            **{**self.fixed, "max_tokens": 32},
        )
        return ", ".join(block.type for block in message.content)

    def claude_code(self) -> str:
        ephemeral = {"type": "ephemeral"}
        body: Any = {
            "model": self.target.model,
            "max_tokens": 8,
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=0;"},
                {"type": "text", "text": "You are Claude Code.", "cache_control": ephemeral},
            ],
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": PROMPT, "cache_control": ephemeral}],
                }
            ],
            "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
            "metadata": {"user_id": "0"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "extra_body": {"temperature": 1},
            "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14"],
        }
        answer = self.client.beta.messages.with_raw_response.create(**body)
        return str(answer.headers["x-slipstream-ignored"])

    def cancel(self) -> None:
        with self.client.messages.stream(
            messages=self.user, **{**self.fixed, "max_tokens": 400}
        ) as stream:
            for _ in stream.text_stream:
                break

    def refusals(self) -> str:
        create = self.client.messages.create
        image: Any = [
            {
                "role": "user",
                "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}],
            }
        ]
        expect(
            anthropic.BadRequestError,
            lambda: create(messages=image, **self.fixed),
            "messages[0].content[0].type",
        )
        none = {**self.fixed, "max_tokens": 0}
        expect(anthropic.BadRequestError, lambda: create(messages=self.user, **none), "max_tokens")
        long: Any = [{"role": "user", "content": "sea " * 400_000}]
        expect(
            anthropic.BadRequestError,
            lambda: create(messages=long, **self.fixed),
            "prompt is too long",
        )
        unknown = {**self.fixed, "model": "no-such-model"}
        return expect(
            anthropic.NotFoundError,
            lambda: create(messages=self.user, **unknown),
            "not_found_error",
        )

    def tools(self) -> str:
        message = self.client.messages.create(
            messages=[{"role": "user", "content": "What is the weather in Paris?"}],
            tools=[TOOL],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            **{**self.fixed, "max_tokens": 300},
        )
        assert message.stop_reason == "tool_use"
        uses = [block for block in message.content if block.type == "tool_use"]
        assert uses[0].name == "get_weather"
        return json.dumps(uses[0].input)

    def stream_tools(self) -> None:
        asked: Any = {
            "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
            "tools": [TOOL],
            "tool_choice": {"type": "tool", "name": "get_weather"},
            **self.fixed,
            "max_tokens": 100,
        }
        whole = self.client.messages.create(**asked)
        with self.client.messages.stream(**asked) as stream:
            final = stream.get_final_message()
        inputs = [block.input for block in final.content if block.type == "tool_use"]
        assert inputs == [block.input for block in whole.content if block.type == "tool_use"]
        assert inputs

    def tool_result(self) -> None:
        use = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}}
        result = {
            "type": "tool_result",
            "tool_use_id": "t1",
            "is_error": True,
            "content": [{"type": "text", "text": "no network"}],
        }
        messages: Any = [
            {"role": "user", "content": "What is the weather in Paris?"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        message = self.client.messages.create(messages=messages, tools=[TOOL], **self.fixed)
        assert message.role == "assistant"
