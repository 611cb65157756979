"""Threads, memory limits and a real Ray cluster give the same result."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.api.diagnose import diagnose
from mismatchctl.api.sweep.sweep import sweep
from mismatchctl.data import engines
from mismatchctl.data.catalog import ReadUnit
from mismatchctl.data.engines import (
    PROCESS_BYTES,
    IncrementalEngine,
    LocalEngine,
    RayEngine,
    estimate_unit_bytes,
    list_shards,
    parse_size,
)
from mismatchctl.data.reader import Dump, open_dump
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.frameworks.registry import find_preset, load_framework
from tests.cli.command import run
from tests.paths import ROOT

SAMPLE = str(ROOT / "sample_data" / "dense")
CORRECTIONS = [find_preset(name) for name in ("token_tis", "geo_rs")]


@dataclass(frozen=True)
class Indices:
    units: tuple[int, ...]

    def __add__(self, other: Indices) -> Indices:
        return Indices(self.units + other.units)


@dataclass(frozen=True)
class RecordIndices:
    """Record the work units. The first task that does not find a file at `dies` writes it and is killed."""

    makes = Indices
    dies: str = ""

    def __call__(self, dump: Dump, unit: ReadUnit) -> Indices:
        if self.dies and not os.path.exists(self.dies):
            Path(self.dies).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Indices((unit.index,))


@dataclass(frozen=True)
class Killed:
    """Work whose first task is killed in the middle of its shard."""

    work: Any
    dies: str

    def __call__(self, dump: Dump, unit: ReadUnit) -> Any:
        made = self.work(dump, unit)
        RecordIndices(self.dies)(dump, unit)
        return made


@dataclass(frozen=True)
class RayWithDeath:
    dies: str

    def map(self, work: Any, dump: Dump, shards: Any) -> Any:
        return RayEngine().map(Killed(work, self.dies), dump, shards)


@pytest.fixture
def grouped(tmp_path: Path, row_groups_apart: None) -> str:
    """Write a file of eight row groups, which are one work unit each."""
    table = pa.concat_tables([pq.read_table(file) for file in sorted(Path(SAMPLE).glob("*.parquet"))])
    pq.write_table(table, tmp_path / "grouped.parquet", row_group_size=-(-len(table) // 8))
    return str(tmp_path / "grouped.parquet")


@pytest.mark.slow
def test_large_files_are_split_equally_by_every_engine(
    grouped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = analyze([grouped], CORRECTIONS)
    monkeypatch.setattr(engines, "SHARD_TOKENS", 10_000)
    dump = open_dump([grouped])
    cut = list(list_shards(dump))
    assert 2 < len(cut) < 9
    assert [unit for shard in cut for unit in shard] == list(dump.units)
    kept = IncrementalEngine(LocalEngine(2))
    all_engines = (LocalEngine(1), LocalEngine(2), LocalEngine(5), kept, kept)
    found = {analyze([grouped], CORRECTIONS, engine=engine).to_json() for engine in all_engines}
    assert len(found) == 1
    run, other = analyze([grouped], CORRECTIONS).runs["grouped"], whole.runs["grouped"]
    for key, value in run.overall.metrics.items():
        assert value.value == pytest.approx(other.overall.metrics[key].value, rel=1e-12), key


def test_memory_sizes_are_parsed() -> None:
    assert [parse_size(text) for text in ("2GB", "800 MB", "1.5g", "1000000", "3GiB")] == [
        2_000_000_000, 800_000_000, 1_500_000_000, 1_000_000, 3_000_000_000,
    ]  # fmt: skip
    for text in ("", "GB", "-1GB", "2 pounds", "1e3MB"):
        with pytest.raises(ConfigError, match="such as 2GB"):
            parse_size(text)


@pytest.mark.parametrize("allowed", [1, 2, 3])
def test_memory_limits_bound_concurrent_units(allowed: int, grouped: str) -> None:
    dump = open_dump([grouped])
    limit = PROCESS_BYTES + allowed * max(map(estimate_unit_bytes, dump.units)) + 1
    running, most, lock, met = 0, 0, threading.Lock(), threading.Barrier(allowed)

    class Counting(RecordIndices):
        def __call__(self, dump: Dump, unit: ReadUnit) -> Indices:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            if unit.index < allowed:
                met.wait(10)  # the tasks run at the same time
            with lock:
                running -= 1
            return Indices((unit.index,))

    ((_, part),) = LocalEngine(8, limit).map(Counting(), dump, list_shards(dump))
    assert part.units == tuple(range(8))
    assert most == allowed


def test_units_above_the_memory_limit_are_named(grouped: str) -> None:
    with pytest.raises(ConfigError, match=r"row group 2 of .*grouped.parquet.*raise the limit to 451MB"):
        analyze([grouped], engine=LocalEngine(8, 450_000_000))


# --- Ray ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="class")
def cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="Ray is not there for this version of Python")
    from ray.cluster_utils import Cluster

    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([path] if path else [])])
    node = {"num_cpus": 1, "object_store_memory": 80_000_000}
    nodes = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    nodes.add_node(**node)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()
        os.environ.pop("PYTHONPATH") if path is None else os.environ.update(PYTHONPATH=path)


@pytest.mark.process
@pytest.mark.usefixtures("cluster")
class TestRay:
    def test_parts_arrive_in_input_order(self, grouped: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engines, "SHARD_TOKENS", 10_000)
        dump = open_dump([SAMPLE, grouped])
        merged = [part.units for _, part in RayEngine().map(RecordIndices(), dump, list_shards(dump))]
        assert [unit for units in merged for unit in units] == list(range(len(dump.units)))

    def test_both_ray_nodes_work(self) -> None:
        import ray

        assert len([node for node in ray.nodes() if node["Alive"]]) == 2

    def test_killed_workers_are_replaced(self, tmp_path: Path) -> None:
        dump = open_dump([SAMPLE])
        flag = tmp_path / "died"
        parts = [part.units for _, part in RayEngine().map(RecordIndices(str(flag)), dump, list_shards(dump))]
        assert flag.exists()
        assert parts == [(index,) for index in range(len(dump.units))]

    @pytest.mark.parametrize("framework", [None, "verl"])
    def test_ray_and_threads_give_equal_bytes(self, framework: str | None, tmp_path: Path) -> None:
        options: dict[str, Any] = {"framework": None if framework is None else load_framework(framework)}
        local = analyze([SAMPLE], CORRECTIONS, sequences=tmp_path / "local.parquet", **options)
        there = RayWithDeath(str(tmp_path / "died"))
        far = analyze([SAMPLE], CORRECTIONS, sequences=tmp_path / "ray.parquet", engine=there, **options)
        assert (tmp_path / "died").exists()
        assert far.to_json() == local.to_json()
        assert (tmp_path / "ray.parquet").read_bytes() == (tmp_path / "local.parquet").read_bytes()

    def test_ray_and_threads_agree_in_sweep_and_diagnose(self) -> None:

        wishes = [("rejected_tokens", 0.05)]
        assert sweep([SAMPLE], wishes=wishes, engine=RayEngine()).to_json() == sweep([SAMPLE], wishes=wishes).to_json()
        assert diagnose([SAMPLE], engine=RayEngine()) == diagnose([SAMPLE])

    def test_ray_and_threads_report_the_same_bad_data(self, tmp_path: Path) -> None:
        for number in range(3):
            values = pa.array([[-0.5, np.nan if number else -0.1]])
            table = pa.table({"rollout_log_probs": values, "train_log_probs": values})
            pq.write_table(table, tmp_path / f"{number}.parquet")
        with pytest.raises(DataError) as here:
            analyze([str(tmp_path)])
        with pytest.raises(DataError) as there:
            analyze([str(tmp_path)], engine=RayEngine())
        assert str(there.value) == str(here.value)
        assert "1.parquet" in str(here.value)

    def test_files_missing_on_workers_are_named(self, tmp_path: Path) -> None:
        file = tmp_path / "gone.parquet"
        file.write_bytes(min(Path(SAMPLE).glob("*.parquet")).read_bytes())
        dump = open_dump([str(file)])
        file.unlink()
        with pytest.raises(DataError, match=r"gone.parquet.*cannot find this file.*the same path on every node"):
            list(RayEngine().map(RecordIndices(), dump, list_shards(dump)))

    def test_other_versions_on_workers_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engines, "tool_version", lambda: "another")
        with pytest.raises(DataError, match="another version of mismatchctl"):
            analyze([SAMPLE], engine=RayEngine())


def test_missing_ray_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'mismatchctl\[ray\]'"):
        analyze([SAMPLE], engine=RayEngine())


def test_ray_start_failures_give_one_sentence(monkeypatch: pytest.MonkeyPatch, grouped: str) -> None:
    def init(**_: object) -> None:
        raise Exception(
            "The current node timed out during startup. This could happen because some processes died.\nlogs"
        )

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    done = run("analyze", grouped, "--engine", "ray", code=2)
    assert done.stderr.count("\n") == 1
    assert "no Ray cluster found (The current node timed out during startup." in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_missing_ray_clusters_are_reported(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=f"no Ray cluster found at {address}"):
        analyze([SAMPLE], engine=RayEngine(address))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--address", "auto"], "only works with --engine ray"),
        (["--engine", "ray", "--threads", "2"], "do not work with --engine ray"),
        (["--engine", "ray", "--memory-limit", "2GB"], "do not work with --engine ray"),
        (["--memory-limit", "much"], "such as 2GB"),
        (["--memory-limit", "1KB"], "--memory-limit 1.00 kB is too little to read"),
    ],
)
def test_contradictory_engine_options_are_refused(flags: list[str], problem: str) -> None:
    done = run("analyze", SAMPLE, *flags, code=2)
    assert problem in " ".join(done.stderr.split())


FILES = 24


def table_of(number: int) -> pa.Table:
    random = np.random.default_rng(number)
    rows = []
    for row, length in enumerate((4 + number % 7, 40, 3)):
        rollout = -random.exponential(0.5, length).astype(np.float32)
        train = np.minimum(rollout + random.normal(0, 0.05, length).astype(np.float32), 0)
        mask = random.random(length) < (0.8 if row < 2 else 0)
        rows.append((rollout, train, mask, f"{number}-{row}", number // 15, number % 3))
    names = ("rollout_log_probs", "train_log_probs", "response_mask", "sequence_id", "step", "worker")
    return pa.table({name: pa.array(list(values)) for name, values in zip(names, zip(*rows, strict=True), strict=True)})


@pytest.fixture
def many(tmp_path: Path) -> Path:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(FILES):
        pq.write_table(table_of(number), folder / f"{number:03}.parquet")
    return folder


def measured(folder: Path, **options: Any) -> str:
    return analyze(
        [str(folder / "a"), str(folder / "b")], CORRECTIONS[:1], by=["worker"], on_bad="skip", **options
    ).to_json()


@pytest.mark.slow
def test_unchanged_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    blocks = Dump._blocks

    def spy(self: Dump, unit: ReadUnit) -> Any:
        read.append(f"{Path(unit.file.path).parent.name}/{Path(unit.file.path).name}")
        return blocks(self, unit)

    monkeypatch.setattr(Dump, "_blocks", spy)
    for number in range(FILES):
        folder = tmp_path / ("a" if number < FILES // 2 else "b")
        folder.mkdir(exist_ok=True)
        pq.write_table(table_of(number), folder / f"{number:03}.parquet")
    table = table_of(1)
    bad = pa.array([None, *table["train_log_probs"].to_pylist()[1:]], table["train_log_probs"].type)
    pq.write_table(table.set_column(1, "train_log_probs", bad), tmp_path / "a" / "001.parquet")
    kept = IncrementalEngine(LocalEngine(2))
    plain = measured(tmp_path)
    assert measured(tmp_path, engine=kept) == plain
    read.clear()
    assert measured(tmp_path, engine=kept) == plain
    assert read == []
    later = [f"a/{number:03}" for number in range(4, FILES // 2)]  # these files get other numbers
    changes = {"b/012": [], "a/400": [], "a/003_1": [*later, "a/400"]}
    for number, (name, expected) in enumerate(changes.items()):
        pq.write_table(table_of(500 + number), tmp_path / f"{name}.parquet")
        read.clear()
        changed = measured(tmp_path, engine=kept)
        assert sorted(read) == sorted(f"{file}.parquet" for file in (name, *expected))
        assert changed == measured(tmp_path)


def test_workers_receive_only_their_files(many: Path) -> None:
    dump = open_dump([str(many)])
    shard = list(list_shards(dump))[14]
    sent = pickle.loads(pickle.dumps(dump.select(shard)))
    assert [file.path for file in sent.files] == [*sent.paths.values()] == [shard[0].file.path]
    here = (engines.tool_version(), "python")
    assert engines.compute_on_worker(RecordIndices(), sent, here) == Indices((shard[0].index,))
    (many / "014.parquet").unlink()
    missing = engines.compute_on_worker(RecordIndices(), sent, here)
    assert isinstance(missing, DataError) and missing.file is not None and missing.file.endswith("014.parquet")
