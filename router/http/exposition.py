"""The text of `/metrics`, built at most twice a second, whoever asks and how often."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from tandem.runtime.shared_call import SharedCall

__all__ = ["Exposition", "Scraper", "exposition_of", "shared_scrape", "text_of", "text_of_registry"]

INTERVAL_S = 0.5
_TENANT_SAMPLE = re.compile(rb'^.*\b(?:tenant|key_id)=".*\n', re.MULTILINE)

Scraper = Callable[[], Awaitable[bytes]]


class Exposition(NamedTuple):
    """Metrics in Prometheus' text format."""

    everything: bytes
    public: bytes  # without the samples of one tenant or one key


def shared_scrape(scrape: Scraper) -> SharedCall[bytes]:
    """The same for many who ask: it is called once for all who ask meanwhile."""
    return SharedCall(scrape, INTERVAL_S)


def exposition_of(scrape: Scraper) -> SharedCall[Exposition]:
    """What `scrape` gives, for operators and for everybody."""

    async def expose() -> Exposition:
        everything = await scrape()
        return Exposition(everything, await asyncio.to_thread(_TENANT_SAMPLE.sub, b"", everything))

    return SharedCall(expose, INTERVAL_S)


async def text_of_registry(registry: CollectorRegistry) -> bytes:
    """What a registry holds. It is read here, where what our collectors read changes, and written down in a thread."""
    return await asyncio.to_thread(text_of, list(registry.collect()))


def text_of(metrics: Iterable[Metric]) -> bytes:
    """These metrics as text: some ms of work."""
    return bytes(generate_latest(SimpleNamespace(collect=lambda: metrics)))
