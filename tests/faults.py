"""Faults of the machine that a command meets: one sentence, the right exit code, and nothing half-written.

`python tests/faults.py [NAMES]` prints one line of JSON for each fault.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import zygote
from kills import litter, make_dump


def tool(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run the tool in a fork, to the end; what it said."""
    ended = zygote.run(folder, zygote.command(argv))
    return subprocess.CompletedProcess(argv, ended.code, ended.stdout, ended.stderr)


def shell(folder: Path, words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the tool as a user does."""
    line = f"{sys.executable} -m mismatchctl {words}"
    return subprocess.run(
        line, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )


def sentence(done: subprocess.CompletedProcess[str], code: int) -> None:
    """One sentence on stderr, this exit code, no traceback."""
    assert done.returncode == code, (done.returncode, done.stderr[-500:])
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


FAULTS: dict[str, Callable[[Path], None]] = {}


def fault(name: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Register a fault by what happens."""

    def register(function: Callable[[Path], None]) -> Callable[[Path], None]:
        FAULTS[name] = function
        return function

    return register


ANALYZE = ("analyze", "a.parquet", "-q", "-o", "out/r.json")


@fault("a disk that is full")
def full_disk(folder: Path) -> None:
    """Every write to /dev/full fails; a folder on a small tmpfs where one can be mounted."""
    small = folder / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(small)], capture_output=True)
    if mounted.returncode:
        with open("/dev/full", "wb", buffering=0) as file:
            try:
                file.write(b"x")
            except OSError as error:
                assert error.errno == errno.ENOSPC
        return
    try:
        sentence(tool(folder, "analyze", "a.parquet", "-q", "-o", "small/r.json"), 2)
        sentence(tool(folder, "analyze", "a.parquet", "-q", "--html", "small/r.html"), 2)
        sentence(tool(folder, "convert", "a.parquet", "small/c.parquet", "-q"), 2)
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


@fault("a target that is read-only, or no folder")
def read_only(folder: Path) -> None:
    """Nothing is written."""
    sentence(tool(folder, "analyze", "a.parquet", "-q", "-o", "/proc/r.json"), 2)
    sentence(tool(folder, "analyze", "a.parquet", "-q", "-o", "a.parquet/r.json"), 2)
    sentence(tool(folder, "analyze", "a.parquet", "-q", "-o", "missing/r.json"), 2)


