"""`slipstream bench --protocol openai`: a real gateway, and what other servers answer."""

import asyncio
import json
from array import array

import pytest
from fixtures.client.answering import answering
from fixtures.gateway.served import MODEL
from slipstream_client.bench import openai, worker
from slipstream_client.bench.messages import Record
from slipstream_client.bench.transports import retry_after_s
from slipstream_client.cli import main
from slipstream_client.commands import bench
from slipstream_contract.errors import ContractError


@pytest.mark.parametrize("load", [("--concurrency", "1,3"), ("--rates", "40")])
def test_a_load_on_a_real_server(gateway, tmp_path, load):
    """Every answer has its length, by the server's own count."""
    file = tmp_path / "report.json"
    port = gateway.address.rpartition(":")[2]
    options = ("--requests", "6", "--warm-up", "1", "--output-len", "uniform:5:9", "--processes")
    common = ("bench", "--protocol", "openai", "--openai-port", port, "--json", str(file))
    assert main([*common, *options, "1", *load]) == 0
    report = json.loads(file.read_text())
    assert report["target"] == {
        "protocol": "openai",
        "address": gateway.address,
        "model": MODEL,
    }
    for found in report["loads"]:
        assert (found["requests"], found["completed"], found["failed"]) == (6, 6, 0)
        assert 5 <= found["output_tokens"]["p50"] <= found["output_tokens"]["max"] <= 9
        assert 50 < found["input_tokens"]["mean"] < 80  # about 64
        assert 0 < found["ttft_ms"]["p50"] <= found["e2e_ms"]["p50"]
        # On a full machine tokens may come together, but none comes before the one before it.
        assert 0 <= found["itl_ms"]["p50"] <= found["e2e_ms"]["max"]
        assert found["tokens_per_s"] > 0


def test_what_the_gateway_refuses_is_told_in_its_words(gateway, capsys):
    port = gateway.address.rpartition(":")[2]
    common = ("bench", "--protocol", "openai", "--openai-port", port, "--requests", "2")
    assert main([*common, "--input-len", "5000"]) == 1
    assert "maximum context length is 2048 tokens" in capsys.readouterr().err
    assert main([*common, "--model", "none-such"]) == 1
    assert "none-such" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "price"),
    [((), None), (("--metrics-port", "8002"), 2.5), (("--price-per-hour", "4"), 4.0)],
)
def test_a_price_is_never_that_of_another_server(gateway, tmp_path, monkeypatch, options, price):
    """As if a server with a price answered at the usual port of metrics."""
    monkeypatch.setattr(bench, "price_per_hour", lambda url: 2.5)
    file, port = tmp_path / "report.json", gateway.address.rpartition(":")[2]
    common = ("bench", "--protocol", "openai", "--openai-port", port, "--json", str(file))
    few = ("--requests", "1", "--warm-up", "0", "--output-len", "2", "--processes", "1")
    assert main([*common, *few, *options]) == 0
    [found] = json.loads(file.read_text())["loads"]
    assert found.get("cost", {}).get("price_per_hour") == price


def body(**options: object) -> dict[str, object]:
    return json.loads(openai.body("m", "say", 7, options, has_end=False))


def test_a_request_is_greedy_and_has_its_length_unless_told():
    assert body()["temperature"] == 0
    assert body(temperature=0.7, top_p=0.9)["temperature"] == 0.7
    assert body()["ignore_eos"] is True
    assert "ignore_eos" not in json.loads(openai.body("m", "say", 7, {}, has_end=True))


# --- servers as they answer -----------------------------------------------------------------------


def answered(reply: bytes) -> Record:
    """Send a request to a port that answers so and hangs up; its record."""
    record = Record(0, 0, 0)

    async def ask() -> None:
        async with (
            answering(reply) as address,
            worker.transport("openai", address, "m", 60.0) as sender,
        ):
            await sender.send(openai.body("m", "say", 7, {}, has_end=False), record)

    asyncio.run(ask())
    return record


def stream(*events: object, end: bytes = b"data: [DONE]\n\n", line: bytes = b"\n") -> bytes:
    lines = [b"data: " + json.dumps(event).encode() + line * 2 for event in events]
    return b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(lines) + end


def text(words: str, count: int | None = None, num_input: int = 3) -> dict[str, object]:
    usage = {"prompt_tokens": num_input, "completion_tokens": count, "total_tokens": 0}
    return {"choices": [{"text": words}]} | ({} if count is None else {"usage": usage})


