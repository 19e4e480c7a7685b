from __future__ import annotations

import re
import subprocess
import sys


def test_a_warning_has_the_time_and_a_line() -> None:
    script = (
        "import logging; from tandem.runtime.log_format import show_warnings; show_warnings(); "
        "logging.getLogger('tandem.x').warning('worker %s died', 'd'); logging.getLogger('tandem.x').info('hidden')"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING tandem\.x: worker d died\n", shown.stderr)
