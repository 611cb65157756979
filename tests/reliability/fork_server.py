"""A process that has imported everything and started no thread: each command is a fork of it.

A command thus costs its own work and no imports, and what it does to its process (limits, signals, a crash of a
library) ends with it. It writes to files, which the parent reads when it has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import glob
import importlib
import os
import pkgutil
import resource
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ |= {"POLARS_MAX_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MISMATCHCTL_THREADS": "1", "COLUMNS": "200"}

import typer.main

import mismatchctl
from mismatchctl.__main__ import main
from mismatchctl.cli.main import app

SLOW, HANGS = 30, 300
"""Seconds of CPU time that a command may take, and of wall time: the machine has others to serve."""
MEMORY = 2 << 30
"""Bytes that a command may take; it is ended at twice as many."""
HEAVY = ("ray", "device", "tensors", "torch", "clients")
"""Modules that are left to those who need them."""

RESULT = Path(__file__).with_name("result.json")
KEPT = "torchinductor_"
"""A cache of torch's among the temporary files, which it keeps for its next run."""
HARMLESS = ("python", "pytest", "jemalloc_bg_thd", "polars-ooc-clea")
"""Threads that this process may have: its own, and two that libraries start and a fork can do without."""


def warm() -> None:
    """Import what any command imports, and let the forks share it."""
    for module in pkgutil.walk_packages(mismatchctl.__path__, "mismatchctl."):
        if module.name.rpartition(".")[2] not in (*HEAVY, "__main__"):
            importlib.import_module(module.name)
    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(app)
    gc.collect()
    gc.freeze()
    threads = {Path(place).read_text().strip() for place in glob.glob("/proc/self/task/*/comm")}
    assert all(name.startswith(HARMLESS) for name in threads), f"a fork would lack {threads}"


@dataclass
class Ended:
    """How a process ended: exit code (minus the signal that ended it), what it said, CPU seconds, bytes of memory.

    Attributes:
        left: names of temporary files that it left.
        hung: it had to be ended.
    """

    code: int
    stdout: str
    stderr: str
    seconds: float
    memory: int
    left: list[str]
    hung: bool = False


def fork(folder: Path, act: Callable[[], None], said: Path) -> int:
    """A process that acts in a folder; its words and temporary files go to the folder `said`; its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        resource.setrlimit(resource.RLIMIT_CPU, (2 * SLOW, 3 * SLOW))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (2 * MEMORY, 2 * MEMORY))
        (said / "tmp").mkdir(exist_ok=True)
        os.environ["TMPDIR"], tempfile.tempdir = str(said / "tmp"), None
        code = played(folder, act, said)
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        flush()
        os._exit(code)


def played(folder: Path, act: Callable[[], None], said: Path) -> int:
    """Act in a folder, in this process; its words go to the folder `said`; the exit code."""
    try:
        os.chdir(folder)
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            opened = os.open(said / name if number else os.devnull, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            os.dup2(opened, number)
            os.close(opened)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
        act()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except KeyboardInterrupt:
        return 130
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        flush()
    return 0


def flush() -> None:
    """Let go of what is still to be said."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def command(argv: Sequence[str]) -> Callable[[], None]:
    """The tool with these words."""

    def act() -> None:
        sys.argv = ["mismatchctl", *argv]
        main()

    return act


def wait(child: int, said: Path) -> Ended:
    """Wait for the end of a process, or end it when it hangs."""
    descriptor = os.pidfd_open(child)
    try:
        hung = not select.select([descriptor], [], [], HANGS)[0]
    finally:
        os.close(descriptor)
    if hung:
        os.kill(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    words = heard(said)
    left = sorted(path.name for path in said.glob("tmp/*") if not path.name.startswith(KEPT))
    seconds = used.ru_utime + used.ru_stime
    return Ended(os.waitstatus_to_exitcode(status), *words, seconds, used.ru_maxrss * 1024, left, hung)


def heard(said: Path) -> tuple[str, str]:
    """What was said on stdout and on stderr."""
    places = [said / name for name in ("stdout", "stderr")]
    out, err = (place.read_text("utf-8", "replace") if place.exists() else "" for place in places)
    return out, err


def run(folder: Path, act: Callable[[], None]) -> Ended:
    """Act in a folder, to the end."""
    said = Path(tempfile.mkdtemp(prefix="said-"))  # a TemporaryDirectory would be removed by the fork
    try:
        return wait(fork(folder, act, said), said)
    finally:
        shutil.rmtree(said)
