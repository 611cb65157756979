"""Signals and closed or full streams: the right exit code, no traceback and no leftover files."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mismatchctl.io.process import install_handlers
from tests.paths import SAMPLE_DATA

SAMPLE = SAMPLE_DATA
SLOW = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the parent may ignore SIGHUP, as nohup does
import mismatchctl.api.analyze.analyze as a
true = a.reduce_batch
def slow(*args, **kwargs):
    print("measuring", file=sys.stderr, flush=True)
    time.sleep(30)
    return true(*args, **kwargs)
a.reduce_batch = slow
from mismatchctl.__main__ import main
main()
"""
SWALLOWED = """
import os, signal, sys
import mismatchctl.cli.output as output
from mismatchctl.io.process import install_handlers
def swallow(*args):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(100_000))
    except KeyboardInterrupt:
        pass
import mismatchctl.api.sweep.sweep as sweep
true = sweep.sweep
def swallowing(*args, **kwargs):
    swallow()
    return true(*args, **kwargs)
sweep.sweep = swallowing
from mismatchctl.__main__ import main
main()
"""


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    return Path(shutil.copy(SAMPLE / "dense" / "step_00000.parquet", tmp_path / "dump.parquet"))


def litter(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in folder.glob("*mismatchctl-*")] + [
        path for folder in folders for path in folder.glob(".*mismatchctl-*")
    ]


@pytest.mark.process
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_end_with_their_code_without_output(
    number: signal.Signals, code: int, dump: Path, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    words = ["analyze", str(dump), "-o", "r.json", "--html", "r.html", "--sequences", "q.parquet", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *words],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(scratch)},
    )
    assert process.stderr is not None and process.stderr.readline() == "measuring\n"
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (code, "interrupted\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump.parquet", "scratch"]
    assert list(scratch.iterdir()) == []


