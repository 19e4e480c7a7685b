"""Checks by the wheel's metadata whether pip would install a CUDA build of torch here.

Usage: check_torch_build.py torch==X.Y.Z. Exit code 0: a CPU build; 3: a CUDA build; 1: pip finds no wheel.
It needs only the standard library and pip, because it runs before anything is installed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

from pip._vendor.packaging.requirements import Requirement

EXIT_CUDA_BUILD = 3
_CUDA_PACKAGE = re.compile(r"nvidia|cuda|triton", re.IGNORECASE)


def main(requirement: str) -> int:
    """The exit code for this requirement. The names of the CUDA packages go to stderr."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps"]
    resolved = subprocess.run([*command, "--report", "-", requirement], stdout=subprocess.PIPE, check=False)
    if resolved.returncode != 0:
        return 1
    cuda = cuda_requirements(json.loads(resolved.stdout))
    if cuda:
        print(f"CUDA packages required by {requirement}: {', '.join(cuda)}", file=sys.stderr)
        return EXIT_CUDA_BUILD
    return 0


def cuda_requirements(report: dict[str, Any]) -> list[str]:
    """Names of the CUDA packages that the wheels in pip's installation report require on this platform."""
    required = [Requirement(text) for item in report["install"] for text in item["metadata"].get("requires_dist", [])]
    return [r.name for r in required if _CUDA_PACKAGE.search(r.name) and (r.marker is None or r.marker.evaluate())]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
