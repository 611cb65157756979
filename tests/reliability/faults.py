"""Faults of the machine give one error message, the right exit code and no partial output.

`python -m tests.reliability.faults [NAMES]` prints one line of JSON for each fault.
"""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from tests.factories.dumps import make_dump
from tests.reliability import fork_server as zygote
from tests.reliability.kills import litter


def tool(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return completed(argv, zygote.run(folder, zygote.command(argv)))


def completed(argv: Sequence[str], ended: zygote.Ended) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(argv, ended.code, ended.stdout, ended.stderr)


def shell(folder: Path, words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    line = f"{sys.executable} -m mismatchctl {words}"
    return subprocess.run(
        line, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )


def sentence(done: subprocess.CompletedProcess[str], code: int) -> None:
    assert done.returncode == code, (done.returncode, done.stderr[-500:])
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


FAULTS: dict[str, Callable[[Path], None]] = {}


def fault(name: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def register(function: Callable[[Path], None]) -> Callable[[Path], None]:
        FAULTS[name] = function
        return function

    return register


NOBODY = 65534
OUTPUTS = ("--html", "--figures", "-o")
"""Options of outputs that a command checks before its work."""
ANALYZE = ("analyze", "a.parquet", "-q", "-o", "out/r.json")


@fault("a disk that is full")
def full_disk(folder: Path) -> None:
    """Yield a folder on a small tmpfs, or limit the size of files if no tmpfs can be mounted."""
    small = folder / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "none", str(small)], capture_output=True)
    try:
        for argv in (
            ("analyze", "a.parquet", "-q", "-o", "small/r.json"),
            ("analyze", "a.parquet", "-q", "--html", "small/r.html"),
            ("convert", "a.parquet", "small/c.parquet", "-q"),
            ("analyze", "a.parquet", "-q", "--sequences", "small/s.parquet"),
            ("analyze", "a.parquet", "-q", "--figures", "small/figures"),
            ("sweep", "a.parquet", "-q", "-o", "small/x.parquet"),
        ):
            sentence(tool(folder, *argv) if mounted.returncode == 0 else limited(folder, *argv), 2)
        assert list(small.iterdir()) == []
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", str(small)], check=True)


def limited(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    def act() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, 8 << 10))
        zygote.command(argv)()

    return completed(argv, zygote.run(folder, act))


@fault("a target that is read-only, or no folder")
def read_only(folder: Path) -> None:
    sentence(tool(folder, "analyze", "a.parquet", "-q", "-o", "/proc/r.json"), 2)
    sentence(tool(folder, "analyze", "a.parquet", "-q", "-o", "a.parquet/r.json"), 2)
    sentence(tool(folder, "analyze", "a.parquet", "-q", "-o", "missing/r.json"), 2)