@pytest.mark.process
def test_signals_swallowed_by_a_callback_end_the_command(dump: Path, tmp_path: Path) -> None:
    words = ["sweep", str(dump), "-o", "s.csv", "--html", "s.html"]
    done = subprocess.run(
        [sys.executable, "-c", SWALLOWED, *words], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stderr, done.stdout) == (130, "interrupted\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["dump.parquet"]


@pytest.mark.process
def test_interrupts_during_imports_end_with_130(dump: Path) -> None:
    """The interrupts come at several moments of the start-up."""
    ready = "import sys; from mismatchctl.io.process import install_handlers; install_handlers(); print(flush=True); "
    code = ready + "from mismatchctl.__main__ import main; main()"
    for wait in (0.0, 0.05, 0.15):
        process = subprocess.Popen(
            [sys.executable, "-c", code, "analyze", str(dump)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(wait)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode in (130, -signal.SIGINT) and "Error" not in said, said


@pytest.mark.process
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_inside_exec_end_with_their_code(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """Dataclasses execute generated code during imports."""
    (tmp_path / "command.py").write_text(
        f"""
import os, signal
from mismatchctl import __main__
signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent may ignore the signal
__main__.gc.set_threshold = lambda count: exec("os.kill(os.getpid(), {number:d}); sum(range(100_000))")
__main__.main()
"""
    )
    done = subprocess.run([sys.executable, "-m", "command"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (code, "interrupted\n")


def shell(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "-c", command.replace("mismatchctl", f"{sys.executable} -m mismatchctl")],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
    )


@pytest.mark.process
@pytest.mark.parametrize("words", ["analyze dump.parquet --json", "--help"])
def test_closed_or_full_streams_are_handled(words: str, dump: Path, tmp_path: Path) -> None:
    closed = shell(f"mismatchctl {words} >&-", tmp_path)
    assert (closed.returncode, closed.stderr) == (0, "")
    full = shell(f"mismatchctl {words} >/dev/full", tmp_path)
    assert (full.returncode, full.stderr) == (2, "error: stdout cannot be written: No space left on device\n")
    silent = shell(f"mismatchctl {words} 2>&-", tmp_path)
    assert silent.returncode == 0 and silent.stdout


@pytest.mark.process
@pytest.mark.parametrize(("words", "code"), [("--help", 0), ("", 2), ("analyze --help", 0), ("--version", 0)])
def test_the_first_output_to_a_closed_stream_is_handled(words: str, code: int, tmp_path: Path) -> None:
    """The script has the name of the installed command."""
    command = tmp_path / "mismatchctl"
    command.write_text(f"#!{sys.executable}\nfrom mismatchctl.__main__ import main\nmain()\n")
    command.chmod(0o755)

    def ended(**streams: Any) -> tuple[int, str]:
        done = subprocess.run([command, *words.split()], stderr=subprocess.PIPE, text=True, **streams)
        return done.returncode, done.stderr

    reader, writer = os.pipe()
    os.close(reader)
    assert ended(stdout=writer) == (141, "")
    os.close(writer)
    with Path("/dev/full").open("w") as full:
        assert ended(stdout=full) == (2, "error: stdout cannot be written: No space left on device\n")
    assert ended(preexec_fn=lambda: os.close(1)) == (code, "")


@pytest.mark.process
def test_unprintable_errors_keep_their_exit_code(tmp_path: Path) -> None:
    assert shell("mismatchctl analyze none 2>/dev/full", tmp_path).returncode == 4
    assert shell("mismatchctl analyze none >&- 2>&- <&-", tmp_path).returncode == 4


def test_ignored_signals_stay_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        install_handlers()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        sys.unraisablehook = sys.__unraisablehook__


EVERY_LINE = """
import os, signal, sys
from contextlib import suppress
from pathlib import Path

signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent may ignore the signal
from mismatchctl.__main__ import main
from mismatchctl.api.compare.compare import compare
import mismatchctl.api.compare.compare as module
import mismatchctl.report.pages.compare, mismatchctl.report.terminal

dump, output = sys.argv[1:]
found = compare([dump, dump])
module.compare = lambda *given, **named: found  # all runs share the steps up to here
traced = ("__main__.py", "main.py", "process.py", "output.py", "core.py", "core/context.py", "contextlib.py")


def lines(at):
    left = at

    def line(frame, event, argument):
        nonlocal left
        if event == "line" and frame.f_code.co_filename.endswith(traced) and os.path.exists(output):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGINT)
        return line

    return line


def end(at):
    said = os.open(os.path.dirname(output) + "/said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1), os.dup2(said, 2)
    sys.argv = ["mismatchctl", "compare", dump, dump, "-o", output]
    tracer = lines(at)
    code = 99
    try:
        sys.settrace(tracer)
        main()
    except SystemExit as ended:
        sys.settrace(None)
        code = ended.code
    except BaseException as error:
        sys.settrace(None)
        print(f"Traceback: {error!r}", file=sys.stderr)
        code = 1
    with suppress(OSError):
        sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


for at in range(1, 10_000):
    with suppress(FileNotFoundError):
        os.unlink(output)
    child = os.fork()
    if not child:
        end(at)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = Path(output).with_name("said").read_text()
    print(at, code, "interrupted" in said, "Traceback" in said, os.path.exists(output), flush=True)
    if not code and not "interrupted" in said:
        break
"""


@pytest.mark.process
def test_interrupts_at_any_line_after_the_output_exit_130(dump: Path, tmp_path: Path) -> None:
    """The interrupt comes at each line of the entry point, typer and contextlib after the output exists."""
    done = subprocess.run(
        [sys.executable, "-c", EVERY_LINE, dump, tmp_path / "c.json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *interrupted, last = [line.split() for line in done.stdout.splitlines()]
    assert len(interrupted) > 50 and last[1:] == ["0", "False", "False", "True"]
    assert {(code, traceback, written) for _, code, _, traceback, written in interrupted} == {("130", "False", "True")}


@pytest.mark.process
def test_interrupts_replaced_by_library_errors_exit_130(tmp_path: Path) -> None:
    """Panics of Rust libraries are not subclasses of Exception."""
    (tmp_path / "command.py").write_text(
        """
import os, signal
from mismatchctl import __main__
signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent may ignore the signal
class Panic(BaseException): pass
def panic(count):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(100_000))
    except KeyboardInterrupt:
        raise Panic from None
__main__.gc.set_threshold = panic
__main__.main()
"""
    )
    done = subprocess.run([sys.executable, "-m", "command"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
