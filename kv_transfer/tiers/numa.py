"""Host memory of one NUMA node, such as memory behind CXL, which Linux shows as a node without cores."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from pathlib import Path

import numpy as np
from typing_extensions import override

from tandem.kv_transfer.tiers.base import Block, BlockStore, StoreSettings
from tandem.kv_transfer.tiers.memory import MemoryStore, populate
from tandem.protocol.config import TierSpec
from tandem.protocol.errors import ConfigError
from tandem.protocol.load_prior import LoadPrior
from tandem.runtime import large_pages

_NODES = Path("/sys/devices/system/node")
_MBIND = {"x86_64": 237, "aarch64": 235}  # numbers of the system call
_MPOL_BIND = 2
_MAX_NODES = 1024


class NumaStore(MemoryStore):
    """`numa:2?gb=256`: a slab of memory that Linux takes from this node alone."""

    prior = LoadPrior(50e-6, 8e9)

    @classmethod
    @override
    def open(cls, settings: StoreSettings) -> BlockStore:
        spec, num_bytes = settings.spec, settings.num_bytes
        node = _node_of(spec)
        free = free_bytes(_NODES / f"node{node}" / "meminfo")
        if num_bytes > free:
            raise ConfigError(
                f"{spec.setting}: {num_bytes / 1e9:.1f} GB do not fit: NUMA node {node} has {free / 1e9:.1f} GB free; "
                "lower gb"
            )
        memory = large_pages.allocate(num_bytes)
        slab: Block = np.frombuffer(memory, np.uint8)
        _bind(slab, node, spec.setting)
        populate(memory, slab)
        return cls(settings.block_bytes, settings.num_blocks, slab)

    @classmethod
    @override
    def check(cls, spec: TierSpec, *, is_local: bool) -> None:
        if not re.fullmatch("[0-9]{1,4}", spec.place):
            raise ConfigError(f"{spec.setting}: {spec.place!r} must be the number of a NUMA node, such as numa:0?gb=64")
        if is_local:
            _node_of(spec)


def free_bytes(meminfo: Path) -> int:
    """Memory of a node that is free, or holds pages of files that can be read again."""
    kilobytes = dict(re.findall(r"(\w+(?:\(file\))?): +([0-9]+) kB", meminfo.read_text()))
    return 1024 * sum(int(kilobytes.get(name, 0)) for name in ("MemFree", "Active(file)", "Inactive(file)"))


def _node_of(spec: TierSpec) -> int:
    """The node, which is there and has memory. Raises `ConfigError`."""
    try:
        there = _numbers((_NODES / "has_memory").read_text())
    except OSError as exc:
        raise ConfigError(
            f"{spec.setting}: this kernel knows no NUMA nodes ({exc.strerror}); use host: instead"
        ) from exc
    node = int(spec.place)
    if node not in there:
        known = ", ".join(map(str, there))
        raise ConfigError(f"{spec.setting}: there is no NUMA node {node} with memory; choose one of {known}")
    return node


def _numbers(text: str) -> list[int]:
    """The numbers in a list of the kernel, such as 0-1,3."""
    bounds = (part.partition("-") for part in text.strip().split(",") if part)
    return [number for first, _, last in bounds for number in range(int(first), int(last or first) + 1)]


def _bind(memory: Block, node: int, setting: str) -> None:
    """Let this memory, none of which is used yet, come from the node alone. Raises `ConfigError`."""
    number = _MBIND.get(platform.machine())
    if number is None:
        raise ConfigError(f"{setting}: memory cannot be bound on a processor of kind {platform.machine()}; use host:")
    mask = (ctypes.c_ulong * (_MAX_NODES // 64))()
    mask[node // 64] = 1 << node % 64
    call = ctypes.CDLL(None, use_errno=True).syscall
    arguments = ctypes.c_void_p(memory.ctypes.data), ctypes.c_ulong(memory.nbytes), ctypes.c_int(_MPOL_BIND)
    if call(ctypes.c_long(number), *arguments, mask, ctypes.c_ulong(_MAX_NODES + 1), ctypes.c_uint(0)):
        error = ctypes.get_errno()
        raise ConfigError(
            f"{setting}: Linux refuses to bind memory to node {node} ({os.strerror(error)}); a container needs the "
            "capability SYS_NICE for it"
        )
