"""The commands, without a server: how text is shown, how a conversation becomes a prompt."""

import argparse
import io
import json
from pathlib import Path

import msgspec
import pytest
from fixtures.client.triton import HEALTH, Triton
from hypothesis import given
from hypothesis import strategies as st
from slipstream.wire import ReplicaState
from slipstream_client.cli import main
from slipstream_client.commands import chat, common
from slipstream_client.results import Chunk
from slipstream_contract.errors import ContractError


class Stream:
    """Chunks with the `with` block of a `ChunkStream`."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = iter(texts)
        self.was_left = False

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.was_left = True

    def __iter__(self):
        return (Chunk(text) for text in self.texts)


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


@given(
    text=st.text(alphabet="ab\n:", max_size=30),
    stop_word=st.sampled_from(["", "\nab:", "aa", "aab", ":", "\n\n"]),
    sizes=st.lists(st.integers(0, 4), max_size=20),
)
def test_printer_shows_exactly_what_comes_before_the_stop_word(text, stop_word, sizes):
    sink = io.StringIO()
    printer = common.Printer(sink, stop_word)
    stream = Stream(cut(text, sizes))
    printer.print(stream)
    assert printer.written == sink.getvalue()
    assert printer.written == (text.split(stop_word)[0] if stop_word else text)
    assert stream.was_left


def test_printer_withholds_only_what_may_start_the_stop_word():
    seen = []

    class Sink(io.StringIO):
        def write(self, text: str) -> int:
            seen.append(text)
            return len(text)

    common.Printer(Sink(), "\nUser:").print(Stream(["one\n", "two\nUs", "er", "?"]))
    assert seen == ["one", "\ntwo", "", "\nUser?", ""]


def test_plain_prompt_ends_where_the_assistant_speaks():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    assert chat.plain_prompt(messages) == (
        "System: Be brief.\nUser: Hi\nAssistant: Hello\nUser: Bye\nAssistant:"
    )


def test_a_template_writes_the_whole_prompt(tmp_path: Path):
    config = {
        "bos_token": "<s>",
        "chat_template": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    render = chat.template_renderer(tmp_path)
    assert render([{"role": "user", "content": "<s>Hi"}]) == "<s>[user]<s>Hi[assistant]"


def test_chat_without_a_template_says_so_and_goes_on(free_port, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", "--grpc-port", str(free_port)]) == 0
    assert "no chat template given (--template CHECKPOINT)" in capsys.readouterr().err
    assert main(["chat", "--plain", "--grpc-port", str(free_port)]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--template", "/nowhere"], "no such directory"),
        (["--plain", "--template", "."], "not both"),
    ],
)
def test_chat_options_that_cannot_be_meant(options, said, capsys):
    assert main(["chat", *options]) == 1
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1


def test_chat_with_a_checkpoint_without_a_template_says_so(tmp_path: Path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    render = chat.template_renderer(tmp_path)
    with pytest.raises(ContractError, match="no chat template"):
        render([{"role": "user", "content": "Hi"}])


def test_only_given_sampling_options_are_sent():
    parser = argparse.ArgumentParser()
    common.add_sampling(parser, max_tokens=7)
    args = parser.parse_args(["--temperature", "0", "--top-k", "3"])
    assert common.sampling_of(args) == {"max_tokens": 7, "temperature": 0.0, "top_k": 3}


@pytest.mark.parametrize("command", [["complete", "a"], ["health"], ["health", "--json"]])
def test_no_server_is_one_line_and_not_zero(command, capsys, free_port):
    code = main([*command, "--grpc-port", str(free_port), "--timeout", "5"])
    captured = capsys.readouterr()
    assert code == 1
    assert "Traceback" not in captured.err
    if "--json" in command:
        said = json.loads(captured.out)
        assert said["ok"] is False
        assert "no server answers at 127.0.0.1" in said["error"]
    else:
        assert "no server answers at 127.0.0.1" in captured.err
        assert captured.err.count("\n") == 1


def test_models_of_a_repository_that_is_not_there(capsys):
    assert main(["models", "--model-repository", "/none"]) == 1
    assert "--model-repository /none: no such directory\n" in capsys.readouterr().err


@pytest.fixture
def idle_port(served, monkeypatch) -> str:
    """The port of a server whose engine is idle."""
    state = {"running": 0, "waiting": 0, "about": {"device": "cpu", "memory_share": None}}
    for key, value in state.items():
        monkeypatch.setitem(HEALTH, key, value)

    def answer(self, request, inputs, context, prompt):
        return self.say(request, inputs, context, "say yes")

    monkeypatch.setattr(Triton, "a", answer, raising=False)  # the prompt of a probe
    return served[1].rpartition(":")[2]


def test_health_has_a_line_for_each_fact_and_for_each_replica(idle_port, monkeypatch, capsys):
    states = [
        ReplicaState(0, 4711, True, 12, 0, 3, 40, 512, 1),
        ReplicaState(1, 0, False, num_requests=7),
    ]
    monkeypatch.setitem(HEALTH, "replicas", msgspec.to_builtins(states))
    assert main(["health", "--grpc-port", idle_port]) == 0
    lines = capsys.readouterr().out.splitlines()
    facts = dict(line.split(maxsplit=1) for line in lines[:-3])
    assert facts["device"] == "cpu"
    assert facts["memory_share"] == "-"
    assert facts["ok"] == "True"
    heads = "replica engine_pid up running waiting kv_blocks_free kv_blocks_total requests restarts"
    assert lines[-3].split() == heads.split()
    assert lines[-2].split() == ["0", "4711", "yes", "12", "0", "3", "40", "512", "1"]
    assert lines[-1].split() == ["1", "0", "no", "0", "0", "0", "0", "7", "0"]
    assert len({len(line) for line in lines[-3:]}) == 1
    assert main(["health", "--json", "--grpc-port", idle_port]) == 0
    assert json.loads(capsys.readouterr().out)["replicas"][1]["num_requests"] == 7
