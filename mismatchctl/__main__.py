"""`python -m mismatchctl`."""

from __future__ import annotations

import sys

from mismatchctl import interrupts


def main() -> None:
    """Entry point of the command: signals are dealt with before anything takes time to load."""
    interrupts.install()
    try:
        from mismatchctl.cli.main import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(interrupts.exit_code() or 130)


if __name__ == "__main__":
    main()
