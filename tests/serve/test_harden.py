"""`harden` changes a binary once, and only one that it knows. sixty.py asks the changed server."""

from pathlib import Path

import pytest
from slipstream_serve.server import server_directory
from slipstream_serve.workarounds.triton_24_10 import harden

BINARY = server_directory() / "bin" / "tritonserver"


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """The installed tritonserver as it was before it was changed."""
    if not BINARY.is_file():
        pytest.skip("no tritonserver: make install")
    data = bytearray(BINARY.read_bytes())
    _, changed = harden._dynamic_symbols(bytes(data))[b"deflate"]
    ((_, _, names),) = harden._symbol_tables(bytes(data))
    inflate = data.index(b"\0inflate\0", names) + 1 - names
    data[changed : changed + 4] = inflate.to_bytes(4, "little")
    begin, end = harden._PARSE_VALUE, harden._PARSE_VALUE + len(harden._PUSHES)
    data[begin:end] = harden._PUSHES
    data[harden._UNUSED : harden._UNUSED + 64] = bytes(64)
    for said, instead in harden._REFUSALS.items():
        data = data.replace(instead, said)
    data = data.replace(harden._TOO_DEEP, harden._TERMINATED)
    path = tmp_path / "tritonserver"
    path.write_bytes(data)
    path.chmod(0o755)
    return path


def test_a_server_is_changed_once(original: Path) -> None:
    before = original.read_bytes()
    assert not harden.refuses_compression(before)
    assert harden.harden(original) == []
    changed = original.read_bytes()
    assert changed == BINARY.read_bytes()
    assert harden.refuses_compression(changed)
    assert len(changed) == len(before)
    assert sum(a != b for a, b in zip(before, changed, strict=True)) < 250
    assert harden.harden(original) == []
    assert original.read_bytes() == changed
    assert original.stat().st_mode & 0o777 == 0o755


def test_another_build_is_reported_and_its_code_left_alone(original: Path) -> None:
    other = original.read_bytes().replace(harden._BUILD, bytes(20))
    original.write_bytes(other)
    (failure,) = harden.harden(original)
    assert failure.endswith(
        "JSON may be nested as deeply as its parser has stack for: its build is not known"
    )
    begin = harden._PARSE_VALUE
    assert original.read_bytes()[begin : begin + 6] == harden._PUSHES
    assert harden.refuses_compression(original.read_bytes())


@pytest.mark.parametrize("place", [harden._PARSE_VALUE + 1, harden._UNUSED + 5])
def test_code_that_is_not_known_is_left_alone(original: Path, place: int) -> None:
    data = bytearray(original.read_bytes())
    data[place] ^= 1
    with pytest.raises(harden.HardenError, match="its code is not known"):
        harden.bound_nesting(bytes(data))


@pytest.mark.parametrize("data", [b"", b"#!/bin/sh\n", Path("/bin/sh").read_bytes()])
def test_what_is_no_tritonserver_is_left_alone(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "tritonserver"
    path.write_bytes(data)
    assert len(harden.harden(path)) == 2
    assert path.read_bytes() == data


def test_texts_keep_their_length() -> None:
    """Pointers and lengths in the code are not changed."""
    texts = harden._REFUSALS | {harden._TERMINATED: harden._TOO_DEEP}
    assert all(len(said) == len(instead) for said, instead in texts.items())
