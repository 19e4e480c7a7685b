"""The id of each request: in its answer, in log lines about it, and in what workers and engines are sent for it."""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

from starlette.types import Scope

REQUEST_ID_HEADER = "x-request-id"
_HEADER = REQUEST_ID_HEADER.encode()
_VALID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")  # nothing that could break a log line or another header
_KEY = "tandem.request_id"  # in the ASGI scope
_PREFIX = "req-"


class RequestId(NamedTuple):
    """The names of one request."""

    shown: str  # in the answer's header and in logs of the router: the client's id, or one that is made here
    unique: str  # what workers and engines get; it begins with `shown`, which two requests of a client may share

    def answer_id(self, prefix: str) -> str:
        """Id of the answer: the same digits as in an id that was made here. A client's id is not part of it.

        Answers are kept under their ids, so these must be unique and hard to guess.
        """
        is_ours = self.shown == self.unique
        return prefix + (self.unique.removeprefix(_PREFIX) if is_ours else secrets.token_hex(16))


def new_request_id() -> RequestId:
    """The id for a request that has none."""
    name = _PREFIX + secrets.token_hex(16)
    return RequestId(name, name)


def note_request_id(scope: Scope) -> RequestId:
    """Give a request its id: that of its header, if it has one that is valid, else a new one."""
    found = [value for name, value in scope["headers"] if name == _HEADER]
    if len(found) == 1 and _VALID.fullmatch(found[0]):
        shown = found[0].decode("ascii")
        request_id = RequestId(shown, f"{shown}.{secrets.token_hex(8)}")
    else:
        request_id = new_request_id()
    scope[_KEY] = request_id
    return request_id


def request_id_of(scope: Scope) -> RequestId:
    """The id that a request was given."""
    request_id: RequestId = scope[_KEY]
    return request_id
