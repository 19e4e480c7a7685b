"""Puts what operators do over HTTP into the audit log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from starlette.requests import Request

from tandem.frontend.http.request_options import key_of
from tandem.frontend.keys.api_key import OPERATOR
from tandem.frontend.keys.audit_log import AuditLog
from tandem.protocol.errors import ServingError

ADMIN_TOKEN = "admin-token"  # in place of a key's id: the token for `/v1/engines`


@dataclass(slots=True)
class _Action:
    target: str = ""  # the object of the action, as far as it is known


@contextlib.contextmanager
def audited(request: Request, action: str, target: str = "", *, key_id: str | None = None) -> Iterator[_Action]:
    """Write to the audit log what the block does, and how it ends. `key_id` is by default that of the request."""
    done = _Action(target)
    result = "internal_error"
    try:
        yield done
        result = "ok"
    except ServingError as exc:
        result = exc.code or str(exc.status)
        raise
    finally:
        if key_id is None:
            key = key_of(request)
            key_id = "" if key is None else key.id
        audit_log: AuditLog = request.app.audit_log
        client = "" if request.client is None else request.client.host
        audit_log.note(action, key_id=key_id, target=done.target, result=result, client=client)


@contextlib.contextmanager
def audited_if_operator(request: Request, action: str, target: str = "") -> Iterator[_Action]:
    """`audited`, for actions that tenants may do too: only those with an operator's key are written."""
    key = key_of(request)
    if key is None or key.tenant != OPERATOR:
        yield _Action(target)
        return
    with audited(request, action, target) as done:
        yield done
