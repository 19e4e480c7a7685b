"""The port of a server, which several processes may share."""

from __future__ import annotations

import socket

import pytest

from tandem.frontend.http.listening import listening
from tandem.protocol.errors import ConfigError


def test_a_shared_port_leads_to_those_that_listen() -> None:
    with listening("127.0.0.1", 0, is_shared=True) as held:
        port = held.getsockname()[1]
        with listening("127.0.0.1", port, is_shared=True) as served:
            served.listen()
            served.settimeout(5)
            with socket.create_connection(("127.0.0.1", port), timeout=5) as client, served.accept()[0] as connection:
                assert connection.getpeername() == client.getsockname()


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_port_in_use_cannot_be_bound_exclusively(is_shared: bool) -> None:
    with listening("127.0.0.1", 0, is_shared=is_shared) as served:
        served.listen()
        with (
            pytest.raises(ConfigError, match="choose another with --port"),
            listening("127.0.0.1", served.getsockname()[1]),
        ):
            pass
