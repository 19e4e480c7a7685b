"""The router's listening socket, bound before anything slow starts."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from tandem.protocol.errors import ConfigError


@contextlib.contextmanager
def listening(host: str, port: int, *, is_shared: bool = False) -> Iterator[socket.socket]:
    """A TCP socket that is bound to the address while the block runs. The server begins to listen on it.

    With `is_shared` other processes of this user may bind it too; connections are spread over those that listen.
    Raises `ConfigError` if the address is not available.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as exc:
        raise _refused(host, port, exc) from exc
    except UnicodeError as exc:  # a label that is empty, too long or no UTF-8
        raise ConfigError(f"host={host!r} is not a host name; choose another with --host") from exc
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            listener.bind(address)
        except OSError as exc:
            raise _refused(host, port, exc) from exc
        yield listener


def _refused(host: str, port: int, exc: OSError) -> ConfigError:
    reason = os.strerror(exc.errno) if exc.errno and exc.errno > 0 else exc.strerror
    return ConfigError(f"cannot listen on host={host} port={port} ({reason}); choose another with --port or --host")
