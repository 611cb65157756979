"""`--cache`: what was read is read no more, whatever may change is noticed, and nothing of it shows in the output."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.data.engines import cache
from mismatchctl.data.engines.cache import CachedEngine, UnpackableError, pack_value, unpack_value
from mismatchctl.data.engines.engine import LocalEngine
from mismatchctl.data.reader import Dump, open_dump
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.registry import find_preset, load_framework
from mismatchctl.measure.sums import WorstRows
from tests.cli.command import run
from tests.paths import ROOT

SAMPLE = ROOT / "sample_data" / "dense"


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """Two steps of the sample data, last changed long ago."""
    folder = tmp_path / "run"
    folder.mkdir()
    for file in sorted(SAMPLE.glob("*.parquet"))[:2]:
        shutil.copy(file, folder)
    return folder


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files, one for every unit that is decoded."""
    found: list[str] = []
    blocks = Dump._blocks

    def spy(self: Dump, unit: Any) -> Any:
        found.append(Path(unit.file.path).name)
        return blocks(self, unit)

    monkeypatch.setattr(Dump, "_blocks", spy)
    return found


def measured(folder: Path, place: Path | None, **options: Any) -> str:
    corrections = [find_preset(name) for name in options.pop("corrections", ("token_tis", "geo_rs"))]
    engine = LocalEngine(2) if place is None else CachedEngine(LocalEngine(2), place)
    return analyze([str(folder)], corrections, engine=engine, **options).to_json()


def names_of(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("*.parquet"))


def test_a_second_run_decodes_nothing_and_says_the_same(dump: Path, tmp_path: Path, decoded: list[str]) -> None:
    plain = measured(dump, None)
    assert sorted(set(decoded)) == names_of(dump)
    assert measured(dump, tmp_path / "kept") == plain
    decoded.clear()
    assert measured(dump, tmp_path / "kept") == plain
    assert decoded == []


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["analyze", "sweep", "diagnose", "compare", "gate"])
def test_every_verb_that_reads_dumps_takes_it(verb: str, dump: Path, tmp_path: Path, decoded: list[str]) -> None:
    other = shutil.copytree(dump, tmp_path / "other")
    baseline = tmp_path / "baseline.json"
    arguments = {
        "compare": [str(other)],
        "sweep": ["--by", "worker", "--target-rejection", "0.05", "--batch", "64"],
        "gate": ["--baseline", str(baseline), "--rule", "k3:increase=20%"],
    }.get(verb, [])
    if verb == "gate":
        run("gate", dump, "--save-baseline", baseline, "--accept", "-q")
    words = [verb, str(dump), *arguments, "--json"]
    decoded.clear()
    plain = run(*words, code=0)
    units = len(decoded)
    kept = ["--cache", str(tmp_path / "kept")]
    assert run(*words, *kept).stdout == plain.stdout
    decoded.clear()
    assert run(*words, *kept).stdout == plain.stdout
    # tokens of two runs are held against each other one by one, which takes them whole
    assert len(decoded) == (units - 2 * len(names_of(dump)) if verb == "compare" else 0)


def test_rows_of_sequences_are_kept_too(dump: Path, tmp_path: Path, decoded: list[str]) -> None:
    for name in ("first", "second"):
        decoded.clear()
        measured(dump, tmp_path / "kept", sequences=tmp_path / f"{name}.parquet")
    assert decoded == []
    assert (tmp_path / "first.parquet").read_bytes() == (tmp_path / "second.parquet").read_bytes()


@pytest.mark.parametrize("place", [min, max])
def test_one_more_step_costs_one_step(
    place: Callable[[Iterable[Path]], Path], dump: Path, tmp_path: Path, decoded: list[str]
) -> None:
    """Before those that are kept or behind them: the places that a Result names are those of the dump as it is now."""
    new = place(dump.glob("*.parquet"))
    shutil.move(new, tmp_path / new.name)
    measured(dump, tmp_path / "kept")
    shutil.move(tmp_path / new.name, new)
    decoded.clear()
    grown = measured(dump, tmp_path / "kept")
    assert set(decoded) == {new.name}
    assert grown == measured(dump, None)