@fault("a file that vanishes, shrinks or grows between runs")
def changing(folder: Path) -> None:
    make_dump(folder / "d.parquet")
    content = (folder / "d.parquet").read_bytes()
    for changed in (content[:-100], content[: len(content) // 2], content + b"more", b""):
        (folder / "d.parquet").write_bytes(changed)
        sentence(tool(folder, "analyze", "d.parquet", "-q"), 4)
    (folder / "d.parquet").unlink()
    sentence(tool(folder, "analyze", "d.parquet", "-q"), 4)


@fault("stdout that is closed or full")
def closed(folder: Path) -> None:
    for target in ("> /dev/full", ">&-"):
        done = shell(folder, f"analyze a.parquet --json {target}")
        assert "Traceback" not in done.stderr, (target, done.stderr[-500:])


@fault("no HOME, no TTY, locale C, 40 columns, NO_COLOR")
def bare(folder: Path) -> None:
    env = {"PATH": os.environ["PATH"], "LC_ALL": "C", "LANG": "C", "COLUMNS": "40", "NO_COLOR": "1"}
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = shell(folder, "analyze a.parquet", env)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "\x1b" not in done.stdout, done.stderr[-500:]
    assert max(map(len, done.stdout.splitlines())) <= 200


@fault("times of files in the future and before 1970")
def clock(folder: Path) -> None:
    make_dump(folder / "t.parquet")
    answers = set()
    for moment in (-(10**9), 0, 2**32):
        os.utime(folder / "t.parquet", (moment, moment))
        for _ in range(2):
            done = tool(folder, "analyze", "t.parquet", "--json")
            assert done.returncode == 0, done.stderr
            answers.add(done.stdout)
    assert len(answers) == 1


@fault("a clock that was set back")
def set_back(folder: Path) -> None:
    """Files from the future are read, and no temporary file remains."""
    answers = set()
    for moment in (time.time(), 1e9, 0.0):
        done = zygote.run(folder, partial(at, moment, "analyze", "a.parquet", "--json"))
        assert done.code == 0, done.stderr
        answers.add(done.stdout)
        done = zygote.run(folder, partial(at, moment, *ANALYZE, "--force"))
        assert done.code == 0 and not done.left, (done.stderr, done.left)
    assert len(answers) == 1 and litter(os.listdir(folder / "out")) == []


def at(moment: float, *argv: str) -> None:
    time.time, time.time_ns = (lambda: moment), (lambda: int(moment * 1e9))
    zygote.command(argv)()


@fault("other numbers of threads")
def threads(folder: Path) -> None:
    """A sweep and an analysis give the same bytes with any number of threads."""
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
    os.environ["POLARS_MAX_THREADS"] = number
    zygote.command(argv)()


def emptied(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


@fault("paths with newlines, markup, emoji, and bytes outside UTF-8")
def paths(folder: Path) -> None:
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


@fault("files and folders without permission")
def permission(folder: Path) -> None:
    """The error names the path. A superuser becomes another user for the test."""
    shutil.copy(folder / "a.parquet", folder / "p.parquet")
    for name in ("r.json", "rules.yaml"):
        shutil.copy(zygote.RESULT, folder / name)
    shutil.copytree(folder / "out", folder / "locked")
    shutil.copy(folder / "a.parquet", folder / "locked")
    folder.chmod(0o755)
    for name, mode in {"p.parquet": 0, "r.json": 0, "rules.yaml": 0, "locked": 0, "out": 0o555}.items():
        (folder / name).chmod(mode)
    done = as_nobody(folder, "analyze", "a.parquet", "-q")
    assert done.returncode == 0, done.stderr[-500:]
    for argv, code in {
        ("analyze", "p.parquet", "-q"): 4,
        ("analyze", ".", "-q"): 4,
        ("analyze", "locked", "-q"): 4,
        ("analyze", "locked/a.parquet", "-q"): 4,
        ("gate", "r.json", "--rule", "k3:max=1"): 4,
        ("gate", "a.parquet", "--rule", "rules.yaml"): 2,
        ("gate", "a.parquet", "--baseline", "r.json"): 4,
        ("watch", "a.parquet", "--rule", "k3:increase=25%", "--baseline", "r.json", "--until-idle", "0.01s"): 4,
        ("report", "r.json"): 4,
        ("analyze", "a.parquet", "--baseline", "r.json"): 4,
        ("analyze", "a.parquet", "--against", "p.parquet"): 4,
        ("lint", "rules.yaml"): 2,
        ("diagnose", "a.parquet", "-q", "--layers", "r.json"): 4,
        ("analyze", "a.parquet", "-q", "-o", "r.json", "--force"): 2,
        ("analyze", "a.parquet", "-q", "-o", "out/x.json"): 2,
        ("analyze", "a.parquet", "-q", "--html", "locked/x.html"): 2,
        ("analyze", "a.parquet", "-q", "--figures", "out/figures"): 2,
        ("convert", "a.parquet", "out/c.parquet"): 2,
    }.items():
        done = as_nobody(folder, *argv)
        reported = "ermission" in done.stderr or "cannot be written" in done.stderr
        assert reported, (argv, done.returncode, done.stderr[-500:])
        sentence(done, code)
    folder.chmod(0o755)
    for name in ("locked", "out"):
        (folder / name).chmod(0o755)
    assert list((folder / "out").iterdir()) == []


def rehearsed(argv: Sequence[str]) -> None:
    folder, silence, said = Path(tempfile.mkdtemp()), os.open(os.devnull, os.O_WRONLY), [os.dup(1), os.dup(2)]
    shutil.copytree(".", folder / "copy")
    for path in folder.rglob("*"):
        path.chmod(0o755)
    own = Path.cwd()
    os.chdir(folder / "copy")
    for number in (1, 2):
        os.dup2(silence, number)
    with contextlib.suppress(SystemExit):
        zygote.command(argv)()
    sys.stdout.flush()
    sys.stderr.flush()
    for number, kept in zip((1, 2), said, strict=True):
        os.dup2(kept, number)
    os.chdir(own)
    shutil.rmtree(folder)


def as_nobody(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    def act() -> None:
        if os.geteuid() == 0:
            # the user `nobody` may not read modules, so import them first, except the modules of outputs
            rehearsed(argv[: len(argv) - 2 * (argv[-2] in OUTPUTS)])
            place = Path(os.environ["TMPDIR"])
            place.parent.chmod(0o755)
            os.chown(place, NOBODY, NOBODY)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        zygote.command(argv)()

    return completed(argv, zygote.run(folder, act))


@fault(f"{int(os.environ.get('FAULTS_FILES', '100')):,} small files")
def many(folder: Path) -> None:
    place = folder / "many"
    place.mkdir()
    make_dump(place / "0.parquet", rows=1)
    for number in range(1, int(os.environ.get("FAULTS_FILES", "100"))):
        os.link(place / "0.parquet", place / f"{number}.parquet")
    done = tool(folder, "analyze", "many", "-q", "-o", "out/many.json")
    assert done.returncode == 0, done.stderr[-300:]


@dataclass
class Outcome:
    name: str
    wrong: str


def run_faults(names: Iterable[str] = ()) -> Iterator[Outcome]:
    for name in names or FAULTS:
        folder = Path(tempfile.mkdtemp(prefix="faults-"))
        (folder / "out").mkdir()
        make_dump(folder / "a.parquet")
        try:
            FAULTS[name](folder)
            yield Outcome(name, "")
        except Exception:
            yield Outcome(name, traceback.format_exc())
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    zygote.warm()
    for one in run_faults(sys.argv[1:]):
        print(json.dumps(asdict(one)), flush=True)
