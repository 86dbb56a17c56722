"""`slipstream adapter`: list, load and unload adapters of a gateway's models; convert one."""

import argparse
import contextlib
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slipstream_contract.errors import Code, ContractError

from slipstream_client.failures import HTTP_CODES, words_of

_ANSWER_S = 600.0
_URL = "http://127.0.0.1:9000"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its options."""
    parser = subparsers.add_parser("adapter", help="list, load and unload adapters")
    parser.set_defaults(url=_URL, api_key=None, model=None)
    _add_gateway(parser)
    acts = parser.add_subparsers(dest="act", metavar="ACT", required=True)
    shown = acts.add_parser(
        "list", help="print a line for each: its name, its model, its directory"
    )
    load = acts.add_parser("load", help="load a directory as PEFT writes it")
    load.add_argument("name", metavar="NAME")
    load.add_argument("path", metavar="DIR", help="below compose --adapter-root")
    unload = acts.add_parser("unload", help="discard a name; requests that run go on")
    unload.add_argument("name", metavar="NAME")
    for act in (shown, load, unload):
        _add_gateway(act)
    convert = acts.add_parser(
        "convert",
        help="write a PEFT directory as TensorRT-LLM's arrays (model.lora_weights.npy, "
        "model.lora_config.npy), or such arrays as a PEFT directory",
    )
    convert.add_argument("source", type=Path, metavar="FROM", help="a directory of either")
    convert.add_argument("output", type=Path, metavar="TO", help="a directory, which is made")
    convert.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="the model of the adapter"
    )


def _add_gateway(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a gateway, which may stand before the act or behind it."""
    parser.add_argument(
        "--url", type=_address, default=argparse.SUPPRESS, help=f"of the gateway ({_URL})"
    )
    parser.add_argument(
        "--api-key",
        type=_key,
        metavar="KEY",
        default=argparse.SUPPRESS,
        help="of the gateway, if it has keys",
    )
    parser.add_argument(
        "--model",
        default=argparse.SUPPRESS,
        help="whose adapters they are, where there are several models",
    )


def _address(text: str) -> str:
    """Read the address of a gateway (an argparse type)."""
    with contextlib.suppress(ValueError):  # as of a bracket that is not closed
        parts = urllib.parse.urlsplit(text)
        if parts.scheme in ("http", "https") and parts.hostname:
            return text
    raise argparse.ArgumentTypeError(f"{text!r} is no address such as {_URL}")


def _key(text: str) -> str:
    """Read a key, which goes into a header (an argparse type)."""
    if not (text and text.isascii() and text.isprintable()):
        raise argparse.ArgumentTypeError("a key has printable ASCII characters alone, at least one")
    return text


def run(args: argparse.Namespace) -> int:
    """Do the act. Raises ContractError if the gateway refuses it, or cannot be reached; `convert`
    raises `ConfigError` or `CheckpointError`.
    """
    if args.act == "convert":
        from slipstream_convert.adapters import convert  # torch takes a second to import

        print(convert(args.source, args.output, args.checkpoint))
        return 0
    if args.act == "list":
        cards = _ask(args, "/v1/models", None)["data"]
        bases = {card["id"]: card["root"] for card in cards if card["parent"] is None}
        if args.model is not None and args.model not in bases:
            raise ContractError(
                f"--model {args.model} does not exist; there are {', '.join(bases)}"
            )
        for card in cards:
            if card["parent"] is not None and args.model in (None, *_names(card["parent"], bases)):
                print(f"{card['id']}  {card['parent']}  {card['root']}")
        return 0
    body = {"lora_name": args.name} | ({} if args.model is None else {"model": args.model})
    if args.act == "load":
        body["lora_path"] = args.path
    print(_ask(args, f"/v1/{args.act}_lora_adapter", body))
    return 0


def _names(parent: str, bases: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of the model `parent`; `bases`: name -> the name that all of one share."""
    return (name for name, root in bases.items() if root == bases.get(parent, parent))


def _ask(args: argparse.Namespace, path: str, body: dict[str, str] | None) -> Any:
    """Return the gateway's answer; with a body it is a POST."""
    headers = {"content-type": "application/json"}
    if args.api_key:
        headers["authorization"] = f"Bearer {args.api_key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{args.url.rstrip('/')}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        raise ContractError(_message(error), _code(error.code)) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        raise ContractError(
            f"no gateway answers at {args.url} ({why}): is it running, and is this its --url?",
            Code.UNAVAILABLE,
        ) from None


def _code(status: int) -> Code:
    """Return the code of a status of HTTP, by which a caller tells what to do."""
    other = Code.INTERNAL if status >= 500 else Code.INVALID_ARGUMENT
    return HTTP_CODES.get(status, other)


def _message(error: urllib.error.HTTPError) -> str:
    return words_of(error.read()) or f"{error.url}: {error.code} {error.reason}"
