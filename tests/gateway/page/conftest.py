"""A headless browser, and the page's files on a port of their own."""

import importlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from slipstream_gateway.page import HEADERS, files
from slipstream_serve.server import repository_root


@pytest.fixture(scope="session")
def chromium() -> Iterator[object]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository_root() / "load"))
        browser, devtools = (importlib.import_module(name) for name in ("browser", "devtools"))
    try:
        browser.get()
    except browser.BrowserError as error:
        pytest.skip(f"no browser: {error}")
    with devtools.Chromium() as chromium:
        yield chromium


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