def flip_a_byte(file: Path) -> None:
    """Another byte in the middle of the first column chunk: a value, or damage."""
    with file.open("r+b") as opened:
        chunk = pq.ParquetFile(file).metadata.row_group(0).column(0)
        opened.seek(chunk.data_page_offset + chunk.total_compressed_size // 2)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("settled", [-1e9, 1e9])
def test_a_byte_in_the_middle_is_noticed_whatever_the_clock_says(
    dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settled: float
) -> None:
    """With times that are relied on at once, and with such as are never relied on."""
    monkeypatch.setattr(cache, "SETTLED_SECONDS", settled)
    engine = CachedEngine(LocalEngine(1), tmp_path / "kept")
    file = max(dump.glob("*.parquet"))
    measured(dump, tmp_path / "kept")
    before = {one.path: digest for one, digest in engine._digests(open_dump([str(dump)]).files)}
    status = file.stat()
    time.sleep(0.02)  # more than a tick of the clock of files
    flip_a_byte(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # as if nothing had been written
    after = {one.path: digest for one, digest in engine._digests(open_dump([str(dump)]).files)}
    assert [path for path in after if after[path] != before[path]] == [str(file)]


def test_a_file_written_again_with_other_values_is_read(dump: Path, tmp_path: Path, decoded: list[str]) -> None:
    measured(dump, tmp_path / "kept")
    file = max(dump.glob("*.parquet"))
    table = pq.read_table(file)
    pq.write_table(table.slice(1), file)
    decoded.clear()
    assert measured(dump, tmp_path / "kept") == measured(dump, None)
    assert set(decoded[: len(decoded) - len(names_of(dump))]) == {file.name}


def test_the_same_content_elsewhere_is_found(dump: Path, tmp_path: Path, decoded: list[str]) -> None:
    measured(dump, tmp_path / "kept")
    elsewhere = shutil.copytree(dump, tmp_path / "elsewhere" / "run")
    decoded.clear()
    assert measured(elsewhere, tmp_path / "kept") == measured(elsewhere, None)
    assert len(decoded) == len(names_of(dump))  # of the second, which keeps nothing


@pytest.mark.slow
def test_another_question_is_another_reading(dump: Path, tmp_path: Path, decoded: list[str]) -> None:
    questions: tuple[dict[str, Any], ...] = (
        {},
        {"corrections": ("token_tis",)},
        {"by": ("worker",)},
        {"on_bad": "skip"},
        {"every_cluster": True},
        {"rename": {"reward": "step"}},
    )
    for options in questions:
        decoded.clear()
        kept = measured(dump, tmp_path / "kept", **options)
        assert sorted(set(decoded)) == names_of(dump), options
        assert kept == measured(dump, None, **options), options


def test_another_version_of_the_tool_reads_again(
    dump: Path, tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(dump, tmp_path / "kept")
    monkeypatch.setattr(cache, "tool_version", lambda: "another")
    decoded.clear()
    measured(dump, tmp_path / "kept")
    assert sorted(set(decoded)) == names_of(dump)


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]


DAMAGES: tuple[Callable[[bytes], bytes], ...] = (_cut, _flipped, lambda content: b"", lambda content: b"x" * 100)


def test_damaged_entries_are_read_again_without_a_word(dump: Path, tmp_path: Path, decoded: list[str]) -> None:
    """And are whole afterwards: each damage is done to what was kept after the one before."""
    plain = measured(dump, tmp_path / "kept")
    for damage in DAMAGES:
        for place in (tmp_path / "kept").rglob("*"):
            if place.is_file():
                place.write_bytes(damage(place.read_bytes()))
        decoded.clear()
        assert measured(dump, tmp_path / "kept") == plain
        assert sorted(set(decoded)) == names_of(dump)
    decoded.clear()
    assert measured(dump, tmp_path / "kept") == plain
    assert decoded == []


@pytest.mark.process
def test_two_processes_share_a_folder(dump: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mismatchctl", "analyze", str(dump), "--json"]
    shared = [*command, "--cache", str(tmp_path / "kept")]
    running = [subprocess.Popen(words, stdout=subprocess.PIPE, cwd=ROOT) for words in (command, shared, shared)]
    printed = {process.communicate()[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(printed) == 1
    assert not [place for place in (tmp_path / "kept").rglob(".*") if place.is_file()]  # nothing half-written is left


def test_left_out_rows_are_told_again(dump: Path, tmp_path: Path, decoded: list[str]) -> None:
    file = max(dump.glob("*.parquet"))
    table = pq.read_table(file)
    values = table["train_log_probs"].to_pylist()
    values[3] = [float("nan")] * len(values[3])
    place = table.column_names.index("train_log_probs")
    pq.write_table(table.set_column(place, "train_log_probs", pa.array(values, table.schema.field(place).type)), file)
    plain = measured(dump, None, on_bad="skip")
    assert json.loads(plain)["provenance"]["left_out"]
    assert measured(dump, tmp_path / "kept", on_bad="skip") == plain
    decoded.clear()
    assert measured(dump, tmp_path / "kept", on_bad="skip") == plain
    assert decoded == []


def test_a_replay_and_a_cache_exclude_each_other(dump: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="replays every token"):
        measured(dump, tmp_path / "kept", framework=load_framework("verl"))


def test_a_folder_that_cannot_be_made_is_told(dump: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        measured(dump, tmp_path / "file")


def test_what_is_packed_comes_back() -> None:
    place = np.array([[0, 5, 2]])
    worst = WorstRows(np.array([np.inf]), place, {"step": np.array([None], object), "name": np.array(["a"])})
    value = {("run", (1, (None, 2.5))): [worst, {}, (True, np.float32(0.1))]}
    back = unpack_value(pack_value(value), list[WorstRows])
    assert list(back) == list(value)
    (found, empty, (flag, number)) = back["run", (1, (None, 2.5))]
    assert np.array_equal(found.score, worst.score) and np.array_equal(found.place, place)
    assert found.fields["step"].tolist() == [None] and found.fields["name"].tolist() == ["a"]
    assert empty == {} and flag is True and number == np.float32(0.1) and number.dtype == np.float32


def test_what_is_not_known_is_neither_packed_nor_unpacked() -> None:
    with pytest.raises(UnpackableError):
        pack_value({"a": object()})
    with pytest.raises(UnpackableError):
        pack_value(np.zeros(2, "datetime64[s]"))
    worst = pack_value(WorstRows(np.arange(50.0)))
    with pytest.raises(UnpackableError):
        unpack_value(worst, list[int])
    for broken in (worst[:4], worst[:-40], b"", worst.replace(b"<f8", b"|O8"), b"\xff" * 64):
        with pytest.raises(UnpackableError):
            unpack_value(broken, WorstRows)


def test_a_part_under_another_name_is_no_part_of_it(dump: Path, tmp_path: Path) -> None:
    folder, right = tmp_path / "cache", measured(dump, None)
    measured(dump, folder)
    parts = sorted((folder / "parts").iterdir())
    contents = [part.read_bytes() for part in parts]
    for part, content in zip(parts, [*contents[1:], contents[0]], strict=True):
        part.write_bytes(content)
    assert measured(dump, folder) == right
    for part, content in zip(parts, contents, strict=True):  # and a size that is made up takes no memory
        part.write_bytes(content[:32] + (1 << 60).to_bytes(8, "little") + content[40:])
    assert measured(dump, folder) == right
