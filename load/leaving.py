"""The ways in which a client can leave a request: one class each, all used alike.

A leaver has asked when it is made; `leave` makes its client go and returns when that was (ns since
the epoch). What the client got is of no interest but for an error that nobody may ever see.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream_client import ContractError, SlipstreamClient
from slipstream_client.client import ChunkStream

TOKEN_MODEL = "tensorrt_llm"


@dataclass(frozen=True)
class Server:
    """Where to ask."""

    grpc: str
    http: str  # with http://
    client: SlipstreamClient
    nursery: "Nursery"


@dataclass(frozen=True)
class Asked:
    """One request; greedy, and it never ends by itself before `max_tokens`."""

    model: str
    prompt: str | list[int]
    max_tokens: int
    seed: int

    @property
    def request_id(self) -> str:
        """Unique among those asked at once."""
        return f"left-{self.seed}"

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the client's `stream`."""
        common = {"max_tokens": self.max_tokens, "seed": self.seed, "temperature": 0.0}
        end = {"ignore_eos": True} if self.model == "vllm_model" else {"end_id": -1}
        about = {"prompt": self.prompt, "model": self.model, "request_id": self.request_id}
        return about | common | end

    def body(self) -> dict[str, Any]:
        """Return the body of HTTP `generate_stream`."""
        common = {"max_tokens": self.max_tokens, "seed": self.seed, "temperature": 0.0}
        if self.model == TOKEN_MODEL:
            del common["max_tokens"]
            inputs = {"input_ids": self.prompt, "input_lengths": len(self.prompt)}
            inputs |= {"request_output_len": self.max_tokens, "streaming": True, "end_id": -1}
            return inputs | common
        inputs = {"text_input": self.prompt, "stream": True}
        if self.model == "vllm_model":
            return inputs | {"sampling_parameters": json.dumps(common | {"ignore_eos": True})}
        return inputs | common | {"end_id": -1}


class Leaver(Protocol):
    """A client that has asked."""

    error: str  # one that is not the consequence of its leaving

    def leave(self) -> int:
        """Go; when (ns)."""

    def close(self) -> None:
        """Leave nothing behind, and wait until the client has seen its end."""


class Reading:
    """A gRPC stream, read to its end by a thread."""

    def __init__(self, server: Server, asked: Asked, timeout_s: float = 60.0) -> None:
        self.error = ""
        self.num_chunks = 0
        self._stream: ChunkStream = server.client.stream(**asked.arguments(), timeout_s=timeout_s)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for _ in self._stream:
                self.num_chunks += 1
        except TimeoutError:
            pass
        except ContractError as error:
            self.error = str(error)

    def close(self) -> None:
        """End it."""
        self._stream.cancel()
        self._thread.join(10)


class Cancel(Reading):
    """A gRPC cancel."""

    def leave(self) -> int:
        """Cancel."""
        self._stream.cancel()
        return time.time_ns()


class Deadline(Reading):
    """The deadline of a gRPC call, which its server is told; passes by itself."""

    def __init__(self, server: Server, asked: Asked, timeout_s: float) -> None:
        self._left_ns = time.time_ns() + int(timeout_s * 1e9)
        super().__init__(server, asked, timeout_s)

    def leave(self) -> int:
        """Wait for it."""
        time.sleep(max(0.0, (self._left_ns - time.time_ns()) / 1e9))
        return self._left_ns


class Stop(Reading):
    """The contract's `stop`: `tensorrt_llm` ends the request of an id with what it has."""

    def __init__(self, server: Server, asked: Asked) -> None:
        self._client, self._id = server.client, asked.request_id
        super().__init__(server, asked)

    def leave(self) -> int:
        """Ask for it."""
        now_ns = time.time_ns()
        inputs = {"max_tokens": 1, "stop": True}
        list(self._client.stream([0], model=TOKEN_MODEL, request_id=self._id, **inputs))
        return now_ns


class Kill:
    """SIGKILL for the process of a gRPC client."""

    def __init__(self, server: Server, asked: Asked) -> None:
        self.error = ""
        self._pid = server.nursery.hold(server.grpc, asked.arguments())

    def leave(self) -> int:
        """Kill."""
        now_ns = time.time_ns()
        os.kill(self._pid, 9)
        return now_ns

    def close(self) -> None:
        """Kill it, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, 9)


class KillCurl:
    """SIGKILL for curl, which reads a stream of events over HTTP."""

    def __init__(self, server: Server, asked: Asked) -> None:
        self.error = ""
        url = f"{server.http}/v2/models/{asked.model}/generate_stream"
        command = ["curl", "-sN", "-m", "60", url, "-d", json.dumps(asked.body())]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def leave(self) -> int:
        """Kill."""
        now_ns = time.time_ns()
        self._process.kill()
        return now_ns

    def close(self) -> None:
        """Kill it, if it still runs."""
        self._process.kill()
        self._process.wait()


# --- clients in processes of their own -----------------------------------------------------------


class Nursery:
    """Forks a process for each stream that is to be killed; a start from nothing takes a second."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)

    def hold(self, url: str, arguments: dict[str, Any]) -> int:
        """The process that has asked."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps({"url": url, "arguments": arguments})
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the nursery."""
        self._process.kill()
        self._process.wait()


def _fork_clients() -> None:
    """A line in, a process that reads its stream until it is killed, its id out."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        asked = json.loads(line)
        if (pid := os.fork()) != 0:
            print(pid, flush=True)
            continue
        with contextlib.suppress(Exception):
            for _ in SlipstreamClient(asked["url"]).stream(**asked["arguments"]):
                pass
        time.sleep(600)


if __name__ == "__main__":
    _fork_clients()
