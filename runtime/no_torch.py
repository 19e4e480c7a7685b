"""Keeps torch out of processes that compute nothing: the command line and the routers."""

from __future__ import annotations

import os
import sys


def keep_torch_out() -> None:
    """Make `import torch` fail in this process from here on, unless torch is loaded already.

    transformers imports torch where it is installed, even for a tokenizer: 270 MB and several seconds.
    """
    # transformers would warn that it found no torch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # None means: not importable
