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
        try:
            gc.set_threshold(_COLLECT_AFTER)
            from mismatchctl.cli.main import main as command

            command()
        finally:
            end_on_signal()  # here and not below, where an interrupt would leave the handlers of this function
    except BaseException as ended:
        # a library can turn an interrupt into another error, and typer into an exit code of 1 or 130
        received = signal_exit_code()
        if received is None or (isinstance(ended, SystemExit) and ended.code not in (1, EXIT_INTERRUPTED)):
            raise
        if not isinstance(ended, SystemExit):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                print("interrupted", file=sys.stderr, flush=True)
        sys.exit(received)
    finally:
        gc.freeze()  # the process ends: nothing is gained by looking through all that it holds


if __name__ == "__main__":
    main()
