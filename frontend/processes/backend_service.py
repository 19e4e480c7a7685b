"""Serves a `Backend` to the frontend processes of `tandem serve`: what they may call, what they are told."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.frontend.http.exposition import Scraper
from tandem.frontend.processes.methods import MethodTable
from tandem.frontend.processes.operator_api import operator_methods
from tandem.frontend.processes.remote_backend import BackendState
from tandem.frontend.response_store import LocalResponses, ResponseStore
from tandem.router.backend import Backend, Pins
from tandem.router.readiness import ReadinessCheck


class BackendService:
    """The `DecidingService` of `tandem serve`."""

    def __init__(self, backend: Backend, readiness: ReadinessCheck, scrape: Scraper) -> None:
        self._backend = backend
        self._shared = operator_methods(backend, scrape)
        self._readiness = readiness
        self._responses = LocalResponses()

    def methods_for(self, frontend_id: str) -> MethodTable:
        """The same for each of them."""
        backend, pins, responses = self._backend, self._backend.cache, self._responses
        table = MethodTable(self._shared)
        table.add(Backend.serve)(backend.serve)
        table.add(Backend.explain)(backend.explain)
        table.add(Pins.pin)(pins.pin)
        table.add(Pins.hint)(pins.hint)
        table.add(Pins.unpin)(pins.unpin)
        table.add(Pins.prefetch)(pins.prefetch)
        table.add(Pins.pins)(pins.pins)
        table.add(ResponseStore.put)(responses.put)
        table.add(ResponseStore.get)(responses.get)
        table.add(ResponseStore.delete)(responses.delete)
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
