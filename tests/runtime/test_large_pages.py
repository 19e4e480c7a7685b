"""Memory in large pages."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch

from tandem.runtime import large_pages


class OldKernel(mmap.mmap):
    def madvise(self, *_: int) -> None:
        raise OSError(22, "Invalid argument")


def test_memory_is_zeroed_and_can_be_written() -> None:
    memory = large_pages.allocate(3 << 20)
    assert len(memory) == 3 << 20
    assert memory[:] == bytes(3 << 20)
    memory[-1] = 7
    assert memory[-1] == 7


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no large pages")
def test_memory_asks_for_large_pages() -> None:
    memory = large_pages.allocate(64 << 20)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    flags: dict[range, list[str]] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            region = range(int(found[1], 16), int(found[2], 16))
        elif line.startswith("VmFlags:"):
            flags[region] = line.split()
    assert ["hg" in names for region, names in flags.items() if address in region] == [True]


def test_an_old_kernel_gives_small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", OldKernel)
    memory = large_pages.allocate(1 << 20)
    assert isinstance(memory, OldKernel)
    assert len(memory) == 1 << 20


@pytest.mark.parametrize("num_bytes", [1 << 60, 1 << 80])
def test_too_much_memory_is_an_error(num_bytes: int) -> None:
    with pytest.raises(MemoryError, match=f"the system refuses {num_bytes} bytes of memory: "):
        large_pages.allocate(num_bytes)
