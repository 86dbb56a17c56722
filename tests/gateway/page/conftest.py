"""A headless browser, and the page's files on a port of their own."""

import importlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from slipstream_gateway.page import HEADERS, files
from slipstream_serve.server import repository_root

# Adds fields, which the page has no box for, to what it sends.
ADD_FIELDS = """(fields => {
  const original = fetch;
  window.fetch = (url, options) => original(url, options?.body
    ? {...options, body: JSON.stringify({...JSON.parse(options.body), ...fields})} : options);
})(%s)"""
DONE = "document.querySelector('.turn:last-child') && !document.querySelector('.running')"


@pytest.fixture(scope="session")
def browsers() -> Iterator[list[object]]:
    """Browsers of this run, the last of which runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository_root() / "load"))
        browser, devtools = (importlib.import_module(name) for name in ("browser", "devtools"))
    try:
        browser.get()
    except browser.BrowserError as error:
        pytest.skip(f"no browser: {error}")
    started = [devtools.Chromium()]
    yield started
    for each in started:
        each.close()


@pytest.fixture
def chromium(browsers) -> object:
    """A browser, which may have served other tests: a new one, if it has ended since."""
    if browsers[-1].has_ended:
        browsers.append(type(browsers[-1])())
    return browsers[-1]


@pytest.fixture
def tab(chromium) -> Iterator[object]:
    """A tab that logs no error and breaks no rule of content; refused requests are no fault."""
    with chromium.page() as page:
        yield page
        page.run("0")  # takes the last events
        assert [fault for fault in page.faults if not fault.startswith("network:")] == []


class _Static(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        file = files().get(self.path)
        self.send_response(404 if file is None else 200)
        if file is not None:
            for name, value in {"content-type": file.media_type, **HEADERS}.items():
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if file is None else file.data)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="session")
def static_url() -> Iterator[str]:
    """The URL of a server of the page's files alone."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Static) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class Chat:
    """The page in a tab, and what a person does with it."""

    def __init__(self, tab, url: str) -> None:
        self.tab = tab
        tab.resize(1280, 800)
        tab.open(url)
        tab.wait("document.querySelector('#model').value || document.querySelector('dialog[open]')")

    def start(self, text: str) -> None:
        """Type a message and press Enter."""
        self.tab.run("document.querySelector('#prompt').focus()")
        self.tab.type(text)
        self.tab.press("Enter")

    def send(self, text: str) -> dict:
        """Send a message; returns the body that was sent, once the answer is complete."""
        count = len(self.tab.posts)
        self.start(text)
        self.tab.wait(
            "document.querySelector('.turn:last-child') && !document.querySelector('.running')"
        )
        return self.tab.posts[count] if len(self.tab.posts) > count else {}

    def set(self, **fields: object) -> None:
        """Write into the settings, by the names of the request's fields."""
        for name, value in fields.items():
            self.tab.run(
                f"""(input => {{
                  if (input.type === 'checkbox') input.checked = {json.dumps(value)};
                  else input.value = {json.dumps(str(value))};
                  input.dispatchEvent(new Event('input', {{bubbles: true}}));
                }})(document.querySelector('[data-param="{name}"]'))"""
            )

    def add(self, **fields: object) -> None:
        """Add fields to every body from here on."""
        self.tab.run(ADD_FIELDS % json.dumps(fields))

    def texts(self, selector: str) -> list[str]:
        """Return the text of each element that a selector finds."""
        where = json.dumps(selector)
        return self.tab.run(f"[...document.querySelectorAll({where})].map(one => one.textContent)")

    def text(self, selector: str) -> str:
        [text] = self.texts(selector)
        return text

    def count(self, selector: str) -> int:
        return len(self.texts(selector))


@pytest.fixture
def chat(tab, gateway) -> Chat:
    """The page of the real gateway."""
    return Chat(tab, f"{gateway.url}/")


@pytest.fixture
def long_chat(tab, long_gateway) -> Chat:
    """The page of a gateway whose streams last until something ends them."""
    return Chat(tab, f"{long_gateway.url}/")


@pytest.fixture(scope="session")
def open_chat() -> type[Chat]:
    """What opens the page of another gateway in a tab."""
    return Chat
