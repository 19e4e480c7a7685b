"""Panels, which are the headings of `--help` and docs/configuration.md, and ranges that several settings share."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MODEL = "Model"
WORKERS = "Workers"
MANAGED = "vLLM or SGLang as workers"
ENGINES = "Engines"
HTTP = "HTTP"
ENGINE = "Engine (of each worker)"
TRANSFER = "KV transfer"
TIERS = "KV tiers below the pool"
PINS = "Pinned prefixes"
QUEUES = "Queues"
LIMITS = "Limits and timeouts"
PANELS = (MODEL, WORKERS, MANAGED, ENGINES, HTTP, ENGINE, TRANSFER, TIERS, PINS, QUEUES, LIMITS)

# Upper bounds only catch typing mistakes, which would otherwise fail much later.
DAY_S = 86_400
MAX_COUNT = 2**24

Seconds = Annotated[float, Meta(gt=0, le=DAY_S)]
Gigabytes = Annotated[float, Meta(ge=0, le=1_000_000)]  # 10^9 bytes
Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
CountOrZero = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
NumWorkers = Annotated[int, Meta(ge=0, le=1024)]
UnitsPerWorker = Annotated[float, Meta(ge=0, le=4096)]
