"""Checks the addresses of engines added at run time: none may be one that only this machine can reach.

Names are resolved here, and the resolved addresses are connected to. So a name cannot point elsewhere between the check
and the connection, and other spellings of a number (127.1, 0x7f000001, ::ffff:127.0.0.1) are checked as the address
that they stand for.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from tandem.protocol.errors import ConfigError
from tandem.router.engines.config import EngineSpec

Resolve = Callable[[str, int], Awaitable[list[str]]]  # host, port -> numeric addresses; raises `OSError`

# Metadata services of clouds, which hand out credentials to the machine; their other addresses are link-local.
_CLOUD_SERVICES = {
    ipaddress.ip_address(text) for text in ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "168.63.129.16")
}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_NUMERIC_ENDPOINT = re.compile(r"tcp://\[?([0-9a-fA-F.:]+)\]?:\d+")


class AddressRefused(OSError):
    """An engine added at run time may not be at this address."""


def is_local(address: str) -> bool:
    """Whether a numeric address belongs to this machine, its link or its cloud, even as IPv4 wrapped in IPv6."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        wrapped = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64 or ip.packed[:12] == bytes(12):
            wrapped = ipaddress.IPv4Address(ip.packed[12:])
        if wrapped is not None and not ip.is_loopback:
            ip = wrapped
    return (
        ip.is_loopback
        or ip.is_link_local
        or ip.is_unspecified
        or ip.is_multicast
        or ip in _CLOUD_SERVICES
        or (ip.version == 4 and ip.packed[0] == 0)
    )


async def public_addresses(host: str, port: int) -> list[str]:
    """The numeric addresses of a host. Raises `AddressRefused` if one is local, another `OSError` if there is none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
    for address in addresses:
        if is_local(address):
            where = address if address == host else f"{host} ({address})"
            raise AddressRefused(
                f"{where} is an address of this machine or its network link; name the engine in the --engines file, "
                "or start the router with --allow-local-engines"
            )
    return addresses


async def check_addresses(spec: EngineSpec, timeout_s: float) -> None:
    """Raise `ConfigError` for a spec that leads to local addresses. Names that do not resolve yet are checked later."""
    for key in ("kv_events", "kv_replay"):
        endpoint = getattr(spec, key)
        numeric = _NUMERIC_ENDPOINT.fullmatch(endpoint)
        try:
            is_allowed = not endpoint or (numeric is not None and not is_local(numeric.group(1)))
        except ValueError:
            is_allowed = False
        if not is_allowed:  # ZMQ resolves names itself, and again at each connection
            raise ConfigError(
                f"engine {spec.name}: {key}={endpoint!r} must be tcp:// with a numeric address that is not this "
                "machine's; name the engine in the --engines file, or start the router with --allow-local-engines"
            )
    parts = urlsplit(spec.url)
    try:
        async with asyncio.timeout(timeout_s):
            await public_addresses(parts.hostname or "", parts.port or 0)
    except AddressRefused as exc:
        raise ConfigError(f"engine {spec.name}: {exc}") from exc
    except OSError:  # a timeout is one
        return
