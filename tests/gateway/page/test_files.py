"""The page's files: served by these paths, small, and nothing in them that the policy forbids."""

import hashlib
import re
from pathlib import Path

import pytest
import slipstream_gateway.page
from slipstream_gateway.page import HEADERS, files

FOLDER = Path(slipstream_gateway.page.__file__).parent
OWN = sorted(path for path in FOLDER.iterdir() if path.suffix in (".html", ".css", ".js"))
VENDORED = FOLDER / "vendor" / "streaming-markdown"
MAX_LINES, MAX_BYTES = 450, 56 * 1024
# What makes elements of text, or runs it. The policy stops most of it; here is none of it.
UNSAFE = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|setHTML|srcdoc"
    r"|\beval\b|new Function|javascript:|createContextualFragment"
)


def test_the_page_is_at_the_root_and_all_it_loads_beside_it() -> None:
    found = files()
    page = found["/"].data.decode()
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert {"page/main.js", "page/layout.css", "page/answer.css"} <= set(loaded)
    modules = {name: file.data.decode() for name, file in found.items() if name.endswith(".js")}
    for name, text in modules.items():
        folder = name.rpartition("/")[0]
        loaded += [f"{folder}/{one}"[1:] for one in re.findall(r'from "\./([^"]+)"', text)]
    assert len(loaded) > 10
    for name in loaded:
        assert f"/{name}" in found, name


def test_only_its_own_files_may_load() -> None:
    policy = HEADERS["content-security-policy"].split("; ")
    assert policy[0] == "default-src 'self'"
    assert "unsafe" not in HEADERS["content-security-policy"]
    assert "http" not in HEADERS["content-security-policy"]


def test_the_gateway_serves_every_file_with_the_policy(gateway) -> None:
    for path, file in files().items():
        response = gateway.get(path)
        assert (response.status, response.data) == (200, file.data), path
        assert response.headers["content-type"] == file.media_type
        assert HEADERS.items() <= response.headers.items()
    assert gateway.get("/page/../server.py").status == 404
    assert gateway.get("/page/__init__.py").status == 404


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_nothing_makes_elements_of_text(path: Path) -> None:
    text = path.read_text()
    assert not UNSAFE.search(text)
    if path.suffix == ".html":
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)
    if path.suffix in (".html", ".css"):
        assert not re.search(r"(src|href)=\"(https?:)?//|@import|url\(", text)


def test_it_is_small() -> None:
    for path in OWN:
        assert len(path.read_text().splitlines()) <= MAX_LINES, path
    assert sum(path.stat().st_size for path in OWN) <= MAX_BYTES


def test_the_library_is_as_published_and_has_its_licence() -> None:
    digest = hashlib.sha256((VENDORED / "smd.min.js").read_bytes()).hexdigest()
    assert digest in (FOLDER / "vendor" / "README.md").read_text()
    assert (VENDORED / "license").read_text().startswith("MIT License")
