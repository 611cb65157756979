"""`python -m mismatchctl`."""

from __future__ import annotations

import sys

from mismatchctl import interrupts, opening
from mismatchctl.errors import EXIT_USAGE


def main() -> None:
    """Entry point of the command: signals are dealt with before anything takes time to load."""
    interrupts.install()
    try:
        text = opening.stored(sys.argv[1:])
        if text is not None:
            print(text, end="", flush=True)
            sys.exit(0 if sys.argv[1:] else EXIT_USAGE)
        from mismatchctl.cli.main import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(interrupts.exit_code() or 130)


if __name__ == "__main__":
    main()
