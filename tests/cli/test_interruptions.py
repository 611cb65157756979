"""Signals, closed and full streams, several outputs: all or nothing, the right exit code, no traceback, no litter."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from mismatchctl.errors import ConfigError
from mismatchctl.io import signals
from mismatchctl.io.files import _machine_id, atomic_output, replace_together, temporary_folder, write_atomically
from tests.cli.command import run
from tests.paths import SAMPLE_DATA

SAMPLE = SAMPLE_DATA
SLOW = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it, as nohup does
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
from mismatchctl import interrupts
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
def test_a_signal_ends_with_its_code_and_leaves_nothing(
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
def test_a_signal_that_a_callback_swallows_is_not_lost(dump: Path, tmp_path: Path) -> None:
    words = ["sweep", str(dump), "-o", "s.csv", "--html", "s.html"]
    done = subprocess.run(
        [sys.executable, "-c", SWALLOWED, *words], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stderr, done.stdout) == (130, "interrupted\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["dump.parquet"]


@pytest.mark.process
def test_interrupts_during_imports_end_with_130(dump: Path) -> None:
    """At several moments of the start, from the first line of the entry point on."""
    ready = "import sys; from mismatchctl import interrupts; interrupts.install(); print(flush=True); "
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
def test_a_signal_within_an_executed_text_ends_with_its_code(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """As dataclasses are made of, while modules are imported."""
    (tmp_path / "command.py").write_text(
        f"""
import os, signal
from mismatchctl import __main__
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
__main__.gc.set_threshold = lambda count: exec("os.kill(os.getpid(), {number:d}); sum(range(100_000))")
__main__.main()
"""
    )
    done = subprocess.run([sys.executable, "-m", "command"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (code, "interrupted\n")


@pytest.mark.process
def test_what_dead_processes_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    machine, others = _machine_id(), "00000000"
    stale = tmp_path / f".mismatchctl-{machine}-{gone.pid}-0123456789ab.tmp"
    alive = tmp_path / f".mismatchctl-{machine}-{os.getppid()}-0123456789ab.tmp"
    elsewhere = tmp_path / f".mismatchctl-{others}-{gone.pid}-0123456789ab.tmp"
    old = tmp_path / f".mismatchctl-{others}-1-0123456789ab.tmp"
    users = tmp_path / ".mismatchctl-mine.tmp"
    for path in (stale, alive, elsewhere, old, users):
        path.write_text("x")
    os.utime(old, (0, 0))
    write_atomically(tmp_path / "a", b"1")
    assert {path.name for path in tmp_path.iterdir()} == {alive.name, elsewhere.name, users.name, "a"}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"mismatchctl-{machine}-{gone.pid}-0123456789ab"
    folder.mkdir()
    with temporary_folder() as own:
        assert own.is_dir() and not folder.exists()
    assert not own.exists()


def test_outputs_appear_together(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("before")
    with pytest.raises(ZeroDivisionError), replace_together():
        write_atomically(first, b"1")
        with atomic_output(second) as temporary:
            temporary.write_text("2")
        raise ZeroDivisionError
    assert (first.read_text(), list(tmp_path.iterdir())) == ("before", [first])
    with pytest.raises(ConfigError, match="cannot be written"), replace_together():
        write_atomically(first, b"1")
        write_atomically(tmp_path / "no" / "folder", b"2")
    assert (first.read_text(), list(tmp_path.iterdir())) == ("before", [first])
    blocked = tmp_path / "blocked"
    for before in (b"before", None):  # the first target is there, or not
        with pytest.raises(ConfigError, match="blocked: cannot be written"), replace_together():
            write_atomically(first, b"1")
            write_atomically(blocked, b"2")
            (blocked / "folder").mkdir(parents=True)
        assert (first.read_bytes() if first.exists() else None) == before
        shutil.rmtree(blocked)
        first.unlink(missing_ok=True)
        assert list(tmp_path.iterdir()) == []
    first.write_text("before")
    with replace_together() as places:
        write_atomically(first, b"1")
        write_atomically(second, b"2")
        assert (first.read_text(), second.exists()) == ("before", False)
    assert (first.read_text(), second.read_text(), places) == ("1", "2", [first, second])


def test_the_first_output_does_not_stay_when_the_second_fails(
    dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise ConfigError("the page fails")

    monkeypatch.setattr("mismatchctl.report.html.render_html", fails)
    monkeypatch.chdir(tmp_path)
    for words in (["analyze", "--sequences", "q.parquet"], ["sweep", "-o", "s.csv"]):
        done = run(*words, dump, "--html", "p.html", "-q")
        assert (done.exit_code, done.stderr) == (2, "error: the page fails\n")
        assert [path.name for path in tmp_path.iterdir()] == ["dump.parquet"]


@pytest.mark.parametrize(
    "words",
    [
        ["analyze", "dump.parquet", "--sequences", "dump.parquet"],
        ["analyze", ".", "--sequences", "dump.parquet"],
        ["analyze", "*.parquet", "--sequences", "dump.parquet"],
        ["analyze", "dump.parquet", "--sequences", "link.parquet"],
        ["analyze", "dump.parquet", "--sequences", "q.parquet", "--join", "other.parquet", "-o", "other.parquet"],
        ["convert", "dump.parquet", "dump.parquet"],
        ["sweep", "dump.parquet", "-o", "dump.parquet"],
        ["compare", "dump.parquet", "other.parquet", "--html", "other.parquet"],
        ["gate", "dump.parquet", "--junit", "dump.parquet"],
        ["report", "r.json", "--html", "r.json"],
        ["diagnose", "dump.parquet", "-o", "dump.parquet"],
    ],
    ids=" ".join,
)
def test_an_output_never_replaces_an_input(
    words: list[str], dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(dump, "other.parquet")
    (tmp_path / "link.parquet").symlink_to("dump.parquet")
    (tmp_path / "r.json").write_text("{}")
    before = dump.read_bytes()
    force = [] if words[0] == "diagnose" else ["--force"]
    done = run(*words, *force)
    assert done.exit_code == 2 and dump.read_bytes() == before
    assert "never replaces an input" in done.stderr or words[0] == "diagnose"


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
def test_streams_that_are_closed_or_full(words: str, dump: Path, tmp_path: Path) -> None:
    closed = shell(f"mismatchctl {words} >&-", tmp_path)
    assert (closed.returncode, closed.stderr) == (0, "")
    full = shell(f"mismatchctl {words} >/dev/full", tmp_path)
    assert (full.returncode, full.stderr) == (2, "error: stdout cannot be written: No space left on device\n")
    silent = shell(f"mismatchctl {words} 2>&-", tmp_path)
    assert silent.returncode == 0 and silent.stdout


@pytest.mark.process
@pytest.mark.parametrize(("words", "code"), [("--help", 0), ("", 2), ("analyze --help", 0), ("--version", 0)])
def test_the_installed_command_s_first_words_where_nobody_reads_them(words: str, code: int, tmp_path: Path) -> None:
    """A script called as the installed command is."""
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
def test_an_error_that_nobody_can_be_told_has_its_code(tmp_path: Path) -> None:
    assert shell("mismatchctl analyze none 2>/dev/full", tmp_path).returncode == 4
    assert shell("mismatchctl analyze none >&- 2>&- <&-", tmp_path).returncode == 4


def test_ignored_signals_stay_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signals.install_handlers()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        sys.unraisablehook = sys.__unraisablehook__
