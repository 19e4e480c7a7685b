"""Adds the dashboard to an app: the page, and the stream of snapshots that it reads."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.frontend.dashboard.feed import SnapshotFeed
from tandem.frontend.dashboard.history import LongHistory
from tandem.frontend.dashboard.snapshot import SnapshotBuilder
from tandem.frontend.http.app import RouterApp, is_head, json_response
from tandem.frontend.http.authentication import check_operator
from tandem.frontend.http.disconnect import cancel_on_disconnect
from tandem.frontend.http.errors import ClientDisconnected
from tandem.frontend.http.pages import PAGE_HEADERS, add_page
from tandem.frontend.http.request_options import key_of
from tandem.frontend.keys.api_keys import ApiKeys

_FOLDER = Path(__file__).parent / "static"
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no", "x-content-type-options": "nosniff"}


def add_dashboard(
    app: RouterApp,
    *,
    overview: Callable[[], Awaitable[dict[str, Any]]],
    traffic: Callable[[], Iterable[Metric]],
    api_keys: ApiKeys,
) -> None:
    """Add the page and its stream. `overview` and `traffic` are as for `SnapshotBuilder`."""
    builder = SnapshotBuilder(overview, traffic, app.version)
    feed = SnapshotFeed(builder.build)
    history = LongHistory(overview, traffic)
    app.run_along("the dashboard's last minute", builder.run)
    app.run_along("the dashboard's history", history.run)
    app.on_drain(feed.close)
    add_page(app, "/dashboard", _FOLDER, "The dashboard: a page that shows the system live, for operators.")

    @app.get("/", include_in_schema=False)
    async def lead_to_dashboard() -> Response:
        """Leads a browser that was given only the server's address to the dashboard."""
        return Response(status_code=307, headers={**PAGE_HEADERS, "location": "dashboard"})

    @app.get("/v1/dashboard")
    async def stream_snapshots(request: Request) -> Response:
        """What the dashboard shows, once a second, as server-sent events. Needs an operator's key."""
        check_operator(request)
        return _SnapshotStream(feed, _may_watch(request, api_keys))

    @app.get("/v1/dashboard/history")
    async def show_history(request: Request) -> Response:
        """The traffic of the last hour, a point each 15 s, as the dashboard draws it. Needs an operator's key."""
        check_operator(request)
        return json_response(history.to_json())


class _SnapshotStream(Response):
    """Sends events until the viewer leaves, the server stops, or the viewer's key ends."""

    media_type = "text/event-stream"

    def __init__(self, feed: SnapshotFeed, may_watch: Callable[[], bool]) -> None:
        self._feed = feed
        self._may_watch = may_watch
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, as an ASGI app."""
        if is_head(scope):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        with self._feed.viewing() as events:
            try:
                async with cancel_on_disconnect(receive), aclosing(events):
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    async for event in events:
                        if not self._may_watch():
                            break
                        await send({"type": "http.response.body", "body": event, "more_body": True})
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            except (ClientDisconnected, OSError):
                pass  # nobody is left to be told


def _may_watch(request: Request, api_keys: ApiKeys) -> Callable[[], bool]:
    """Whether the key with which a stream was opened is still valid: it may be revoked while the stream lasts."""
    opened_with = key_of(request)

    def may_watch() -> bool:
        if opened_with is None:  # the server needs no keys
            return True
        key = api_keys.get(opened_with.id)
        return key is not None and key.sha256 == opened_with.sha256 and key.state(time.time()) == "active"

    return may_watch
