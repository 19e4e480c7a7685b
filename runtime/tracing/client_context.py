"""The trace that a client's headers name, in W3C's format. It is read alike with and without OpenTelemetry."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_TRACESTATE_BYTES = 512  # a longer one is dropped, as the standard allows

# Only later versions may have more after the flags. Identifiers of only zeros and the version ff are invalid.
_IDS = rb"-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
_TRACEPARENT = re.compile(rb"00%b|(?!00|ff)[0-9a-f]{2}%b(?:-[!-~]{0,200})?" % (_IDS, _IDS))
_TRACESTATE = re.compile(rb"[\t -~]+")


def client_trace_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """`traceparent` and `tracestate` of a request; empty if they are not exactly what the standard describes."""
    parents = []
    states = []
    for name, value in headers:
        if name == b"traceparent":
            parents.append(value)
        elif name == b"tracestate":
            states.append(value)
    if len(parents) != 1 or not _TRACEPARENT.fullmatch(parents[0]):
        return {}
    found = {"traceparent": parents[0].decode("ascii")}
    state = b",".join(states)
    if len(state) <= MAX_TRACESTATE_BYTES and _TRACESTATE.fullmatch(state):
        found["tracestate"] = state.decode("ascii")
    return found
