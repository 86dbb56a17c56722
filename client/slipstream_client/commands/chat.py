"""`slipstream chat`: a conversation in the terminal, kept by the client.

The server's contract is text in, text out: it has no tensor for messages. So the client renders
the conversation, by the chat template in the checkpoint's directory (`--template`), or as a bare
transcript (`--plain`) for a model that was never trained on conversations.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from slipstream_contract.errors import Code, ContractError
from slipstream_contract.vocab import read_tokenizer_config, special_token
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
PLAIN_STOP_WORD = f"\n{PLAIN_NAMES['user']}:"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declares the command."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to the model",
        description="Ctrl-C cancels an answer, Ctrl-D ends the conversation.",
    )
    parser.add_argument(
        "--template", type=Path, metavar="DIR", help="checkpoint directory with a chat template"
    )
    parser.add_argument(
        "--plain", action="store_true", help="no template: a transcript of User: and Assistant:"
    )
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    add_sampling(parser, max_tokens=256)
    add_connection(parser, timeout_s=None)


def run(args: argparse.Namespace) -> int:
    """Reads a line, streams the answer, until the end of the input."""
    render = renderer(args.template, args.plain)
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
            if line.strip():
                messages.append({"role": "user", "content": line})
                answer = _answer(client, render(messages), args)
                messages.append({"role": "assistant", "content": answer})


def renderer(template: Path | None, is_plain: bool) -> Callable[[Messages], str]:
    """How a conversation becomes a prompt. Raises ContractError where it is not known."""
    if is_plain:
        return plain_prompt
    if template is None:
        raise ContractError(
            "which chat template? Give the checkpoint's directory with --template DIR, "
            "or use --plain for a model without one (such as the default model)",
            Code.UNSUPPORTED,
        )
    if not template.is_dir():
        raise ContractError(f"--template {template}: no such directory")
    chat_template = ChatTemplate.load(template)
    beginning = special_token(read_tokenizer_config(template), "bos") or ""

    def render(messages: Messages) -> str:
        # The server's tokenizer puts the beginning-of-text token before every prompt by itself.
        return chat_template.render(messages).removeprefix(beginning)

    return render


def plain_prompt(messages: Messages) -> str:
    """A transcript that ends where the assistant speaks."""
    lines = [f"{PLAIN_NAMES[message['role']]}: {message['content']}" for message in messages]
    return "\n".join([*lines, f"{PLAIN_NAMES['assistant']}:"])


def _answer(client: SlipstreamClient, prompt: str, args: argparse.Namespace) -> str:
    """Streams one answer; after Ctrl-C as much of it as was shown."""
    stop_word = PLAIN_STOP_WORD if args.plain else ""
    parameters = sampling_of(args) | stop_at(args.model, [stop_word] if stop_word else [])
    printer = Printer(sys.stdout, stop_word)
    with contextlib.suppress(KeyboardInterrupt):
        printer.print(client.stream(prompt, **parameters))
    print(flush=True)
    return printer.written.strip()
