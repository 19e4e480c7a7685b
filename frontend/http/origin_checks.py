"""Host and Origin checks: they keep a web page in a user's browser from driving a server on the same machine.

A page can send requests to localhost. But it cannot hide where it came from (Origin), name a host other than its own
(Host), or send a body declared as JSON without a CORS preflight. All three are checked; the last in `json_body.py`.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Mapping
from functools import lru_cache

from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import RequestError

_LOCALHOST = "localhost"
_SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
_ANY = "*"
_PROBE_PATHS = {"/health", "/ready"}  # allowed under any name: probes know only an address, and these reveal nothing


class CallerNotAllowed(RequestError):
    """The request's Host, or the web page that sent it, is not allowed."""

    status = 403
    code = "caller_not_allowed"


def hosts_allowed(config: RouterConfig) -> frozenset[str] | None:
    """Names that a request's Host may have; None = any. A server on loopback checks them by default."""
    if _ANY in config.allowed_hosts or not (config.allowed_hosts or _listens_on_loopback(config.host)):
        return None
    return frozenset(_name_of(host.encode()) for host in (*config.allowed_hosts, config.host)) | {_LOCALHOST}


def check_host_and_origin(
    headers: Mapping[bytes, bytes], method: str, path: str, hosts: Collection[str] | None, origins: Collection[str]
) -> None:
    """Raise `CallerNotAllowed` unless the Host is allowed and, if the request may change something, the Origin."""
    host = headers.get(b"host", b"")
    if hosts is not None and host and _name_of(host) not in hosts and path not in _PROBE_PATHS:
        # DNS rebinding: a page whose name was made to resolve to this machine would have this server's own origin.
        shown = host.decode("latin-1")[:200]
        raise CallerNotAllowed(f"The host '{shown}' is not allowed; start the server with --allowed-hosts to allow it.")
    origin = headers.get(b"origin")
    if origin is None or method in _SAFE_METHODS or (host and origin.partition(b"://")[2] == host):
        return
    shown = origin.decode("latin-1")
    if shown not in origins and _ANY not in origins:
        raise page_refused(shown)


def page_refused(origin: str) -> CallerNotAllowed:
    """The error for a web page of this origin."""
    return CallerNotAllowed(
        f"Pages of '{origin[:200]}' may not call this server; start it with --cors-allow-origins to allow them."
    )


def _listens_on_loopback(host: str) -> bool:
    """Whether a server that listens on this host can be reached from this machine only."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)
    except (OSError, ValueError):
        return False  # listening will fail too, and report it


@lru_cache(maxsize=64)
def _name_of(header: bytes) -> str:
    """The host without port and brackets; "localhost" for every address by which this machine reaches itself.

    Such an address is safe as a Host, because DNS cannot make it point elsewhere. If a page of another site sends
    requests to it, or to 0.0.0.0, its Origin gives it away.
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
