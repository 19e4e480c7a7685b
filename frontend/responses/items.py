"""Ids of items, the opaque copies of reasoning, and references to items of responses that are kept."""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tandem.frontend.response_store import ResponseNotFound, ResponseStore
from tandem.frontend.responses.answer_shapes import InputItems
from tandem.protocol.errors import RequestError

Json = dict[str, Any]

MAX_REFERENCED_RESPONSES = 1024  # by one request: each is looked up
MAX_PAGE_ITEMS = 100
MAX_DEPTH = 100  # of a field
MAX_CONVERSATION_BYTES = 8 << 20  # of what is kept and asked for again: it is decoded at once, by a small request
MAX_VALUES = 1 << 18  # in a field, all levels together

_OPAQUE = "tandem1."
_REFERENCE = re.compile(r"[a-z]{2,8}_([0-9a-f]{32})[0-9a-f]{4,8}")
_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
}


def item_id(kind: str, response_id: str, index: int) -> str:
    """The id of an item of a response's output. The response can be told from it."""
    return f"{_PREFIXES[kind]}{response_id.removeprefix('resp_')}{index:04x}"


def as_items(given: str | list[Json]) -> list[Json]:
    """An input as items."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return given


def check_nesting(value: Any, param: str) -> None:
    """Raise `RequestError` for a value that could be read, but not written again, because of its depth, and for one
    whose values are too many to walk through in the event loop.
    """
    level = [value] if isinstance(value, (dict, list)) else []
    num_values = 0
    for _ in range(MAX_DEPTH):
        num_values += sum(map(len, level))
        if num_values > MAX_VALUES:
            raise RequestError(f"'{param}' has more than {MAX_VALUES} values.", param=param)
        inner = (inner for one in level for inner in (one.values() if isinstance(one, dict) else one))
        level = [one for one in inner if isinstance(one, (dict, list))]
        if not level:
            return
    raise RequestError(f"'{param}' is nested more than {MAX_DEPTH} levels deep.", param=param)


def check_kept_bytes(num_bytes: int, param: str) -> None:
    """Raise `RequestError` if a request goes on from too much that is kept."""
    if num_bytes > MAX_CONVERSATION_BYTES:
        raise RequestError(
            f"The conversation has {num_bytes} bytes including what is stored; the limit is {MAX_CONVERSATION_BYTES}. "
            "Start a new one, or send less.",
            param=param,
        )


def with_ids(items: Sequence[Json]) -> list[Json]:
    """The items of an input, each with an id and a type."""
    typed = [{**item, "type": item.get("type") or "message"} for item in items]
    return [one if one.get("id") else {**one, "id": _new_id(str(one["type"]))} for one in typed]


async def resolved(items: list[Json], store: ResponseStore, tenant: str) -> tuple[list[Json], int]:
    """The items with those that references name in their places, and how many bytes these have at most.

    Raises `RequestError`.
    """
    outputs: dict[str, dict[str, Json]] = {}
    num_bytes = 0
    found: list[Json] = []
    for i, item in enumerate(items):
        name = _referred(item)
        if name is None:
            found.append(item)
            continue
        param = f"input[{i}].id"
        response_id = _response_of(name, param)
        if response_id not in outputs:
            if len(outputs) == MAX_REFERENCED_RESPONSES:
                raise RequestError(f"The input refers to over {MAX_REFERENCED_RESPONSES} responses.", param=param)
            stored = await store.get(response_id, tenant, param)
            num_bytes += len(stored.body)
            outputs[response_id] = {one["id"]: one for one in stored.output}
        one = outputs[response_id].get(name)
        if one is None:
            raise ResponseNotFound(f"There is no item {name!r} in {response_id!r}.", param=param)
        num_bytes += len(msgspec.json.encode(one))  # each time: a few bytes may refer to the same long item again
        check_kept_bytes(num_bytes, param)
        found.append(one)
    return found, num_bytes


def opaque_reasoning(text: str) -> str:
    """A copy of reasoning that clients send back as it is. It hides nothing: the text itself is in the item too."""
    return _OPAQUE + base64.urlsafe_b64encode(text.encode("utf-8", "replace")).decode()


def read_reasoning(opaque: Any) -> str | None:
    """The text of such a copy; None for one of another server."""
    if not isinstance(opaque, str) or not opaque.startswith(_OPAQUE):
        return None
    try:
        return base64.b64decode(opaque.removeprefix(_OPAQUE), b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def input_page(items: list[Json], query: Mapping[str, str]) -> InputItems:
    """The answer of `/v1/responses/{id}/input_items`: some of the items, by default the newest first."""
    order, after, asked = query.get("order", "desc"), query.get("after"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise RequestError(f"'order' must be 'asc' or 'desc', not {order[:50]!r}.", param="order")
    limit = int(asked) if re.fullmatch(r"[0-9]{1,3}", asked) else 0
    if not 1 <= limit <= MAX_PAGE_ITEMS:
        raise RequestError(f"'limit' must be from 1 to {MAX_PAGE_ITEMS}, not {asked[:50]!r}.", param="limit")
    ordered = items if order == "asc" else items[::-1]
    ids = [one["id"] for one in ordered]
    if after is not None and after not in ids:
        raise RequestError(f"There is no item {after[:100]!r} to list from.", param="after")
    start = 0 if after is None else ids.index(after) + 1
    page = ordered[start : start + limit]
    return InputItems(
        object="list",
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=start + limit < len(ordered),
    )


def _referred(item: Json) -> str | None:
    """The id of the item that this one refers to, if it does. Clients may leave the type out."""
    is_reference = item.get("type") == "item_reference" or (item.keys() <= {"id", "type"} and item.get("type") is None)
    return str(item.get("id")) if is_reference and "id" in item else None


def _response_of(name: str, param: str) -> str:
    made_here = _REFERENCE.fullmatch(name)
    if made_here is None:
        raise ResponseNotFound(f"There is no item {name[:100]!r}: this server did not create it.", param=param)
    return f"resp_{made_here[1]}"


def _new_id(kind: str) -> str:
    return _PREFIXES.get(kind, "item_") + secrets.token_hex(16)
