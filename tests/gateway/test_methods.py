"""Methods that an endpoint does not have: the answer says which it has, as RFC 9110 demands."""

import json

import pytest
from slipstream_gateway import openapi


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", {"POST"}),
        ("TRACE", "/v1/messages", {"POST"}),
        ("DELETE", "/tokenize", {"POST"}),
        ("TRACE", "/health", {"GET", "HEAD"}),
        ("OPTIONS", "/ping", {"GET", "HEAD", "POST"}),
    ],
)
def test_a_refused_method_comes_with_the_allowed_ones(gateway, method, path, allowed):
    found = gateway.request(method, path)
    assert found.status == 405
    assert {each.strip() for each in found.headers["allow"].split(",")} == allowed


def test_probes_are_described_without_a_body(gateway):
    document = json.loads(openapi.FILE.read_bytes())
    for path in ("/health", "/ready", "/ping"):
        assert gateway.get(path).data == b""
        assert "content" not in document["paths"][path]["get"]["responses"]["200"]
    assert gateway.post("/ping", {}).status == 200
    assert "post" in document["paths"]["/ping"]


def test_what_open_responses_has_beyond_is_refused_by_name(gateway):
    """docs/responses.md lists the cases of its suite."""
    offer = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    socket = gateway.request("GET", "/v1/responses", None, offer)
    assert (socket.status, socket.headers["allow"]) == (405, "POST")
    compact = gateway.post("/v1/responses/compact", {"model": "a", "input": "a"})
    assert compact.status == 404
    assert compact.error["message"] == "/v1/responses/compact is not served"
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:"}]
    image = gateway.post(
        "/v1/responses", {"model": "ensemble", "input": [{"role": "user", "content": parts}]}
    )
    assert (image.status, image.error["param"]) == (400, "input[0].content[1].type")
