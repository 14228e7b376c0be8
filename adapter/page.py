"""The page at `/`: files of the package, under headers that let them do little.

All of its addresses are relative, so that it also works below a proxy's prefix.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}

# The one inline style sheet that may be: wavesurfer writes it into the waveform's shadow root, the
# same text each time, since waveform.js gives a height of 112 pixels.
_WAVEFORM_STYLE = "'sha256-4hGoO+X6KXe8Gw08N/aBKwvHEYryxn/8CNSB0dTq+m0='"

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": f"'self' {_WAVEFORM_STYLE}",
    "img-src": "'self' blob:",
    "media-src": "'self' blob:",
    "connect-src": "'self' blob:",
    "frame-ancestors": "'none'",
    "base-uri": "'none'",
    "form-action": "'none'",
}
_HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    content_type: str
    etag: str


def add_page(app: FastAPI) -> None:
    """Add GET and HEAD of `/` and `/static/{path}`, which the OpenAPI document leaves out."""
    found = dict(_read_folder(files("adapter").joinpath("page")))
    index = found.pop("index.html")

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return _response(index, request)

    @app.head("/static/{path:path}", include_in_schema=False)
    @app.get("/static/{path:path}", include_in_schema=False)
    async def static(request: Request, path: str) -> Response:
        if path not in found:
            raise HTTPException(404)
        return _response(found[path], request)


def _read_folder(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, PageFile]]:
    """The folder's files and their paths in it."""
    for entry in folder.iterdir():
        name = prefix + entry.name
        if entry.is_dir():
            yield from _read_folder(entry, f"{name}/")
        else:
            yield name, _read_file(entry)


def _read_file(file: Traversable) -> PageFile:
    content = file.read_bytes()
    suffix = "." + file.name.rpartition(".")[2]
    content_type = _CONTENT_TYPES.get(suffix, "application/octet-stream")
    return PageFile(content, content_type, f'"{hashlib.sha256(content).hexdigest()}"')


def _response(file: PageFile, request: Request) -> Response:
    headers = _HEADERS | {"ETag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers | {"Content-Type": file.content_type})
