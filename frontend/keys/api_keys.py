"""The API keys that a process knows: looked up by digest, and replaced as a whole when their file changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from tandem.frontend.keys.api_key import ApiKey, KeyState, key_digest
from tandem.frontend.keys.limiter import KeyUse, Limiter, LocalLimiter

Listener = Callable[[], None]


class ApiKeys:
    """Who may use a server, and how much. Used from one event loop only."""

    def __init__(
        self, keys: Iterable[ApiKey] = (), *, is_required: bool = False, limiter: Limiter | None = None
    ) -> None:
        """A server that requires keys and knows none refuses everybody. By default this process counts limits."""
        self._limiter = limiter or LocalLimiter()
        self.is_required = is_required
        self.damage = ""  # why the file cannot be used now; then the earlier keys stay valid
        self.num_reloads = 0
        self._by_digest: dict[str, ApiKey] = {}
        self._by_id: dict[str, ApiKey] = {}
        self._listeners: list[Listener] = []
        self._set(keys)

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def all(self) -> list[ApiKey]:
        """All keys, including expired and revoked ones."""
        return list(self._by_id.values())

    def find(self, secret: str) -> ApiKey | None:
        """The key that a client sent, in whatever state it is; None if it is unknown."""
        return self._by_digest.get(key_digest(secret))

    def get(self, key_id: str) -> ApiKey | None:
        """The key of this id."""
        return self._by_id.get(key_id)

    async def begin(self, key: ApiKey) -> KeyUse | None:
        """Begin a request with this key. Returns None if nothing limits it. Raises `RateLimitExceeded`."""
        if not key.limits.is_any_on_requests:
            return None
        use = await self._limiter.begin(key)
        return KeyUse(use, is_charged=key.limits.tokens_per_minute is not None)

    def num_by_state(self, now_s: float) -> Counter[KeyState]:
        """Keys by their state at this Unix time."""
        return Counter(key.state(now_s) for key in self._by_id.values())

    def listen(self, listener: Listener) -> None:
        """Call this after each change."""
        self._listeners.append(listener)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Replace all keys by these, from the next request on."""
        self._set(keys)
        self._limiter.keep(self._by_id)
        self.num_reloads += 1
        for listener in self._listeners:
            listener()

    def _set(self, keys: Iterable[ApiKey]) -> None:
        self._by_id = {key.id: key for key in keys}
        self._by_digest = {key.sha256: key for key in self._by_id.values()}
