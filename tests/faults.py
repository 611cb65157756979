"""Kills at random moments, and faults of the machine: what is written is whole or not there, and nothing else is.

A verb runs in a fork of this process, which has imported everything and run nothing, so that a thousand kills take
minutes and hit the verb's work rather than its imports.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import mismatchctl.analyze
import mismatchctl.compare
import mismatchctl.dumps.convert
import mismatchctl.gate
import mismatchctl.render.report
import mismatchctl.render.terminal
import mismatchctl.sweep  # noqa: F401
from mismatchctl.cli.main import main
from mismatchctl.recorder import Recorder

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def make_dump(path: Path, rows: int = 64, seed: int = 0) -> Path:
    """Sequences of 32 tokens in 4 steps."""
    noise = np.random.default_rng(seed)
    rollout = -0.5 - noise.random((rows, 32))
    train = rollout + 0.02 * noise.standard_normal((rows, 32))
    ids = {"step": np.arange(rows) // max(rows // 4, 1), "prompt_id": np.arange(rows) % 16}
    pq.write_table(
        pa.table({"rollout_log_probs": list(rollout), "train_log_probs": list(train), **ids}), path, row_group_size=8
    )
    return path


VERBS: dict[str, list[str]] = {
    "analyze": [
        "analyze",
        "a.parquet",
        "-q",
        "-o",
        "out/r.json",
        "--html",
        "out/r.html",
        "--sequences",
        "out/q.parquet",
    ],
    "sweep": ["sweep", "a.parquet", "-q", "-c", "token_tis", "--vary", "weight.truncate=1:3:5", "-o", "out/s.csv"],
    "compare": ["compare", "a.parquet", "b.parquet", "-q", "-o", "out/c.json", "--html", "out/c.html"],
    "gate": ["gate", "a.parquet", "--rule", "k3:max=1", "-q", "--save-baseline", "out/b.json", "--junit", "out/j.xml"],
    "convert": ["convert", "a.parquet", "out/c.parquet", "-q"],
    "report": ["report", "r.json", "-q", "--html", "out/r.html"],
    "diagnose": ["diagnose", "a.parquet", "--json"],
    "recorder": [],
}


def prepare(folder: Path) -> None:
    """The inputs of every verb."""
    make_dump(folder / "a.parquet")
    make_dump(folder / "b.parquet", seed=1)
    run(folder, ["analyze", "a.parquet", "-q", "-o", "r.json"])
    (folder / "out").mkdir()


def record() -> None:
    """Write six files with the recorder."""
    noise = np.random.default_rng(0)
    with Recorder("out") as recorder:
        for step in range(6):
            rollout = -0.5 - noise.random((64, 256))
            recorder.write(
                step=step, rollout_log_probs=[*rollout], train_log_probs=[*(rollout - 0.01)], prompt_id=np.arange(64)
            )


def forked(folder: Path, argv: Sequence[str], said: Sequence[Path] = ()) -> int:
    """A process that runs a verb (no words: the recorder) in a folder, perhaps with files for what it says; its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        for number, place in enumerate((os.devnull, *(said or (os.devnull, os.devnull)))):
            os.dup2(os.open(place, os.O_RDWR | os.O_CREAT), number)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["mismatchctl", *argv]
        if argv:
            main()
        else:
            record()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except KeyboardInterrupt:
        code = 130
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run(folder: Path, argv: Sequence[str]) -> int:
    """Run to the end; the exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(forked(folder, argv), 0)[1])


def emptied(folder: Path) -> Path:
    """The folder of outputs, with nothing in it."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    (folder / "out").mkdir()
    return folder / "out"


def contents(out: Path) -> dict[str, bytes]:
    """Files by name."""
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def litter(names: Sequence[str]) -> list[str]:
    """Names that no output has."""
    return [name for name in names if name.startswith(".") or name.endswith((".tmp", ".part"))]


@dataclass
class Kill:
    """What became of one kill: the verb, the signal, how it ended, what was lost or left."""

    verb: str
    signal: str
    code: int
    partial: list[str]
    left: list[str]


def kills(folder: Path, count: int, seed: int) -> Iterator[Kill]:
    """Kill verbs at random moments: an output is as it should be or not there; the next run leaves nothing else."""
    rng = random.Random(seed)
    expected, took = {}, {}
    for verb, argv in VERBS.items():
        emptied(folder)
        begun = time.monotonic()
        code = run(folder, argv)
        assert code == 0, (verb, code)
        took[verb], expected[verb] = time.monotonic() - begun, contents(folder / "out")
    for number in range(count):
        verb = [*VERBS][number % len(VERBS)]
        out, how = emptied(folder), rng.choice(SIGNALS)
        child = forked(folder, VERBS[verb])
        time.sleep(rng.uniform(0, 1.1 * took[verb]))
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, how)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        there = contents(out)
        right = expected[verb]
        partial = [name for name, data in there.items() if not litter([name]) and not whole(name, data, right)]
        if VERBS[verb]:
            for name in [name for name in there if not litter([name])]:
                (out / name).unlink()
            run(folder, VERBS[verb])
        left = litter([*contents(out)]) if VERBS[verb] else []
        yield Kill(verb, how.name, code, partial, left)


def whole(name: str, data: bytes, expected: dict[str, bytes]) -> bool:
    """Whether an output is what an undisturbed run writes."""
    return data == expected.get(name) or (name.endswith(".json") and len(data) == len(expected.get(name, b"")))


# -- faults of the machine


def tool(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run the tool in a fork, to the end; what it said."""
    with tempfile.TemporaryDirectory() as said:
        places = [Path(said, "stdout"), Path(said, "stderr")]
        code = os.waitstatus_to_exitcode(os.waitpid(forked(folder, argv, places), 0)[1])
        out, err = (place.read_text(encoding="utf-8", errors="replace") for place in places)
    return subprocess.CompletedProcess(argv, code, out, err)


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


def told(folder: Path, count: int) -> dict[str, object]:
    """What became of some kills, and the traceback of each fault that was not met as it should be."""
    prepare(folder)
    found: dict[str, str] = {}
    for name, meet in FAULTS.items():
        try:
            meet(folder)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    return {"kills": [asdict(kill) for kill in kills(folder, count, seed=1)], "faults": found}


if __name__ == "__main__":
    print(json.dumps(told(Path(sys.argv[1]), int(sys.argv[2]))))
