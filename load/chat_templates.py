"""Chat templates of public models: is the form of their calls found, and are their calls read back?

    python load/chat_templates.py FOLDER --output FILE

FOLDER has templates as `*.jinja`. The source archive of the package llama_cpp_python has 70, in
`vendor/llama.cpp/models/templates`. A template writes a turn of the assistant down as its model
writes it. What the turn adds to the prompt of an answer goes through the parser that is chosen for
the template: it must find the calls, the text and the reasoning again.
"""

import argparse
import collections
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from serving import about
from slipstream_contract.errors import ContractError
from slipstream_gateway.answer import Answer
from slipstream_gateway.history import prepare_messages
from slipstream_gateway.parsing.choice import read_choice, shown_tools
from slipstream_gateway.parsing.detect import choose
from slipstream_gateway.parsing.format import AddedTokens
from slipstream_preprocessing.chat import ChatTemplate

USER = {"role": "user", "content": "What is the weather?"}
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "clock"}},
)
_CALLS = (("get_weather", {"city": "Oslo", "days": 3}), ("clock", {}))
_VARIABLES = {"bos_token": "<BOS>", "eos_token": "<EOS>", "pad_token": "<PAD>"}
_PIECE = 3  # characters of a token

Calls = Sequence[tuple[str, Mapping[str, Any]]]


class Turn(NamedTuple):
    """A turn of the assistant: what the model said, and what a template makes of it."""

    calls: Calls
    text: str = ""
    reasoning: str = ""

    def message(self) -> dict[str, Any]:
        """Return it as a message of a request."""
        found: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        found["tool_calls"] = [
            {
                "id": f"call{number:05}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for number, (name, arguments) in enumerate(self.calls)
        ]
        return found


TURNS = [
    Turn(calls, text, reasoning)
    for calls, text, reasoning in itertools.product(
        (_CALLS, _CALLS[:1]), ("Let me look.", ""), ("", "Hm.")
    )
]


def written(source: str, turn: Turn, tools: Sequence[Any] = TOOLS) -> tuple[str, str]:
    """Return the prompt of an answer, and the answer, as a template writes both down.

    The prompt may open the reasoning that the turn lacks: then the answer has that opening again.
    Raises ContractError for a turn that the template refuses.
    """
    chat, shown = ChatTemplate({"default": source}, _VARIABLES), shown_tools(tools)
    prompt = chat.render(prepare_messages([USER]), shown)
    whole = chat.render(prepare_messages([USER, turn.message()]), shown, False)
    pairs = zip(prompt, whole, strict=False)
    size = next((at for at, (one, other) in enumerate(pairs) if one != other), len(prompt))
    if size < len(prompt) and (mark := prompt.rfind("<", 0, size)) > prompt.rfind(">", 0, size):
        size = mark  # both go on with a mark, of which only the start is the same
    return prompt[:size], whole[size:]


def read(source: str, prompt: str, answer: str, tools: Sequence[Any] = TOOLS) -> Answer:
    """Return what the parser for a template makes of an answer, which comes in small pieces."""
    parser = choose(source, AddedTokens()).parser(read_choice(list(tools)), prompt)
    found = Answer()
    for at in range(0, len(answer), _PIECE):
        found.add(parser.feed([1], [answer[at : at + _PIECE]]))
    found.add(parser.finish())
    return found


def calls_of(answer: Answer) -> list[tuple[str, Any]]:
    """Return the calls of an answer, with their arguments as values. Raises ValueError."""
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


def _outcome(source: str, turn: Turn) -> tuple[str, str]:
    """Return a word, and where it is `differs`, the answer."""
    try:
        prompt, answer = written(source, turn)
    except ContractError as error:
        return f"refused: {error.message}"[:200], ""
    if not all(name in answer for name, _ in turn.calls):
        return "not written", ""
    found = read(source, prompt, answer)
    try:
        is_same = calls_of(found) == [(name, dict(values)) for name, values in turn.calls]
    except ValueError:
        is_same = False
    kept = turn.text in found.text + found.reasoning or turn.text not in answer
    return ("read", "") if is_same and kept else ("differs", answer)


def judge(source: str) -> dict[str, Any]:
    """Return the form that is found for a template, and what came of each turn."""
    form = choose(source, AddedTokens()).format
    ends: collections.Counter[str] = collections.Counter()
    example = ""
    for turn in TURNS:
        end, answer = _outcome(source, turn)
        ends[end] += 1
        example = example or answer
    found: dict[str, Any] = {"form": form.name, "turns": dict(ends)}
    has_calls = form.calls is not None or form.channels is not None
    if example and has_calls:
        found["differs"] = example
    elif example:
        found["calls"] = "of no form that is known: tools are refused"
    return found


def main() -> int:
    """Judge the templates of a folder; return 1 where a form is found and calls are not."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="with *.jinja")
    parser.add_argument("--output", type=Path, help="the result, as JSON")
    args = parser.parse_args()
    templates = {
        path.stem: judge(path.read_text(encoding="utf-8"))
        for path in sorted(args.folder.glob("*.jinja"))
    }
    for name, found in templates.items():
        print(f"{name}: {found['form']}: {found['turns']} {found.get('differs', '')!r:.300}")
    if args.output:
        text = json.dumps({**about(), "templates": templates}, indent=1)
        args.output.write_text(text + "\n", encoding="utf-8")
    return 1 if any("differs" in found for found in templates.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
