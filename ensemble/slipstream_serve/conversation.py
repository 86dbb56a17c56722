"""A conversation in the terminal of `slipstream serve --chat`, whose end is the server's."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

from slipstream_contract.deployment import Deployment, deployments_of
from slipstream_contract.tokenizer_config import TokenizerConfig

from slipstream_serve.triton import Endpoints, ServeError

# The likeliest tokens alone: small models are wrong without need else. But they repeat themselves.
_SAMPLING = ("--repetition-penalty", "1.1")
_ENDS = (
    "Ctrl-C cancels an answer. /exit, Ctrl-D or Ctrl-C at the prompt end conversation and server."
)


def chat_options(repository: Path, endpoints: Endpoints) -> list[str]:
    """Return the arguments of `slipstream chat` for the first model of a repository that has text.

    Raises ServeError if there is none.
    """
    try:
        deployments = deployments_of(repository)
    except ValueError as error:
        raise ServeError(str(error)) from None
    found = next((each for each in deployments if each.text_model), None)
    if found is None:
        raise ServeError(f"{repository} has no model that takes text: nothing can chat")
    connection = ["--host", endpoints.host, "--grpc-port", str(endpoints.grpc_port)]
    model = [] if found.text_model == "ensemble" else ["--model", str(found.text_model)]
    return [*model, *_template(found), *_SAMPLING, *connection]


def _template(deployment: Deployment) -> list[str]:
    folder = deployment.checkpoint
    is_there = (folder / "chat_template.jinja").is_file()
    if is_there or TokenizerConfig.load(folder).chat_template:
        return ["--template", str(folder)]
    return ["--plain"]


class Conversation:
    """A `slipstream chat` in this terminal, or, where stdin is none, its command to read.

    Until `close`, Ctrl-C is the conversation's. At its end this process gets SIGTERM.
    """

    def __init__(self, repository: Path, endpoints: Endpoints) -> None:
        options = chat_options(repository, endpoints)
        self._process: subprocess.Popen[bytes] | None = None
        if not sys.stdin.isatty():
            command = shlex.join([f"{sys.prefix}/bin/slipstream", "chat", *options])
            print(f"\nno terminal to chat in; from one:\n  {command}\n", flush=True)
            return
        self._terminal = termios.tcgetattr(sys.stdin)
        print(f"\n{_ENDS}\n", flush=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slipstream_client.cli", "chat", *options]
        )
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # not before: the child would ignore it, too
        threading.Thread(target=self._end_server, daemon=True).start()

    def _end_server(self) -> None:
        assert self._process is not None
        self._process.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """End the conversation, and leave the terminal as it was."""
        if self._process is None:
            return
        self._process.terminate()
        self._process.wait()
        with contextlib.suppress(termios.error):
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._terminal)
