"""The first words of the command, `--help` and a bare call, from stored texts: nothing is loaded to say them.

`docs/generate.py` writes the texts from the commands, and a test holds them to these.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
PLAIN, COLOURED = "help.txt", "help.ansi"
"""As a pipe gets it, 80 columns wide; as a terminal does, `WIDTH` wide."""
WIDTH = 100
_HELP = (["--help"], ["-h"])
CHANGES = (
    "COLUMNS", "TERMINAL_WIDTH", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "TTY_COMPATIBLE", "GITHUB_ACTIONS",
    "TYPER_USE_RICH", "_TYPER_FORCE_DISABLE_TERMINAL", "_MISMATCHCTL_COMPLETE",
)  # fmt: skip
"""Variables that make the text another one."""


def stored(arguments: list[str]) -> str | None:
    """The text that answers these arguments, where it is the one that would be made; None: it has to be made."""
    wanted = not arguments or arguments in _HELP
    if not wanted or Path(sys.argv[0]).name != "mismatchctl" or any(name in os.environ for name in CHANGES):
        return None
    if sys.stdout is None or (sys.stdout.encoding or "").lower().replace("-", "") != "utf8":
        return None
    try:
        name = COLOURED if sys.stdout.isatty() else PLAIN
        if name == COLOURED and not _is_wide_enough():
            return None
        text = (FOLDER / name).read_text(encoding="utf-8")
    except OSError:
        return None
    return text if arguments else text.removesuffix("\n")  # a bare call ends with an empty line less


def is_printed(text: str) -> bool:
    """Print a text past all buffers; False: it cannot be, and the command, which tries again, says why."""
    rest = memoryview(text.encode())
    try:
        while rest:
            rest = rest[os.write(sys.stdout.fileno(), rest) :]
    except OSError:
        return False
    return True


def _is_wide_enough() -> bool:
    return os.environ.get("TERM", "dumb") != "dumb" and os.get_terminal_size(sys.stdout.fileno()).columns >= WIDTH
