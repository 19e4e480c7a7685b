"""Tiers in memory of a NUMA node, and in a mapped device or file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.kv_transfer.tiers import dax, numa
from tandem.kv_transfer.tiers.kinds import check_spec
from tandem.kv_transfer.tiers.memory import MemoryStore
from tandem.protocol.config import parse_tier
from tandem.protocol.errors import ConfigError
from tandem.testing.store_contract import BLOCK_BYTES, name_of, read, write
from tests.support.store_world import NUMA_NODES, opened

has_numa = pytest.mark.skipif(not NUMA_NODES.exists(), reason="this kernel has no NUMA nodes")


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def check(spec: str) -> None:
    check_spec(parse_tier(spec, eviction="lru"), is_local=True)


def mapping_of(store: MemoryStore) -> str:
    """What the kernel says of the memory in which a store's slab is."""
    address = store._slab.ctypes.data
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return max(
        (line for line in lines if int(line.split()[0], 16) <= address), key=lambda line: int(line.split()[0], 16)
    )


@has_numa
def test_memory_of_a_node_is_bound_to_it_and_there() -> None:
    store = opened("numa:0?gb=1", block_bytes=1 << 20, num_blocks=8)
    assert isinstance(store, MemoryStore)
    words = mapping_of(store).split()
    assert words[1] == "bind:0"
    assert sum(int(word.removeprefix("N0=")) for word in words if word.startswith("N0=")) >= 8, (
        "pages, large ones maybe"
    )
    ordinary = opened("host:1GB", block_bytes=1 << 20, num_blocks=8)
    assert isinstance(ordinary, MemoryStore)
    assert mapping_of(ordinary).split()[1] == "default"


@has_numa
def test_a_node_that_is_not_there_or_too_small_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"there is no NUMA node 77 with memory; choose one of 0"):
        check("numa:77?gb=1")
    with pytest.raises(ConfigError, match=r"1000000.0 GB do not fit: NUMA node 0 has .* lower gb"):
        opened("numa:0?gb=1", block_bytes=10**6, num_blocks=10**9)


def test_a_kernel_without_numa_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    with pytest.raises(ConfigError, match=r"this kernel knows no NUMA nodes .*; use host:"):
        check("numa:0?gb=1")


@has_numa
def test_a_container_that_may_not_bind_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "_MPOL_BIND", 99)  # any refusal
    with pytest.raises(ConfigError, match=r"refuses to bind memory to node 0 \(Invalid argument\).*SYS_NICE"):
        opened("numa:0?gb=1")


def test_lists_of_nodes_and_their_free_memory(tmp_path: Path) -> None:
    assert numa._numbers("0-1,3,8-9\n") == [0, 1, 3, 8, 9]
    assert numa._numbers("\n") == []
    meminfo = tmp_path / "meminfo"
    lines = ("MemFree:  100", "MemUsed:  999", "Active(file):  20", "Inactive(file):   3", "Active:  7")
    meminfo.write_text("".join(f"Node 0 {line} kB\n" for line in lines))
    assert numa.free_bytes(meminfo) == 123 * 1024


def test_workers_take_parts_of_one_file_that_do_not_overlap(tmpfs: Path) -> None:
    spec = f"dax:{tmpfs}/slab?gb=1"
    stores = [opened(spec, num_blocks=4) for _ in range(3)]
    for number, store in enumerate(stores):
        write(store, name_of(number))
    assert [read(store, name_of(number)) for number, store in enumerate(stores)] == [True] * 3
    assert (tmpfs / "slab").stat().st_size == 3 * (2 << 20)
    assert (tmpfs / "slab").stat().st_mode & 0o777 == 0o600
    stores.pop(1).close()
    stores.append(opened(spec, num_blocks=4))
    assert (tmpfs / "slab").stat().st_size == 3 * (2 << 20), "what a worker gave back is taken first"
    assert stores[-1].scan() == [], "it begins empty, whatever is in the file"


def test_a_device_has_an_end(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmpfs / "dax0.0").open("wb") as file:
        file.truncate(5 << 20)
    monkeypatch.setattr(dax.stat, "S_ISREG", lambda mode: False)
    monkeypatch.setattr(dax, "_device", lambda number: (2 << 20, 5 << 20))
    spec = f"dax:{tmpfs}/dax0.0?gb=1"
    stores = [opened(spec), opened(spec)]
    with pytest.raises(ConfigError, match=r"dax0.0\?gb=1': no 0.0 GB of it are free of other workers' KV; lower gb"):
        opened(spec)
    assert len(stores) == 2


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("/dev/dax77.0", "there is no /dev/dax77.0; name a device, or a file of a folder that is there"),
        ("{}/none/slab", "there is no {}/none/slab"),
        ("{}", "{} is neither a file nor a device"),
        ("dax0.0", "'dax0.0' must be a whole path"),
    ],
)
def test_places_that_cannot_be_mapped_are_refused_before_the_start(place: str, message: str, tmpfs: Path) -> None:
    with pytest.raises(ConfigError, match=message.format(tmpfs)):
        check(f"dax:{place.format(tmpfs)}?gb=1")


def test_a_file_that_cannot_grow_or_is_not_ours_is_refused(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"slab cannot be mapped: .*No space left on device"):
        opened(f"dax:{tmpfs}/slab?gb=1", num_blocks=10**12 // BLOCK_BYTES)
    with pytest.raises(ConfigError, match=r"null cannot be mapped: it is not a device dax"):
        opened("dax:/dev/null?gb=1")
    (tmpfs / "link").symlink_to("slab")
    with pytest.raises(ConfigError, match=r"link cannot be mapped: .*symbolic links"):
        opened(f"dax:{tmpfs}/link?gb=1")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match=r"the file belongs to user [0-9]+, who could change KV"):
        opened(f"dax:{tmpfs}/slab?gb=1")