def last(count: int) -> dict[str, object]:
    return text("", count) | {"choices": []}


@pytest.mark.parametrize(
    ("reply", "counts"),
    [
        (stream(text("a", 1), text("b c", 3), text("", 4), last(4)), [1, 2, 1]),
        (stream(text("a"), text("b"), text(""), last(2)), [1, 1]),  # counted at the end alone
        (stream(text("a"), text("b c"), last(5)), [1, 1, 3]),
        (stream(text("a"), text("b"), text("c"), last(2)), [1, 1, 1]),  # more events than tokens
        (stream(text("a"), text("b")), [1, 1]),  # counted by nobody
        (stream(text("a", 1), last(1), line=b"\r\n", end=b"data: [DONE]\r\n\r\n"), [1]),
        (stream(text("a", 1), end=b": ping\n\nevent: end\ndata: [DONE]\n\n"), [1]),
        (stream(text("a", 1), end=b"data:[DONE]"), [1]),  # without a line's end
        (stream({"choices": [{"text": None}], "usage": None}, text("a", 1)), [1]),
    ],
)
def test_tokens_are_counted_by_usage_or_else_by_events(reply, counts):
    record = answered(reply)
    assert (record.code, record.message) == ("", "")
    assert list(array("i", record.counts)) == counts
    assert len(record.times_ns) == 8 * len(counts)


@pytest.mark.parametrize(
    ("head", "words", "code", "said", "pause_s"),
    [
        ("429 Busy\r\nretry-after-ms: 250", "full", "UNAVAILABLE", "full", 0.25),
        ("503 No\r\nRetry-After: 2", "full", "UNAVAILABLE", "full", 2.0),
        ("503 No\r\nRetry-After: Fri, 27 Nov", "full", "UNAVAILABLE", "full", None),
        ("400 Bad", "top_p is 2", "INVALID_ARGUMENT", "top_p is 2", None),
        ("404 No", "no model x", "NOT_FOUND", "no model x", None),
        ("401 Who", "no key", "HTTP_401", "no key", None),
    ],
)
@pytest.mark.parametrize("form", ["object", "text", "indented", "message"])
def test_refusals_wait_and_errors_fail(head, words, code, said, pause_s, form):
    error = {
        "object": {"error": {"message": words, "code": None}},
        "text": {"error": words},
        "indented": {"error": {"message": words}},
        "message": {"object": "error", "message": words},
    }[form]
    body = json.dumps(error, indent=2 if form == "indented" else None)
    record = answered(f"HTTP/1.1 {head}\r\n\r\n{body}".encode())
    assert record.code == code
    assert said in record.message
    assert record.is_refused == (code == "UNAVAILABLE")
    assert retry_after_s(record.message) == pause_s


@pytest.mark.parametrize(
    ("reply", "code", "is_refused"),
    [
        (stream(text("a", 1), end=b""), "UNAVAILABLE", False),  # cut off
        (stream({"error": {"message": "out", "code": 503}}), "UNAVAILABLE", True),
        (stream({"error": {"message": "x", "type": "rate_limit_error"}}), "UNAVAILABLE", True),
        (stream(text("a", 1), {"error": {"message": "x", "code": 429}}), "UNAVAILABLE", False),
        (stream(text("a", 1), {"error": {"message": "x", "code": 500}}), "INTERNAL", False),
        (stream({"error": "x"}), "INTERNAL", False),
        (b"HTTP/1.1 404 No\r\n\r\n<html>", "UNAVAILABLE", False),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: <html>\n", "HTTP_200", False),
        (b"\x00\x00\x18\x04", "UNAVAILABLE", False),
    ],
)
def test_what_ends_an_answer_early_is_no_answer(reply, code, is_refused):
    record = answered(reply)
    assert (record.code, record.is_refused) == (code, is_refused)
    assert record.message


def test_a_key_is_sent_and_is_in_no_report(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    heard: list[bytes] = []
    found = b'{"data": [{"id": "first"}, {"id": "second"}]}'
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(found), found)

    async def ask() -> str:
        async with answering(reply, heard) as address:
            return await asyncio.to_thread(openai.first_model, address)

    assert asyncio.run(ask()) == "first"
    assert b"Bearer secret" in heard[0]


def test_where_nothing_listens(free_port):
    said = rf"no server answers at 127\.0\.0\.1:{free_port} \(Connection refused\).*OpenAI port"
    with pytest.raises(ContractError, match=said):
        openai.first_model(f"127.0.0.1:{free_port}")
