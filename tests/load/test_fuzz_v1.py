"""Requests drawn over the gateway's endpoints, on a real engine; and what the judge would find."""

import json

import pytest
from slipstream_gateway.dialects.openai_fields import CHAT, TABLES
from slipstream_serve.server import repository_root

NAMES = ("crashes", "serving", "fuzz_fields", "fuzz_cases", "fuzz_v1_cases", "fuzz_v1")


@pytest.mark.rest
def test_2000_requests_to_v1(load, tmp_path):
    result = load.fuzz_v1.run(2000, 0, tmp_path / "log")
    assert result["problems"] == []
    assert result["requests"] == 2000
    assert result["canaries"] >= 80
    for path in ("/v1/completions", "/v1/chat/completions"):
        for kind in ("served", "refused", "changed"):
            assert result["ends"][f"{path} {kind}"] > 50


def test_every_field_comes_up(load):
    cases = load.fuzz_v1_cases
    drawn = {*cases.BOTH, *cases.OWN[cases.COMPLETIONS], *cases.OWN[cases.CHATS], *cases._REST}
    assert TABLES[CHAT].keys() <= drawn | {"prompt", "messages"}
    found: set[str] = set()
    for case in cases.cases(300, 1):
        try:
            found |= json.loads(case.data).keys()
        except (ValueError, AttributeError, RecursionError):
            continue
    assert len(found & TABLES[CHAT].keys()) > 60


def error(message: str = "top_p is 2", param: object = "top_p") -> bytes:
    inner = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    return json.dumps({"error": inner}).encode()


JSON = {b"content-type": b"application/json"}


@pytest.mark.parametrize(
    ("faults", "is_changed", "status", "data", "said"),
    [
        ([], False, 200, b"{}", ""),
        ([], False, 400, error(), "was refused"),
        ([], True, 400, error(), ""),
        ([], True, 500, error(), "internal"),
        ([], True, 503, error(), "internal"),
        (["top_p"], False, 400, error(), ""),
        (["top_p"], False, 200, b"{}", "was served"),
        (["top_p"], False, 400, error(param=None), "param is None"),
        (["top_p"], False, 400, error(param="n"), "param is n"),
        (["messages"], False, 400, error(param="messages[0].role"), ""),
        (["top_p"], False, 400, b"no", "Expecting"),
        (["top_p"], False, 400, b"{}", "'error'"),
        (["top_p"], False, 400, b'{"error":{"message":"a"}}', "not the shape"),
        (["top_p"], False, 400, error("Traceback"), "says too much"),
        (["top_p"], False, 400, error(f"{repository_root()}"), "says too much"),
        (["top_p"], False, 400, error("a" * 900), "has 900 characters"),
    ],
)
def test_the_judge_of_v1(load, faults, is_changed, status, data, said):
    case = load.fuzz_v1_cases.Case(faults=faults, is_changed=is_changed)
    answer = load.fuzz_v1.Answer(status, JSON, data)
    try:
        found = load.fuzz_v1.judge(case, [answer])
    except (ValueError, KeyError) as failure:  # `Run.ask` counts these
        found = str(failure)
    assert said in found
    assert bool(said) == bool(found)


def test_the_judge_of_v1_sees_streams_and_silence(load):
    case = load.fuzz_v1_cases.Case(is_streaming=True)
    answer = load.fuzz_v1.Answer
    whole = b'data: {"choices":[]}\n\ndata: [DONE]\n\n'
    failed = b'data: {"error":{}}\n\ndata: [DONE]\n\n'
    assert not load.fuzz_v1.judge(case, [answer(200, {}, whole)])
    assert "no end" in load.fuzz_v1.judge(case, [answer(200, {}, whole[:-2])])
    assert "an error in" in load.fuzz_v1.judge(case, [answer(200, {}, failed)])
    assert "no answer" in load.fuzz_v1.judge(case, "EOFError")
    case.repeat = 3
    assert "1 answers to 3" in load.fuzz_v1.judge(case, [answer(200, {}, whole)])


def test_a_pipelined_and_a_chunked_request(load):
    case = load.fuzz_v1_cases.Case(data=b"x" * 50, repeat=2)
    assert case.message().count(b"Content-Length: 50\r\n\r\n" + b"x" * 50) == 2
    case = load.fuzz_v1_cases.Case(data=b"x" * 50, is_chunked=True)
    assert case.message().endswith(
        b"\r\n\r\n25\r\n" + b"x" * 37 + b"\r\nd\r\n" + b"x" * 13 + b"\r\n0\r\n\r\n"
    )
