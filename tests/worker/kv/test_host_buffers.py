"""Buffers for copies of a GPU, over a fake of CUDA's two calls and a device that completes late."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.engine.device import HostStream
from tandem.protocol.errors import ConfigError
from tandem.worker.kv.host_buffers import HostBuffers, PinnedBuffers
from tests.support.late_device import LateStream

SIZE = 10_240


class FakePages:
    """Memory that is locked, by address, and the codes that CUDA's calls return."""

    def __init__(self, lock_code: int = 0, unlock_code: int = 0) -> None:
        self.locked: dict[int, int] = {}
        self._lock_code, self._unlock_code = lock_code, unlock_code

    def lock(self, address: int, num_bytes: int) -> int:
        assert address not in self.locked
        if not self._lock_code:
            self.locked[address] = num_bytes
        return self._lock_code

    def unlock(self, address: int) -> int:
        del self.locked[address]  # KeyError: twice, or never locked
        return self._unlock_code


def offset_of(buffer: Tensor, buffers: PinnedBuffers) -> int:
    return buffer.data_ptr() - buffers._memory.ctypes.data


def test_buffers_lie_side_by_side_and_come_back_with_their_last_view() -> None:
    pages = FakePages()
    buffers = PinnedBuffers(SIZE, HostStream(), pages)
    assert list(pages.locked.values()) == [SIZE]
    first, second, third = buffers.take(3, 100), buffers.take(1, 512), buffers.take(2, 1000)
    assert [offset_of(buffer, buffers) for buffer in (first, second, third)] == [0, 512, 1024]
    assert [buffer.shape for buffer in (first, second, third)] == [(3, 100), (1, 512), (2, 1000)]
    assert buffers.num_free_bytes == SIZE - 512 - 512 - 2048
    row = second.numpy()[0]
    del first, second
    assert buffers.num_free_bytes == SIZE - 512 - 2048
    del row
    assert offset_of(buffers.take(1, 1024), buffers) == 0, "what was two buffers is one"
    del third
    assert buffers.num_free_bytes == SIZE


def test_without_room_a_buffer_comes_from_elsewhere() -> None:
    buffers = PinnedBuffers(SIZE, HostStream(), FakePages())
    held = buffers.take(1, SIZE)
    other = buffers.take(4, 50)
    assert other.shape == (4, 50)
    assert not 0 <= offset_of(other, buffers) < SIZE
    del held, other
    assert buffers.num_free_bytes == SIZE


def play(seed: int, *, is_impatient: bool) -> None:
    """Fill buffers, let a copy of each be launched, drop them, and take others meanwhile."""
    source = random.Random(seed)
    stream = LateStream(seed, is_impatient=is_impatient)
    buffers = PinnedBuffers(SIZE, stream, FakePages())
    held: list[Tensor] = []
    for number in range(300):
        buffer = buffers.take(source.randint(1, 4), source.choice((1, 100, 700)))
        offset = offset_of(buffer, buffers)
        if 0 <= offset < SIZE:
            memory = buffers._memory[offset : offset + buffer.numel()]
            value = number % 251

            def copy(memory: np.ndarray[tuple[int], np.dtype[np.uint8]] = memory, value: int = value) -> None:
                assert (memory == value).all(), "the memory was used again before it was copied"

            buffer.fill_(value)
            stream.launch(copy)
        held.append(buffer)
        while len(held) > 8 or (held and source.random() < 0.4):
            held.pop(source.randrange(len(held)))
    held.clear()
    del buffer
    stream.flush()
    assert buffers.num_free_bytes == SIZE


@pytest.mark.parametrize("seed", range(5))
def test_memory_is_used_again_only_behind_the_copies_that_read_it(seed: int) -> None:
    play(seed, is_impatient=False)


def test_a_stream_that_calls_everything_done_is_found_out() -> None:
    with pytest.raises(AssertionError, match="used again before it was copied"):
        play(0, is_impatient=True)


def test_memory_that_cannot_be_locked_is_refused_with_the_limit() -> None:
    expected = (
        r"256\.0 MB of host memory cannot be page-locked .* cudaHostRegister returned 2, and this process may lock "
        r".*; raise that .* or serve without tiers"
    )
    with pytest.raises(ConfigError, match=expected):
        PinnedBuffers(256_000_000, HostStream(), FakePages(lock_code=2))


def test_memory_that_is_locked_already_is_not_blamed_on_the_limit() -> None:
    with pytest.raises(ConfigError, match=r"cudaHostRegister returned 712: some of it is locked already"):
        PinnedBuffers(256_000_000, HostStream(), FakePages(lock_code=712))


def test_pages_are_unlocked_once_and_buffers_outlive_that() -> None:
    pages = FakePages()
    buffers = PinnedBuffers(SIZE, HostStream(), pages)
    buffer = buffers.take(2, 8)
    buffers.close()
    assert not pages.locked
    buffers.close()
    buffer.fill_(7)
    with pytest.raises(RuntimeError, match="cudaHostUnregister returned 713"):
        PinnedBuffers(SIZE, HostStream(), FakePages(unlock_code=713)).close()


def test_a_machine_without_a_gpu_takes_ordinary_memory() -> None:
    buffers = HostBuffers()
    buffer = buffers.take(2, 3)
    assert buffer.shape == (2, 3)
    assert buffer.dtype == torch.uint8
    buffers.close()
