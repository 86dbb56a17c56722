"""Checks of LiteLLM's provider `triton` against Triton's own HTTP endpoint."""

from typing import Any

import litellm
from checks import CODE, Checks, Target, expect

USER = [{"role": "user", "content": CODE}]
MODELS = ("ensemble", "tensorrt_llm_bls")


def checks(target: Target) -> Checks:
    """Return the checks by name."""
    found: Checks = {}
    for model in MODELS:
        each = _Checks(target, model)
        found |= {
            f"{model}: generate": each.generate,
            f"{model}: generate, async": each.run_async,
            f"{model}: generate_stream": each.stream,
            f"{model}: errors": each.errors,
        }
    found["vllm_model: generate"] = _Checks(target, "vllm_model").vllm
    return found


class _Checks:
    def __init__(self, target: Target, model: str) -> None:
        self.base = f"{target.triton}/v2/models/{model}"
        self.options: Any = {
            "model": f"triton/{model}",
            "messages": USER,
            "api_base": f"{self.base}/generate",
            "max_tokens": 24,
        }
        self.call: Any = litellm.completion

    def generate(self) -> str:
        answer = self.call(**self.options)
        text = answer.choices[0].message.content
        assert text.startswith(CODE)  # as TensorRT-LLM's models have it
        return repr(text[:40])

    async def run_async(self) -> None:
        whole: Any = await litellm.acompletion(**self.options)
        assert (
            whole.choices[0].message.content == self.call(**self.options).choices[0].message.content
        )

    def stream(self) -> str:
        chunks = list(self.call(stream=True, **self.options))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        whole = self.call(exclude_input_in_output=True, **self.options)
        assert text == whole.choices[0].message.content
        return f"{len(chunks)} chunks"

    def errors(self) -> str:
        options = {**self.options, "max_tokens": -1}
        return expect(Exception, lambda: self.call(**options), "max_tokens")

    def vllm(self) -> str:
        return repr(self.call(**self.options).choices[0].message.content[:40])
