"""Serves `OperatorApi` to frontend processes: methods that those of `tandem serve` and of `tandem route` may call."""

from __future__ import annotations

from tandem.frontend.http.exposition import INTERVAL_S, Scraper
from tandem.frontend.processes.methods import MethodTable
from tandem.frontend.processes.remote import DecidingMetrics
from tandem.router.operator_api import ManagedWorkers, OperatorApi
from tandem.runtime.shared_call import SharedCall


def operator_methods(operator_api: OperatorApi, scrape: Scraper) -> MethodTable:
    """The methods. All frontend processes share the overviews and the scrapes that are made at once."""
    manager, table = operator_api.manager, MethodTable()
    table.add(OperatorApi.decisions)(operator_api.decisions)
    table.add(OperatorApi.pools)(operator_api.pools)
    table.add(OperatorApi.overview)(SharedCall(operator_api.overview, INTERVAL_S))
    table.add(OperatorApi.migrate)(operator_api.migrate)
    table.add(ManagedWorkers.set_role)(manager.set_role)
    table.add(ManagedWorkers.drain)(manager.drain)
    table.add(ManagedWorkers.add_worker)(manager.add_worker)
    table.add(ManagedWorkers.check_integrity)(manager.check_integrity)
    table.add(DecidingMetrics.scrape)(SharedCall(scrape, INTERVAL_S))
    return table
