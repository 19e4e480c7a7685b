"""Messages between edge processes and the hub of `tandem route`.

They are separate from the service, so that edge processes do not load what only the hub needs, 20 MB each.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.frontend.processes.wire import WireFormat
from tandem.frontend.processes.worker_questions import WorkerQuestion
from tandem.router.engines.config import EngineSpec
from tandem.router.engines.dispatcher import DispatchRequest, EngineTarget

__all__ = [
    "WIRE_FORMAT",
    "Aborted",
    "AddEngine",
    "AnswerOwner",
    "ClientHolds",
    "DispatchDecisions",
    "Ended",
    "EngineAdded",
    "EngineAnswered",
    "EngineFailure",
    "EngineRefusal",
    "EngineRemoved",
    "ExplainDispatch",
    "FirstToken",
    "FleetOverview",
    "FleetPools",
    "FleetStatus",
    "Gap",
    "GoOn",
    "Item",
    "News",
    "Note",
    "PlaceElsewhere",
    "Prefilled",
    "Question",
    "RemoveEngine",
    "ScrapeHub",
    "Stored",
]


class _DispatchMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# -- notes about a call: each stands for a method of `EngineReservation` ----------------------------------------


class FirstToken(_DispatchMessage, frozen=True):
    """The first token of a stream came."""

    now: float


class Gap(_DispatchMessage, frozen=True):
    """Two tokens of a stream came this far apart."""

    duration_s: float
    now: float


class ClientHolds(_DispatchMessage, frozen=True):
    """The client has stopped reading its stream, or reads it again."""

    is_held: bool


class EngineAnswered(_DispatchMessage, frozen=True):
    """The first byte of the answer came."""


class Prefilled(_DispatchMessage, frozen=True):
    """The prefill engine of a pair returned."""

    now: float


class EngineFailure(_DispatchMessage, frozen=True):
    """An engine failed the request."""

    engine: str
    is_absent: bool
    is_lost: bool


class EngineRefusal(_DispatchMessage, frozen=True):
    """An engine has no room."""

    engine: str
    retry_after_s: float


class Ended(_DispatchMessage, frozen=True):
    """The answer is complete."""

    num_prompt_tokens: int
    num_output_tokens: int


class Stored(_DispatchMessage, frozen=True):
    """The engine keeps the answer under this id."""

    answer_id: str


class PlaceElsewhere(_DispatchMessage, frozen=True):
    """The request needs another target."""


class GoOn(_DispatchMessage, frozen=True):
    """A stream needs another target after tokens were shown."""

    cause: str
    prompt: bytes
    num_output_tokens: int


Note = (
    FirstToken
    | Gap
    | ClientHolds
    | EngineAnswered
    | Prefilled
    | EngineFailure
    | EngineRefusal
    | Stored
    | Ended
    | PlaceElsewhere
    | GoOn
)


# -- items of a call: targets and ------------------------------------------------------------------------------------


class Aborted(_DispatchMessage, frozen=True):
    """An engine of the latest target is gone."""

    engine: str
    reason: str


Item = EngineTarget | Aborted


# -- questions --------------------------------------------------------------------------------------------------------


class ExplainDispatch(_DispatchMessage, frozen=True):
    """`Dispatcher.explain`."""

    request: DispatchRequest


class DispatchDecisions(_DispatchMessage, frozen=True):
    """`Dispatcher.decisions`."""


class AnswerOwner(_DispatchMessage, frozen=True):
    """`Dispatcher.answer_owner`."""

    answer_id: str
    tenant: str


class FleetPools(_DispatchMessage, frozen=True):
    """`Dispatcher.pools`."""


class FleetOverview(_DispatchMessage, frozen=True):
    """`Dispatcher.overview`."""


class ScrapeHub(_DispatchMessage, frozen=True):
    """The metrics of the hub's process, as Prometheus reads them."""


class AddEngine(_DispatchMessage, frozen=True):
    """`Dispatcher.add_engine`."""

    fields: dict[str, Any]


class RemoveEngine(_DispatchMessage, frozen=True):
    """`Dispatcher.remove_engine`."""

    name: str


Question = (
    ExplainDispatch
    | DispatchDecisions
    | AnswerOwner
    | FleetOverview
    | FleetPools
    | ScrapeHub
    | WorkerQuestion
    | AddEngine
    | RemoveEngine
)


# -- news -------------------------------------------------------------------------------------------------------------


class FleetStatus(_DispatchMessage, frozen=True):
    """What every request needs to know about the fleet."""

    models: dict[str, int | None]  # the longest context of each model
    capabilities: dict[str, dict[str, Any] | None]  # by model
    adapters: dict[str, str]  # the base model of each LoRA adapter
    unknown_engines: list[str]
    unready: str | None


class EngineAdded(_DispatchMessage, frozen=True):
    """An engine joined the fleet. An edge process hears this before it is told to use it."""

    spec: EngineSpec
    is_trusted: bool


class EngineRemoved(_DispatchMessage, frozen=True):
    """An engine left the fleet."""

    name: str


News = FleetStatus | EngineAdded | EngineRemoved

WIRE_FORMAT = WireFormat(request=DispatchRequest, note=Note, item=Item, question=Question, news=News)
