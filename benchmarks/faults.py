"""10,000 handoffs under injected faults: is any token wrong, any block leaked, any wait endless?

The world is in `tests/support/fault_world.py`. Stands behind README's "nothing leaks" and "nothing waits forever".

    python -m benchmarks.faults [--handoffs 10000]
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.common import arguments, console, print_table, write_result
from tests.support.fault_world import DEADLINE_S, Faults, Report, run, save_model


def main() -> int:
    parser = arguments(__doc__, model=False)
    parser.option("--handoffs", 10_000, quick=300)
    settings = parser.settings()
    logging.disable(logging.WARNING)  # each broken link is logged, and here hundreds break
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = run(save_model(Path(folder)), handoffs=settings.handoffs, seed=settings.seed, faults=Faults())
    _print_report(report, settings.seed, time.perf_counter() - started)
    write_result("faults", settings, asdict(report))
    return 0 if report.is_clean else 1


def _print_report(report: Report, seed: int, duration_s: float) -> None:
    aims = {
        "wrong tokens (aim 0)": report.wrong_tokens,
        "leaked blocks (aim 0)": report.leaked_blocks,
        f"waits over the deadline of {DEADLINE_S:.0f} s (aim 0)": report.overdue,
    }
    rows: list[tuple[str, object]] = [
        ("handoffs", report.handoffs),
        ("completed, equal to the undisturbed engine", report.completed),
        ("cancelled by the client", report.cancelled),
        *((f"failed: {reason}", count) for reason, count in report.failed.most_common()),
        *((f"injected: {kind}", count) for kind, count in report.injected.most_common()),
        ("integrity checks of all workers, idle", report.checks),
        ("longest wait in virtual seconds", report.longest_wait_s),
        *aims.items(),
    ]
    print_table(f"Handoffs under faults (seed {seed}, {duration_s:.0f} s)", ["", "count"], rows)
    for complaint in report.complaints[:10]:
        console.print(complaint, markup=False)


if __name__ == "__main__":
    sys.exit(main())
