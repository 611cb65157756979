"""Several outputs appear together or not at all, and inputs are never replaced."""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import pytest

from mismatchctl.errors import ConfigError
from mismatchctl.io import process
from mismatchctl.io.files import (
    _machine_id,
    atomic_output,
    make_temporary_folder,
    read_first_bytes,
    read_regular_file,
    replace_together,
    write_atomically,
)
from mismatchctl.io.stores import first_error_line
from tests.cli.command import run
from tests.factories.dumps import make_dump
from tests.paths import SAMPLE_DATA


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    return Path(shutil.copy(SAMPLE_DATA / "dense" / "step_00000.parquet", tmp_path / "dump.parquet"))


@pytest.mark.process
def test_temporary_files_of_dead_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    own = make_temporary_folder()
    assert own.is_dir() and not folder.exists()


def test_outputs_are_replaced_together(tmp_path: Path) -> None:
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
    for before in (b"before", None):  # with and without the first target
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


def test_a_failed_second_output_removes_the_first(dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert "this file is an input" in done.stderr or words[0] == "diagnose"


@pytest.mark.process
@pytest.mark.parametrize(
    "words", ["analyze a.parquet --sequences out/s.parquet", "sweep a.parquet -o out/x.parquet",
              "sweep a.parquet -o out/x.csv", "analyze a.parquet --figures out/figures"]
)  # fmt: skip
def test_a_file_over_the_size_limit_gives_one_sentence(words: str, tmp_path: Path) -> None:
    make_dump(tmp_path / "a.parquet")
    (tmp_path / "out").mkdir()

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, 1 << 10))

    command = [sys.executable, "-m", "mismatchctl", *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, preexec_fn=limit, timeout=120)
    assert done.returncode == 2 and "cannot be written" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and os.listdir(tmp_path / "out") == []


def test_refused_paths_do_not_stay_open(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = os.listdir("/proc/self/fd")
    for path, problem in ((tmp_path, "Is a directory"), (tmp_path / "pipe", "is not a regular file")):
        with pytest.raises(OSError, match=problem):
            read_first_bytes(path, 8)
    assert os.listdir("/proc/self/fd") == before


def test_reading_a_small_file_uses_little_memory(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 2_000_000)
    tracemalloc.start()
    assert len(read_regular_file(tmp_path / "a", 1 << 34)) == 2_000_000
    assert tracemalloc.get_traced_memory()[1] < 8_000_000
    tracemalloc.stop()
    assert read_regular_file("/proc/self/status", 1 << 20).startswith(b"Name:")  # its reported size is 0
    with pytest.raises(OSError, match="is larger than"):
        read_regular_file(tmp_path / "a", 1_999_999)


@pytest.mark.parametrize(
    ("written", "limit"),
    [("2000000000\n", 2_000_000_000), ("max\n", None), ("9223372036854771712\n", None), (None, None)],
)
def test_containers_without_a_memory_limit_report_none(
    written: str | None, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cgroup v2 writes "max", and cgroup v1 a number near 2**63."""
    if written is not None:
        (tmp_path / "memory").write_text(written)
    monkeypatch.setattr(process, "_CGROUP_LIMITS", (str(tmp_path / "memory"),))
    assert process.container_bytes() == limit


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot open /data/my. run/A. B/x.pt", "cannot open /data/my. run/A. B/x.pt"),
        ("expected No. 3 of the rows. Use another", "expected No. 3 of the rows"),
        ("bad header. See the docs.\nmore", "bad header"),
        ("", "ValueError"),
    ],
)
def test_messages_of_libraries_are_cut_after_the_first_sentence(text: str, shown: str) -> None:
    assert first_error_line(ValueError(text)) == shown
