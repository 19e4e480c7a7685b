"""A frontend process's `Backend`: the one that the deciding process serves."""

from __future__ import annotations

import msgspec

from tandem.frontend.processes.deciding_client import DecidingClient, JoinSettings
from tandem.frontend.processes.remote import Remote, RemoteObject, asked
from tandem.frontend.response_store import ResponseStore
from tandem.protocol.errors import ServingError
from tandem.protocol.messages import SequenceDelta
from tandem.router.backend import Backend, GenerateRequest, Pins
from tandem.router.callback_scheduler import CallbackScheduler
from tandem.router.streams import DeltaQueue, QueueStream, Stream


class BackendState(msgspec.Struct, frozen=True, array_like=True):
    """The state update: what every request needs to know about the backend."""

    model: str
    max_model_len: int | None
    unready: str | None  # why requests should not be sent here now
    can_serve: bool  # whether there are any workers


class RemoteBackend(Remote):
    """The backend of `BackendService`, with its readiness, its pins and its responses."""

    def __init__(self, settings: JoinSettings) -> None:
        super().__init__(settings, results=SequenceDelta, states=BackendState)
        self._state: BackendState | None = None
        self._scheduler = CallbackScheduler()
        self.cache = _RemotePins(self._client)
        self.responses = _RemoteResponses(self._client)

    @property
    def model(self) -> str:
        """Name the model is served under."""
        return self._state.model if self._state else ""

    @property
    def max_model_len(self) -> int | None:
        """Shortest context of the workers; None while there is no worker."""
        return self._state.max_model_len if self._state else None

    @property
    def ready(self) -> bool:
        """Whether a request could be placed now."""
        return bool(self._state and self._state.can_serve and not self._client.is_silent)

    @property
    def reason(self) -> str | None:
        """Why requests should not be sent here now; None when they should."""
        if self._state is None or self._client.is_silent:
            return "The deciding process does not answer."
        return self._state.unready

    def serve(self, request: GenerateRequest) -> Stream[SequenceDelta]:
        """Generate, ending with a delta that has a `finish_reason`. The stream raises a `ServingError`."""
        return _RemoteStream(self._client, request, DeltaQueue(self._scheduler))

    explain = asked(Backend.explain)

    def _on_state(self, state: BackendState) -> None:
        self._state = state


class _RemotePins(RemoteObject):
    """The pins of the KV cache."""

    pin = asked(Pins.pin)
    hint = asked(Pins.hint)
    unpin = asked(Pins.unpin)
    prefetch = asked(Pins.prefetch)
    pins = asked(Pins.pins)


class _RemoteResponses(RemoteObject):
    """The responses that the deciding process keeps for all frontend processes."""

    put = asked(ResponseStore.put)
    get = asked(ResponseStore.get)
    delete = asked(ResponseStore.delete)


class _RemoteStream(QueueStream[SequenceDelta]):
    """One request that the deciding process serves."""

    def __init__(self, client: DecidingClient, request: GenerateRequest, queue: DeltaQueue[SequenceDelta]) -> None:
        super().__init__(queue)
        self._client = client
        self._request = request
        self._call: int | None = None
        self._is_complete = False  # the last delta has arrived

    def close(self) -> None:
        """Expect nothing more; tell the deciding process unless it has ended the call."""
        call, self._call = self._call, None
        if call is not None:
            self._client.close_call(call, is_over=self._is_complete)

    async def _begin(self) -> None:
        self._call = self._client.open(self._receive, Backend.serve, self._request)

    def _receive(self, result: SequenceDelta | ServingError) -> None:
        if isinstance(result, ServingError):
            self._queue.fail(result)
        else:
            self._queue.put(result)

    def _convert(self, deltas: list[SequenceDelta]) -> list[SequenceDelta]:
        self._has_ended = self._is_complete = deltas[-1].finish_reason is not None
        return deltas
