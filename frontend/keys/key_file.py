"""Follows the file of API keys while a server runs. Only the deciding process does; it tells the others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable

from tandem.frontend.keys.api_key import ApiKey
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.keys.audit_log import AuditLog
from tandem.frontend.keys.store import StoredKeys, read_keys
from tandem.protocol.errors import ConfigError
from tandem.runtime.background import BackgroundTasks
from tandem.runtime.file_signature import Signature, signature_of

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
MAX_NAMED = 20  # keys of each kind of change in one line of the audit log


class KeyFile:
    """The keys of a file, kept up to date. A file that cannot be used changes nothing: the earlier keys stay valid."""

    def __init__(self, path: str, audit_log: str = "") -> None:
        """Read the file; without a path the server requires no keys. Raises `ConfigError`.

        Changes are written to the file `audit_log`; "" = to none.
        """
        self._path = path
        self._audit_log = AuditLog(audit_log)
        stored = read_keys(path) if path else StoredKeys([], ())
        self.api_keys = ApiKeys(stored.keys, is_required=bool(path))
        self._signature: Signature | None = stored.signature
        self._is_settled = False

    @contextlib.asynccontextmanager
    async def followed(self) -> AsyncIterator[ApiKeys]:
        """The keys; they follow the file while the block runs."""
        background = BackgroundTasks()
        if self._path:
            background.keep("watch of the API keys", self._follow)
        try:
            yield self.api_keys
        finally:
            await background.close()
            await asyncio.to_thread(self._audit_log.close)

    async def look(self) -> None:
        """Read the file again if it has changed."""
        signature = await asyncio.to_thread(signature_of, self._path)
        if signature == self._signature and self._is_settled and not self.api_keys.damage:
            return
        # Read once more after each change: a second one may have come so soon that the file's time is the same.
        self._is_settled = signature == self._signature
        try:
            stored = await asyncio.to_thread(read_keys, self._path)
        except ConfigError as exc:
            self._signature = signature
            self._note_damage(exc.message)
            return
        self._signature = stored.signature
        self._note_damage("")
        if stored.keys != self.api_keys.all:
            changes = changes_of(self.api_keys.all, stored.keys)
            self.api_keys.replace(stored.keys)
            self._audit_log.note("keys.reload", target=self._path, details=changes)
            logger.warning("%s has changed: %d keys", self._path, len(stored.keys))

    async def _follow(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(POLL_INTERVAL_S)

    def _note_damage(self, damage: str) -> None:
        if damage and damage != self.api_keys.damage:
            self._audit_log.note("keys.reload", target=self._path, result="damaged")
            logger.error("%s. The keys read before stay valid; CHANGES, REVOCATIONS TOO, HAVE NO EFFECT", damage)
        elif self.api_keys.damage and not damage:
            logger.warning("%s can be used again", self._path)
        self.api_keys.damage = damage


def changes_of(before: Iterable[ApiKey], after: Iterable[ApiKey]) -> dict[str, list[str]]:
    """The ids of keys that are new, revoked, otherwise changed, or gone; only the first ones of many."""
    old, new = ({key.id: key for key in keys} for keys in (before, after))
    changes: dict[str, list[str]] = {"created": [], "revoked": [], "changed": []}
    for key_id, key in new.items():
        if key_id not in old:
            changes["created"].append(key_id)
        elif key.revoked is not None and old[key_id].revoked is None:
            changes["revoked"].append(key_id)
        elif key != old[key_id]:
            changes["changed"].append(key_id)
    changes["removed"] = [key_id for key_id in old if key_id not in new]
    return {kind: ids[:MAX_NAMED] for kind, ids in changes.items() if ids}
