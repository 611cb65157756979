from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.api.diagnose import diagnose
from mismatchctl.data.conversion import convert_dump
from mismatchctl.data.formats import ArrowContents
from mismatchctl.data.problems import Fault, Problems
from mismatchctl.data.reader import check_files, open_dump
from mismatchctl.errors import ConfigError, DataError
from tests.cli.command import at_once
from tests.factories.dump_files import MASK, ROLLOUT, TRAIN, batches, content, lists, read, to_long, wide, write

pytestmark = pytest.mark.usefixtures("file_format")


def refuse(*paths, **options):
    with pytest.raises(DataError) as caught:
        content(open_dump([str(path) for path in paths], **options))
    assert caught.value.exit_code == 4
    assert "\n" not in str(caught.value)
    return caught.value


def skip(*paths, **options):
    dump, problems = open_dump([str(path) for path in paths], on_bad="skip", **options), Problems()
    joined = content(dump, problems)
    return joined, dump.problems + problems


GOOD = [-1.0, -2.0, -3.0]
BAD_ROWS = [
    (ROLLOUT, [-1, np.nan, -3], "NaN", "expected a finite number, found NaN at token 1"),
    (TRAIN, [-1, -2, np.inf], "infinite", "expected a finite number, found inf at token 2"),
    (ROLLOUT, [-np.inf, -2, -3], "infinite", "expected a finite number, found -inf at token 0"),
    (TRAIN, [-1, 0.002, -3], "log-prob above 0", "must not be above 0, found 0.002 at token 1"),
    (ROLLOUT, [-1, None, -3], "null element", "expected a number, found null at token 1"),
    (ROLLOUT, None, "null list", "the list is null"),
    (TRAIN, None, "null list", "the list is null"),
    (TRAIN, [-1, -2], "length differs", "expected 3 elements as in rollout_log_probs, found 2"),
    ("current_log_probs", [-1, np.nan, -3], "NaN", "NaN at token 1"),
    ("current_log_probs", [-1, -2], "length differs", "expected 3 elements as in rollout_log_probs, found 2"),
    ("current_log_probs", [3, -2, -1], "log-prob above 0", "3"),
    ("advantages", [1, 2, np.inf], "infinite", "inf at token 2"),
    (MASK, [1, 0.5, 1], "mask is not 0 or 1", "found 0.5 at token 1"),
    (MASK, [1, None, 1], "mask is not 0 or 1", "found null at token 1"),
    (MASK, [1, np.nan, 1], "mask is not 0 or 1", "found NaN at token 1"),
    (MASK, None, "null list", "the list is null"),
    (MASK, [1], "length differs", "found 1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("column", "bad", "reason", "words"), BAD_ROWS)
@pytest.mark.parametrize("group", [None, 1, 2])
def test_bad_values_are_reported_with_their_place(tmp_path, column, bad, reason, words, group):
    columns = {
        ROLLOUT: [GOOD, GOOD, GOOD, GOOD],
        TRAIN: [GOOD, GOOD, GOOD, GOOD],
        MASK: [[1, 0, 1], [1, 1, 1], [1, 1, 1], [0, 0, 0]],
        "current_log_probs": [GOOD, GOOD, GOOD, GOOD],
        "advantages": [[1, 2, 3]] * 4,
    }
    columns[column] = [columns[column][0], columns[column][1], bad, columns[column][3]]
    columns = {name: lists(rows) for name, rows in columns.items()}
    path = write(tmp_path / "a.parquet", {**columns, "sequence_id": [10, 11, 12, 13]}, rows=group)
    wanted = ["current_log_probs", "advantages"]
    error = refuse(path, wanted=wanted)
    assert (error.file, error.row, error.column) == (path, 2, column)
    assert words in str(error), str(error)
    assert "on_bad='skip'" in error.remedy
    joined, problems = skip(path, wanted=wanted)
    assert joined["sequence_id"] == [10, 11, 13]
    assert joined["rollout"] == [[-1, -3], GOOD, []]
    assert joined["positions"] == [[0, 2], [0, 1, 2], []]
    assert (problems.sequences, problems.skipped) == (1, {path: 1})
    ((where, why), count), *more = problems.counts.items()
    assert (where, count, more) == (path, 1, [])
    assert why.endswith(reason)
    assert problems.examples[where, why].row == 2
    if column in ("current_log_probs", "advantages"):
        assert len(read(path)["rollout"]) == 4  # columns that are not needed are not checked


@pytest.mark.parametrize(
    ("bad", "words"), [([-1, -2], "expected 3 elements as in rollout_log_probs, found 2"), (None, "is null")]
)
@pytest.mark.parametrize("column", [TRAIN, MASK, "current_log_probs", "advantages"])
def test_unreadable_rows_are_not_converted(tmp_path, column, bad, words):
    good = [1, 1, 0] if column == MASK else GOOD
    columns = {ROLLOUT: lists([GOOD] * 600), TRAIN: lists([GOOD] * 600)}
    path = write(tmp_path / "a.parquet", {**columns, column: lists([*[good] * 599, bad])}, rows=512)
    with pytest.raises(DataError, match=words) as error:
        convert_dump(path, tmp_path / "out.parquet")
    assert (error.value.file, error.value.row, error.value.column) == (path, 599, column)
    assert "--on-bad skip" in error.value.remedy and not (tmp_path / "out.parquet").exists()


def test_the_first_bad_value_of_the_file_is_reported(tmp_path):
    columns = {
        ROLLOUT: lists([[-1], [-1, 1], [np.nan]]),
        TRAIN: lists([[-1], [np.nan, -1], [-1, -1]]),
    }
    path = write(tmp_path / "a.parquet", columns)
    assert (refuse(path).row, refuse(path).column) == (1, ROLLOUT)
    _, problems = skip(path)
    assert problems.counts[path, "train_log_probs: NaN"] == 1
    assert problems.counts[path, "train_log_probs: length differs"] == 1
    assert problems.sequences == 2


def test_rounding_above_zero_is_accepted(tmp_path):
    columns = {ROLLOUT: lists([[0.0009]]), TRAIN: lists([[0.0]])}
    assert len(read(write(tmp_path / "a.parquet", columns))["rollout"][0]) == 1


def test_missing_scalar_advantages_and_steps_are_bad_values(tmp_path):
    path = write(tmp_path / "a.parquet", wide((1, 0, 1), advantages=[1.0, None, np.nan]))
    assert refuse(path, wanted=["advantages"]).row == 2
    path = write(tmp_path / "a.parquet", wide((1, 1), step=pa.array([None, 4])))
    error = refuse(path)
    assert (error.row, error.column) == (0, "step")
    joined, problems = skip(path)
    assert joined["step"] == [4]
    assert problems.sequences == 1


def test_errors_use_the_column_name_of_the_file(tmp_path):
    columns = {ROLLOUT: lists([[-1]]), "old\x1b": lists([[np.nan]])}
    path = write(tmp_path / "a.parquet", columns)
    assert r"column old\x1b (train_log_probs): " in str(refuse(path, rename={TRAIN: "old\x1b"}))


def test_broken_files_are_refused(tmp_path):
    whole = Path(write(tmp_path / "d/a.parquet", wide()))
    data, suffix = whole.read_bytes(), whole.suffix
    for name, content_ in [("b", b""), ("c", data[: len(data) // 2]), ("e", b"words" * 9)]:
        broken = whole.with_name(f"{name}{suffix}")
        broken.write_bytes(content_)
        error = refuse(broken)
        assert error.file == str(broken)
        assert f"not a complete {'Arrow' if suffix == '.arrow' else 'Parquet'} file" in error.problem or name == "b"
        assert "on_bad='skip'" in error.remedy
    joined, problems = skip(tmp_path / "d")
    assert len(joined["rollout"]) == 2
    assert sorted(Path(path).stem for path in problems.files) == ["b", "c", "e"]
    with pytest.raises(DataError, match="none of the files can be used"):
        open_dump([str(whole.with_name(f"b{suffix}"))], on_bad="skip")


def _break_pages(path, row_group):
    """Overwrite values of the first column in one row group, without changing the footer."""
    if path.endswith(".arrow"):
        with pa.OSFile(path) as file:
            batch = ArrowContents.of(file).batches[row_group]
            head = 8 + int.from_bytes(file.read_at(4, batch.start + 4), "little")
        start, junk = batch.start + head, bytes(24)
    else:
        column = pq.read_metadata(path).row_group(row_group).column(0)
        start, junk = column.dictionary_page_offset or column.data_page_offset, b"\xff" * column.total_compressed_size
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(junk)


@pytest.mark.parametrize("layout", ["wide", "long"])
def test_broken_pages_are_refused(tmp_path, layout):
    columns = wide((2, 2, 2, 2), step=[1, 1, 2, 2])
    columns = columns if layout == "wide" else to_long(columns)
    path = write(tmp_path / "a.parquet", columns, rows=2 if layout == "wide" else 4)
    _break_pages(path, 1)
    error = refuse(path)
    assert error.file == path
    assert ("record batch" if path.endswith(".arrow") else "row group") in str(error)
    assert "cannot be decoded" in str(error)
    joined, problems = skip(path)
    assert len(joined["rollout"]) == 2
    assert problems.counts == {(path, "cannot be decoded"): 2}
    assert problems.sequences == 2


def test_checksums_are_verified(tmp_path):
    columns = {ROLLOUT: lists([[-1.0] * 500]), TRAIN: lists([[-1.5] * 500])}
    path = write(tmp_path / "a.parquet", columns, write_page_checksum=True, compression="none", use_dictionary=False)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[400] ^= 1
    (tmp_path / "a.parquet").write_bytes(data)
    assert "cannot be decoded" in str(refuse(path))


def test_files_that_change_while_read_are_reported(tmp_path):
    path = write(tmp_path / "a.parquet", wide())
    dump = open_dump([path])
    write(tmp_path / "a.parquet", wide((9, 9, 9)))
    with pytest.raises(DataError, match="changed while it was being read"):
        content(dump)


def test_missing_required_columns_are_named(tmp_path):
    columns = wide((2,), reward=[1.0])
    columns["train_logprobs"] = columns.pop(TRAIN)
    path = write(tmp_path / "a.parquet", columns)
    text = str(refuse(path))
    assert "missing required column train_log_probs (did you mean 'train_logprobs'?)" in text
    assert "columns={'train_log_probs': 'NAME'}" in text
    assert "the columns of the file are rollout_log_probs, reward, train_logprobs" in text
    write(tmp_path / "d/1.parquet", wide())
    write(tmp_path / "d/2.parquet", columns)
    assert Path(refuse(tmp_path / "d").file).stem == "2"
    joined, problems = skip(tmp_path / "d")
    assert len(joined["rollout"]) == 2
    ((file, why),) = problems.files.items()
    assert Path(file).stem == "2"
    assert "train_log_probs" in why


def test_renaming_an_absent_column_is_refused(tmp_path):
    path = write(tmp_path / "a.parquet", wide(old_log_probs=[[1.0], [2.0]]))
    error = refuse(path, rename={TRAIN: "old_logprobs"})
    assert "columns={'train_log_probs': 'old_logprobs'}" in str(error)
    assert "did you mean 'old_log_probs'" in str(error)
    error = refuse(path, rename={"reward": "rewrd"})
    assert "columns={'reward': 'rewrd'}: no file has a column rewrd" in str(error)
    with pytest.raises(ConfigError, match=r"no such column \(did you mean 'reward'"):
        open_dump([path], rename={"rewrd": "x"})


def test_two_aliases_of_one_column_are_refused(tmp_path):
    columns = wide((1,), a=lists([[-1]]), b=lists([[-2]]))
    del columns[TRAIN]
    path = write(tmp_path / "d.parquet", columns)
    aliases = {"a": TRAIN, "b": TRAIN}
    error = refuse(path, aliases=aliases)
    assert "several columns may contain train_log_probs: a and b" in str(error)
    assert "columns={'train_log_probs': 'NAME'}" in str(error)
    assert read(path, aliases=aliases, rename={TRAIN: "b"})["train"] == [[-2]]


@pytest.mark.parametrize(
    ("columns", "column", "words"),
    [
        ({ROLLOUT: [["a"]], TRAIN: lists([[-1]])}, ROLLOUT, "contains text (string) instead of floats; change"),
        ({ROLLOUT: ["a"], TRAIN: [-1.0]}, ROLLOUT, "sequence_id"),
        (
            {ROLLOUT: lists([[-1]]), TRAIN: [-1.0]},
            TRAIN,
            "contains numbers instead of lists with one element per token",
        ),
        ({ROLLOUT: [[-1]], TRAIN: lists([[-1]])}, ROLLOUT, "contains numbers (int64) instead of floats"),
        ({**wide((1,)), MASK: [["x"]]}, MASK, "instead of 0/1 or true/false"),
        ({**wide((1,)), MASK: [True]}, MASK, "contains true/false instead of lists"),
        ({**wide((1,)), "step": [[1]]}, "step", "contains lists of numbers"),
        ({**wide((1,)), TRAIN: pa.nulls(1)}, TRAIN, "contains only nulls"),
    ],
)
def test_columns_of_wrong_types_are_refused(tmp_path, columns, column, words):
    path = write(tmp_path / "a.parquet", columns)
    error = refuse(path)
    assert words in str(error), str(error)
    assert error.file == path
    assert error.column in (column, None)


def test_duplicate_columns_are_refused(tmp_path):
    table = pa.Table.from_arrays([lists([[-1]])] * 3, names=[ROLLOUT, TRAIN, TRAIN])
    assert "two columns with this name" in str(refuse(write(tmp_path / "a.parquet", table)))


def test_wrong_optional_columns_are_ignored_with_a_warning(tmp_path):
    path = write(tmp_path / "a.parquet", wide((1,), reward=["good"], worker=[[1]]))
    dump = open_dump([path], wanted=["worker"])
    assert set(content(dump)) == {"rollout", "train", "positions", "rows", "run"}
    assert len(dump.warnings) == 2
    assert "reward is ignored, because it contains text (string) instead of numbers" in " ".join(dump.warnings)


@pytest.mark.parametrize(
    ("odd", "column", "words"),
    [
        (to_long(wide((1,), step=[1])), ROLLOUT, "contains numbers in this file, but lists of numbers in"),
        (wide((1,), step=["one"]), "step", "contains text in this file, but numbers in"),
        (
            wide((1,), step=[1], advantages=[1.0]),
            "advantages",
            "contains numbers in this file, but lists of numbers in",
        ),
    ],
)
def test_files_with_other_columns_than_the_rest_are_refused(tmp_path, odd, column, words):
    for number in [1, 3]:
        write(tmp_path / f"d/{number}.parquet", wide((1,), step=[1], advantages=lists([[1]])))
    path = write(tmp_path / "d/2.parquet", odd)
    error = refuse(tmp_path / "d", wanted=["advantages"])
    assert error.file == path
    assert words in str(error), str(error)
    assert "d/1." in str(error) and " and 1 more" in str(error)
    assert column in (error.column, column)
    joined, problems = skip(tmp_path / "d", wanted=["advantages"])
    assert len(joined["rollout"]) == 2
    assert list(problems.files) == [path]
    dump = open_dump([str(tmp_path / "d")], wanted=["advantages"], on_bad="skip")
    assert [file.index for file in dump.files] == [0, 1]


def test_runs_can_have_different_layouts(tmp_path):
    dump = open_dump([write(tmp_path / "a.parquet", wide()), write(tmp_path / "b.parquet", to_long(wide()))])
    assert [file.layout for file in dump.files] == ["wide", "long"]
    assert len(content(dump)["rollout"]) == 4


def test_columns_of_only_some_files_are_reported(tmp_path):
    write(tmp_path / "d/1.parquet", wide((1,), reward=[1.0], current_log_probs=lists([[-1]])))
    write(tmp_path / "d/2.parquet", wide((1,)))
    dump = open_dump([str(tmp_path / "d")], wanted=["current_log_probs"])
    assert len(dump.warnings) == 2
    assert "current_log_probs: used in 1 of 2 files; missing in" in " ".join(dump.warnings)
    first, second = batches(dump)
    assert "reward" in first.columns
    assert "reward" not in second.columns
    assert first.current is not None
    assert second.current is None


def test_dumps_without_valid_tokens_are_refused(tmp_path):
    path = write(tmp_path / "a.parquet", wide((2,), **{MASK: [[0, 0]]}))
    dump = open_dump([path])
    total = sum(batch.tokens for batch in batches(dump))
    with pytest.raises(DataError, match=r"a\.(parquet|arrow): no valid token found.*response_mask"):
        dump.require_tokens(total)
    dump.require_tokens(1)
    empty = write(tmp_path / "b.parquet", pa.table(wide((2,))).slice(0, 0))
    with pytest.raises(DataError, match=r"b\.(parquet|arrow): no row found in the file; pass a dump that contains"):
        open_dump([empty]).require_tokens(0)


def test_the_first_bad_row_is_named_if_no_row_remains(tmp_path):
    """A message about the mask would mislead."""
    path = write(tmp_path / "a.parquet", wide((2, 2), **{MASK: [[1], [1, 1, 1]]}))
    with pytest.raises(
        DataError, match=r"row 0, column response_mask: expected . elements as in .*, found 1.*no valid token"
    ):
        analyze([path], [], on_bad="skip")
    (findings,) = diagnose([path]).runs.values()
    assert [finding.cause for finding in findings] == ["length_mismatch"]
    assert "in 2 of 2 rows" in findings[0].summary.lower()
    assert "in row 0, response_mask has 1 elements" in findings[0].summary


def test_problems_are_summed():
    one, two = Problems(), Problems()
    one.add("f", [Fault("c", "bad", np.array([5, 7]), 5, "x")])
    two.add("f", [Fault("c", "bad", np.array([2]), 2, "y"), Fault("c", "worse", np.array([2]), 2, "z")])
    two.files["g"] = "broken"
    for both in (one + two, two + one):
        assert both.counts == {("f", "bad"): 3, ("f", "worse"): 1}
        assert both.examples["f", "bad"].row == 2
        assert both.sequences == 3
        assert both.files == {"g": "broken"}
    assert one.counts == {("f", "bad"): 2}
    assert not Problems()
    assert one


def test_unknown_on_bad_values_are_refused(tmp_path):
    with pytest.raises(ConfigError):
        open_dump([write(tmp_path / "a.parquet", wide())], on_bad="ignore")


def test_units_can_be_read_in_threads(tmp_path):
    path = write(tmp_path / "a.parquet", wide(range(1, 60)), rows=3)
    dump = open_dump([path])
    totals = [0] * len(dump.units)

    def work(unit):
        totals[unit.index] = sum(batch.tokens for batch in dump.read(unit, Problems()))

    at_once(*(partial(work, unit) for unit in dump.units))
    assert sum(totals) == sum(range(1, 60))


def test_check_files_reports_rows_and_problems(tmp_path):
    folder = tmp_path / "d"
    columns = wide((1, 2), reward=[1.0, 2.0], trian_versoin=[1, 2], old=lists([[-1], [-2, -3]]))
    columns[TRAIN] = lists([[np.nan], [np.nan, -1]])
    write(folder / "a.parquet", columns)
    write(folder / "b.parquet", {ROLLOUT: lists([[-1]]), "x": [1]})
    (folder / "c.parquet").write_bytes(b"no")
    write(folder / "step=3/e.parquet", wide((2,)))
    a, b, c, e = check_files([str(folder)], aliases={"old": TRAIN})
    assert (a.error, a.layout, a.rows, a.sequences, a.tokens) == (None, "wide", 2, 0, 0)
    assert [(column.name, column.actual, column.dtype) for column in a.recognized][-1] == (
        "reward",
        "reward",
        "double",
    )
    assert "step" in a.absent
    assert "position" not in a.absent
    assert {column.name: column.hint for column in a.unknown} == {
        "trian_versoin": " (did you mean 'train_version'?)",
        "old": " (another column is train_log_probs already)",
    }
    (bad,) = a.bad
    assert (bad.column, bad.sequences, bad.row) == (TRAIN, 2, 0)
    assert not a.sound
    assert "missing required column train_log_probs" in b.error
    assert [column.name for column in b.recognized] == [ROLLOUT]
    assert (b.layout, b.rows, b.sound) == (None, 1, False)
    assert "not a complete Parquet file" in c.error
    assert (c.rows, c.recognized, c.absent) == (0, (), ())
    assert e.sound
    assert e.partition == {"step": 3}
    assert "step" not in e.absent
    assert e.tokens == 2


def test_check_files_reports_empty_files(tmp_path):
    """Commands refuse the files together, even if each file can be read."""
    write(tmp_path / "a.parquet", wide(()))
    (only,) = check_files([str(tmp_path)])
    assert (only.error, only.sound) == ("no row found in the file", False)
    masked = {**wide((2,)), "response_mask": lists([[0, 0]])}
    write(tmp_path / "b.parquet", masked)
    assert [file.error for file in check_files([str(tmp_path)])] == ["no valid token found in any of the 2 files"] * 2
    write(tmp_path / "b.parquet", {**wide((2,)), TRAIN: lists([[np.nan, -1]])})
    empty, bad = check_files([str(tmp_path)])
    assert empty.error and not bad.error and not bad.sound
    write(tmp_path / "b.parquet", wide((2,)))
    assert all(file.sound for file in check_files([str(tmp_path)]))


def test_check_files_reports_a_single_bad_file(tmp_path):
    (tmp_path / "c.parquet").write_bytes(b"no")
    (only,) = check_files([str(tmp_path / "c.parquet")])
    assert only.error
    with pytest.raises(DataError):
        check_files([str(tmp_path / "nothing")])
