"""Metrics of the API keys: how many there are, and whether their file can be used."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tandem.frontend.keys.api_key import KeyState
from tandem.frontend.keys.api_keys import ApiKeys


class KeyCollector:
    """Shows the keys that this process knows."""

    def __init__(self, api_keys: ApiKeys) -> None:
        self._api_keys = api_keys

    def collect(self) -> Iterator[Metric]:
        """The samples now."""
        keys = GaugeMetricFamily("tandem_api_keys", "API keys in the file, by state", labels=["state"])
        num_by_state = self._api_keys.num_by_state(time.time())
        for state in get_args(KeyState):
            keys.add_metric([state], num_by_state[state])
        yield keys
        yield CounterMetricFamily(
            "tandem_api_key_reloads", "Changes of the file of API keys that took effect", self._api_keys.num_reloads
        )
        yield GaugeMetricFamily(
            "tandem_api_key_file_damaged",
            "1 while the file of API keys cannot be used: changes have no effect",
            float(bool(self._api_keys.damage)),
        )
