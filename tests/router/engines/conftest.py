from collections.abc import Iterator

import pytest

from tests.support.fake_openai import FakeServer, fake_openai


@pytest.fixture
def fake_a() -> Iterator[FakeServer]:
    with fake_openai() as fake:
        yield fake


@pytest.fixture
def fake_b() -> Iterator[FakeServer]:
    with fake_openai() as fake:
        yield fake
