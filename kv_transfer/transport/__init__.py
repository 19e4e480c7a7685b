"""Transports: they move bytes between pools. Their callers decide who may write which blocks."""

from __future__ import annotations

from tandem.kv_transfer.transport.base import (
    Notification,
    PoolShape,
    Transfer,
    TransferState,
    Transport,
)
from tandem.kv_transfer.transport.factory import create_transport

__all__ = ["Notification", "PoolShape", "Transfer", "TransferState", "Transport", "create_transport"]
