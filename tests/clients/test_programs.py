"""Programs as users of client libraries write them, against a running server. docs/clients.md lists their steps."""

from __future__ import annotations

import pytest

from tests.clients.conftest import CLIENTS, RunProgram

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_clients_program_works(client: str, run_program: RunProgram) -> None:
    """Each step of the program asserts what it got."""
    assert run_program(client).count("### ") >= 5
