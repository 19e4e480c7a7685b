"""Which callers a server listens to: what keeps a web page in a user's browser from driving a server beside it.

A page can send requests to localhost, but cannot hide where it came from (Origin), name another host than its own
(Host), or send JSON declared as such without asking first (CORS). All three are checked.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Mapping
from functools import lru_cache

from starlette.requests import Request

from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import RequestError
from tandem.router.http.errors import UnsupportedMediaType

__all__ = ["CallerNotAllowed", "check_content_type", "check_host_and_origin", "hosts_allowed"]

_LOCALHOST = "localhost"
_READING = {"GET", "HEAD", "OPTIONS"}
_ANY = "*"
_PROBED = {"/health", "/ready"}  # under any name: a probe knows an address alone, and they tell nothing


class CallerNotAllowed(RequestError):
    """The request is sent under a name, or from a web page, that is not allowed."""

    status = 403
    code = "caller_not_allowed"


def hosts_allowed(config: RouterConfig) -> frozenset[str] | None:
    """Names that requests may be sent to; None = any. A server on loopback has its own names at least."""
    is_loopback = _is_loopback(config.host)
    if _ANY in config.allowed_hosts or not (config.allowed_hosts or is_loopback):
        return None
    return frozenset(_name_of(host.encode()) for host in (*config.allowed_hosts, config.host)) | {_LOCALHOST}


def check_host_and_origin(
    headers: Mapping[bytes, bytes], method: str, path: str, hosts: Collection[str] | None, origins: Collection[str]
) -> None:
    """Raise `CallerNotAllowed` unless the request's Host is allowed, and its Origin where it changes something."""
    host = headers.get(b"host", b"")
    if hosts is not None and host and _name_of(host) not in hosts and path not in _PROBED:
        # A page whose name was made to point here (DNS rebinding) would count as this server's own.
        shown = host.decode("latin-1")[:200]
        raise CallerNotAllowed(f"The host '{shown}' is not allowed; start the server with --allowed-hosts to allow it.")
    origin = headers.get(b"origin")
    if origin is None or method in _READING or (host and origin.partition(b"://")[2] == host):
        return
    shown = origin.decode("latin-1")
    if shown not in origins and _ANY not in origins:
        raise CallerNotAllowed(
            f"Pages of '{shown[:200]}' may not call this server; start it with --cors-allow-origins to allow it."
        )


def check_content_type(request: Request) -> None:
    """Raise `UnsupportedMediaType` unless the body is declared as JSON."""
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        found = f"not '{media_type[:100]}'" if media_type else "and there is none"
        raise UnsupportedMediaType(
            f"Content-Type must be application/json, {found}. With curl add: -H 'Content-Type: application/json'"
        )


def _is_loopback(host: str) -> bool:
    """Whether a server that listens on this host can be reached from this machine only."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)
    except (OSError, ValueError):
        return False  # it cannot be listened on either, which is told elsewhere


@lru_cache(maxsize=64)
def _name_of(header: bytes) -> str:
    """A host without its port and brackets; "localhost" for every address by which this machine reaches itself.

    Such an address is safe as a Host: DNS cannot make it point elsewhere. A page of another site that sends requests to
    it, also to 0.0.0.0, is refused by its Origin.
    """
    host = header.decode("latin-1").strip().lower()
    if host.startswith("["):
        name = host[1:].partition("]")[0]
    else:
        name = (host if host.count(":") > 1 else host.partition(":")[0]).removesuffix(".")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name
    return _LOCALHOST if address.is_loopback or address.is_unspecified else name
