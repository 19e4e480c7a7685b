"""Counts ignored messages by reason, and logs some of them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from enum import StrEnum

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 10.0  # between two log lines of one reason, so that a flood of messages does not fill a disk


class DropReason(StrEnum):
    """Why a message or a connection was dropped."""

    STRANGER = "stranger"  # the key of its connection is not allowed
    IMPOSTOR = "impostor"  # it claims another sender's name
    MALFORMED = "malformed"  # it does not decode, or a value is out of range
    FAILED = "failed"  # handling it raised
    UNDELIVERED = "undelivered"  # the receiver is unknown or reads too slowly


class DroppedMessages:
    """Counts for `/metrics`. Thread-safe."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._quiet_until: dict[str, float] = {}

    def add(self, reason: DropReason, text: str, *, exc_info: BaseException | bool = False) -> None:
        """Count one. `text` describes it; it is logged unless the same reason was logged moments ago."""
        self.counts[reason.value] += 1
        now = time.monotonic()
        if now >= self._quiet_until.get(reason, 0.0):
            self._quiet_until[reason] = now + _LOG_INTERVAL_S
            logger.warning("dropped (%s, number %d): %s", reason, self.counts[reason.value], text, exc_info=exc_info)
