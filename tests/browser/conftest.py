"""Headless Chromium for tests of the pages. `make test-browser` installs it if it is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.server import REPOSITORY
from tests.support.tiny_llama import save_tiny_text_model

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
PICTURES = REPOSITORY / "bench-results" / "dashboard"  # screenshots to look at


class Windows:
    """Opens pages, and checks at the end that none logged an error or asked another server for anything."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    @contextmanager
    def open(
        self,
        url: str,
        path: str = "/dashboard",
        *,
        width: int = 1440,
        height: int = 900,
        expects_errors: bool = False,
        **options: Any,
    ) -> Iterator[Page]:
        """A page of a server. `expects_errors`: requests fail on purpose, which Chromium logs."""
        context = self._browser.new_context(viewport={"width": width, "height": height}, **options)
        page = context.new_page()
        page.set_default_timeout(20_000)
        complaints: list[str] = []
        urls: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
        page.on("request", lambda request: urls.append(request.url))
        page.goto(f"{url}{path}")
        yield page
        context.close()
        if expects_errors:
            complaints = [text for text in complaints if "Failed to load resource" not in text]
        assert complaints == []
        assert [one for one in urls if not one.startswith(f"{url}/")] == []


@pytest.fixture
def windows() -> Iterator[Windows]:
    """A browser. A new one for each test: playwright keeps an event loop, which async tests must not find running."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    assert path, "there is no Chromium: `make test-browser` installs Debian's"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield Windows(browser)
        browser.close()


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_text_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def pictures() -> Path:
    """The folder of the screenshots."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    print(f"screenshots: {PICTURES}")
    return PICTURES
