"""The HTTP client of commands that talk to a server, and its errors as the user sees them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import httpx

from tandem.cli.options import no_server
from tandem.protocol.errors import ConfigError, ServingError

_CONNECT_TIMEOUT_S = 5.0


@contextlib.contextmanager
def server_client(
    url: str, api_key: str, *, read_timeout_s: float, lost_error: type[ServingError]
) -> Iterator[httpx.Client]:
    """A client of the server at `url`, with or without /v1.

    HTTP errors in the block become `ConfigError` if the URL is wrong or nobody listens there, otherwise `lost_error`.
    """
    base_url = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(read_timeout_s, connect=_CONNECT_TIMEOUT_S)
    try:
        with httpx.Client(base_url=base_url, headers=headers, timeout=timeout) as client:
            yield client
    except httpx.ConnectError as exc:
        raise no_server(base_url, exc, "start one with: tandem serve") from exc
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as exc:  # the last for a host that is not a name
        raise ConfigError(f"url={url!r} is not of the form http://host:port ({exc})") from exc
    except httpx.HTTPError as exc:
        raise lost_error(f"lost the server at url={base_url}: {exc or type(exc).__name__}") from exc


def error_message(status: int, body: bytes) -> str:
    """The message of an error answer, in OpenAI's form or another."""
    try:
        return f"{json.loads(body)['error']['message']} (HTTP {status})"
    except (ValueError, LookupError, TypeError):
        return f"HTTP {status}: {body[:200].decode(errors='replace')}"
