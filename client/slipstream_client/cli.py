"""The `slipstream` command: one module per sub-command, imported only when it is used.

An error prints one line to stderr, saying what is wrong and what to do, and exits with a code other
than 0. Set `SLIPSTREAM_TRACEBACK` to get the traceback instead.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from slipstream_client.release import release

# name -> (module with add_parser(subparsers) and run(args) -> int, what it does)
COMMANDS = {
    "compose": ("slipstream_compose.cli", "write a model repository for a checkpoint"),
    "profile": ("slipstream_compose.profile", "choose how to serve a checkpoint on a GPU"),
    "serve": ("slipstream_serve.serve", "start a tritonserver on a model repository"),
    "rank": ("slipstream_serve.rank", "run ranks of a server on another host"),
    "ray": ("slipstream_serve.ray_cluster", "serve a model on several nodes of a Ray cluster"),
    "drain": ("slipstream_serve.drain", "refuse new requests and wait for the running ones"),
    "gateway": ("slipstream_gateway.cli", "answer OpenAI's requests, beside a server or alone"),
    "convert": ("slipstream_convert.cli", "write pickled weights as safetensors"),
    "quantize": ("slipstream_quantize.cli", "make a checkpoint in fewer bits"),
    "eval": ("slipstream_eval.cli", "run lm-eval's tasks on a checkpoint"),
    "tune": ("slipstream_serve.tune", "measure which GEMM kernels are the fastest here"),
    "kernels": (
        "slipstream_serve.kernels",
        "print which GEMM kernel runs for each matrix, and why",
    ),
    "health": ("slipstream_client.commands.health", "exit code 0 only if tokens can be had now"),
    "models": (
        "slipstream_client.commands.models",
        "list a repository's deployments, load and unload them",
    ),
    "adapter": ("slipstream_client.commands.adapter", "list, load, unload and convert adapters"),
    "waits": ("slipstream_client.commands.waits", "print what slow first tokens waited for"),
    "complete": ("slipstream_client.commands.complete", "stream one completion"),
    "chat": ("slipstream_client.commands.chat", "talk to the model"),
    "bench": ("slipstream_client.commands.bench", "load a server and measure it"),
}
GATEWAY_PACKAGES = ("httptools", "starlette", "uvicorn", "uvloop")  # of the extra `gateway`
ENGINE_PACKAGES = ("safetensors", "tokenizers", "torch", "zmq")  # the extra `engine` has these
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
TRACEBACK_VARIABLE = "SLIPSTREAM_TRACEBACK"


# What other servers call some options: names that are too far from ours, or nearer to a wrong one.
_ELSEWHERE = {
    "adapter": "adapters",
    "batch-size": "max-num-batched-tokens",
    "ctx-size": "max-model-len",
    "data-parallel-size": "replicas",
    "enable-lora": "adapters",
    "gpu-memory-utilization": "memory-share",
    "kv-cache-free-gpu-mem-fraction": "memory-share",
    "kv-cache-free-gpu-memory-fraction": "memory-share",
    "lora": "adapters",
    "lora-modules": "adapters",
    "max-batch-size": "max-num-seqs",
    "max-input-len": "max-model-len",
    "max-num-tokens": "max-num-batched-tokens",
    "max-seq-len": "max-model-len",
    "model-dir": "checkpoint",
    "model-path": "checkpoint",
    "num-speculative-tokens": "num-draft-tokens",
    "parallel": "max-num-seqs",
    "pp": "pipeline-parallel",
    "pp-size": "pipeline-parallel",
    "served-model-name": "model-name",
    "speculative-config": "speculation",
    "swap-space": "kv-cache-host-gb",
    "tp": "tensor-parallel",
    "tp-size": "tensor-parallel",
}


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports an error in one line; argparse's own prints the usage first.

    The sub-command reports an option that it does not have, and names the nearest that it has. It
    takes no beginning of a name: `--lora` of other servers would be `--lora-task-bytes`.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Make argparse's parser, without abbreviations."""
        super().__init__(*args, **settings | {"allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; end with an error if anything is left over."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}{self._hint(rest[0])}")
        return found, rest

    def _hint(self, given: str) -> str:
        """Return the option that was meant, as an addition to an error; nothing if none is near."""
        name = given.partition("=")[0].lstrip("-").replace("_", "-")
        known = [option.lstrip("-") for option in self._option_string_actions]
        near = get_close_matches(_ELSEWHERE.get(name, name), known, 1, 0.65)
        return f" (do you mean --{near[0]}?)" if given.startswith("--") and near else ""

    def error(self, message: str) -> NoReturn:
        """Print the error and where help is found, then exit."""
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """Build the parser; only the sub-command `chosen` gets its arguments, others just a name."""
    parser = OneLineParser(
        prog="slipstream", description="LLM serving inside Triton: serve a checkpoint, and ask it."
    )
    parser.add_argument("--version", action="version", version=f"slipstream {release()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        if name == chosen:
            importlib.import_module(module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def _of_system(error: OSError, options: dict[str, Path]) -> str:
    """Return what the system refuses: file and reason, after the option that named the file.

    The option may have named a folder of the file, or a file in a folder that cannot be made.
    """
    reason = error.strerror or str(error)
    if not isinstance(error.filename, str):
        return reason
    file = Path(error.filename)
    for option, given in options.items():
        if given == file:
            return f"{option} {given}: {reason}"
        if file in given.parents or given in file.parents:
            return f"{option} {given}: cannot be used ({file}: {reason})"
    return f"{file}: {reason}"


def _paths(args: argparse.Namespace, given: Sequence[str]) -> dict[str, Path]:
    """Return the files that options name, by the option; what has its default is left out."""
    words = {word.partition("=")[0] for word in given}
    pairs = ((f"--{name.replace('_', '-')}", value) for name, value in vars(args).items())
    return {name: path for name, path in pairs if name in words and isinstance(path, Path)}


def _one_line(error: Exception, options: dict[str, Path]) -> str:
    """Return an error's first line, with its type unless the message was written for users."""
    if isinstance(error, OSError) and error.errno is not None:
        return _of_system(error, options)
    if isinstance(error, ModuleNotFoundError) and error.name in ENGINE_PACKAGES:
        return (
            f"{error.name} is not installed, the engine needs it: pip install 'slipstream[engine]'"
        )
    if isinstance(error, ModuleNotFoundError) and error.name in GATEWAY_PACKAGES:
        return (
            f"{error.name} is not installed, the gateway needs it: "
            "pip install 'slipstream[engine,gateway]'"
        )
    if isinstance(error, ModuleNotFoundError) and error.name == "ray":
        return "ray is not installed: pip install 'slipstream[ray]', here and on the nodes"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = type(error)
    is_meant = isinstance(error, OSError) or kind.__module__.startswith(
        ("slipstream", "tritonclient")
    )
    if is_meant and lines:
        return lines[0]
    return f"{': '.join([kind.__name__, *lines[:1]])} ({TRACEBACK_VARIABLE}=1 shows where)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    options: dict[str, Path] = {}
    try:
        args = build_parser(chosen).parse_args(arguments)
        options = _paths(args, arguments)
        code = importlib.import_module(COMMANDS[args.command][0]).run(args)
        sys.stdout.flush()
        return int(code)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has closed the pipe: nothing more can be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        print(f"slipstream: {_one_line(error, options)}", file=sys.stderr)
        return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
