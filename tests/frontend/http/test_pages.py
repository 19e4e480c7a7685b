"""Static pages: their files, and the headers that keep foreign scripts out and the page out of foreign frames."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tandem.frontend.http.app import RouterApp
from tandem.frontend.http.metrics import FrontendMetrics
from tandem.frontend.http.pages import PAGE_HEADERS, add_page
from tandem.protocol.config import RouterConfig
from tests.support.apps import app_client
from tests.support.keys import api_keys_of

PAGE = b"<!doctype html><title>A page</title><script type=module src=dashboard/main.js></script>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "index.html").write_bytes(PAGE)
    (tmp_path / "main.js").write_text("export {};\n")
    (tmp_path / "style.css").write_text("body { margin: 0 }\n")
    return tmp_path


def client_of(folder: Path) -> httpx.AsyncClient:
    app = RouterApp(RouterConfig(), FrontendMetrics(CollectorRegistry()), api_keys_of({"any": "*"}))
    add_page(app, "/dashboard", folder, "What the page shows.")
    return app_client(app)


@pytest.mark.parametrize(
    ("path", "media_type"),
    [("", "text/html"), ("/index.html", "text/html"), ("/main.js", "text/javascript"), ("/style.css", "text/css")],
)
async def test_its_files_have_their_types_and_the_headers(folder: Path, path: str, media_type: str) -> None:
    async with client_of(folder) as client:
        response = await client.get(f"/dashboard{path}")
        assert response.status_code == 200
        assert response.content == (folder / (path.strip("/") or "index.html")).read_bytes()
        assert response.headers["content-type"] == f"{media_type}; charset=utf-8"
        assert PAGE_HEADERS.items() <= dict(response.headers).items()
        head = await client.head(f"/dashboard{path}")
        assert (head.status_code, head.headers["etag"]) == (200, response.headers["etag"])


def test_the_policy_allows_only_this_server() -> None:
    policy = dict(part.strip().split(" ", 1) for part in PAGE_HEADERS["content-security-policy"].split(";"))
    assert policy == {
        "default-src": "'self'",
        "object-src": "'none'",
        "base-uri": "'none'",
        "form-action": "'self'",
        "frame-ancestors": "'none'",
    }
    assert (PAGE_HEADERS["x-content-type-options"], PAGE_HEADERS["referrer-policy"]) == ("nosniff", "no-referrer")


async def test_an_unchanged_file_is_not_sent_again(folder: Path) -> None:
    async with client_of(folder) as client:
        etag = (await client.get("/dashboard")).headers["etag"]
        response = await client.get("/dashboard", headers={"if-none-match": f'"other", W/{etag}'})
        assert (response.status_code, response.content, response.headers["etag"]) == (304, b"", etag)
        assert PAGE_HEADERS.items() <= dict(response.headers).items()
        assert (await client.get("/dashboard/main.js", headers={"if-none-match": etag})).status_code == 200


@pytest.mark.parametrize(
    "path", ["/missing.js", "/..%2fsecret.txt", "/%2e%2e%2fsecret.txt", "/style.css/", "//main.js"]
)
async def test_nothing_else_is_served(folder: Path, path: str) -> None:
    (folder.parent / "secret.txt").write_text("secret")
    async with client_of(folder) as client:
        response = await client.get(f"/dashboard{path}")
        assert response.status_code in {307, 404}
        assert b"secret\n" not in response.content


async def test_a_slash_at_the_end_leads_to_the_page(folder: Path) -> None:
    async with client_of(folder) as client:
        response = await client.get("/dashboard/")
        assert response.headers["location"] == "../dashboard", "it holds behind a proxy that adds a prefix and TLS"
        response = await client.get("/dashboard/", follow_redirects=True)
        assert (response.status_code, response.content) == (200, PAGE)


def test_a_folder_must_have_an_index_and_types_that_are_known(folder: Path) -> None:
    (folder / "tool.exe").write_bytes(b"MZ")
    with pytest.raises(KeyError, match="exe"):
        client_of(folder)
    (folder / "tool.exe").unlink()
    (folder / "index.html").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no index.html"):
        client_of(folder)
