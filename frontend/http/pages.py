"""Web pages of the package: static files, served from memory under a strict Content-Security-Policy.

A page holds no data, so it needs no API key. What it shows comes from routes that check one. Its files may use nothing
but files of this server: no inline scripts, styles or event handlers, and no other host.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from tandem.protocol.errors import RequestError

PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    # Browsers ask again at each use, which an ETag makes cheap: a new version of the server shows its page at once.
    "cache-control": "no-cache",
}

_INDEX = "index.html"
_SHARED = Path(__file__).parent / "style"  # files that all pages have
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
}


class PageNotFound(RequestError):
    """A page has no file of this name."""

    status = 404
    code = "page_not_found"


def add_page(app: FastAPI, path: str, folder: Path, summary: str) -> None:
    """Serve `index.html` of a folder at `path`, and the folder's other files below it. `summary` says what is shown.

    Below it are also the files that all pages share: `base.css` and `icon.svg`. Relative links of the page begin with
    the last part of `path`. The files are read now, and never again. Raises `FileNotFoundError` without an
    `index.html`, and `KeyError` for a type of file that pages do not have.
    """
    files = {file.name: _response(file) for file in (*sorted(_SHARED.iterdir()), *sorted(folder.iterdir()))}
    if _INDEX not in files:
        raise FileNotFoundError(f"{folder} has no {_INDEX}")

    def answer(request: Request, name: str) -> Response:
        response = files.get(name)
        if response is None:
            raise PageNotFound(f"{path} has no file '{name[:100]}'.")
        if response.headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers={**PAGE_HEADERS, "etag": response.headers["etag"]})
        return response

    async def show_page(request: Request) -> Response:
        return answer(request, _INDEX)

    async def show_file(request: Request, name: str) -> Response:
        return answer(request, name)

    async def lead_to_page() -> Response:
        # Relative, because behind a proxy scheme and path differ from those that this server knows.
        return Response(status_code=307, headers={**PAGE_HEADERS, "location": f"../{path.rpartition('/')[2]}"})

    # For the reference of all routes.
    show_page.__doc__, show_file.__doc__ = summary, f"A file of the page `{path}`."
    lead_to_page.__doc__ = f"Leads to the page `{path}`."
    app.get(path, include_in_schema=False)(show_page)
    app.get(f"{path}/", include_in_schema=False)(lead_to_page)
    app.get(f"{path}/{{name}}", include_in_schema=False)(show_file)


def _response(file: Path) -> Response:
    content = file.read_bytes()
    etag = f'"{blake2b(content, digest_size=12).hexdigest()}"'
    return Response(content, headers={**PAGE_HEADERS, "etag": etag}, media_type=_TYPES[file.suffix])
