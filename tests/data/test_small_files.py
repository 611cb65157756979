"""Many small files are read together, and each is told of as if it had been read alone."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.api.diagnose import diagnose
from mismatchctl.api.sweep.sweep import sweep
from mismatchctl.core.batch import TokenBatch
from mismatchctl.corrections.model import Correction
from mismatchctl.data import catalog, reader
from mismatchctl.data.blocks import DecodedBlock, Rows, assemble_batch
from mismatchctl.data.engines import (
    BYTES_PER_TOKEN,
    PROCESS_BYTES,
    IncrementalEngine,
    LocalEngine,
    compute_on_worker,
    list_shards,
    tool_version,
)
from mismatchctl.data.files import ReadUnit
from mismatchctl.data.problems import Problems
from mismatchctl.data.reader import Dump, open_dump
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.frameworks.registry import find_preset
from tests.factories.sequence_samples import read_sample

pytestmark = pytest.mark.slow

FILES = 40
CORRECTIONS = [
    find_preset("token_tis"),
    Correction.model_validate(
        {
            "name": "scoped",
            "weight": {"clip": [0.5, 2.0], "normalize": "token", "normalize_over": "micro_batch"},
            "gates": [{"statistic": "k2", "level": "mean", "keep": [None, 0.001], "over": "batch"}],
        }
    ),
]


def table_of(number: int) -> pa.Table:
    """Three sequences, one of them long, one without a valid token."""
    random = np.random.default_rng(number)
    rows = []
    for row, length in enumerate((4 + number % 7, 40, 3)):
        rollout = -random.exponential(0.5, length).astype(np.float32)
        train = np.minimum(rollout + random.normal(0, 0.05, length).astype(np.float32), 0)
        mask = random.random(length) < (0.8 if row < 2 else 0)
        ids = random.integers(0, 50, length)
        rows.append((rollout, train, mask, ids, f"{number}-{row}", number // 15, number % 3, float(row)))
    names = ("rollout_log_probs", "train_log_probs", "response_mask", "token_ids")
    names = (*names, "sequence_id", "step", "worker", "reward")
    return pa.table({name: pa.array(list(values)) for name, values in zip(names, zip(*rows, strict=True), strict=True)})


@dataclass(frozen=True)
class Tokens:
    """Counts the valid tokens of a unit."""

    makes = int

    def __call__(self, dump: Dump, unit: ReadUnit) -> int:
        return sum(batch.tokens for batch in dump.read(unit, Problems()))


@pytest.fixture
def many(tmp_path: Path) -> Path:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(FILES):
        pq.write_table(table_of(number), folder / f"{number:03}.parquet")
    return folder


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on each file is read alone."""
    return lambda: monkeypatch.setattr(catalog, "_MANY_FILES", FILES + 1)


def change(file: Path, column: str, row: int, edit: Callable[[list[Any]], Any]) -> None:
    table = pq.read_table(file)
    values = table[column].to_pylist()
    values[row] = edit(values[row])
    place = table.column_names.index(column)
    pq.write_table(table.set_column(place, column, pa.array(values, table.schema.field(place).type)), file)


def with_nan(values: list[float]) -> list[float]:
    return [*values[:-1], float("nan")]


