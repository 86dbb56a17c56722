"""Hold the chat page: static files, and the headers that they are served with."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; object-src 'none'",
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_FOLDER = Path(__file__).parent
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class File(NamedTuple):
    """A file of the page."""

    media_type: str
    data: bytes


@cache
def files() -> dict[str, File]:
    """Return the files by the path of their URL: `/` is the page, `/page/NAME` what it loads."""
    found = {
        f"/page/{path.relative_to(_FOLDER).as_posix()}": File(
            _MEDIA_TYPES[path.suffix], path.read_bytes()
        )
        for path in sorted(_FOLDER.rglob("*"))
        if path.suffix in _MEDIA_TYPES
    }
    return {"/": found.pop("/page/index.html"), **found}


def routes() -> list[Route]:
    """Return the routes of all files."""
    return [Route(path, _show, methods=["GET"]) for path in files()]


async def _show(request: Request) -> Response:
    file = files()[request.url.path]
    return Response(file.data, headers=HEADERS, media_type=file.media_type)
