"""The apps of both commands, without anything behind them, for tests that read their routes; a client of any app."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from tandem.frontend.http.app import RouterApp
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.relay.connections import EngineConnections
from tandem.frontend.route_app import create_engines_app
from tandem.frontend.serve_app import create_app
from tandem.protocol.config import ExternalEnginesConfig, RouterConfig


def _no_ids(text: str, *, add_special_tokens: bool) -> list[int]:
    return []


def serve_app() -> RouterApp:
    """The app of `tandem serve`, without backend and tokenizer: only its routes are read."""
    backend, tokenizer = (
        SimpleNamespace(decisions=None, pools=None, overview=None),
        SimpleNamespace(start_id=0, chat_template="", response_template=None, to_json=None, encode=_no_ids),
    )
    return create_app(cast(Any, backend), cast(Any, tokenizer), RouterConfig(), CollectorRegistry(), api_keys=ApiKeys())


def route_app() -> RouterApp:
    """The app of `tandem route`, without dispatcher and engines."""
    dispatcher = SimpleNamespace(decisions=None, pools=None, overview=None, max_model_len=None, capabilities=None)
    return create_engines_app(
        cast(Any, dispatcher),
        EngineConnections(ExternalEnginesConfig()),
        {},
        CollectorRegistry(),
        config=RouterConfig(),
        engines_config=ExternalEnginesConfig(),
        scrape=cast(Any, None),
        api_keys=ApiKeys(),
    )


def app_client(app: FastAPI) -> httpx.AsyncClient:
    """A client that calls the app without a network."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
