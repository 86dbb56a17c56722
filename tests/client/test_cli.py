"""The frame of the `slipstream` command: help, errors in one line, exit codes, lazy imports."""

import importlib.metadata
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from slipstream_client import cli
from slipstream_client.release import release

MODELS = Path(__file__).parents[2] / "model_repository"


def run(*arguments: str) -> int | str | None:
    """Exit code of the command, run in this process."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return ended.value.code


class Failing:
    """A sub-command that raises what it is given."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def add_parser(self, subparsers) -> None:  # type: ignore[no-untyped-def]
        subparsers.add_parser("serve")

    def run(self, args) -> int:  # type: ignore[no-untyped-def]
        raise self._error


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: Failing(error))


def test_help_names_every_command_and_imports_none() -> None:
    code = (
        "import sys; from slipstream_client import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        f"loaded = [name for name, _ in {cli.COMMANDS!r}.values() if name in sys.modules]\n"
        "assert not loaded, loaded\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in cli.COMMANDS:
        assert name in done.stdout


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    assert f"slipstream {command}" in capsys.readouterr().out


def test_version() -> None:
    command = [sys.executable, "-m", "slipstream_client.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == f"slipstream {importlib.metadata.version('slipstream')}\n"


def test_a_checkout_on_the_path_alone_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert release() == "not installed"
    assert cli.build_parser("quantize").prog == "slipstream"


COMPOSE = ["compose", "--checkpoint", "a", "--output", "b"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["sreve"], "invalid choice: 'sreve'"),
        (
            ["health", "--grpc-port", "abc"],
            "--grpc-port: 'abc' is not a whole number from 1 to 65535",
        ),
        (["health", "--grpc-port", "65536"], "--grpc-port: '65536' is not a whole number from 1"),
        (["health", "--timeout", "nan"], "--timeout: 'nan' is not a number of seconds above 0"),
        (["complete", "a", "--timeout", "-1"], "--timeout: '-1' is not a number of seconds"),
        (["serve", "--grpc-port", "0"], "--grpc-port: '0' is not a whole number from 1 to 65535"),
        (["serve", "--openai-port", "70000"], "'70000' is not a whole number from 0 to 65535"),
        (["serve", "--drain", "nan"], "--drain: 'nan' is not a number of seconds from 0 to 86400"),
        (["gateway", "--port", "99999"], "--port: '99999' is not a whole number from 0 to 65535"),
        (["gateway", "--drain", "-1"], "--drain: '-1' is not a number of seconds from 0 to 86400"),
        (["gateway", "--stall", "0"], "--stall: '0' is not a number of seconds above 0 to 86400"),
        (["gateway", "--max-body-bytes", "0"], "'0' is not a whole number of at least 1"),
        (["adapter", "list", "--url", "here"], "--url: 'here' is no address such as http://"),
        (["adapter", "list", "--url", "ftp://x"], "--url: 'ftp://x' is no address"),
        (["complete"], "PROMPT"),
        (["compose", "--checkpoint", "a"], "--output"),
        (["compose", "--checkpoint", "a", "--output", "b", "--dtype", "int8"], "'int8'"),
        ([*COMPOSE, "--quantisation", "int4"], "--quantisation int4 (do you mean --quantization?)"),
        ([*COMPOSE, "--max_model_len=9"], "--max_model_len=9 (do you mean --max-model-len?)"),
        ([*COMPOSE, "--max-seq-len", "9"], "(do you mean --max-model-len?)"),
        ([*COMPOSE, "--tensor-parallel-size", "2"], "(do you mean --tensor-parallel?)"),
        ([*COMPOSE, "--lora", "a=b"], "--lora a=b (do you mean --adapters?)"),
        ([*COMPOSE, "--tp", "2"], "--tp 2 (do you mean --tensor-parallel?)"),
        ([*COMPOSE, "--max-num-s", "2"], "--max-num-s 2 (do you mean --max-num-seqs?)"),
        (["compose", "--checkpoint", "a", "--output", ""], "--output: it is empty"),
        ([*COMPOSE, "--adapter-root", ""], "--adapter-root: it is empty"),
        ([*COMPOSE, "--request-log", ""], "--request-log: it is empty"),
        ([*COMPOSE, "--adapters", ""], "--adapters: it is empty"),
        (["adapter", "list", "--url", "http://[::1"], "--url: 'http://[::1' is no address"),
        (["adapter", "list", "--api-key", "a\nb"], "a key has printable ASCII characters alone"),
        ([*COMPOSE, "--xyz", "2"], "slipstream compose: unrecognized arguments: --xyz 2; see"),
        (["adapter", "list", "--prot", "1"], "slipstream adapter list: unrecognized"),
        (["complete", "a", "b"], "slipstream complete: unrecognized arguments: b; see"),
    ],
)
def test_a_usage_error_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert said.endswith("--help\n")


