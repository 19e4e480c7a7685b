"""Memory in large pages."""

from __future__ import annotations

import mmap

import pytest

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


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no large pages")
def test_memory_asks_for_large_pages() -> None:
    memory = large_pages.allocate(64 << 20)
    with open("/proc/self/smaps") as file:
        regions = file.read().split("\nVmFlags: ")
    sizes = [int(line.split()[1]) for region in regions for line in region.splitlines() if line.startswith("Size:")]
    flags = [region.splitlines()[0].split() for region in regions[1:]]
    assert any(size >= 64 << 10 and "hg" in names for size, names in zip(sizes, flags, strict=False))
    memory.close()


def test_an_old_kernel_gives_small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", OldKernel)
    memory = large_pages.allocate(1 << 20)
    assert isinstance(memory, OldKernel)
    assert len(memory) == 1 << 20


def test_too_much_memory_is_an_error() -> None:
    with pytest.raises((OSError, OverflowError)):
        large_pages.allocate(1 << 60)
