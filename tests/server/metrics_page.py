"""What the server's metrics endpoint says, as numbers."""

import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

PERIOD_S = 1.0  # in which each process tells what it has counted
_COUNTS = tuple(
    f"slipstream_{what}_total"
    for what in ("requests", "responses", "refusals", "finished_sequences", "cancels")
)

Key = tuple[str, frozenset[tuple[str, str]]]


class Page:
    """One scrape."""

    def __init__(self, url: str) -> None:
        with urllib.request.urlopen(url, timeout=10) as reply:
            self.text = reply.read().decode()
        self._values: dict[Key, float] = {}
        for line in self.text.splitlines():
            if not line.startswith("#"):
                name, labels, value = _SAMPLE.match(line).groups()
                key = (name, frozenset(_LABEL.findall(labels or "")))
                assert key not in self._values, f"twice: {line}"
                self._values[key] = float(value)

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self._values}

    def labels(self, name: str) -> list[dict[str, str]]:
        """Of every metric of that name."""
        return [dict(labels) for found, labels in self._values if found == name]

    def get(self, name: str, **labels: str) -> float:
        """The sum of all metrics of that name that have these labels; KeyError for none."""
        wanted = frozenset(labels.items())
        found = [
            value for (other, has), value in self._values.items() if other == name and wanted <= has
        ]
        if not found:
            raise KeyError(f"{name}{labels}")
        return sum(found)


def wait_for(url: str, is_so: Callable[[Page], bool], timeout_s: float = 60.0) -> Page:
    """The first page of which it is so; fails after a while.

    A server that begins opens this port last, after it has said that it is ready.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            page = Page(url)
        except urllib.error.URLError:
            if time.monotonic() > deadline:
                raise
        else:
            if is_so(page):
                return page
            assert time.monotonic() < deadline, page.text
        time.sleep(0.2)


def settled(url: str, is_so: Callable[[Page], bool] = lambda page: True) -> Page:
    """The first page of which it is so and whose counts have stood still for a while.

    Processes tell theirs at different moments: one page may hold half of what has happened.
    """
    deadline = time.monotonic() + 120.0
    page, since = wait_for(url, is_so), time.monotonic()
    while time.monotonic() < since + 3 * PERIOD_S:
        assert time.monotonic() < deadline, page.text
        time.sleep(0.2)
        before, page = page, Page(url)
        if not is_so(page) or any(page.get(name) != before.get(name) for name in _COUNTS):
            since = time.monotonic()
    return page
