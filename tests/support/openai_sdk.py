"""OpenAI's client before the app of a scripted backend."""

from __future__ import annotations

from typing import Any

import httpx
import openai

from tests.support.fake_backend import FakeBackend, make_app


def openai_sdk(backend: FakeBackend, **config: Any) -> openai.AsyncOpenAI:
    http_client = httpx.AsyncClient(transport=httpx.ASGITransport(make_app(backend, **config)))
    return openai.AsyncOpenAI(api_key="any", base_url="http://localhost/v1", http_client=http_client, max_retries=0)
