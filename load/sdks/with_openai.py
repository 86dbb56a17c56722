"""Checks of `/v1/responses` with openai's SDK."""

from typing import Any

import openai
from checks import PARAMETERS, PROMPT, Answer, Checks, Target, expect

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": PARAMETERS,
    "strict": True,
}


def checks(target: Target) -> Checks:
    """Return the checks by name."""
    each = _Checks(target)
    found: Checks = {
        "create": each.create,
        "create, streamed, equals create": each.stream_equals_create,
        "responses.stream() folds to the last response": each.fold,
        "async client, streamed": each.run_async,
        "conversation by items": each.turns,
        "text.format json_schema, responses.parse()": each.parse,
        "log probs": each.log_probs,
        "incomplete": each.incomplete,
        "cancel in mid-stream": each.cancel,
        "what Codex sends": each.codex,
        "refusals": each.refusals,
        "sequence numbers, raw": each.raw,
    }
    if target.has_tools:
        found |= {
            "tool_choice required": each.tools,
            "tools, streamed by responses.stream()": each.stream_tools,
            "result of a tool": each.tool_result,
        }
    return found


class _Checks:
    def __init__(self, target: Target) -> None:
        self.target = target
        self.client = openai.OpenAI(base_url=f"{target.url}/v1", api_key=target.key, max_retries=0)
        self.fixed: Any = {
            "model": target.model,
            "temperature": 0,
            "max_output_tokens": 24,
            "store": False,
        }

    def create(self) -> str:
        response = self.client.responses.create(input=PROMPT, **self.fixed)
        assert response.output_text
        assert response.usage is not None
        assert response.usage.total_tokens > response.usage.output_tokens > 0
        return repr(response.output_text[:60])

    def stream_equals_create(self) -> str:
        whole = self.client.responses.create(input=PROMPT, instructions="Be brief.", **self.fixed)
        stream = self.client.responses.create(
            input=PROMPT, instructions="Be brief.", stream=True, **self.fixed
        )
        events = list(stream)
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text
        last: Any = events[-1]
        assert last.response.output_text == whole.output_text
        assert last.response.usage.output_tokens == whole.usage.output_tokens
        return f"{len(events)} events"

    def fold(self) -> None:
        with self.client.responses.stream(input="Say one word.", **self.fixed) as stream:
            texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
            if "max" not in str(self.fixed):
                assert stream.get_final_response().output_text == "".join(texts)

    async def run_async(self) -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{self.target.url}/v1", api_key=self.target.key
        ) as client:
            stream = await client.responses.create(input=PROMPT, stream=True, **self.fixed)
            kinds = [event.type async for event in stream]
        assert kinds[0] == "response.created"
        assert kinds[-1] in ("response.completed", "response.incomplete")

    def turns(self) -> None:
        first = self.client.responses.create(input=PROMPT, **self.fixed)
        history: Any = [{"role": "user", "content": PROMPT}]
        history += [item.to_dict() for item in first.output]
        history.append({"role": "user", "content": [{"type": "input_text", "text": "Again."}]})
        second = self.client.responses.create(input=history, **self.fixed)
        assert second.usage is not None
        assert first.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens

    def parse(self) -> str:
        response = self.client.responses.parse(
            input=PROMPT, text_format=Answer, **{**self.fixed, "max_output_tokens": 100}
        )
        assert isinstance(response.output_parsed, Answer)
        return repr(response.output_parsed)

    def log_probs(self) -> str:
        response = self.client.responses.create(
            input=PROMPT, include=["message.output_text.logprobs"], top_logprobs=2, **self.fixed
        )
        (part,) = [part for item in response.output for part in getattr(item, "content", ())]
        entries: Any = part.logprobs
        assert response.usage is not None
        assert len(entries) == response.usage.output_tokens
        assert all(len(entry.top_logprobs) == 2 for entry in entries)
        stream = self.client.responses.create(
            input=PROMPT,
            include=["message.output_text.logprobs"],
            top_logprobs=2,
            stream=True,
            **self.fixed,
        )
        streamed = [
            entry
            for event in stream
            if event.type == "response.output_text.delta"
            for entry in event.logprobs
        ]
        assert [entry.logprob for entry in streamed] == [entry.logprob for entry in entries]
        return f"{len(entries)} tokens"

    def incomplete(self) -> None:
        fixed = {**self.fixed, "max_output_tokens": 2}
        response = self.client.responses.create(input=PROMPT, **fixed)
        if response.usage is not None and response.usage.output_tokens == 2:
            assert response.status == "incomplete"
            assert response.incomplete_details is not None
            assert response.incomplete_details.reason == "max_output_tokens"

    def cancel(self) -> None:
        stream = self.client.responses.create(
            input=PROMPT, stream=True, **{**self.fixed, "max_output_tokens": 400}
        )
        for event in stream:
            if event.type == "response.output_text.delta":
                break
        stream.close()

    def codex(self) -> str:
        body: Any = {
            "extra_body": {"client_metadata": {"x-codex-installation-id": "0"}},
            "include": ["reasoning.encrypted_content"],
            "input": [{"type": "message", "role": "user", "content": PROMPT}],
            "instructions": "You are a coding agent.",
            "model": self.target.model,
            "parallel_tool_calls": False,
            "prompt_cache_key": "0",
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": False,
            "tool_choice": "auto",
            "tools": [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}],
            "max_output_tokens": 8,
        }
        answer = self.client.responses.with_raw_response.create(**body)
        said = answer.headers["x-slipstream-ignored"]
        assert "tools[0].type=web_search" in said
        return str(said)

    def refusals(self) -> str:
        create = self.client.responses.create
        expect(
            openai.BadRequestError,
            lambda: create(input="x", previous_response_id="resp_1", **self.fixed),
            "previous_response_id",
        )
        image: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
        expect(
            openai.BadRequestError,
            lambda: create(input=image, **self.fixed),
            "input[0].content[0].type",
        )
        bad = {**self.fixed, "max_output_tokens": -1}
        expect(openai.BadRequestError, lambda: create(input="x", **bad), "max_output_tokens")
        unknown = {**self.fixed, "model": "no-such-model"}
        return expect(openai.NotFoundError, lambda: create(input="x", **unknown), "no-such-model")

    def raw(self) -> None:
        with self.client.responses.with_streaming_response.create(
            input=PROMPT, stream=True, **self.fixed
        ) as response:
            text = "".join(response.iter_text())
        assert "[DONE]" not in text
        stream = self.client.responses.create(input=PROMPT, stream=True, **self.fixed)
        numbers = [event.sequence_number for event in stream]
        assert numbers == list(range(len(numbers)))

    def tools(self) -> str:
        response = self.client.responses.create(
            input="What is the weather in Paris?",
            tools=[TOOL],
            tool_choice="required",
            **{**self.fixed, "max_output_tokens": 100},
        )
        calls = [item for item in response.output if item.type == "function_call"]
        assert calls
        assert all(call.call_id and call.name == "get_weather" for call in calls)
        return calls[0].arguments

    def stream_tools(self) -> None:
        with self.client.responses.stream(
            input="What is the weather in Paris?",
            tools=[TOOL],
            tool_choice={"type": "function", "name": "get_weather"},
            **{**self.fixed, "max_output_tokens": 100},
        ) as stream:
            deltas = [
                event.delta
                for event in stream
                if event.type == "response.function_call_arguments.delta"
            ]
            final = stream.get_final_response()
        calls: Any = [item for item in final.output if item.type == "function_call"]
        assert "".join(deltas) == "".join(call.arguments for call in calls)
        assert calls[0].parsed_arguments

    def tool_result(self) -> None:
        history: Any = [
            {"role": "user", "content": "What is the weather in Paris?"},
            {
                "type": "function_call",
                "call_id": "call_1",
                "name": "get_weather",
                "arguments": '{"city": "Paris"}',
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        ]
        response = self.client.responses.create(input=history, tools=[TOOL], **self.fixed)
        assert response.output
