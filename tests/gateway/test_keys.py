"""Keys, origins, ids of requests: what stands before every endpoint."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.gateway.served import Gateway, serving
from slipstream_gateway.keys import Keys

ORIGIN = "https://example.com"


@pytest.fixture(scope="module")
def locked(gateway_repository: Path, tmp_path_factory) -> Iterator[Gateway]:
    """A gateway with two keys and one origin. It needs no engine to refuse."""
    folder = tmp_path_factory.mktemp("locked")
    (folder / "keys").write_text("# ours\nfirst\n\n  second  \n")
    options = ("--api-key-file", str(folder / "keys"), "--allowed-origin", ORIGIN)
    with serving(gateway_repository, folder / "log", *options, waits=False) as gateway:
        yield gateway


@pytest.mark.parametrize(
    ("headers", "is_open"),
    [
        ({}, False),
        ({"authorization": "Bearer first"}, True),
        ({"authorization": "bearer second"}, True),
        ({"x-api-key": "second"}, True),
        ({"authorization": "Bearer "}, False),
        ({"authorization": "Bearer firs"}, False),
        ({"authorization": "Bearer # ours"}, False),
        ({"authorization": "first"}, False),
        ({"authorization": "Basic first"}, False),
        ({"x-api-key": ""}, False),
    ],
)
def test_a_key_opens_everything_but_what_is_open(
    locked: Gateway, headers: dict[str, str], is_open: bool
):
    for path in ("/v1/models", "/metrics", "/version"):
        found = locked.get(path, headers)
        up = (200, 503) if path == "/v1/models" else (200,)  # the engine may not be up yet
        assert found.status in (up if is_open else (401,))
        if not is_open:
            assert found.error["code"] == "invalid_api_key"
    posted = locked.post("/v1/completions", {}, headers)
    assert (posted.status == 401) == (not is_open)
    anthropic = locked.post("/v1/messages", {}, headers)
    assert (anthropic.status == 401) == (not is_open)
    assert anthropic.json["type"] == "error"
    assert locked.get("/ping", headers).status == 200
    assert locked.get("/health", headers).status in (200, 503)
    assert locked.get("/", headers).status == 200


def test_preflights_need_no_key_and_name_the_allowed_origin_alone(locked: Gateway):
    asked = {"access-control-request-method": "POST", "origin": ORIGIN}
    found = locked.request("OPTIONS", "/v1/chat/completions", None, asked)
    assert found.status == 204
    assert found.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in found.headers["access-control-allow-headers"]
    own = {**asked, "access-control-request-headers": "authorization,x-stainless-os"}
    of_sdk = locked.request("OPTIONS", "/v1/chat/completions", None, own).headers
    assert of_sdk["access-control-allow-headers"] == "authorization,x-stainless-os"
    other = locked.request("OPTIONS", "/v1/models", None, {**asked, "origin": "https://evil"})
    assert "access-control-allow-origin" not in other.headers
    key = {"x-api-key": "first"}
    shown = locked.get("/v1/models", {**key, "origin": ORIGIN}).headers
    assert (shown["access-control-allow-origin"], shown["vary"]) == (ORIGIN, "origin")
    assert "access-control-allow-origin" not in locked.get("/v1/models", key).headers


def test_request_ids_come_back(locked: Gateway):
    assert locked.get("/ping", {"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    own = locked.get("/ping", {"x-request-id": "a b"}).headers["x-request-id"]
    assert own != "a b"
    assert len(own) == 32
    assert locked.get("/ping").headers["x-request-id"] != own


def test_a_file_without_a_key_opens_nothing(tmp_path: Path):
    (tmp_path / "keys").write_text("# none\n\n")
    with pytest.raises(ValueError, match="holds no key"):
        Keys.load(tmp_path / "keys")