@fault("a file that vanishes, shrinks or grows between runs")
def changing(folder: Path) -> None:
    """It is read as it is, or named."""
    make_dump(folder / "d.parquet")
    content = (folder / "d.parquet").read_bytes()
    for changed in (content[:-100], content[: len(content) // 2], content + b"more", b""):
        (folder / "d.parquet").write_bytes(changed)
        sentence(tool(folder, "analyze", "d.parquet", "-q"), 4)
    (folder / "d.parquet").unlink()
    sentence(tool(folder, "analyze", "d.parquet", "-q"), 4)


@fault("stdout that is closed or full")
def closed(folder: Path) -> None:
    """No traceback."""
    for target in ("> /dev/full", ">&-"):
        done = shell(folder, f"analyze a.parquet --json {target}")
        assert "Traceback" not in done.stderr, (target, done.stderr[-500:])


@fault("no HOME, no TTY, locale C, 40 columns, NO_COLOR")
def bare(folder: Path) -> None:
    """The same answer."""
    env = {"PATH": os.environ["PATH"], "LC_ALL": "C", "LANG": "C", "COLUMNS": "40", "NO_COLOR": "1"}
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = shell(folder, "analyze a.parquet", env)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "\x1b" not in done.stdout, done.stderr[-500:]
    assert max(map(len, done.stdout.splitlines())) <= 200


@fault("times of files in the future and before 1970")
def clock(folder: Path) -> None:
    """The cache and the answer do not care."""
    make_dump(folder / "t.parquet")
    answers = set()
    for moment in (0, 2**31 + 10, 1):
        os.utime(folder / "t.parquet", (moment, moment))
        for _ in range(2):
            done = tool(folder, "analyze", "t.parquet", "--json", "--cache", "cache")
            assert done.returncode == 0, done.stderr
            answers.add(done.stdout)
    assert len(answers) == 1


@fault("a clock that was set back")
def set_back(folder: Path) -> None:
    """What was written in the future is believed, and nothing of a living process is swept."""
    answers = set()
    for moment in (time.time(), 1e9, 0.0):
        done = zygote.run(folder, partial(at, moment, "analyze", "a.parquet", "--json", "--cache", "cache"))
        assert done.code == 0, done.stderr
        answers.add(done.stdout)
        done = zygote.run(folder, partial(at, moment, *ANALYZE, "--force"))
        assert done.code == 0 and not done.left, (done.stderr, done.left)
    assert len(answers) == 1 and litter(os.listdir(folder / "out")) == []


def at(moment: float, *argv: str) -> None:
    """Run the tool at a moment."""
    time.time, time.time_ns = (lambda: moment), (lambda: int(moment * 1e9))
    zygote.command(argv)()


@fault("other numbers of threads")
def threads(folder: Path) -> None:
    """The bytes of a sweep and of an analysis are the same, whatever threads polars and the engine have."""
    sweep = ("sweep", "a.parquet", "-q", "--target-rejection", "0.1", "--by", "prompt_id", "-o", "out/s.parquet")
    analyze = ("analyze", "a.parquet", "-q", "--sequences", "out/q.parquet", "-o", "out/r.json")
    for argv in (sweep, (*sweep[:-1], "out/s.csv"), analyze):
        answers = set()
        for number in ("1", "2", "5"):
            done = zygote.run(folder, partial(threaded, number, *argv, "--threads", number, "--force"))
            assert done.code == 0, done.stderr
            answers.add(tuple(path.read_bytes() for path in sorted((folder / "out").iterdir())))
            emptied(folder / "out")
        assert len(answers) == 1, argv


def threaded(number: str, *argv: str) -> None:
    """Run the tool with so many threads of polars."""
    os.environ["POLARS_MAX_THREADS"] = number
    zygote.command(argv)()


def emptied(folder: Path) -> None:
    """Nothing is in the folder."""
    for path in folder.iterdir():
        path.unlink()


@fault("paths with newlines, markup, emoji, and bytes that are no text")
def paths(folder: Path) -> None:
    """They are read, and shown escaped."""
    for name in (
        b"new\nline.parquet",
        b"[bold]x[red].parquet",
        "\U0001f600.parquet".encode(),
        b"\xff\xfe.parquet",
        b"-x.parquet",
    ):
        place = os.path.join(os.fsencode(folder), name)
        shutil.copy(folder / "a.parquet", place)
        done = tool(folder, "analyze", "./" + os.fsdecode(name), "--json")
        assert done.returncode == 0 and "Traceback" not in done.stderr, (name, done.stderr[-300:])
        os.unlink(place)


@fault("files without permission")
def permission(folder: Path) -> None:
    """They are named as such; a superuser may read anything."""
    shutil.copy(folder / "a.parquet", folder / "p.parquet")
    (folder / "p.parquet").chmod(0)
    done = tool(folder, "analyze", "p.parquet", "-q")
    assert done.returncode == (0 if os.geteuid() == 0 else 4) and "Traceback" not in done.stderr


@fault(f"{int(os.environ.get('FAULTS_FILES', '100')):,} small files")
def many(folder: Path) -> None:
    """They are read in minutes, not hours."""
    place = folder / "many"
    place.mkdir()
    make_dump(place / "0.parquet", rows=1)
    for number in range(1, int(os.environ.get("FAULTS_FILES", "100"))):
        os.link(place / "0.parquet", place / f"{number}.parquet")
    done = tool(folder, "analyze", "many", "-q", "-o", "out/many.json")
    assert done.returncode == 0, done.stderr[-300:]


@dataclass
class Met:
    """A fault, and what went wrong when it was met."""

    name: str
    wrong: str


def met(names: Iterable[str] = ()) -> Iterator[Met]:
    """Meet faults, each in a folder of its own; no names: all."""
    for name in names or FAULTS:
        folder = Path(tempfile.mkdtemp(prefix="faults-"))
        (folder / "out").mkdir()
        make_dump(folder / "a.parquet")
        try:
            FAULTS[name](folder)
            yield Met(name, "")
        except Exception:
            yield Met(name, traceback.format_exc())
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    zygote.warm()
    for one in met(sys.argv[1:]):
        print(json.dumps(asdict(one)), flush=True)
