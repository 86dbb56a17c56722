"""Render a template that a request brought: code of a stranger, in a process that is killed.

    python -m slipstream_gateway.foreign < REQUEST > ANSWER

Jinja's sandbox keeps it from the interpreter, not from looping for ever or filling memory. So a
process of its own, with bounds on time and memory, renders it.
"""

import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from slipstream_contract.errors import Code, ContractError
from slipstream_preprocessing.chat import ChatTemplate

SECONDS = 5
MEMORY_BYTES = 1 << 30
MAX_PROMPT_BYTES = 64 << 20


class Request(msgspec.Struct):
    """What is rendered."""

    source: str
    defined: dict[str, str]  # such as `bos_token`
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    opens: bool
    documents: list[Any] | None
    variables: dict[str, Any]


class Answer(msgspec.Struct):
    """The prompt, or why there is none."""

    prompt: str = ""
    error: str = ""


class ForeignTemplate:
    """A template with the method of `ChatTemplate`."""

    def __init__(self, source: str, defined: Mapping[str, str]) -> None:
        """Take a template, and what is defined in it."""
        self._source = source
        self._defined = dict(defined)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render the prompt; blocks for `SECONDS` at most. Raises ContractError."""
        request = Request(
            self._source,
            self._defined,
            [dict(message) for message in messages],
            None if tools is None else list(tools),
            add_generation_prompt,
            None if documents is None else list(documents),
            dict(variables),
        )
        command = [sys.executable, "-P", "-m", "slipstream_gateway.foreign"]
        try:
            done = subprocess.run(
                command,
                input=msgspec.json.encode(request),
                capture_output=True,
                timeout=SECONDS,
                check=False,
            )
            answer = msgspec.json.decode(done.stdout, type=Answer)
        except subprocess.TimeoutExpired:
            raise ContractError(
                f"chat_template did not end within {SECONDS} s", Code.INVALID_ARGUMENT
            ) from None
        except msgspec.DecodeError:
            raise ContractError(
                f"chat_template failed: it may take {MEMORY_BYTES >> 20} MiB"
            ) from None
        if answer.error:
            raise ContractError(answer.error)
        return answer.prompt


def _failed(error: str) -> bytes:
    return msgspec.json.encode(Answer(error=error.encode(errors="replace").decode()))


def main() -> int:
    """Render what stdin holds."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    try:
        prompt = ChatTemplate({"default": request.source}, request.defined).render(
            request.messages, request.tools, request.opens, request.documents, request.variables
        )
        answer = Answer(prompt)
        if len(prompt) > MAX_PROMPT_BYTES:
            answer = Answer(error=f"chat_template made {len(prompt)} characters")
        written = msgspec.json.encode(answer)
    except ContractError as error:
        written = _failed(f"chat_template: {error.message}")
    except UnicodeEncodeError as error:
        written = _failed(f"chat_template made what is no text: {error.reason}")
    except MemoryError:
        written = _failed(f"chat_template needs more than {MEMORY_BYTES >> 20} MiB")
    sys.stdout.buffer.write(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
