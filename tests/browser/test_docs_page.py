"""The page `/docs` in headless Chromium: the document is shown, filtered and tried out."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import expect
from prometheus_client import CollectorRegistry

from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.serve_app import create_app
from tandem.protocol.config import RouterConfig
from tandem.text.tokenizer import Tokenizer
from tests.browser.conftest import Windows
from tests.support.fake_backend import FakeBackend
from tests.support.keys import api_keys_of
from tests.support.toy_tokenizer import build_tokenizer

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300)]


@contextmanager
def docs_server(folder: Path, api_keys: ApiKeys) -> Iterator[str]:
    tokenizer = Tokenizer(build_tokenizer(folder))
    backend: Any = FakeBackend(tokenizer)
    app = create_app(backend, tokenizer, RouterConfig(), CollectorRegistry(), api_keys=api_keys)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


def test_routes_are_shown_filtered_and_tried_out(windows: Windows, tmp_path: Path) -> None:
    keys = api_keys_of({})
    with docs_server(tmp_path, keys) as url, windows.open(url, "/docs", expects_errors=True) as page:
        chat = page.locator("#post_v1_chat_completions")
        expect(page.locator("h2").first).to_have_text("generation")
        chat.locator("summary").first.click()
        expect(chat.get_by_text("Body of POST /v1/chat/completions.")).to_be_visible()
        chat.locator("summary", has_text="ChatMessage").first.click()
        expect(chat.get_by_text("One turn of a conversation.")).to_be_visible()
        send, status, output = chat.get_by_role("button", name="Send"), chat.get_by_role("status"), chat.locator("pre")
        send.click()
        expect(status).to_have_text("200 OK")
        expect(output).to_contain_text("hello world")
        chat.locator("textarea").fill('{"messages": [{"role": "user", "content": "hi"}], "stream": true}')
        send.click()
        expect(output).to_contain_text("data: [DONE]")
        chat.locator("textarea").fill('{"messages": []}')
        send.click()
        expect(status).to_have_text("400 Bad Request")
        page.get_by_label("Filter routes").fill("tokenize")
        expect(page.locator(".route:visible")).to_have_count(2)


def test_a_server_with_keys_shows_its_document_to_those_who_have_one(windows: Windows, tmp_path: Path) -> None:
    keys = api_keys_of({"sk-a": "a"})
    with docs_server(tmp_path, keys) as url, windows.open(url, "/docs", expects_errors=True) as page:
        expect(page.get_by_role("alert")).to_contain_text("The API key is missing or wrong")
        page.get_by_label("API key").fill("sk-a")
        page.get_by_role("button", name="Use").click()
        expect(page.get_by_role("alert")).to_be_hidden()
        models = page.locator("#get_v1_models")
        models.locator("summary").first.click()
        models.get_by_role("button", name="Send").click()
        expect(models.locator("pre")).to_contain_text("org/toy")
