"""`slipstream gateway`: answer OpenAI's requests, beside `slipstream serve` or alone."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from slipstream_contract.arguments import count, patience, port_or_zero, seconds

from slipstream_gateway.keys import Keys
from slipstream_gateway.settings import MAX_BODY_BYTES, QUIET_S, STALL_S, Settings


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that `serve` passes on."""
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="requests need one of its keys, one a line (default: none is needed)",
    )
    parser.add_argument(
        "--allowed-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="whose pages may use this server, such as https://example.com, or * (repeatable)",
    )
    parser.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="a Jinja template in the place of the checkpoint's",
    )
    parser.add_argument(
        "--tool-call-parser",
        default="auto",
        metavar="NAME",
        help="how the model writes calls: auto (by its chat template), none, or a name",
    )
    parser.add_argument(
        "--reasoning-parser",
        default="auto",
        metavar="NAME",
        help="how the model marks its reasoning: auto, none, or a name",
    )
    parser.add_argument(
        "--allow-request-templates",
        action="store_true",
        help="let requests bring chat templates, which are code: they run in a sandbox",
    )
    parser.add_argument(
        "--max-body-bytes", type=count, default=MAX_BODY_BYTES, metavar="N", help="(%(default)s)"
    )
    parser.add_argument(
        "--keep-alive",
        type=patience,
        default=QUIET_S,
        metavar="SECONDS",
        help="a silent stream gets a comment after so long (%(default)g)",
    )
    parser.add_argument(
        "--stall",
        type=patience,
        default=STALL_S,
        metavar="SECONDS",
        help="a client that reads nothing for so long is disconnected (%(default)g)",
    )


def options_of(args: argparse.Namespace) -> list[str]:
    """Return the options of `add_options` as words, for another process."""
    words = []
    for name in ("api_key_file", "chat_template"):
        if (path := getattr(args, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(path.resolve())]
    for origin in args.allowed_origin:
        words += ["--allowed-origin", origin]
    words += ["--tool-call-parser", args.tool_call_parser]
    words += ["--reasoning-parser", args.reasoning_parser]
    words += ["--max-body-bytes", str(args.max_body_bytes)]
    words += ["--keep-alive", str(args.keep_alive), "--stall", str(args.stall)]
    return [*words, *(["--allow-request-templates"] if args.allow_request_templates else [])]


def check_options(args: argparse.Namespace) -> Keys:
    """Return the keys. Raises OSError, ValueError, ApiError for options that cannot be used."""
    from slipstream_gateway.parsing.answers import format_of

    format_of(_named(args.tool_call_parser), _named(args.reasoning_parser))
    if args.chat_template is not None:
        args.chat_template.read_text(encoding="utf-8")
    return Keys.load(args.api_key_file) if args.api_key_file else Keys()


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `slipstream gateway`."""
    parser = subparsers.add_parser("gateway", help="answer OpenAI's requests")
    parser.add_argument(
        "--model-repository", type=Path, metavar="DIR", default=Path("model_repository")
    )
    parser.add_argument(
        "--runtime",
        type=Path,
        metavar="DIR",
        help="the runtime directory of a running server (default: start an engine for this alone)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument(
        "--port", type=port_or_zero, default=9000, metavar="N", help="(%(default)s)"
    )
    parser.add_argument(
        "--drain",
        type=seconds,
        default=4.0,
        metavar="SECONDS",
        help="time for running answers when it ends (%(default)g)",
    )
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. Raises OSError, ValueError."""
    if not any(args.model_repository.glob("*/config.pbtxt")):
        why = "contains no model" if args.model_repository.is_dir() else "no such directory"
        raise FileNotFoundError(
            f"{args.model_repository}: {why}; make one with `slipstream compose`"
        )
    if args.runtime is not None and not args.runtime.is_dir():
        raise FileNotFoundError(
            f"--runtime {args.runtime}: no such directory; start its server first, or leave it out "
            "for an engine of this gateway's own"
        )
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s gateway %(levelname)s %(message)s",
    )
    os.environ.setdefault("SLIPSTREAM_PYTHON", sys.executable)  # of an engine that is started here
    from slipstream_gateway import server

    settings = Settings(
        args.model_repository.resolve(),
        args.runtime,
        args.host,
        args.port,
        check_options(args),
        tuple(args.allowed_origin),
        args.allow_request_templates,
        args.chat_template,
        args.tool_call_parser,
        args.reasoning_parser,
        args.max_body_bytes,
        quiet_s=args.keep_alive,
        stall_s=args.stall,
        drain_s=args.drain,
    )
    listener = server.listen(settings)
    port = listener.getsockname()[1]
    print(f"listening on http://{settings.host}:{port}/v1", flush=True)
    server.run(settings, listener)
    return 0


def _named(parser: str) -> str | None:
    return None if parser in ("auto", "none") else parser
