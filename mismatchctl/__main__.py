"""`python -m mismatchctl`."""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings

from mismatchctl.errors import EXIT_INTERRUPTED
from mismatchctl.io.process import end_on_signal, install_handlers, signal_exit_code

_COLLECT_AFTER = 300_000
"""Objects after which unreachable ones are looked for: by far more than are made while modules are imported."""


def main() -> None:
    """Entry point of the command: signals are dealt with before anything takes time to load."""
    install_handlers()
    if not sys.warnoptions:  # what is not finite is told in our words
        warnings.simplefilter("ignore", RuntimeWarning)
    try:
        gc.set_threshold(_COLLECT_AFTER)
        from mismatchctl.cli.main import main as command

        command()
    except SystemExit as ended:
        # typer exits with 1 or 130 if a signal comes while it parses or after the command returned
        if (received := signal_exit_code()) is not None and ended.code in (1, EXIT_INTERRUPTED):
            sys.exit(received)
        raise
    except KeyboardInterrupt:  # before the command could deal with it, or after
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print("interrupted", file=sys.stderr, flush=True)
        sys.exit(signal_exit_code() or EXIT_INTERRUPTED)
    finally:
        end_on_signal()
        gc.freeze()  # the process ends: nothing is gained by looking through all that it holds


if __name__ == "__main__":
    main()
