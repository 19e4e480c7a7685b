"""A TLS context that follows its files: certificates are renewed without a restart.

The files may be replaced one by one, or all at once behind a link, as Kubernetes does. Files that cannot be used change
nothing: the former context stays until all files fit together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from tandem.protocol.errors import ConfigError
from tandem.runtime.background import BackgroundTasks
from tandem.runtime.certificates import NamedFile
from tandem.runtime.file_signature import Signature, signature_of

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0


class LoadedTls(NamedTuple):
    """A context, and when its own certificate expires (Unix time; infinite without one)."""

    context: ssl.SSLContext
    expires_at_s: float


class FollowedTls:
    """The context for new connections. Connections that exist keep the one that they began with."""

    def __init__(
        self,
        files: Sequence[NamedFile],
        load: Callable[[], LoadedTls],
        on_change: Callable[[], object] = lambda: None,
    ) -> None:
        """`load` makes a context from the files. It raises `ConfigError`, and so does this constructor.

        `on_change` is called after a reload, and when `damage` changes.
        """
        self._files = [file for file in files if file.path]
        self._load = load
        self._signatures = self._look()
        self._is_pending = True  # whether to load again at the next look
        self._looked_s = time.monotonic()
        self.loaded = load()
        self.damage = ""  # why the files cannot be used
        self.num_reloads = 0
        self._on_change = on_change

    @contextlib.asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Follow the files while the block runs."""
        background = BackgroundTasks()
        background.keep("watch of the certificates", self._follow)
        try:
            yield
        finally:
            await background.close()

    async def current(self) -> ssl.SSLContext:
        """The context for a connection that begins now. Looks at the files first, once a second at most."""
        now = time.monotonic()
        if now - self._looked_s >= POLL_INTERVAL_S:
            self._looked_s = now
            await self.look()
        return self.loaded.context

    async def look(self) -> None:
        """Load the files again if one has changed."""
        signatures = await asyncio.to_thread(self._look)
        is_same = signatures == self._signatures
        if is_same and not self._is_pending:
            return
        self._signatures = signatures
        try:
            loaded = await asyncio.to_thread(self._load)
        except ConfigError as exc:
            self._is_pending = True
            if is_same:  # somebody who writes one file after the other causes no error in between
                self._note_damage(exc.message)
            return
        # Load once more after each change: a second one may have come so soon that the files' times are the same.
        self._is_pending = not is_same
        self.loaded = loaded
        if not is_same or self.damage:
            self.num_reloads += 1
            self.damage = ""
            logger.warning("the certificates of %s have been loaded again", self._names)
            self._on_change()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await self.look()

    def _look(self) -> list[Signature | None]:
        return [signature_of(file.path) for file in self._files]

    @property
    def _names(self) -> str:
        return ", ".join(map(str, self._files))

    def _note_damage(self, damage: str) -> None:
        if damage != self.damage:
            logger.error("%s. The certificates loaded before stay in use", damage)
            self.damage = damage
            self._on_change()
