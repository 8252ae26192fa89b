"""The page's static files, read once and sent with an ETag."""

import hashlib
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.http.errors import rejection

INDEX = "index.html"

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_HEADERS = {
    "cache-control": "no-cache",  # revalidate every time: the response is a 304 until octavo is updated
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; media-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@dataclass(frozen=True)
class Asset:
    """One static file."""

    body: bytes
    media_type: str
    etag: str

    def answer(self, request: Request) -> Response:
        """Return the file, or a 304 if the browser has it."""
        headers = _HEADERS | {"etag": self.etag}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(self.body, headers=headers, media_type=self.media_type)


@cache
def assets() -> dict[str, Asset]:
    """Return all static files by name."""
    found = {}
    for file in files("octavo.frontend.dashboard").joinpath("static").iterdir():
        media_type = _MEDIA_TYPES.get("." + file.name.rpartition(".")[2])
        if media_type is not None:
            body = file.read_bytes()
            found[file.name] = Asset(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return found


async def index(request: Request) -> Response:
    """Return the page."""
    return assets()[INDEX].answer(request)


async def asset(request: Request) -> Response:
    """Return one static file."""
    name = request.path_params["name"]
    if (found := assets().get(name)) is None:
        return rejection(HTTPStatus.NOT_FOUND, f"the page has no file {name!r}")
    return found.answer(request)
