"""The object store tier when its server dies, hangs and comes back."""

from __future__ import annotations

import asyncio
import itertools
import signal
import stat
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.kv_transfer.tiers.base import StoreFailure
from tandem.kv_transfer.tiers.object import ObjectStore
from tandem.protocol.errors import ConfigError
from tandem.testing.store_contract import BLOCK_BYTES, KEY, NAMESPACE, chain, content, name_of, read
from tests.support.store_world import Clock, S3Server, World, get, make_tier, put
from tests.support.waiting import poll_until

PAUSE_S = 0.2
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]

_HEAD = b'HTTP/1.1 200 OK\r\nlast-modified: Thu, 01 Jan 2026 00:00:00 GMT\r\netag: "x"\r\ncontent-length: %d\r\n\r\n'
_ENTRY = (
    b"<Contents><Key>folder/%032x-</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>1</Size></Contents>"
)
_LISTING = (
    b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken>%b"
    b"</ListBucketResult>"
)


async def answers_nothing(_: asyncio.StreamWriter) -> None:
    """Accept a request and say no word."""
    await asyncio.Event().wait()


async def one_byte_at_a_time(writer: asyncio.StreamWriter) -> None:
    """Send a block as long as it can be waited for."""
    writer.write(_HEAD % 1_000_000)
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)  # the whole block would take hours


def lists_without_end() -> Answer:
    """A listing whose every page names another one."""
    numbers = itertools.count()

    async def answer(writer: asyncio.StreamWriter) -> None:
        page = _LISTING % b"".join(_ENTRY % next(numbers) for _ in range(1000))
        writer.write(_HEAD % len(page) + page)

    return answer


@contextmanager
def hostile_s3(answer: Answer) -> Iterator[dict[str, str]]:
    """Options for a store there. Each request gets `answer`."""
    started = threading.Event()
    ports: list[int] = []
    stops: list[Callable[[], object]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                await answer(writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            writer.transport.abort()

    async def run() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            ports.append(server.sockets[0].getsockname()[1])
            stops.append(lambda: loop.call_soon_threadsafe(stop.set))
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert started.wait(10)
        yield {
            "endpoint": f"http://127.0.0.1:{ports[0]}",
            "access_key_id": "tandem",
            "secret_access_key": "secret",
            "region": "us-east-1",
        }
    finally:
        for stop in stops:
            stop()
        thread.join(10)


@pytest.fixture
def mortal_server() -> Iterator[S3Server]:
    """A server that only this test uses."""
    server = S3Server()
    yield server
    server.kill()


def test_a_hanging_server_is_a_bounded_failure(s3_server: S3Server, tmp_path: Path) -> None:
    store = World("object-s3", tmp_path, s3_server).open()
    store.write(name_of(1), content(name_of(1)))
    s3_server.signal(signal.SIGSTOP)
    for call in (lambda: read(store, name_of(1)), lambda: store.write(name_of(2), content(name_of(2))), store.scan):
        assert call() is StoreFailure.UNREACHABLE
    s3_server.signal(signal.SIGCONT)
    assert read(store, name_of(1)) is True


def test_a_tier_goes_on_without_a_killed_server_and_with_the_next(mortal_server: S3Server, tmp_path: Path) -> None:
    clock = Clock()
    tier = make_tier(World("object-s3", tmp_path, mortal_server).open(), pause_s=PAUSE_S, clock=clock)
    names = chain(1, 2, 3, 4)
    put(tier, names)
    assert get(tier, names) == 4
    mortal_server.kill()
    assert get(tier, names) == 0
    assert tier.count_present([name.digest for name in names]) == 0
    assert tier.store(*name_of(9), content(name_of(9))) is None
    mortal_server.start()  # it has lost everything
    clock.now += PAUSE_S
    poll_until(tier, lambda: tier.digests() == [])
    put(tier, names)
    assert get(tier, names) == 4
    stats = tier.stats()
    assert stats.num_drops["unreachable"] == 1
    assert (stats.num_hits, stats.num_misses) == (8, {"unreachable": 4})
    tier.check_integrity(idle=True)
    tier.close()


def test_a_scan_that_failed_is_made_again(s3_server: S3Server, tmp_path: Path) -> None:
    world = World("object-s3", tmp_path, s3_server)
    world.open().write(name_of(1), content(name_of(1)))
    s3_server.signal(signal.SIGSTOP)
    tier = make_tier(world.open(), pause_s=PAUSE_S)
    assert tier.digests() == []
    s3_server.signal(signal.SIGCONT)
    poll_until(tier, lambda: tier.digests() == [name_of(1).digest])
    tier.close()


@pytest.mark.parametrize(
    ("url", "options"), [("gopher://bucket", {}), ("bucket", {}), ("s3://bucket", {"no_such_option": "1"})]
)
def test_a_bad_url_or_option_is_a_config_error(url: str, options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="cannot be opened"):
        ObjectStore(url, NAMESPACE, BLOCK_BYTES, KEY, options=options)


def test_a_folder_as_an_object_store_is_private(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}/a b/objects", NAMESPACE, BLOCK_BYTES, KEY)
    store.write(name_of(1), content(name_of(1)))
    [file] = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert file.parent == tmp_path / "a b" / "objects" / KEY.folder_name(NAMESPACE)
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert read(store, name_of(1)) is True


@pytest.mark.parametrize("answer", [answers_nothing, one_byte_at_a_time])
def test_a_store_that_accepts_and_does_not_answer_is_unreachable(answer: Answer) -> None:
    with hostile_s3(answer) as options:
        store = ObjectStore("s3://bucket", NAMESPACE, BLOCK_BYTES, KEY, timeout_s=0.3, options=options)
        assert store.scan() is StoreFailure.UNREACHABLE
        assert store.delete(name_of(1)) is StoreFailure.UNREACHABLE
        assert read(store, name_of(1)) in (StoreFailure.UNREACHABLE, StoreFailure.CORRUPT)


def test_a_listing_without_an_end_ends() -> None:
    with hostile_s3(lists_without_end()) as options:
        store = ObjectStore("s3://bucket", NAMESPACE, BLOCK_BYTES, KEY, max_listed=5_000, options=options)
        found = store.scan()
        assert not isinstance(found, StoreFailure)
        assert len(found) == 5_000
