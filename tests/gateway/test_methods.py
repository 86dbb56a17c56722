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
