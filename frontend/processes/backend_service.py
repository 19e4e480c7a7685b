"""Serves a `Backend` to the frontend processes of `tandem serve`: what they may call, what they are told."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.frontend.http.exposition import Scraper, shared_scrape
from tandem.frontend.processes.methods import MethodTable
from tandem.frontend.processes.remote import DecidingMetrics
from tandem.frontend.processes.remote_backend import BackendState
from tandem.frontend.response_store import LocalResponses, ResponseStore
from tandem.router.backend import Backend, Pins
from tandem.router.overview import OncePerInterval
from tandem.router.readiness import ReadinessCheck

__all__ = ["BackendService"]


class BackendService:
    """The `DecidingService` of `tandem serve`."""

    def __init__(self, backend: Backend, readiness: ReadinessCheck, scrape: Scraper) -> None:
        self._backend = backend
        self._overview = OncePerInterval(backend.overview)  # for all frontend processes
        self._readiness = readiness
        self._scrape = shared_scrape(scrape)
        self._responses = LocalResponses()

    def methods_for(self, frontend_id: str) -> MethodTable:
        """The same for each of them."""
        backend, pins, responses, table = self._backend, self._backend.cache, self._responses, MethodTable()
        table.add(Backend.serve)(backend.serve)
        table.add(Backend.explain)(backend.explain)
        table.add(Backend.decisions)(backend.decisions)
        table.add(Backend.pools)(backend.pools)
        table.add(Backend.overview)(self._overview)
        table.add(Backend.check)(backend.check)
        table.add(Backend.set_role)(backend.set_role)
        table.add(Backend.drain)(backend.drain)
        table.add(Backend.add_worker)(backend.add_worker)
        table.add(Backend.migrate)(backend.migrate)
        table.add(Pins.pin)(pins.pin)
        table.add(Pins.unpin)(pins.unpin)
        table.add(Pins.prefetch)(pins.prefetch)
        table.add(Pins.pins)(pins.pins)
        table.add(ResponseStore.put)(responses.put)
        table.add(ResponseStore.get)(responses.get)
        table.add(ResponseStore.delete)(responses.delete)
        table.add(DecidingMetrics.scrape)(self._scrape)
        return table

    def joined(self, frontend_id: str) -> Sequence[BackendState]:
        """The state is all that a frontend process needs."""
        return [self.status()]

    def left(self, frontend_id: str) -> None:
        """Nothing about it is kept here."""

    def status(self) -> BackendState:
        """The present state."""
        backend = self._backend
        return BackendState(backend.model, backend.max_model_len, self._readiness.reason, backend.ready)
