"""Entry point of the command `mismatchctl` and of `python -m mismatchctl`."""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType

from mismatchctl.errors import EXIT_INTERRUPTED
from mismatchctl.io.process import end_on_signal, install_handlers, signal_exit_code

COLLECT_AFTER = 300_000
"""Python collects garbage when there are this many new objects. Imports create fewer, so no collection slows them."""


class _PandasBlocker:
    """Makes `import pandas` fail. Commands do not need pandas, but pyarrow would import it, which takes 0.25 s."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "pandas" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        raise ModuleNotFoundError("commands do not use pandas", name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing. importlib requires this method, but never calls it, because `create_module` raises an error."""


def main() -> None:
    """Install signal handlers, so that Ctrl-C also works during the slow imports. Then import and run the command."""
    install_handlers()
    if not sys.warnoptions:  # numpy warns about overflows, which mismatchctl reports itself
        warnings.simplefilter("ignore", RuntimeWarning)
    sys.meta_path.insert(0, _PandasBlocker())
    try:
        try:
            gc.set_threshold(COLLECT_AFTER)
            from mismatchctl.cli.main import main as command

            command()
        finally:
            end_on_signal()  # may raise an interrupt, which the handler below must catch
    except BaseException as ended:
        # after Ctrl-C, a library may have raised another error, and typer may have replaced the exit code by 1 or 130
        received = signal_exit_code()
        if received is None or (isinstance(ended, SystemExit) and ended.code not in (1, EXIT_INTERRUPTED)):
            raise
        if not isinstance(ended, SystemExit):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                print("interrupted", file=sys.stderr, flush=True)
        sys.exit(received)
    finally:
        gc.freeze()  # the process ends, so a last garbage collection would only take time


if __name__ == "__main__":
    main()
