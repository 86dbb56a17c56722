"""A start of `slipstream serve` whose tritonserver crashes by itself before the first token."""

from http.client import IncompleteRead
from types import SimpleNamespace

import pytest
from slipstream_serve import serve
from slipstream_serve.triton import ServeError

ABORTED, BY_ITSELF = -6, 1


class Server(SimpleNamespace):
    """A server that ends with each of `codes` in turn while it makes its first token."""

    def __init__(self, *codes: int | None) -> None:
        self.left: list[str] = ["processes", "files"]
        files = SimpleNamespace(remove_process_files=lambda: self.left.remove("files"))
        super().__init__(endpoints=SimpleNamespace(http="http://x"), runtime=files)
        self.codes, self.exit_code, self.num_starts = [*codes], None, 1

    def kill(self) -> None:
        self.left.remove("processes")

    def reason(self) -> str:
        return f"it ended with {self.exit_code}"


@pytest.fixture(autouse=True)
def around(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server in the place of what answers and of what starts it."""
    monkeypatch.setattr(serve, "_ABORT_S", 0.1)

    def bring_up(server: Server, models: list[str], deadline: float) -> str:
        assert server.left == []  # of the one before
        server.left = ["processes", "files"]
        server.exit_code, server.num_starts = None, server.num_starts + 1
        return f"start {server.num_starts}"

    monkeypatch.setattr(serve, "_bring_up", bring_up)


def answer(server: Server, monkeypatch: pytest.MonkeyPatch, error: Exception) -> str:
    def first_token(url: str, models: list[str]) -> None:
        if server.codes:
            server.exit_code = server.codes.pop(0)
            raise error

    monkeypatch.setattr(serve, "first_token", first_token)
    return serve._answer_first(server, [], 0.0, "start 1")


@pytest.mark.parametrize("error", [ServeError("reset"), IncompleteRead(b""), ValueError("no JSON")])
def test_a_server_that_aborts_is_started_again_twice_at_most(error, monkeypatch, capsys):
    for count in (0, 1, 2):
        server = Server(*[ABORTED] * count)
        assert answer(server, monkeypatch, error) == f"start {count + 1}"
        said = "it ended with -6: starting it again\n"
        assert capsys.readouterr().out == said * count
    server = Server(ABORTED, ABORTED, ABORTED)
    with pytest.raises(type(error)):
        answer(server, monkeypatch, error)
    assert server.num_starts == 3


@pytest.mark.parametrize("code", [BY_ITSELF, None])
def test_any_other_end_and_a_refusal_are_errors_at_once(code, monkeypatch):
    server = Server(code)
    with pytest.raises(ServeError, match="refused"):
        answer(server, monkeypatch, ServeError("refused"))
    assert server.num_starts == 1
