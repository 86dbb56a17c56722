"""`slipstream chat`: a conversation in the terminal, kept by the client.

The server's contract is text in, text out, without a tensor for messages. So the client renders the
conversation, with the chat template in a checkpoint's directory (`--template`), or as a plain
transcript, which is all that a model without a chat template understands.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream_contract.errors import ContractError
from slipstream_preprocessing.chat import ChatTemplate

from slipstream_client.client import SlipstreamClient
from slipstream_client.commands.common import (
    Printer,
    add_connection,
    add_sampling,
    connect,
    sampling_of,
    stop_at,
)

Messages = list[dict[str, str]]
PLAIN_NAMES = {"system": "System", "user": "User", "assistant": "Assistant"}
NO_TEMPLATE = (
    "no chat template given (--template CHECKPOINT): a plain transcript, which is all that a model "
    "without one understands"
)
EXIT = "/exit"
PLAIN_STOP_WORD = f"\n{PLAIN_NAMES['user']}:"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its options."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to the model",
        description="Ctrl-C cancels an answer; /exit, or Ctrl-D, ends the conversation.",
    )
    parser.add_argument(
        "--template", type=Path, metavar="DIR", help="checkpoint directory with a chat template"
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="send a transcript of User: and Assistant:, as without --template, with no warning",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_sampling(parser, max_tokens=256)
    add_connection(parser, timeout_s=None)


def run(args: argparse.Namespace) -> int:
    """Read a line and stream the answer, until the end of the input."""
    if args.template is not None and args.plain:
        raise ContractError("give --template or --plain, not both")
    if args.template is None and not args.plain:
        print(f"{NO_TEMPLATE}\n", file=sys.stderr, flush=True)
    render = plain_prompt if args.template is None else template_renderer(args.template)
    stop_words = [PLAIN_STOP_WORD] if args.template is None else []
    parameters = sampling_of(args) | stop_at(args.model, stop_words)
    if args.template is not None:  # the template writes every special token
        parameters["add_special_tokens"] = False
    messages: Messages = [{"role": "system", "content": args.system}] if args.system else []
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives input() its line editing)
    with connect(args) as client:
        while True:
            try:
                line = input("> ")
            except EOFError:
                print()
                return 0
            if line.strip() == EXIT:
                return 0
            if line.strip():
                messages.append({"role": "user", "content": line})
                answer = _answer(client, render(messages), stop_words, parameters)
                messages.append({"role": "assistant", "content": answer})


def template_renderer(template: Path) -> Callable[[Messages], str]:
    """Return a function that renders conversations with a checkpoint's chat template.

    The prompt contains its special tokens: send it with `add_special_tokens` false.
    """
    if not template.is_dir():
        raise ContractError(f"--template {template}: no such directory")
    return ChatTemplate.load(template).render


def plain_prompt(messages: Messages) -> str:
    """Render a transcript that ends where the assistant speaks."""
    lines = [f"{PLAIN_NAMES[message['role']]}: {message['content']}" for message in messages]
    return "\n".join([*lines, f"{PLAIN_NAMES['assistant']}:"])


def _answer(
    client: SlipstreamClient,
    prompt: str,
    stop_words: list[str],
    parameters: dict[str, Any],
) -> str:
    """Stream one answer and return it; after Ctrl-C, the part that was printed."""
    printer = Printer(sys.stdout, *stop_words)
    with contextlib.suppress(KeyboardInterrupt):
        printer.print(client.stream(prompt, **parameters))
    print(flush=True)
    return printer.written.strip()
