"""The answers that both commands give: errors, models, health, decisions. `/openapi.json` describes these types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType


class ErrorBody(msgspec.Struct):
    """What is wrong."""

    message: Annotated[str, Meta(description="For people.")]
    type: Annotated[str, Meta(description="`invalid_request_error`, `rate_limit_error` or `server_error`.")]
    param: Annotated[str | None, Meta(description="The field that is wrong.")]
    code: Annotated[str | None, Meta(description="For programs.")]


class Error(msgspec.Struct):
    """An error in OpenAI's shape."""

    error: ErrorBody


class ErrorDetails(msgspec.Struct):
    """Where Anthropic's SDK reads some codes."""

    error_code: str


class MessagesErrorBody(msgspec.Struct):
    """What is wrong."""

    message: Annotated[str, Meta(description="For people.")]
    type: Annotated[str, Meta(description="Anthropic's word for it; it follows from the status.")]
    param: Annotated[str | None, Meta(description="The field that is wrong.")]
    code: Annotated[str | None, Meta(description="For programs.")]
    details: Annotated[ErrorDetails | UnsetType, Meta(description="Of some codes, which are here too.")] = UNSET


class MessagesError(msgspec.Struct, tag_field="type", tag="error"):
    """An error in Anthropic's shape."""

    error: MessagesErrorBody


class Health(msgspec.Struct):
    """The process answers."""

    status: Literal["ok"]


class ReadyStatus(msgspec.Struct):
    """Requests can be served."""

    status: Literal["ready"]


class Version(msgspec.Struct):
    """The version of Tandem."""

    version: str


class ModelCard(msgspec.Struct):
    """A served model, or a LoRA adapter of one, as OpenAI's and Anthropic's clients read it."""

    id: Annotated[str, Meta(description="The name that requests give as `model`.")]
    object: Literal["model"]
    type: Literal["model"]
    display_name: Annotated[str, Meta(description="The same name.")]
    created: Annotated[int, Meta(description="Unix time at which the server started.")]
    created_at: Annotated[str, Meta(description="The same, as RFC 3339 writes it.")]
    owned_by: str
    root: str
    parent: Annotated[str | None, Meta(description="The base model of an adapter.")]
    max_model_len: Annotated[int | None, Meta(description="Tokens of prompt and answer together.")]
    capabilities: Annotated[
        dict[str, Any] | None,
        Meta(description="What it can do, by feature. Of several engines what all of them tell; null if none tells."),
    ]


class ModelList(msgspec.Struct):
    """The served models."""

    object: Literal["list"]
    data: list[ModelCard]


class DecisionList(msgspec.Struct):
    """Routing decisions, with the predicted cost of each candidate."""

    object: Literal["list"]
    data: list[dict[str, Any]]


class RoleChange(msgspec.Struct, frozen=True):
    """A worker, and the role in which it should serve."""

    worker: Annotated[str, Meta(description="Its id in `/v1/pools`.")]
    role: Literal["prefill", "decode"]


class NewWorker(msgspec.Struct, frozen=True):
    """One more worker."""

    role: Annotated[Literal["prefill", "decode", "colocated"], Meta(description="The role in which it begins.")]


class Drain(msgspec.Struct, frozen=True):
    """A worker that should leave: it gets nothing new, and its work ends or goes on with others."""

    worker: Annotated[str, Meta(description="Its id in `/v1/pools`.")]
    grace_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="Seconds for its work to end or to move. What is left then goes on with other workers behind "
            "the tokens that were sent (with `--engine`: it ends with an error).",
        ),
    ] = 30.0
    restart: Annotated[bool, Meta(description="Start it again in a new process; false = it is gone for good.")] = False


class Migration(msgspec.Struct, frozen=True):
    """Answers that should go on with another worker."""

    worker: Annotated[str, Meta(description="Where they are decoded: its id in `/v1/pools`.")]
    to: Annotated[str, Meta(description="The worker that takes them over; empty = the cheapest for each.")] = ""
    request_id: Annotated[str, Meta(description="Only this request, as in `x-request-id`; empty = all there.")] = ""


class Migrated(msgspec.Struct):
    """Requests, by outcome."""

    moving: Annotated[list[str], Meta(description="These go on elsewhere once their KV is there.")]
    staying: Annotated[list[str], Meta(description="For these there is no place, or they move already.")]


class Deleted(msgspec.Struct):
    """What was removed."""

    id: str
    object: str
    deleted: Literal[True]
