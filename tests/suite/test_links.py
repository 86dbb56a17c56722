"""Documents point at what exists: relative links, their anchors, and paths and targets in code."""

import re
import subprocess
from functools import cache
from itertools import chain, takewhile
from pathlib import Path

import pytest
from slipstream_serve.server import repository_root

ROOT = repository_root()
TOP = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "LOG.md")
PAGES = [*TOP, *(page.relative_to(ROOT).as_posix() for page in sorted(ROOT.glob("docs/**/*.md")))]
# The log tells what was: files that it names may have moved since.
OF_TODAY = [page for page in PAGES if page != "LOG.md" and not page.startswith("docs/log/")]

PICTURE = re.compile(r"""!\[[^\]]*\]\(([^()\s]+)\)|src(?:set)?="([^"]+)\"""")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^()\s]+)\)")
MAKE = re.compile(r"(?:^|\s)make ([a-z][a-z-]*)\b")
SPAN = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.*-]+(/[\w.*-]+)*/?")
WRITTEN = "benchmarks/out/"  # where runs write; git ignores it
SUFFIXES = (".py", ".cu", ".cuh", ".md", ".toml", ".yml", ".sh", ".pbtxt", ".txt")


@cache
def tracked() -> frozenset[str]:
    """Return every file and folder of the repository, in POSIX form."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = [Path(name) for name in listed.stdout.splitlines()]
    return frozenset(one.as_posix() for file in files for one in (file, *file.parents))


def prose(page: Path) -> list[str]:
    """Return the lines of a page, those of fenced code blocks empty."""
    lines, is_code = [], False
    for line in page.read_text().splitlines():
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        lines.append("" if is_code or is_fence else line)
    return lines


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    found: list[str] = []
    for line in prose(page):
        if heading := re.fullmatch(r"#+ +(.*)", line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            count = len(list(takewhile(lambda n, a=anchor: _numbered(a, n) in found, range(99))))
            found.append(_numbered(anchor, count))
    return frozenset(found)


def _numbered(anchor: str, count: int) -> str:
    return f"{anchor}-{count}" if count else anchor


def code(page: Path) -> list[str]:
    """Return what a page shows as code: texts in backticks, and lines of blocks."""
    plain = prose(page)
    lines = page.read_text().splitlines()
    blocks = [line for line, text in zip(lines, plain, strict=True) if line != text]
    indented = [line for line in plain if line.startswith("    ")]
    return [*blocks, *indented, *chain.from_iterable(SPAN.findall(line) for line in plain)]


def links(page: str) -> list[str]:
    """Return the targets of a page's links and pictures that are no URLs."""
    lines = prose(ROOT / page)
    found = chain.from_iterable(LINK.findall(line) for line in lines)
    shown = chain.from_iterable(pair for line in lines for pair in PICTURE.findall(line))
    return [target for target in (*found, *filter(None, shown)) if ":" not in target]


def broken(page: str, target: str) -> bool:
    """Return whether a link of a page leads nowhere."""
    name, _, anchor = target.partition("#")
    file = (ROOT / page).parent / name if name else ROOT / page
    file = file.resolve()
    if not file.is_relative_to(ROOT) or file.relative_to(ROOT).as_posix() not in tracked():
        return True
    return bool(anchor) and anchor not in anchors(file)


def looks_like_a_path(span: str) -> bool:
    """Return whether a text in backticks reads as a path of the repository from its root."""
    tops = {name.partition("/")[0] for name in tracked()} - {"."}
    return (
        "/" in span
        and PATH.fullmatch(span) is not None
        and not span.startswith(WRITTEN)
        and (span.partition("/")[0] in tops or span.endswith(SUFFIXES))
    )


def exists(span: str) -> bool:
    """Return whether a path, from the root or any folder, is in the repository; `*` is any name."""
    pattern = re.escape(span.rstrip("/")).replace(r"\*", "[^/]*")
    return any(re.search(rf"(^|/){pattern}$", name) for name in tracked())


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert [target for target in links(page) if broken(page, target)] == []


@pytest.mark.parametrize("page", OF_TODAY)
def test_paths_in_code_exist(page: str) -> None:
    words = {word for text in code(ROOT / page) for word in text.split()}
    assert sorted(w for w in words if looks_like_a_path(w) and not exists(w)) == []


@pytest.mark.parametrize("page", OF_TODAY)
def test_targets_of_make_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for text in code(ROOT / page) for name in MAKE.findall(text)}
    assert named - targets == set()


def test_a_bad_link_anchor_or_path_is_found() -> None:
    assert broken("README.md", "docs/no_such_page.md")
    assert broken("README.md", "../outside.md")
    assert broken("README.md", "docs/clients.md#no-such-heading")
    assert not broken("docs/clients.md", "cache.md")
    assert not broken("docs/clients.md", "#load")
    assert looks_like_a_path("tests/no_such_test.py")
    assert not exists("tests/no_such_test.py")
    assert exists("core/batch.py")
    assert not looks_like_a_path("application/json")
