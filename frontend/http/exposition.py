"""Metrics as text: in the classic format of Prometheus, which any scraper reads, and in that of OpenMetrics.

The text is built at most twice a second, however many clients ask for it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache
from types import SimpleNamespace
from typing import NamedTuple

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST

from tandem.frontend.http.vllm_names import with_vllm_names
from tandem.protocol.config import RouterConfig
from tandem.runtime.shared_call import SharedCall

INTERVAL_S = 0.5
_TENANT_SAMPLE = re.compile(rb'^.*\b(?:tenant|key_id)=".*\n', re.MULTILINE)

Scraper = Callable[[], Awaitable[bytes]]

CLASSIC, OPENMETRICS = CONTENT_TYPE_PLAIN_0_0_4, CONTENT_TYPE_LATEST
_MEDIA_TYPES = ("application/openmetrics-text", "text/plain")
_COUNTER = re.compile(rb"^(# (?:HELP|TYPE) \S+)_total ", re.MULTILINE)
_MAX_RANGES = 64  # of an `Accept` header that are read

# A time of creation for each counter and histogram makes a third of the text, and nothing here reads it. The library
# has one switch for the whole process.
disable_created_metrics()


def exposition(families: Iterable[Metric], config: RouterConfig, models: Iterable[str]) -> bytes:
    """The metrics in the classic format: with `vllm_metric_names` also under vLLM's names.

    `models` are those that the metrics are of. If they are several, `model_name` is empty, as if there were no label:
    the values are sums over all of them.
    """
    if config.vllm_metric_names:
        names = list(models)
        families = with_vllm_names(families, names[0] if len(names) == 1 else "")
    return bytes(generate_latest(SimpleNamespace(collect=lambda: families)))


async def registry_text(registry: CollectorRegistry, config: RouterConfig, models: Iterable[str]) -> bytes:
    """As `exposition`. The registry is read here, where what it tells changes; the text is written in a thread."""
    return await asyncio.to_thread(exposition, list(registry.collect()), config, list(models))


class MetricsText(NamedTuple):
    """Metrics in the classic format."""

    everything: bytes
    public: bytes  # without the samples of one tenant or one key


def shared_metrics(scrape: Scraper, interval_s: float = INTERVAL_S) -> SharedCall[MetricsText]:
    """What `scrape` gives, for operators and for everybody."""

    async def expose() -> MetricsText:
        everything = await scrape()
        return MetricsText(everything, await asyncio.to_thread(_TENANT_SAMPLE.sub, b"", everything))

    return SharedCall(expose, interval_s)


@lru_cache(maxsize=2)
def as_openmetrics(text: bytes) -> bytes:
    """The same metrics in the format of OpenMetrics, without formatting them again: only the names of counters differ.

    It takes 0.2 ms for the 28 KB of a small server, and texts of several processes can be joined before.
    """
    return _COUNTER.sub(rb"\1 ", text) + b"# EOF\n"


def prefers_openmetrics(accept: str) -> bool:
    """Whether an `Accept` header names OpenMetrics, and weighs it no less than the classic format."""
    weights = dict.fromkeys(_MEDIA_TYPES, 0.0)
    for one in accept.split(",", _MAX_RANGES)[:_MAX_RANGES]:
        media_type, *parameters = (part.strip().lower() for part in one.split(";"))
        if media_type in weights:
            weights[media_type] = max(weights[media_type], _weight(parameters))
    openmetrics, classic = weights.values()
    return openmetrics > 0 and openmetrics >= classic


def _weight(parameters: Iterable[str]) -> float:
    """The `q` of a media range: from 0 to 1."""
    given = next((value for name, _, value in (one.partition("=") for one in parameters) if name == "q"), "1")
    return float(given) if re.fullmatch(r"0(\.\d{0,3})?|1(\.0{0,3})?", given) else 0.0
