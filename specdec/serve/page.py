"""The page at /: a chat with the model, and what it costs. Plain files, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

_FOLDER = Path(__file__).parent / "page"
_FILES = {
    "/": ("index.html", "text/html"),
    "/page/style.css": ("style.css", "text/css"),
    "/page/script.js": ("script.js", "text/javascript"),
}
_HEADERS = {
    # Nothing but these three files and this server; a text that looks like HTML stays text.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
        "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    for path, (name, media_type) in _FILES.items():
        content = (_FOLDER / name).read_bytes()
        app.add_api_route(path, _giving(content, media_type), include_in_schema=False)


def _giving(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def give() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return give
