"""`watch` prints a line per step, reads complete files only, and ends if a rule fails."""

from functools import partial
from pathlib import Path

import polars as pl
import pytest

from mismatchctl.api.watch import DumpWatcher, Snapshot
from tests.cli import command
from tests.factories.dumps import write_dump


def steps(folder: Path) -> list[bytes]:
    made = []
    for seed in range(3):
        (file,) = write_dump(folder / str(seed), seed=seed, steps=1).iterdir()
        made.append(file.read_bytes())
    return made


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return steps(tmp_path_factory.mktemp("steps"))


class Arrivals:
    """Add files and advance a fake clock whenever `watch` sleeps."""

    def __init__(self, *events: object) -> None:
        self.events, self.now = list(events), 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.events:
            self.events.pop(0)()  # type: ignore[operator]

    def clock(self) -> float:
        return self.now


def snapshots(folder: Path, *events: object) -> list[Snapshot | None]:
    arrivals = Arrivals(*events)
    watch = DumpWatcher([str(folder)], until_idle=45.0, sleep=arrivals.sleep, clock=arrivals.clock)
    return list(watch.snapshots())


def test_each_look_reports_new_files(tmp_path: Path, files: list[bytes]) -> None:
    dump = tmp_path / "dump"

    def begin() -> None:
        dump.mkdir()
        (dump / "a.parquet").write_bytes(files[0])

    found = snapshots(dump, begin, lambda: None, lambda: (dump / "b.parquet").write_bytes(files[1]))
    assert found[0] is None
    first, second = found[1:]
    assert first is not None and second is not None
    assert len(first.steps) == 1 and not first.again and first.answered
    assert len(second.steps) == 1
    tokens = [look.result.runs["dump"].overall.metrics["tokens"].value for look in (first, second)]
    assert tokens[1] > tokens[0]  # type: ignore[operator]


def test_incomplete_files_are_retried(tmp_path: Path, files: list[bytes]) -> None:
    (tmp_path / "a.parquet").write_bytes(files[0])
    half = tmp_path / "b.parquet"
    half.write_bytes(files[1][: len(files[1]) // 2])
    found = snapshots(tmp_path, lambda: None, lambda: half.write_bytes(files[1]))
    assert [look and look.waiting for look in found] == [(str(half),), ()]
    assert all(look is not None and not look.result.provenance.left_out for look in found)


run = partial(command.run, "watch", "--every", "0.1s", "--until-idle", "0s")


def test_unreadable_files_are_reported_when_idle(tmp_path: Path, files: list[bytes]) -> None:
    (tmp_path / "a.parquet").write_bytes(files[0][:-8] + b"nonsense"[:4] + b"PAR1")
    done = command.run("watch", tmp_path, "--every", "0.1s", "--until-idle", "0.2s", code=4)
    assert "a.parquet" in done.stderr and done.stdout == ""


def test_skipped_data_is_reported_once(tmp_path: Path, files: list[bytes]) -> None:
    (tmp_path / "a.parquet").write_bytes(files[0])
    rows = pl.read_parquet(files[1])
    worse = rows.with_columns(step=pl.when(pl.int_range(pl.len()) == 1).then(None).otherwise(pl.col("step")))
    bad, broken = tmp_path / "b.parquet", tmp_path / "c.parquet"
    found = snapshots(
        tmp_path, lambda: worse.write_parquet(bad), lambda: broken.write_bytes(b"nonsense"), *[lambda: None] * 2
    )
    reported = [look.left_out for look in found if look is not None]
    assert [len(notes) for notes in reported] == [0, 1, 1]
    assert f"left out of {bad}: 1 sequence, " in reported[1][0] and "row 1" in reported[1][0]
    assert f"left out {broken}: " in reported[2][0]
    assert (
        f"warning: {reported[1][0]}" in command.run("watch", tmp_path, "--every", "0.1s", "--until-idle", "0s").stderr
    )


@pytest.mark.parametrize("rule", [[], ["--rule", "k3:max=0.1"]])
def test_a_watch_without_data_could_not_judge(tmp_path: Path, rule: list[str]) -> None:
    done = command.run("watch", tmp_path / "not there", "--every", "0.1s", "--until-idle", "0.2s", *rule, code=4)
    assert "not there: no file arrived within 0.2s; check the path that the job writes to" in done.stderr


@pytest.mark.parametrize("beside", [True, False])
def test_files_that_stay_incomplete_are_named(beside: bool, tmp_path: Path, files: list[bytes]) -> None:
    (tmp_path / "a.parquet").write_bytes(files[0][:-50])
    if beside:
        (tmp_path / "b.parquet").write_bytes(files[1])
    done = command.run("watch", tmp_path, "--every", "0.1s", "--until-idle", "0.2s", code=0 if beside else 4)
    assert f"warning: left out {tmp_path / 'a.parquet'}: it never became complete" in done.stderr
    assert "b.parquet" not in done.stderr


def test_watch_prints_lines_and_the_answer_and_updates_the_page(tmp_path: Path, files: list[bytes]) -> None:
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "a.parquet").write_bytes(files[0])
    page = tmp_path / "now.html"
    done = run(tmp_path / "dump", "--html", page)
    assert done.exit_code == 0, done.output  # type: ignore[attr-defined]
    out = done.stdout.splitlines()  # type: ignore[attr-defined]
    assert out[0].split()[0] in ("OK", "CHECK", "FAIL")
    assert out[2].split()[:3] == ["step", "tokens", "K3"]
    assert out[-1] == f"Next: mismatchctl diagnose {tmp_path / 'dump'}"
    assert "mismatchctl" in page.read_text()[:3000]


@pytest.mark.process
def test_a_failing_rule_ends_the_watch(tmp_path: Path, files: list[bytes]) -> None:
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "a.parquet").write_bytes(files[0])
    failed = run(tmp_path / "dump", "--rule", "tokens:max=1")
    assert failed.exit_code == 3, failed.output  # type: ignore[attr-defined]
    assert "failed: " in failed.stderr  # type: ignore[attr-defined]


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    command.run("watch", tmp_path, "--until-idle", "soon", code=2)


def test_rules_that_cannot_fail_are_refused(tmp_path: Path) -> None:
    done = command.run("watch", tmp_path, "--until-idle", "0s", "--rule", "k3:increase=5%", code=2)
    assert done.stderr.startswith("error: --rule k3:increase=5%: this rule compares with a baseline; add --baseline")
