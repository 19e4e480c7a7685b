"""The key of the persistent tiers: where it is, who may read it, and what is derived from it."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tandem.kv_transfer.tiers.base import Block, BlockName
from tandem.kv_transfer.tiers.key import StoreKey, load_key
from tandem.kv_transfer.tiers.seal import FOOTER_BYTES, BlockSeal, make_seal
from tandem.protocol.errors import ConfigError
from tandem.testing.store_contract import KEY, NAMESPACE, content, name_of


def test_a_key_is_created_once_for_this_user_only(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "kv-key"
    with ThreadPoolExecutor(8) as threads:  # as workers that start at once
        keys = list(threads.map(lambda _: load_key(path, may_make=True), range(32)))
    assert set(keys) == {load_key(path, may_make=False)}
    assert len(keys[0].secret) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
    assert load_key(tmp_path / "other", may_make=True) != keys[0]


def test_a_key_that_was_to_be_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_key_file=.*/none does not exist; make it with: "):
        load_key(tmp_path / "none", may_make=False)


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660, 0o620, 0o644])
def test_a_key_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    path.write_bytes(bytes(32))
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:o}, .* is open to others"):
        load_key(path, may_make=True)


def test_a_key_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(bytes(32))
    path.chmod(0o600)
    if os.geteuid() != 0:
        pytest.skip("only root can make a file another user's")
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="owner 12345"):
        load_key(path, may_make=True)


@pytest.mark.parametrize("kind", ["short", "empty", "folder", "pipe"])
def test_what_is_not_a_key_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "key"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(bytes(31 if kind == "short" else 0))
    with pytest.raises(ConfigError, match="kv_key_file="):
        load_key(path, may_make=True)


def test_a_key_may_be_behind_a_link(tmp_path: Path) -> None:
    """Kubernetes mounts a Secret like this."""
    (tmp_path / "key").symlink_to("data")
    (tmp_path / "data").write_bytes(KEY.secret)
    (tmp_path / "data").chmod(0o600)
    assert load_key(tmp_path / "key", may_make=True) == KEY


def test_the_secret_is_in_no_name_and_no_log() -> None:
    assert KEY.secret.hex() not in KEY.folder_name(NAMESPACE) + repr(KEY)
    others = [StoreKey(bytes(32)).folder_name(NAMESPACE), StoreKey(KEY.secret, encrypts=True).folder_name(NAMESPACE)]
    assert len({KEY.folder_name(NAMESPACE), KEY.folder_name(bytes(16)), *others}) == 4


@pytest.mark.parametrize("encrypts", [False, True])
def test_a_seal_is_for_one_key_one_name_and_these_bytes(encrypts: bool) -> None:
    seal, name = make_seal(StoreKey(KEY.secret, encrypts)), name_of(1)
    data = content(name)
    stored = sealed(seal, name, data)
    assert stored.nbytes == data.nbytes + FOOTER_BYTES
    assert opens(seal, name, stored, data)
    again = sealed(seal, name, data)
    assert not np.array_equal(again, stored), "a nonce that comes twice would give the key away"
    assert opens(seal, name, again, data)
    assert not opens(make_seal(StoreKey(bytes(32), encrypts)), name, stored, data)
    assert not opens(make_seal(StoreKey(KEY.secret, not encrypts)), name, stored, data)
    assert not opens(seal, name_of(2), stored, data)
    assert not opens(seal, name_of(1, parent=2), stored, data)
    assert not opens(seal, name, stored[1:], data[1:])
    for position in range(0, stored.nbytes, 13):
        damaged = stored.copy()
        damaged[position] ^= 1
        assert not opens(seal, name, damaged, data) or 20 <= position - data.nbytes < 24  # the footer's padding


def sealed(seal: BlockSeal, name: BlockName, data: Block) -> Block:
    return np.concatenate([np.frombuffer(part, np.uint8) for part in seal.seal(name, data)])


def opens(seal: BlockSeal, name: BlockName, stored: Block, data: Block) -> bool:
    opened = seal.open(name, seal.split(stored), np.zeros_like(data))
    assert opened is None or np.array_equal(opened, data), "what a seal opens is what was sealed"
    return opened is not None


def test_names_are_encrypted_and_come_back() -> None:
    seal, plain = make_seal(StoreKey(KEY.secret, encrypts=True)), make_seal(KEY)
    for name in (name_of(1), name_of(2, parent=1)):
        stored = seal.stored_name(name)
        assert seal.true_name(stored) == name
        assert stored == make_seal(StoreKey(KEY.secret, encrypts=True)).stored_name(name)
        assert not {stored.digest, stored.parent} & {name.digest, *filter(None, [name.parent])}
        assert plain.stored_name(name) == plain.true_name(name) == name
    assert seal.stored_name(name_of(2, parent=1)).parent == seal.stored_name(name_of(1)).digest