def assert_alike(one: Any, other: Any, place: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            assert_alike(one[key], other[key], f"{place}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), place
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_alike(*pair, f"{place}/{number}")
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-12), place
    else:
        assert one == other, place


def measured(folder: Path, **options: Any) -> str:
    given = {"by": ["worker"], "micro_batch_size": 4, "corrections": CORRECTIONS} | options
    return analyze([str(folder)], given.pop("corrections"), **given).to_json()


def test_they_are_one_unit_in_files_of_a_kind(many: Path) -> None:
    dump = open_dump([str(many)])
    assert len(dump.units) == FILES and len(dump.units) == 1
    pq.write_table(table_of(36).append_column("extra", pa.array([1, 2, 3])), many / "036.parquet")
    pq.write_table(pa.concat_tables([table_of(number) for number in range(600)]), many / "033.parquet")
    tokens = [len(unit.members) for unit in open_dump([str(many)]).units]
    assert tokens == [
        33,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
    ]  # what nobody asks for is no difference; of the 6 after a large one, each is a unit


def test_results_are_those_of_each_alone(many: Path, apart: Callable[[], None], tmp_path: Path) -> None:
    rows = tmp_path / "rows.parquet", tmp_path / "apart.parquet"
    together = [measured(many, threads=threads, sequences=rows[0]) for threads in (1, 2, 4)]
    assert len(set(together)) == 1
    swept, found = sweep([str(many)], by=["worker"]), diagnose([str(many)])
    sample = read_sample([str(many)], CORRECTIONS)
    apart()
    assert len(open_dump([str(many)]).units) == FILES
    assert_alike(json.loads(together[0]), json.loads(measured(many, sequences=rows[1])))
    assert_alike(*(pq.read_table(file).to_pydict() for file in rows))  # in the same order too
    assert_alike(
        swept.overall.to_dict(as_series=False), sweep([str(many)], by=["worker"]).overall.to_dict(as_series=False)
    )
    assert found == diagnose([str(many)])
    np.testing.assert_array_equal(np.sort(sample.tokens), np.sort(read_sample([str(many)], CORRECTIONS).tokens))


def test_a_bad_value_is_told_of_its_file_and_row(many: Path, apart: Callable[[], None]) -> None:
    for number in (12, 30):
        change(many / f"{number:03}.parquet", "train_log_probs", 1, with_nan)
        change(many / f"{number:03}.parquet", "response_mask", 1, lambda mask: [True] * len(mask))
    with pytest.raises(DataError, match=r"012\.parquet, row 1, column train_log_probs: a valid token's value is nan"):
        measured(many)
    left = measured(many, on_bad="skip")
    assert [(row["file"][-11:], row["count"]) for row in json.loads(left)["provenance"]["left_out"]] == [
        ("012.parquet", 1),
        ("030.parquet", 1),
    ]
    apart()
    assert_alike(json.loads(measured(many, on_bad="skip")), json.loads(left))


def test_a_file_that_cannot_be_decoded_is_told(many: Path, apart: Callable[[], None]) -> None:
    file = many / "033.parquet"
    content = bytearray(file.read_bytes())
    place = pq.ParquetFile(file).metadata.row_group(0).column(0).data_page_offset
    content[place : place + 8] = b"\xff" * 8
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"033\.parquet: row group 0 cannot be decoded"):
        measured(many)
    left = measured(many, on_bad="skip", micro_batch_size=None)
    told = json.loads(left)["provenance"]["left_out"]
    assert [(row["file"][-11:], row["count"]) for row in told] == [("033.parquet", 3)]
    apart()
    assert_alike(json.loads(measured(many, on_bad="skip", micro_batch_size=None)), json.loads(left))


def test_a_column_of_one_file_that_does_not_fit_is_that_files(many: Path) -> None:
    """Token ids of another length than the log-probs: the other files keep theirs."""
    change(many / "002.parquet", "token_ids", 0, lambda ids: ids[1:])

    found: list[bool] = []

    def watch(rows: Rows) -> None:
        found.append("token_ids" in rows.tokens)

    dump = open_dump([str(many)], watched=["token_ids"])
    (unit,) = dump.units
    assert sum(len(batch) for batch in dump.read(unit, Problems(), watch)) == 3 * FILES
    assert found.count(False) == 1 and len(found) < 8  # those beside it are read together


