"""Configuration of every component: one frozen dataclass each, each default written once, in this package.

Flags, keys of a `--config` file, fields and helm values share a name. Values are checked when a configuration is made:
a bad one raises `ConfigError` with the name, the value and the remedy. `protocol/settings.py` explains the annotations.
"""

from __future__ import annotations

import os
from pathlib import Path

from tandem.protocol.config.cluster import ClusterConfig
from tandem.protocol.config.managed import ManagedEngineConfig
from tandem.protocol.config.panels import PANELS
from tandem.protocol.config.router import ExternalEnginesConfig, RouterConfig, RouterFiles
from tandem.protocol.config.tiers import COMMON_OPTIONS, TierSpec, parse_tier
from tandem.protocol.config.worker import (
    DEFAULT_MODEL,
    GPU_MEMORY_SHARE,
    EngineConfig,
    TierConfig,
    TransferConfig,
    WorkerConfig,
)
from tandem.protocol.user_file import expanded


def cache_folder() -> Path:
    """Folder of everything Tandem fetches: TANDEM_CACHE, else ~/.cache/tandem. Raises `ConfigError`."""
    return Path(expanded("TANDEM_CACHE", os.environ.get("TANDEM_CACHE") or "~/.cache/tandem"))
