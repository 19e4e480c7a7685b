"""Messages that were not acted upon: counted by reason, logged now and then."""

from __future__ import annotations

import logging
import time
from collections import Counter
from enum import StrEnum

__all__ = ["DropReason", "DroppedMessages"]

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 10.0  # between two log lines of one reason: a flood of messages must not fill a disk


class DropReason(StrEnum):
    """Why a message, or a connection with all it would have said, was dropped."""

    STRANGER = "stranger"  # nobody introduced the key it came with
    IMPOSTOR = "impostor"  # it speaks in another's name
    MALFORMED = "malformed"  # it does not decode, or a value is out of bounds
    FAILED = "failed"  # handling it raised
    UNDELIVERED = "undelivered"  # its receiver is unknown or reads too slowly


class DroppedMessages:
    """Counts for `/metrics`. May be used from several threads."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._quiet_until: dict[str, float] = {}

    def add(self, reason: DropReason, text: str, *, exc_info: BaseException | bool = False) -> None:
        """Count one. `text` says what it was; it is logged unless the reason was logged moments ago."""
        self.counts[reason.value] += 1
        now = time.monotonic()
        if now >= self._quiet_until.get(reason, 0.0):
            self._quiet_until[reason] = now + _LOG_INTERVAL_S
            logger.warning("dropped (%s, number %d): %s", reason, self.counts[reason.value], text, exc_info=exc_info)