def test_kept_parts_are_found_again(many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_MOST_FILES", 20)
    read: list[str] = []
    blocks = Dump._blocks

    def spy(self: Dump, unit: Any) -> Any:
        read.extend(Path(one.file.path).name for one in unit.members or (unit,))
        return blocks(self, unit)

    monkeypatch.setattr(Dump, "_blocks", spy)
    engine = IncrementalEngine(LocalEngine(2))
    options: dict[str, Any] = {"micro_batch_size": None, "corrections": CORRECTIONS[:1], "on_bad": "skip"}
    change(many / "001.parquet", "train_log_probs", 0, with_nan)
    change(many / "001.parquet", "response_mask", 0, lambda mask: [True] * len(mask))
    plain = measured(many, **options)
    assert measured(many, engine=engine, **options) == plain
    read.clear()
    assert measured(many, engine=engine, **options) == plain
    assert read == []
    pq.write_table(table_of(500), many / "030.parquet")
    changed = measured(many, engine=engine, **options)
    assert read == [f"{number:03}.parquet" for number in range(20, 40)]
    assert changed == measured(many, **options) != plain
    pq.write_table(pa.concat_tables([table_of(number) for number in range(600)]), many / "0.parquet")
    read.clear()
    grown = measured(many, engine=engine, **options)
    assert len(set(read)) == FILES + 1  # a dump of twice the tokens is sampled in another way
    assert grown == measured(many, **options)


def test_what_is_read_together_is_assembled_once(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[DecodedBlock] = []

    def spy(block: DecodedBlock) -> TokenBatch:
        blocks.append(block)
        return assemble_batch(block)

    monkeypatch.setattr(reader, "assemble_batch", spy)
    dump = open_dump([str(many)])
    (unit,) = dump.units
    assert sum(len(batch) for batch in dump.read(unit, Problems())) == 3 * FILES
    assert len(blocks) == 1


def test_no_more_is_read_together_than_there_is_room_for(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [unit.tokens for unit in open_dump([str(many)]).units]
    monkeypatch.setattr(catalog, "_MOST_TOKENS", 500)
    dump = open_dump([str(many)])
    assert [one.tokens for unit in dump.units for one in unit.members] == tokens
    assert all(400 < unit.tokens <= 500 for unit in dump.units[:-1]) and len(dump.units) > 4
    for room, unread in ((500, False), (max(tokens), False), (max(tokens) - 1, True)):
        engine = LocalEngine(2, PROCESS_BYTES + room * BYTES_PER_TOKEN)
        if unread:  # what is too large for itself alone
            with pytest.raises(ConfigError, match="is too little for row group 0 of"):
                list(engine.map(Tokens(), dump, list_shards(dump)))
        else:
            made = list(engine.map(Tokens(), dump, list_shards(dump)))
            assert made == list(LocalEngine(2).map(Tokens(), dump, list_shards(dump)))


def test_kept_parts_name_the_files_that_they_are_of(many: Path, tmp_path: Path) -> None:
    """A file without a row has a number and no unit: once it is gone, those behind it have other numbers."""
    empty = many / "003.parquet"
    pq.write_table(table_of(3).slice(0, 0), empty)
    options: dict[str, Any] = {"micro_batch_size": None, "corrections": CORRECTIONS[:1]}
    engine = IncrementalEngine(LocalEngine(1))
    assert measured(many, engine=engine, **options) == measured(many, **options)
    empty.unlink()
    assert measured(many, engine=engine, **options) == measured(many, **options)


def test_another_process_needs_no_more_than_its_files(many: Path) -> None:
    dump = open_dump([str(many)])
    (shard,) = list_shards(dump)
    assert len(shard.files) == FILES
    sent = pickle.loads(pickle.dumps(dump.select(shard.units)))
    assert [file.path for file in sent.files] == [file.path for file in shard.files]

    assert compute_on_worker(Tokens(), sent, (tool_version(), "python")) == Tokens()(dump, shard.units[0])
    (many / "034.parquet").unlink()
    told = compute_on_worker(Tokens(), sent, (tool_version(), "python"))
    assert isinstance(told, DataError) and told.file is not None and told.file.endswith("034.parquet")
