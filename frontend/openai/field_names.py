"""Names of fields in errors: other APIs become requests of chat, whose checks name the fields of chat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tandem.protocol.errors import RequestError

__all__ = ["renamed_fields"]


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Let a `RequestError` about a field of chat name that of another API. `names`: its own by chat's.

    Only chat's tools have a `function`; the fields of other APIs' tools are not nested.
    """
    try:
        yield
    except RequestError as exc:
        param = exc.param or ""
        if (name := names.get(param, param.replace("].function.", "]."))) != param:
            exc.message = exc.message.replace(f"'{exc.param}'", f"'{name}'")
            exc.param = name
        raise
