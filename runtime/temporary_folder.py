"""The folder of a server's temporary files: its sockets and, in `tandem serve`, Ray's logs."""

from __future__ import annotations

import os
import shutil
import tempfile

from tandem.protocol.errors import ConfigError

MIN_FREE_BYTES = 16 << 20  # sockets and Ray's logs take under 1 MiB at the start, and the logs grow


def make_temporary_folder() -> str:
    """Make a folder of mode 0700 with a short name: the paths of the sockets in it must not be long.

    Python would go on in another place if `TMPDIR` could not be used. Raises `ConfigError` instead.
    """
    parent = os.environ.get("TMPDIR") or "/tmp"
    try:
        parent = os.environ.get("TMPDIR") or tempfile.gettempdir()
        num_free_bytes = shutil.disk_usage(parent).free
        if num_free_bytes < MIN_FREE_BYTES:
            raise ConfigError(
                f"the folder for temporary files, {parent}, has {num_free_bytes >> 20} MiB free and needs "
                f"{MIN_FREE_BYTES >> 20} MiB; delete files there, or set TMPDIR to another local folder"
            )
        return tempfile.mkdtemp(prefix="tandem-", dir=parent)
    except OSError as exc:
        raise ConfigError(
            f"the folder for temporary files, {parent}, cannot be written: {exc.strerror or exc}; "
            "set TMPDIR to another local folder"
        ) from exc
