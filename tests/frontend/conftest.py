"""The app of `tandem serve` before a scripted backend."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tandem.text.tokenizer import Tokenizer
from tests.support.fake_backend import Client, FakeBackend, closing


@pytest.fixture
def backend(tokenizer: Tokenizer) -> FakeBackend:
    return FakeBackend(tokenizer)


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[Client]:
    """Its end checks that no generation was left open."""
    async with closing(backend) as client:
        yield client
