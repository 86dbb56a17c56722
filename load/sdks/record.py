"""Record what tools send: `record.py URL FILE -- TOOL COMMAND ...`; `{url}` is then the proxy's.

Forwards requests to the server at URL while COMMAND runs, and keeps in FILE one request of each
form (tool, path and names of fields): the shortest, and the status that it got.
"""

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

KEPT = ("accept", "accept-encoding", "content-type", "anthropic-version", "anthropic-beta")
SECRET = ("authorization", "x-api-key")
STATUSES = (200, 400, 404)  # others depend on keys, on load and on time
MAX_BYTES = 4096
Form = tuple[str, str, int, tuple[str, ...]]


class Recorder:
    """A proxy that keeps requests of one tool."""

    def __init__(self, upstream: str, tool: str) -> None:
        """Listen on a free port."""
        self.found: dict[Form, dict[str, Any]] = {}
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._forward(None)

            def do_POST(self) -> None:
                self._forward(self.rfile.read(int(self.headers["content-length"] or 0)))

            def _forward(self, body: bytes | None) -> None:
                names = (*KEPT, *SECRET)
                headers = {k.lower(): v for k, v in self.headers.items() if k.lower() in names}
                plain = {k: v for k, v in headers.items() if k != "accept-encoding"}
                request = urllib.request.Request(upstream + self.path, body, plain)
                try:
                    with urllib.request.urlopen(request) as answer:
                        status, fields, data = answer.status, answer.headers, answer.read()
                except urllib.error.HTTPError as error:
                    status, fields, data = error.code, error.headers, error.read()
                recorder.keep(tool, self.path, status, headers, body)
                self.send_response(status)
                self.send_header("content-type", fields["content-type"] or "text/plain")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_request(self, *args: object) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def keep(
        self, tool: str, path: str, status: int, headers: dict[str, str], body: bytes | None
    ) -> None:
        """Keep a request if it is the shortest of its form."""
        if body is None or status not in STATUSES or len(body) > MAX_BYTES or path == "/load":
            return
        value = json.loads(body)
        form = (tool, path, status, tuple(sorted(value)))
        row = {
            "tool": tool,
            "path": path,
            "status": status,
            "headers": {name: text for name, text in headers.items() if name in KEPT},
            "body": value,
        }
        if form not in self.found or len(str(row)) < len(str(self.found[form])):
            self.found[form] = row


def main() -> int:
    """Record, and add what was found to the file."""
    upstream, file, mark, tool, *command = sys.argv[1:]
    assert mark == "--", __doc__
    recorder = Recorder(upstream, tool)
    status = subprocess.run([each.replace("{url}", recorder.url) for each in command], check=False)
    path = Path(file)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    rows = [row for row in rows if row["tool"] != tool]
    rows += list(recorder.found.values())
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(recorder.found)} forms of requests")
    return status.returncode


if __name__ == "__main__":
    raise SystemExit(main())
