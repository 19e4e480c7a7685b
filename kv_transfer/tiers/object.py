"""L4: blocks in an object store (S3, GCS, Azure, or a folder by file://), shared by all hosts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from typing_extensions import override

from tandem.kv_transfer.tiers.base import (
    Block,
    BlockName,
    BlockStore,
    StoreFailure,
    StoreSettings,
    file_name,
    parse_file_name,
)
from tandem.kv_transfer.tiers.disk import check_folder, make_private
from tandem.kv_transfer.tiers.key import StoreKey
from tandem.kv_transfer.tiers.seal import FOOTER_BYTES, make_seal
from tandem.protocol.config import TierSpec
from tandem.protocol.errors import ConfigError
from tandem.protocol.load_prior import TIER_PRIORS

logger = logging.getLogger(__name__)

MAX_LISTED = 1 << 24
_MAX_RETRIES = 2
_FIRST_BACKOFF_S = 0.05


class ObjectStore(BlockStore):
    """Objects `<url>/<namespace and key>/<digest>-<parent>`; the object store publishes each of them whole.

    A read or write takes at most about three times `timeout_s`, retries included, and so does each page of a listing.
    Credentials and endpoint come from the environment, as the cloud's own tools read them, or from `options` under
    obstore's names.
    """

    prior = TIER_PRIORS["object"]
    num_threads = 8
    rescan_s = 60.0
    shared_by = "all"

    @classmethod
    @override
    def open(cls, settings: StoreSettings) -> BlockStore:
        spec, key = settings.spec, settings.key
        assert key is not None, f"{spec.setting} has no key"
        url = f"{spec.url.rstrip('/')}/{spec.codec}"
        store = cls(url, settings.namespace, settings.block_bytes, key, max_listed=settings.max_listed)
        store.identity = f"{url}#{key.folder_name(settings.namespace)}"
        return store

    @classmethod
    @override
    def check(cls, spec: TierSpec, *, is_local: bool) -> None:
        if spec.scheme != "file":
            _open(_import_obstore(), spec.url, 1.0, {})  # sends nothing
            return
        url = urlsplit(spec.url)
        if url.netloc not in ("", "localhost"):  # it would be taken for a host, and left out
            raise ConfigError(
                f"{spec.setting}: {spec.url!r} names the host {url.netloc!r}; a folder has three slashes: "
                f"file:///{url.netloc}{url.path}"
            )
        if is_local:
            check_folder(spec.setting, Path(unquote(url.path)))

    def __init__(
        self,
        url: str,
        namespace: bytes,
        block_bytes: int,
        key: StoreKey,
        *,
        timeout_s: float = 2.0,
        max_listed: int = MAX_LISTED,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """`max_listed`: a scan reads no more objects than this, or a listing without an end would never end."""
        super().__init__(block_bytes)
        self._max_listed = max_listed
        self._obstore = _import_obstore()
        self._errors = (self._obstore.exceptions.BaseError, OSError)
        self._absent_errors = (self._obstore.exceptions.NotFoundError, FileNotFoundError)
        self._url = url
        self._folder = key.folder_name(namespace)
        self._seal = make_seal(key)
        self._store = _open(self._obstore, url, timeout_s, options or {})
        if url.startswith("file:"):
            make_private(Path(unquote(urlsplit(url).path)) / self._folder)

    @override
    def read(self, name: BlockName, scratch: Block) -> Block | StoreFailure:
        try:
            found = self._obstore.get(self._store, self._path(name))
            is_whole = found.meta["size"] == self.block_bytes + FOOTER_BYTES
            content = found.bytes() if is_whole else b""  # an object of another size may not fit into memory
        except self._errors as exc:
            if isinstance(exc, self._absent_errors):
                return StoreFailure.ABSENT
            return self._unreachable("cannot read a block", exc)
        parts = self._seal.split(np.frombuffer(content, np.uint8))
        data = self._seal.open(name, parts, scratch) if is_whole else None
        return self.whole_or_deleted(name, data)

    @override
    def write(self, name: BlockName, data: Block) -> StoreFailure | None:
        content, *others = (np.frombuffer(part, np.uint8) for part in self._seal.seal(name, data))
        if others:
            content = np.concatenate((content, *others))  # releases the interpreter lock, unlike joining bytes
        try:
            self._obstore.put(self._store, self._path(name), content.data, use_multipart=False)
        except self._errors as exc:
            return self._unreachable("cannot write a block", exc)
        return None

    @override
    def delete(self, name: BlockName) -> StoreFailure | None:
        try:
            self._obstore.delete(self._store, self._path(name))
        except self._errors as exc:
            if not isinstance(exc, self._absent_errors):
                return self._unreachable("cannot delete a block", exc)
        return None

    @override
    def scan(self) -> Sequence[BlockName] | StoreFailure:
        found: list[tuple[datetime, BlockName]] = []
        num_listed = 0
        try:
            for page in self._obstore.list(self._store, self._folder, chunk_size=1000):
                num_listed += len(page)
                if num_listed > self._max_listed:
                    logger.warning("%s: lists more than %d objects; the others are ignored", self._url, num_listed)
                    break
                for entry in page:
                    if (name := parse_file_name(entry["path"].rpartition("/")[2])) is not None:
                        found.append((entry["last_modified"], name))
        except self._errors as exc:
            return self._unreachable("cannot be listed", exc)
        found.sort(key=itemgetter(0))
        return [self._seal.true_name(stored) for _, stored in found]

    def _path(self, name: BlockName) -> str:
        return f"{self._folder}/{file_name(self._seal.stored_name(name))}"

    def _unreachable(self, what: str, exc: Exception) -> StoreFailure:
        logger.warning("%s: %s: %s", self._url, what, str(exc).partition("\n")[0])
        return StoreFailure.UNREACHABLE


def _import_obstore() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as exc:
        raise ConfigError(
            f"the object store tier cannot be loaded ({exc}); pip install 'tandem-serve[worker]'"
        ) from exc
    return obstore


def _open(obstore: Any, url: str, timeout_s: float, options: Mapping[str, str]) -> Any:
    timeout = timedelta(seconds=timeout_s)
    try:
        if url.startswith("file:"):
            return obstore.store.from_url(url, mkdir=True)
        return obstore.store.from_url(
            url,
            config=dict(options),
            client_options={"timeout": timeout, "connect_timeout": timeout, "allow_http": True},
            retry_config={
                "max_retries": _MAX_RETRIES,
                "retry_timeout": timeout,
                "backoff": {"init_backoff": timedelta(seconds=_FIRST_BACKOFF_S), "max_backoff": timeout, "base": 2},
            },
        )
    except (obstore.exceptions.BaseError, OSError, ValueError) as exc:
        raise ConfigError(f"object store {url!r} cannot be opened: {str(exc).partition(chr(10))[0]}") from exc
