"""Processes held to a share of one core each, so that several workers on few cores do not slow each other down.

Needs Linux, root and the cgroup CPU controller, version 1 or 2.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["cpu_share"]

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 10_000  # shorter than an engine step, so that it acts as a slower core and not as pauses


@contextlib.contextmanager
def cpu_share(pids: Iterable[int], share: float) -> Iterator[None]:
    """Hold each of these processes to `share` of a core's time for as long as the block runs.

    Raises RuntimeError if the machine does not allow it.
    """
    with contextlib.ExitStack() as stack:
        try:
            for pid in pids:
                stack.callback(_remove, _limit(pid, share))
        except OSError as exc:
            raise RuntimeError(f"--core-share needs root and the cgroup CPU controller: {exc}") from exc
        yield


def _limit(pid: int, share: float) -> Path:
    """Move the process into a new cgroup and return that."""
    quota_us = round(share * _PERIOD_US)
    is_v1 = (_ROOT / "cpu" / "cpu.shares").exists()
    group = (_ROOT / "cpu" if is_v1 else _ROOT) / f"tandem-bench-{pid}"
    group.mkdir()
    if is_v1:
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    else:
        (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
    (group / "cgroup.procs").write_text(str(pid))
    return group


def _remove(group: Path) -> None:
    """Move the process back to the parent cgroup: only an empty group can be removed."""
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            (group.parent / "cgroup.procs").write_text(pid)
    os.rmdir(group)
