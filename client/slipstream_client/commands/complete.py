"""`slipstream complete PROMPT`: one completion, streamed to the terminal."""

import argparse
import sys

from slipstream_client.commands.common import (
    Printer,
    add_connection,
    add_sampling,
    connect,
    sampling_of,
    stop_at,
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its options."""
    parser = subparsers.add_parser(
        "complete", help="stream one completion", description="Ctrl-C cancels it on the server."
    )
    parser.add_argument(
        "prompt", metavar="PROMPT", help="the text to continue; - reads it from stdin"
    )
    parser.add_argument("--echo", action="store_true", help="print the prompt first")
    parser.add_argument(
        "--stop-word", action="append", default=[], metavar="TEXT", help="end at it; repeatable"
    )
    add_sampling(parser, max_tokens=128)
    add_connection(parser, timeout_s=None)


def run(args: argparse.Namespace) -> int:
    """Stream the completion to stdout and end it with a newline."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    parameters = sampling_of(args) | stop_at(args.model, args.stop_word)
    with connect(args) as client:
        chunks = client.stream(prompt, **parameters)  # checks the parameters before any output
        if args.echo:
            print(prompt, end="", flush=True)
        printer = Printer(sys.stdout)
        try:
            printer.print(chunks)
        finally:
            if args.echo or printer.written:
                print(flush=True)
    return 0
