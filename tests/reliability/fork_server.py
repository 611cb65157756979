"""A process that has imported all modules and has no threads. Each command runs in a fork of it.

A command therefore costs no imports, and its limits, signals and crashes end with the fork. The fork writes its output
to files, which the parent reads.
"""

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
"""Limits of a command in seconds of CPU time and wall time."""
MEMORY = 2 << 30
"""Memory limit of a command in bytes. At twice the limit, the command is killed."""
HEAVY = ("ray", "device", "tensors", "torch", "clients")
"""Modules that only some commands import."""

RESULT = Path(__file__).with_name("result.json")
KEPT = "torchinductor_"
"""A cache of torch in the folder of temporary files, which torch keeps."""
HARMLESS = ("python", "pytest", "jemalloc_bg_thd", "polars-ooc-clea")
"""Number of threads of this process: its own, and two of libraries that a fork does not need."""


def warm() -> None:
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
    """How a process ended. `left` lists temporary files, and `hung` means that the process was killed."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    memory: int
    left: list[str]
    hung: bool = False


def fork(folder: Path, act: Callable[[], None], said: Path) -> int:
    """Run an action in a fork in a folder. Output and temporary files go to `said`. Return the process id."""
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
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def command(argv: Sequence[str]) -> Callable[[], None]:
    def act() -> None:
        sys.argv = ["mismatchctl", *argv]
        main()

    return act


def wait(child: int, said: Path) -> Ended:
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
    places = [said / name for name in ("stdout", "stderr")]
    out, err = (place.read_text("utf-8", "replace") if place.exists() else "" for place in places)
    return out, err


def run(folder: Path, act: Callable[[], None]) -> Ended:
    said = Path(tempfile.mkdtemp(prefix="said-"))  # a TemporaryDirectory would be removed by the fork
    try:
        return wait(fork(folder, act, said), said)
    finally:
        shutil.rmtree(said)
