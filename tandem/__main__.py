"""`tandem`, and `python -m tandem`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command. A Ctrl-C while it is imported, which takes a second, ends it without a traceback."""
    try:
        from tandem.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)  # as tandem.cli.main ends for it later
    run()


if __name__ == "__main__":
    main()
