"""Whether requests compete at present: those of several tenants, and those of different urgency."""

from __future__ import annotations

import math

from tandem.scheduling.lru_dict import LruDict
from tandem.scheduling.request import ServiceClass

MEMORY_S = 60.0  # contention lasts this long after the latest request that showed it
MAX_TENANTS = 4096  # tenants whose latest priority is remembered: clients may name any number of them


class Contention:
    """Follows the latest requests. Preparing for contention costs latency, so it is done only while there is any."""

    def __init__(self) -> None:
        self.tenants_until_s = -math.inf  # until when requests of several tenants are expected
        self.urgencies_until_s = -math.inf  # until when requests of different urgency are expected
        self._latest_tenant: str | None = None
        self._priorities = LruDict[str, int](MAX_TENANTS)  # of each tenant's latest request

    def note(self, service_class: ServiceClass, slo_s: float, now: float) -> None:
        """Count a request. A TTFT SLO makes it more urgent than others; `slo_s` is infinite without one."""
        tenant, priority = service_class.tenant, service_class.priority
        if self._latest_tenant not in (None, tenant):
            self.tenants_until_s = now + MEMORY_S
        if slo_s < math.inf or self._priorities.get(tenant, priority) != priority:
            self.urgencies_until_s = now + MEMORY_S
        self._latest_tenant, self._priorities[tenant] = tenant, priority
