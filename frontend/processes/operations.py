"""Serves `Operations` to frontend processes: methods that those of `tandem serve` and of `tandem route` may call."""

from __future__ import annotations

from tandem.frontend.http.exposition import Scraper, shared_scrape
from tandem.frontend.processes.methods import MethodTable
from tandem.frontend.processes.remote import DecidingMetrics
from tandem.router.operations import ManagedWorkers, Operations
from tandem.router.overview import OncePerInterval

__all__ = ["operation_methods"]


def operation_methods(operations: Operations, scrape: Scraper) -> MethodTable:
    """The methods. All frontend processes share one overview an interval, and the scrapes that are made at once."""
    manager, table = operations.manager, MethodTable()
    table.add(Operations.decisions)(operations.decisions)
    table.add(Operations.pools)(operations.pools)
    table.add(Operations.overview)(OncePerInterval(operations.overview))
    table.add(Operations.migrate)(operations.migrate)
    table.add(ManagedWorkers.set_role)(manager.set_role)
    table.add(ManagedWorkers.drain)(manager.drain)
    table.add(ManagedWorkers.add_worker)(manager.add_worker)
    table.add(ManagedWorkers.check_integrity)(manager.check_integrity)
    table.add(DecidingMetrics.scrape)(shared_scrape(scrape))
    return table
