"""Files of the recorder are complete or missing and never overwritten, after kills, full disks and forks."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.recorder.recorder import Recorder
from tests.cli.command import run

RAGGED = [np.array([-0.5, -1.0, -0.25], np.float32), np.array([], np.float32), np.array([-2.0], np.float32)]
COLUMNS: dict[str, Any] = {"rollout_log_probs": RAGGED, "train_log_probs": RAGGED}
BAD: dict[str, Any] = {**COLUMNS, "reward": [1.0]}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def steps(folder: Path) -> list[int]:
    return sorted(step for path in folder.glob("*.parquet") for step in pq.read_table(path)["step"].to_pylist())


def full_disk(table: pa.Table, handle: Any, **settings: Any) -> None:
    handle.write(b"PAR1")
    raise OSError(28, "No space left on device")


def test_file_names_contain_step_and_part(tmp_path: Path) -> None:
    with Recorder(tmp_path / "deep" / "folder") as recorder:
        written = [recorder.write(step=step, **COLUMNS) for step in (3, 3, 4, 3)]
    assert [path.name for path in written if path] == [
        "step_00003.parquet",
        "step_00003_001.parquet",
        "step_00004.parquet",
        "step_00003_002.parquet",
    ]
    with Recorder(recorder.folder, rank=2) as ranked:
        ranked.write(step=3, **COLUMNS)
    with Recorder(recorder.folder) as again:
        again.write(step=4, **COLUMNS)
    assert {"step_00003_rank00002.parquet", "step_00004_001.parquet"} <= set(names(recorder.folder))
    assert len(names(recorder.folder)) == 6


def test_the_rank_comes_from_torchrun_unless_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    for rank in (None, 1):
        with Recorder(tmp_path, rank=rank) as recorder:
            recorder.write(step=0, **COLUMNS)
    assert names(tmp_path) == ["step_00000_rank00001.parquet", "step_00000_rank00003.parquet"]


@pytest.mark.parametrize("background", [0, 2])
def test_writes_share_a_file_up_to_the_size_limit(tmp_path: Path, background: int) -> None:
    with Recorder(tmp_path, file_bytes=300, background=background) as recorder:
        for step in range(8):
            recorder.write(step=step, **COLUMNS)
        recorder.write(step=8, **COLUMNS, reward=1.0)  # other columns: another file
        recorder.write(step=9, **COLUMNS, reward=1.0)
    tables = {path.name: sorted(set(pq.read_table(path)["step"].to_pylist())) for path in sorted(tmp_path.iterdir())}
    assert [step for held in tables.values() for step in held] == list(range(10))
    assert 2 < len(tables) < 10
    assert all(name == f"step_{held[0]:05d}.parquet" for name, held in tables.items())
    assert "step_00008.parquet" in tables


def test_arrow_files_are_written(tmp_path: Path) -> None:
    with Recorder(tmp_path, run="a", format="arrow") as recorder:
        path = recorder.write(step=3, **COLUMNS)
    assert path is not None and path.name == "step_00003.arrow"
    with pa.ipc.open_file(path) as reader:
        table = reader.read_all()
    assert table["train_log_probs"].to_pylist() == [row.tolist() for row in RAGGED]
    assert not any(field.nullable for field in table.schema)
    plain = pa.table({"x": pa.array(np.zeros(100_000))})
    assert path.stat().st_size < plain.nbytes


def test_files_can_be_analyzed_while_recording(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        for step in range(3):
            recorder.write(step=step, **COLUMNS)
            run("analyze", tmp_path, "--json", "--quiet", code=0)


@pytest.mark.parametrize("background", [0, 1])
@pytest.mark.parametrize("file_bytes", [0, 1 << 20])
def test_a_full_disk_raises_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: int, file_bytes: int
) -> None:
    recorder = Recorder(tmp_path, background=background, file_bytes=file_bytes)
    with monkeypatch.context() as patch:
        patch.setattr(pq, "write_table", full_disk)
        with pytest.raises(OSError, match=r"cannot be written, 1 call.*No space left on device") as caught, recorder:
            recorder.write(step=0, **COLUMNS)
    assert caught.value.errno == 28 and caught.value.filename is None
    assert (recorder.lost, names(tmp_path)) == (1, [])
    recorder.close()  # said once
    with Recorder(tmp_path) as again:
        again.write(step=0, **COLUMNS)
    assert names(tmp_path) == ["step_00000.parquet"]


def test_rows_after_a_failed_write_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Recorder(tmp_path, file_bytes=1 << 20) as recorder:
        recorder.write(step=0, **COLUMNS)
        with monkeypatch.context() as patch:
            patch.setattr(pq, "write_table", full_disk)
            with pytest.raises(OSError, match="1 call"):
                recorder.write(step=1, **COLUMNS, reward=1.0)  # other columns end the file
    assert recorder.lost == 1 and steps(tmp_path) == [1, 1, 1]


def test_an_error_inside_the_with_block_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pq, "write_table", full_disk)
    with pytest.raises(KeyError), Recorder(tmp_path, background=1) as recorder:
        recorder.write(step=0, **COLUMNS)
        raise KeyError("the training's own")


@pytest.mark.parametrize("background", [0, 1])
def test_on_error_warn_never_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, background: int
) -> None:
    with Recorder(tmp_path, on_error="warn", background=background) as recorder:
        recorder.write(step=0, **COLUMNS)
        recorder.write(step=1, **BAD)
        recorder.write(step="two", **COLUMNS)  # type: ignore[arg-type]
        recorder.write(step=3, **COLUMNS)
        recorder.close()
        recorder.write(step=4, **COLUMNS)
    assert recorder.lost == 3
    (record,) = caplog.records
    assert "reward: 1 rows, but there are 3 sequences (training goes on" in record.getMessage()
    with monkeypatch.context() as patch:
        patch.setattr(pq, "write_table", full_disk)
        with Recorder(tmp_path, on_error="warn", background=background) as recorder:
            for step in range(5, 8):
                recorder.write(step=step, **COLUMNS)
    assert recorder.lost == 3 and len(caplog.records) == 2
    assert steps(tmp_path) == [0, 0, 0, 3, 3, 3]


def test_an_impossible_folder_warns_or_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Recorder(tmp_path / "file" / "dumps", on_error="warn") as patient:
        patient.write(step=0, **COLUMNS)
    assert patient.lost == 1
    with pytest.raises(OSError, match="file/dumps: cannot be written"), Recorder(tmp_path / "file" / "dumps") as strict:
        strict.write(step=0, **COLUMNS)


@pytest.mark.process
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_file_size_limit_raises_one_error(tmp_path: Path, on_error: str) -> None:
    """The operating system refuses the write, like on a full disk or above a quota."""
    script = """if True:
        import resource, sys
        import numpy as np
        from mismatchctl.recorder import Recorder
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with Recorder(sys.argv[1], on_error=sys.argv[2]) as recorder:
            for step, tokens in enumerate((10, 100_000, 10)):
                rows = [-np.random.default_rng(0).random(tokens)]
                recorder.write(step=step, rollout_log_probs=rows, train_log_probs=rows)
    """
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path), on_error], capture_output=True, text=True)
    assert "cannot be written, 1 call(s) of write are lost: File too large" in done.stderr
    assert done.returncode == (1 if on_error == "raise" else 0), done.stderr
    assert names(tmp_path) == ["step_00000.parquet"] + ["step_00002.parquet"] * (on_error == "warn")


def test_the_write_queue_is_bounded_and_lossless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, real = threading.Event(), pq.write_table

    def wait(*given: Any, **settings: Any) -> None:
        assert slow.wait(30)
        real(*given, **settings)

    monkeypatch.setattr(pq, "write_table", wait)
    with Recorder(tmp_path, background=2) as recorder, ThreadPoolExecutor(1) as pool:
        for step in range(2):
            recorder.write(step=step, **COLUMNS)
        more = pool.submit(lambda: [recorder.write(step=step, **COLUMNS) for step in range(2, 5)])
        with pytest.raises(futures.TimeoutError):  # one at the disk, two in the queue, and the next one waits
            more.result(timeout=0.2)
        slow.set()
        more.result(timeout=30)
    assert steps(tmp_path) == sorted(list(range(5)) * 3)


@pytest.mark.process
@pytest.mark.parametrize("background", [0, 2])
def test_process_exit_closes_the_recorder(tmp_path: Path, background: int) -> None:
    script = f"""if True:
        import sys
        from mismatchctl.recorder import Recorder
        recorder = Recorder(sys.argv[1], file_bytes=1 << 20, background={background})
        for step in range(3):
            recorder.write(step=step, rollout_log_probs=[[-1.0]], train_log_probs=[[-1.0]])
    """
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    assert steps(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize("given", [{"format": "csv"}, {"on_error": "ignore"}, {"rank": -1}, {"background": -1}])
def test_arguments_out_of_range_are_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        Recorder(tmp_path, **given)
    with pytest.raises(ValueError, match="folder: s3://bucket/dumps is not a local folder"):
        Recorder("s3://bucket/dumps")


def test_temporary_files_of_killed_processes_are_removed_after_a_day(tmp_path: Path) -> None:
    old, living, mine = (tmp_path / name for name in (".step_00000.1-a.tmp", ".step_00000.2-b.tmp", ".mine.tmp"))
    for path in (old, living, mine):
        path.write_bytes(b"PAR1")
    for path in (old, mine):
        os.utime(path, (time.time() - 90_000,) * 2)
    with Recorder(tmp_path) as recorder:
        recorder.write(step=0, **COLUMNS)
    assert names(tmp_path) == sorted([mine.name, living.name, "step_00000.parquet"])


def test_failed_move_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hard links, an empty file reserves the name until the file is complete."""

    def fail(*names: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError):
        Recorder(tmp_path).write(step=1, **COLUMNS)
    assert not names(tmp_path)