def test_an_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, FileNotFoundError(2, "No such file or directory", "x/config.json"))
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err == "slipstream: x/config.json: No such file or directory\n"


@pytest.mark.parametrize(
    ("option", "file", "said"),
    [
        ("--log-file", "/a/b", "--log-file /a/b: Permission denied"),
        ("--log-file", "/a", "--log-file /a/b: cannot be used (/a: Permission denied)"),
        ("--log-file", "/a/b/c", "--log-file /a/b: cannot be used (/a/b/c: Permission denied)"),
        ("--log-file", "/z", "/z: Permission denied"),
        ("--log-file", None, "Permission denied"),
        ("--load", "/a/b", "/a/b: Permission denied"),
    ],
)
@pytest.mark.parametrize("is_joined", [False, True])
def test_a_file_is_named_with_its_option(
    option: str,
    file: str | None,
    said: str,
    is_joined: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    refused = PermissionError(13, "Permission denied", file)
    monkeypatch.setattr("slipstream_serve.serve.run", Failing(refused).run)
    given = [f"{option}=/a/b"] if is_joined else [option, "/a/b"]
    assert cli.main(["serve", *given]) == 1
    assert capsys.readouterr().err == f"slipstream: {said}\n"


def test_an_unexpected_error_names_its_type_and_how_to_get_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, KeyError("model"))
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err == (
        "slipstream: KeyError: 'model' (SLIPSTREAM_TRACEBACK=1 shows where)\n"
    )
    monkeypatch.setenv(cli.TRACEBACK_VARIABLE, "1")
    with pytest.raises(KeyError):
        cli.main(["serve"])


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    assert cli.main(["serve"]) == 130


def test_a_reader_that_went_away_is_no_traceback() -> None:
    command = f"{sys.executable} -m slipstream_client.cli --help | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("name", "why"), [("", "contains no model"), ("x", "no such directory")])
def test_a_gateway_without_models_listens_on_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, why: str
) -> None:
    repository = str(tmp_path / name)
    assert cli.main(["gateway", "--model-repository", repository, "--port", "0"]) == 1
    said = capsys.readouterr()
    assert said.err == f"slipstream: {repository}: {why}; make one with `slipstream compose`\n"
    assert not said.out


@pytest.fixture
def unserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway ends where it would begin to serve."""
    monkeypatch.setattr("slipstream_gateway.server.run", lambda settings, listener: None)


@pytest.mark.usefixtures("unserved")
def test_a_gateway_makes_no_runtime_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gateway beside no server would start no engine, and wait for one without end."""
    missing = tmp_path / "x"
    arguments = ["gateway", "--model-repository", str(MODELS), "--port", "0"]
    assert cli.main([*arguments, "--runtime", str(missing)]) == 1
    assert f"--runtime {missing}: no such directory; start its server" in capsys.readouterr().err
    assert not missing.exists()


@pytest.mark.usefixtures("unserved")
def test_a_gateway_whose_port_is_taken_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["gateway", "--model-repository", str(MODELS), "--port", str(port)]) == 1
    said = capsys.readouterr().err
    assert f"port {port} on 127.0.0.1 cannot be used" in said
    assert "--port" in said


@pytest.mark.parametrize("act", [["list"], ["load", "a", "/a"], ["unload", "a"]])
@pytest.mark.parametrize("is_behind", [True, False])
def test_a_gateway_that_is_not_there(
    act: list[str], is_behind: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    url = ["--url", "http://127.0.0.1:1"]
    arguments = [*act, *url] if is_behind else [*url, *act]
    assert cli.main(["adapter", *arguments]) == 1
    assert capsys.readouterr().err == (
        "slipstream: UNAVAILABLE: no gateway answers at http://127.0.0.1:1 ([Errno 111] Connection "
        "refused): is it running, and is this its --url?\n"
    )


STATUSES = {400: "INVALID_ARGUMENT", 404: "NOT_FOUND", 500: "INTERNAL", 503: "UNAVAILABLE"}


@pytest.mark.parametrize("status", STATUSES)
def test_errors_of_adapters_have_the_code_of_their_status(
    status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that is being started again is worth another try, a wrong path is not."""

    class Refuses(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "why"}}')

        def log_message(self, *values: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert cli.main(["adapter", "--url", url, "load", "a", "/a"]) == 1
        thread.join()
    assert capsys.readouterr().err == f"slipstream: {STATUSES[status]}: why\n"
