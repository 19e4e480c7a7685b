"""The disk tier under bad conditions: killed writers, full disks, strange files, shared folders."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem.kv_transfer.tiers.base import StoreFailure
from tandem.kv_transfer.tiers.disk import DiskStore, folder_id
from tandem.protocol.errors import ConfigError
from tandem.testing.store_contract import BLOCK_BYTES, KEY, NAMESPACE, chain, content, name_of, read
from tests.support.store_world import World, get, make_tier, put

LARGE_BYTES = 2_000_000
NUM_KILLS = 3

# Writes blocks with numbers from `first` on and says so after each, until it is killed.
WRITER = f"""
import sys
from pathlib import Path
from tandem.testing.store_contract import KEY, NAMESPACE, content, name_of
from tandem.kv_transfer.tiers.disk import DiskStore
store = DiskStore(Path(sys.argv[1]), NAMESPACE, {LARGE_BYTES}, KEY)
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    name = name_of(number)
    assert store.write(name, content(name, {LARGE_BYTES})) is None
    print(number, flush=True)
"""


def start_writer(folder: Path, first: int, end: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(first), str(end)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World("disk", tmp_path)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a few blocks."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, timeout=10).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=10)


def unfinished_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix == ".tmp"]


def test_writers_killed_in_mid_write_leave_whole_blocks_only(tmp_path: Path) -> None:
    seed = 20
    print(f"seed={seed}")
    rng = random.Random(seed)
    reported: list[int] = []
    for turn in range(NUM_KILLS):
        writer = start_writer(tmp_path, 1000 * turn, 1000 * (turn + 1))
        assert writer.stdout is not None
        reported += [int(writer.stdout.readline()) for _ in range(rng.randint(1, 4))]
        while not unfinished_files(tmp_path) and writer.poll() is None:
            pass  # so that it dies while a file is being written, most times
        writer.kill()
        reported += [int(line) for line in writer.communicate(timeout=20)[0].splitlines()]
    store = DiskStore(tmp_path, NAMESPACE, LARGE_BYTES, KEY)
    found = store.scan()
    assert {name_of(number) for number in reported} <= set(found)
    assert all(read(store, name) is True for name in found)
    left_behind = unfinished_files(tmp_path)
    for path in left_behind:
        os.utime(path, (0, 0))
    store.scan()
    assert unfinished_files(tmp_path) == []
    assert set(store.scan()) == set(found)


def test_scan_leaves_the_files_of_writers_at_work(world: World, tmp_path: Path) -> None:
    store = world.open()
    store.write(name_of(1), content(name_of(1)))
    at_work = world.path(name_of(1)).with_suffix(".0a1b2c3d.tmp")
    at_work.write_bytes(b"half")
    assert store.scan() == [name_of(1)]
    assert unfinished_files(tmp_path) == [at_work]


def test_processes_share_a_folder(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, NAMESPACE, LARGE_BYTES, KEY)
    writers = [start_writer(tmp_path, 0, 20) for _ in range(2)]
    deadline = time.monotonic() + 30
    results: list[StoreFailure | bool] = []
    while any(writer.poll() is None for writer in writers):
        assert time.monotonic() < deadline
        results += [read(store, name_of(number)) for number in range(0, 20, 5)]
    assert [writer.wait() for writer in writers] == [0, 0]
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.close()
    assert set(results) <= {True, StoreFailure.ABSENT}
    assert sorted(store.scan()) == sorted(name_of(number) for number in range(20))
    assert all(read(store, name_of(number)) is True for number in range(20))


def test_scan_is_ordered_by_age(world: World) -> None:
    store = world.open()
    names = chain(5, 200, 3, 100)
    for name in names:
        store.write(name, content(name))
    for age, name in enumerate(names):
        os.utime(world.path(name), (1000 - age, 1000 - age))
    assert store.scan() == names[::-1]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_failed_write_drops_it(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    store = world.open()

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", fail)
        expected = StoreFailure.UNREACHABLE if code == errno.EIO else StoreFailure.FULL
        assert store.write(name_of(1), content(name_of(1))) is expected
    assert read(store, name_of(1)) is StoreFailure.ABSENT
    assert unfinished_files(tmp_path) == []
    assert store.write(name_of(1), content(name_of(1))) is None


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
def test_a_file_error_is_not_one_of_this_process(world: World, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    store = world.open()
    store.write(name_of(1), content(name_of(1)))

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        failure = read(store, name_of(1))
    if code == errno.EIO:
        assert (failure, read(store, name_of(1))) == (StoreFailure.CORRUPT, StoreFailure.ABSENT)
    else:
        assert (failure, read(store, name_of(1))) == (StoreFailure.UNREACHABLE, True)


def test_a_full_disk_keeps_what_it_has(tiny_disk: Path) -> None:
    store = DiskStore(tiny_disk, NAMESPACE, BLOCK_BYTES, KEY)
    results = [store.write(name_of(number), content(name_of(number))) for number in range(20)]
    num_stored = results.count(None)
    assert 0 < num_stored < 20
    assert set(results) == {None, StoreFailure.FULL}
    assert unfinished_files(tiny_disk) == []
    found = store.scan()
    assert len(found) == num_stored
    assert all(read(store, name) is True for name in found)
    store.delete(found[0])
    assert store.write(name_of(99), content(name_of(99))) is None


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"the tier's folder .* cannot be created"):
        DiskStore(tmp_path / "file" / "blocks", NAMESPACE, BLOCK_BYTES, KEY)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_its_user_can_enter_and_read(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "a" / "b", NAMESPACE, BLOCK_BYTES, KEY)
    store.write(name_of(1), content(name_of(1)))
    paths = list((tmp_path / "a").rglob("*"))
    assert {mode(path) for path in [tmp_path / "a", *paths] if path.is_dir()} == {0o700}
    assert {mode(path) for path in paths if path.is_file()} == {0o600}


def test_an_open_folder_is_closed_and_told_once(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world.open().write(name_of(1), content(name_of(1)))
    folder = tmp_path / "blocks" / KEY.folder_name(NAMESPACE)
    folder.chmod(0o755)
    (tmp_path / "blocks").chmod(0o777)
    for _ in range(2):
        assert read(world.open(), name_of(1)) is True
    assert caplog.text.count("others could enter") == 1
    assert (mode(folder), mode(tmp_path / "blocks")) == (0o700, 0o777), "what is above may be somebody else's place"


def test_a_folder_that_another_user_made_is_refused(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "blocks" / KEY.folder_name(NAMESPACE)
    folder.parent.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="is a link or belongs to"):
        world.open()
    folder.unlink()
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can make a folder another user's")
    os.chown(folder, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        world.open()


def put_stray(kind: str, path: Path, outside: Path) -> None:
    """Put something at `path` that no store has made. `outside` is the target of links."""
    match kind:
        case "folder":
            path.mkdir()
            (path / "theirs").write_bytes(b"x")
        case "link":
            path.symlink_to(outside)
        case "dangling link":
            path.symlink_to("nothing")
        case "link to itself":
            path.symlink_to(path)
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(path.parent):
                listener.bind(path.name)  # the whole path would be too long for a socket
        case "file of another user":
            path.write_bytes(b"x" * BLOCK_BYTES)
            os.chown(path, 12345, 12345)
        case "file":
            path.write_bytes(b"x")


STRAYS = ["folder", "link", "dangling link", "link to itself", "pipe", "socket"]


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        *((kind, place) for kind in [*STRAYS, "file of another user"] for place in ("block", "folder of blocks")),
        ("file", "folder of blocks"),  # in a block's place it is a damaged block
    ],
)
def test_what_is_not_ours_is_left_and_pauses_nothing(world: World, tmp_path: Path, kind: str, place: str) -> None:
    if kind == "file of another user" and os.geteuid() != 0:
        pytest.skip("only root can make a file another user's")
    names = [name_of(number) for number in range(1, 9)]
    first = world.open()
    for name in names:
        first.write(name, content(name))
    genuine = world.path(names[0])
    outside = tmp_path / "outside"
    if place == "block":
        outside.write_bytes(genuine.read_bytes())  # a genuine block: a link would be good to read
        stray = genuine
        genuine.unlink()
    else:
        outside.mkdir()
        (outside / genuine.name).write_bytes(genuine.read_bytes())
        stray = genuine.parent
        genuine.unlink()
        stray.rmdir()
    put_stray(kind, stray, outside)
    before = os.lstat(stray)
    is_plain_folder = place == "folder of blocks" and kind == "folder"  # the same as one of ours
    store = world.open()
    assert set(store.scan()) == set(names[1:])
    assert read(store, names[0]) in (StoreFailure.CORRUPT, StoreFailure.ABSENT)
    assert store.write(names[0], content(names[0])) is (None if is_plain_folder else StoreFailure.OCCUPIED)
    store.delete(names[0])
    tier = make_tier(store)
    put(tier, names)  # those that are there already are not written again
    assert not tier.is_paused
    assert get(tier, names[1:]) == len(names) - 1
    assert tier.stats().num_drops == ({} if is_plain_folder else {"occupied": 1})
    tier.close()
    after = os.lstat(stray)
    assert (after.st_ino, after.st_mode, after.st_size) == (before.st_ino, before.st_mode, before.st_size) or (
        is_plain_folder and (stray / "theirs").exists()
    )
    assert outside.exists()


def test_other_files_beside_blocks_are_left_alone(world: World, tmp_path: Path) -> None:
    store = world.open()
    store.write(name_of(1), content(name_of(1)))
    folder = tmp_path / "blocks" / KEY.folder_name(NAMESPACE)
    strays = []
    for where in (folder, world.path(name_of(1)).parent):
        for number, kind in enumerate([*STRAYS, "file"]):
            strays.append(where / f"stray-{number}")
            put_stray(kind, strays[-1], tmp_path)
        huge = where / "huge"
        with huge.open("wb") as file:
            file.truncate(10**12)
        for name in ("notes.tmp", "x.0a1b2c3d.tmp", "zz", "00.tmp"):
            (where / name).write_bytes(b"theirs")
            os.utime(where / name, (0, 0))
            strays.append(where / name)
        strays.append(huge)
    assert store.scan() == [name_of(1)]
    assert read(store, name_of(1)) is True
    assert all(os.path.lexists(stray) for stray in strays)


def test_a_block_cannot_be_read_and_is_ours(world: World) -> None:
    store = world.open()
    store.write(name_of(1), content(name_of(1)))
    world.path(name_of(1)).chmod(0)
    assert read(store, name_of(1)) in ((True,) if os.geteuid() == 0 else (StoreFailure.CORRUPT,))  # root reads anything


def test_hosts_that_share_a_folder_know_it_by_one_name(tmp_path: Path) -> None:
    """Whatever the hosts' names: two hosts may have the same name and the same path without sharing a disk."""
    with ThreadPoolExecutor(8) as threads:
        names = list(threads.map(folder_id, [tmp_path / "kv"] * 8))
    assert len(set(names)) == 1
    assert folder_id(tmp_path / "kv" / "raw") not in names
    assert folder_id(tmp_path / "other") not in names
    assert [path.name for path in (tmp_path / "kv").iterdir() if path.is_file()] == ["id"]


def test_a_folder_whose_name_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv" / "id").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"the tier's folder .*kv cannot be used"):
        folder_id(tmp_path / "kv")