@pytest.mark.parametrize("links", [True, False])
def test_existing_files_are_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    if not links:
        monkeypatch.setattr(os, "link", lambda *names: (_ for _ in ()).throw(PermissionError()))
    (tmp_path / "step_00000.parquet").write_bytes(b"mine")
    with Recorder(tmp_path) as recorder:
        path = recorder.write(step=0, **COLUMNS)
    assert path == tmp_path / "step_00000_001.parquet"
    assert (tmp_path / "step_00000.parquet").read_bytes() == b"mine"
    assert len(pq.read_table(path)) == 3 and len(names(tmp_path)) == 2


RECORD = """if True:
    import sys, time
    import numpy as np
    from mismatchctl.recorder import Recorder
    folder, worker, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rng = np.random.default_rng(worker)
    with Recorder(folder, run="a", background=1) as recorder:
        for step in range(count):
            rollout = [-rng.random(2000, np.float32) for _ in range(8)]
            train = [row - np.float32(0.01) for row in rollout]
            recorder.write(step=step, rollout_log_probs=rollout, train_log_probs=train, worker=worker)
"""


def start(folder: Path, worker: int, count: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", RECORD, str(folder), str(worker), str(count)])


@pytest.mark.process
def test_two_processes_record_into_one_folder(tmp_path: Path) -> None:
    for process in [start(tmp_path, worker, 20) for worker in range(2)]:
        assert process.wait(60) == 0
    found = [pq.read_table(path, columns=["step", "worker"]).to_pylist() for path in tmp_path.iterdir()]
    assert sorted((rows[0]["step"], rows[0]["worker"]) for rows in found) == [
        (step, worker) for step in range(20) for worker in range(2)
    ]
    assert all(rows == [rows[0]] * 8 for rows in found)


@pytest.mark.process
def test_files_left_by_sigkill_can_be_analyzed(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    process = start(tmp_path, 0, 100_000)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*.parquet"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (tmp_path / ".step_99999.parquet.tmp").write_bytes(b"PAR1 and half a page")  # if the process was writing a file
    kept = steps(tmp_path)
    assert len(kept) >= 4 * 8
    assert kept == sorted(list(range(kept[-1] + 1)) * 8)  # all files except the open one

    assert start(tmp_path, 1, 2).wait(60) == 0  # the restart
    assert len(steps(tmp_path)) == len(kept) + 16
    done = run("analyze", tmp_path, "--json", "--quiet", code=0)
    assert sum(file["rows"] for file in json.loads(done.output)["provenance"]["inputs"]) == len(kept) + 16
    out = tmp_path_factory.mktemp("out") / "out.parquet"
    run("convert", tmp_path, out, code=0)
    assert sorted(pq.read_table(out)["step"].to_pylist()) == steps(tmp_path)
    run("analyze", out, "--json", "--quiet", code=0)


def test_recorders_of_one_step_do_not_overwrite_each_other(tmp_path: Path) -> None:
    def write(value: int) -> Path | None:
        rows = [[-float(value)]]
        return Recorder(tmp_path).write(step=0, rollout_log_probs=rows, train_log_probs=rows)

    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(write, range(40)))
    values = {pq.read_table(path)["train_log_probs"][0].as_py()[0] for path in paths if path}
    assert values == {-float(value) for value in range(40)}
    assert len(names(tmp_path)) == 40


@pytest.mark.parametrize(("file_bytes", "background"), [(0, 0), (1 << 20, 0), (300, 2)])
def test_threads_share_a_recorder(tmp_path: Path, file_bytes: int, background: int) -> None:
    with (
        Recorder(tmp_path, file_bytes=file_bytes, background=background) as recorder,
        ThreadPoolExecutor(8) as pool,
    ):
        list(pool.map(lambda step: recorder.write(step=step, **COLUMNS), range(100)))
    assert steps(tmp_path) == sorted(list(range(100)) * 3)


@pytest.mark.process
@pytest.mark.parametrize("background", [0, 1])
def test_a_forked_process_records_separately(tmp_path: Path, background: int) -> None:
    """The child records too, and rows that wait in the parent are written once."""
    script = f"""if True:
        import os, sys
        from mismatchctl.recorder import Recorder
        recorder = Recorder(sys.argv[1], file_bytes=1 << 20, background={background})
        row = [[-1.0]]
        recorder.write(step=0, rollout_log_probs=row, train_log_probs=row)
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0
        else:
            recorder.write(step=1, rollout_log_probs=row, train_log_probs=row)
        if not os.fork():
            sys.exit()  # a child that records nothing
        os.wait()
    """
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)
    assert steps(tmp_path) == [0, 1]


def test_a_closed_recorder_refuses_writes(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        pass
    with pytest.raises(ValueError, match="closed"):
        recorder.write(step=0, **COLUMNS)


@pytest.mark.process
def test_the_recorder_imports_only_numpy_and_pyarrow() -> None:
    script = """if True:
        import sys, tempfile
        import numpy, pyarrow.ipc, pyarrow.parquet
        pyarrow.array([[-1.0]])  # this imports an installed pandas
        before = set(sys.modules)
        from mismatchctl.recorder import Recorder
        with tempfile.TemporaryDirectory() as folder, Recorder(folder) as recorder:
            recorder.write(step=0, rollout_log_probs=[[-1.0]], train_log_probs=[[-1.0]])
        added = {name for name in set(sys.modules) - before if name.split(".")[0] not in sys.stdlib_module_names}
        ours = {name for name in added if name.split(".")[0] == "mismatchctl"}
        expected = {"mismatchctl", "mismatchctl.io", "mismatchctl.results"}
        assert all(name.startswith("mismatchctl.recorder") for name in ours - expected), ours
        others = {name.split(".")[0] for name in added - ours} - {"numpy", "pyarrow"}
        assert not others, others
    """
    subprocess.run([sys.executable, "-c", script], check=True)
