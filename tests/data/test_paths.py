import errno
import os
import re
import subprocess
from collections import Counter

import pytest

from mismatchctl.data.reader import open_dump
from mismatchctl.errors import DataError
from mismatchctl.io.files import natural_key
from mismatchctl.io.stores import escape_unprintable
from tests.factories.dump_files import batches, wide, write


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def names(*paths, **options):
    return [(file.run, file.path) for file in open_dump(paths, **options).files]


def test_folders_are_read_recursively_in_natural_order(tmp_path):
    for name in [
        "step_10.parquet",
        "step_2.pq",
        "later/step_1.PARQUET",
        "_metadata.parquet",
        ".x.parquet",
        "n.txt",
    ]:
        write(tmp_path / "dumps/a" / name, wide())
    write(tmp_path / "dumps/a/_temporary/x.parquet", wide())
    write(tmp_path / "dumps/a/.git/x.parquet", wide())
    expected = ["dumps/a/later/step_1.PARQUET", "dumps/a/step_2.pq", "dumps/a/step_10.parquet"]
    assert names("dumps/a") == [("a", path) for path in expected]
    assert [file.index for file in open_dump(["dumps/a"]).files] == [0, 1, 2]


def test_the_order_of_arguments_does_not_matter(tmp_path):
    for run in ["run_10", "run_9"]:
        write(tmp_path / run / "s.parquet", wide())
    expected = [("run_9", "run_9/s.parquet"), ("run_10", "run_10/s.parquet")]
    assert names("run_10", "run_9") == names("run_9", "run_10") == expected


def test_repeated_paths_are_read_once(tmp_path):
    write(tmp_path / "a/s.parquet", wide())
    os.symlink(tmp_path / "a", tmp_path / "link")
    assert names("a", "./a/", str(tmp_path / "a"), "link") == [("a", "a/s.parquet")]


def test_run_names_are_the_shortest_unique_trailing_parts(tmp_path):
    for path in ["x/a/s.parquet", "y/a/s.parquet", "z/b.parquet"]:
        write(tmp_path / path, wide())
    assert [run for run, _ in names("x/a", "y/a", "z/b.parquet")] == ["b", "x/a", "y/a"]


def test_runs_with_equal_names_get_unique_names(tmp_path):
    for path in ["b.parquet", "b.pq", "c/s.parquet", "c.parquet"]:
        write(tmp_path / path, wide())
    assert [run for run, _ in names("b.parquet", "b.pq")] == ["b.parquet", "b.pq"]
    assert len({run for run, _ in names("c", "c.parquet")}) == 2


def test_the_current_folder_names_the_run(tmp_path, monkeypatch):
    write(tmp_path / "mine/s.parquet", wide())
    monkeypatch.chdir(tmp_path / "mine")
    write(tmp_path / "mine/x/s.parquet", wide())
    assert names(".") == [("mine", "s.parquet"), ("mine", "x/s.parquet")]


def test_globs_of_files_are_one_run_and_of_folders_one_each(tmp_path):
    for path in ["d/step_2.parquet", "d/step_10.parquet", "e/s.parquet", "e/notes.txt"]:
        write(tmp_path / path, wide())
    assert names("d/step_*.parquet") == [("d", "d/step_2.parquet"), ("d", "d/step_10.parquet")]
    assert {run for run, _ in names("[de]")} == {"d", "e"}
    assert len(names("**/*.parquet")) == 3


def test_existing_paths_with_wildcard_characters_are_read(tmp_path):
    write(tmp_path / "run[1]/s.parquet", wide())
    assert names("run[1]") == [("run[1]", "run[1]/s.parquet")]


def test_hive_folders_give_steps(tmp_path):
    for step in [2, 10]:
        write(tmp_path / f"h/step={step}/a.parquet", wide())
    dump = open_dump(["h"])
    assert [file.partition for file in dump.files] == [{"step": 2}, {"step": 10}]
    assert [unit.step_range for unit in dump.units] == [(2, 2), (10, 10)]
    assert [batch.columns["step"].tolist() for batch in batches(dump)] == [[2, 2], [10, 10]]
    assert dump.has("step")
    assert not dump.has("reward")
    assert {run for run, _ in names("h/step=*")} == {"h"}


def test_hive_values_can_be_text_null_or_aliases(tmp_path):
    write(tmp_path / "h/iter=a%20b/kind=__HIVE_DEFAULT_PARTITION__/a.parquet", wide())
    write(tmp_path / "h/iter=3/kind=x/a.parquet", wide())
    dump = open_dump(["h"], aliases={"iter": "step"}, by=["kind"])
    assert [file.partition for file in dump.files] == [{"step": "3", "kind": "x"}, {"step": "a b"}]
    assert next(batches(dump)).columns["kind"].tolist() == ["x", "x"]


def test_hive_runs_and_run_columns_are_read(tmp_path):
    write(tmp_path / "h/run=7/a.parquet", wide())
    write(tmp_path / "h/run=8/a.parquet", wide(run=["x", None]))
    runs = [batch.columns["run"].tolist() for batch in batches(open_dump(["h"]))]
    assert runs == [["7", "7"], ["x", "8"]]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("dumqs", ["dumqs", "the file or folder does not exist", "similar names", "dumps"]),
        ("dumps/rnu_1/x", ["dumps/rnu_1/x", "similar names in dumps", "run_1"]),
        ("dumps/run_1/zzz.parquet", ["does not exist", "dumps/run_1 contains data.jsonl"]),
        ("dumps/run_1", ["dumps/run_1/data.jsonl", "contains no log-probs", "The columns are none"]),
        ("dumps/empty", ["dumps/empty", "is empty", "Parquet"]),
        ("dumps/*.parquet", ["dumps/*.parquet", "matches nothing", "empty"]),
        ("dumps/run_1/*", ["data.jsonl", "contains no log-probs"]),
        ("dumps/run_1/data.jsonl", ["data.jsonl", "contains no log-probs", "The columns are none"]),
        ("ROWS.CSV", ["ROWS.CSV", "contains no log-probs", "The columns are step"]),
        ("notes.txt", ["notes.txt", "this format is not supported", "JSONL"]),
        ("other", ["other", "contains no dump, only a.txt", "Parquet, Arrow, JSONL"]),
        ("ftp://bucket/dumps", ["ftp://bucket/dumps", "ftp:// is not supported", "s3://"]),
        ("s3://", ["s3://: ", "missing bucket"]),
        ("s3:///dumps", ["s3:///dumps", "missing bucket"]),
        ("s3://*/dumps", ["s3://*/dumps", "missing bucket"]),
        ("hf://", ["hf://: ", "missing repository", "hf://datasets/OWNER/NAME"]),
        ("hf://dumps", ["hf://dumps: ", "missing repository"]),
        ("hf://datasets/*", ["hf://datasets/*: ", "missing repository"]),
        ("s3://key:secret@bucket/dumps", ["s3://bucket/dumps", "a path must not contain credentials"]),
        ("", ["no path was given"]),
    ],
)
def test_missing_paths_are_refused_with_a_remedy(tmp_path, path, words):
    (tmp_path / "dumps/empty").mkdir(parents=True)
    (tmp_path / "dumps/run_1").mkdir()
    (tmp_path / "dumps/run_1/data.jsonl").write_text("{}")
    (tmp_path / "ROWS.CSV").write_text("step\n1\n")
    (tmp_path / "notes.txt").write_text("words")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/a.txt").write_text("words")
    with pytest.raises(DataError) as caught:
        open_dump([path], on_bad="skip")
    assert caught.value.exit_code == 4
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "secret" not in str(caught.value)


def test_other_files_next_to_runs_are_ignored_with_a_warning(tmp_path):
    write(tmp_path / "a/s.parquet", wide())
    (tmp_path / "README.md").write_text("words")
    dump = open_dump(["README.md", "a"])
    assert len(dump.files) == 1
    assert dump.warnings == ["ignored, since they are not dumps: README.md"]


def test_parquet_files_without_a_suffix_are_read(tmp_path):
    write(tmp_path / "part-00000", wide())
    assert names("part-00000") == [("part-00000", "part-00000")]


def test_wrong_paths_get_hints(tmp_path):
    for path in ["d/run_1.parquet", "d/run_2.parquet", "e/x/s.parquet", "e/y/s.parquet"]:
        write(tmp_path / path, wide())
    (hint,) = open_dump(["e"]).warnings
    assert "2 of its folders contain a file s.parquet" in hint
    (hint,) = open_dump(["d", "d/run_1.parquet"]).warnings
    assert "is part of 2" in hint
    assert open_dump(["d"]).warnings == []


@pytest.mark.parametrize(
    ("files", "runs"),
    [
        (["d/step_1.parquet", "d/step_2.parquet", "d/step_10.parquet"], {"d": 3}),
        (["d/7.parquet", "d/8.parquet"], {"d": 2}),
        (
            ["d/global_step_5.parquet", "d/global_step_6.parquet", "e/global_step_5.parquet"],
            {"d": 2, "global_step_5": 1},
        ),
        (["d/seed1_step_5.parquet", "d/seed2_step_5.parquet"], {"seed1_step_5": 1, "seed2_step_5": 1}),
        (["d/seed1_step_5.parquet", "d/seed2_step_6.parquet"], {"seed1_step_5": 1, "seed2_step_6": 1}),
        (["d/run_1.parquet", "d/run_2.parquet"], {"run_1": 1, "run_2": 1}),
        (["d/moe_1.parquet", "d/moe_2.parquet"], {"moe_1": 1, "moe_2": 1}),
        ([f"d/moe_{step}.parquet" for step in range(8)], {"d": 8}),
        (["d/step_1/rank_0.parquet", "d/step_2/rank_0.parquet"], {"rank_0": 2}),
    ],
)
def test_files_that_differ_only_in_the_step_are_one_run(tmp_path, files, runs):
    for path in files:
        write(tmp_path / path, wide())
    dump = open_dump(files)
    found = Counter(file.run for file in dump.files)
    if files[0].count("/") == 2:
        assert len(found) == 2  # single files of other folders
        dump = open_dump(["d/step_1", "d/step_2"])
        assert Counter(file.run for file in dump.files) == {"d": 2}
        assert dump.warnings == ["2 folders d/step_* are read as one run (to compare the folders, use compare)"]
        return
    assert found == runs
    if len(runs) == 1:
        (pattern,) = {re.sub(r"[0-9]+", "*", path) for path in files}
        assert f"{len(files)} files {pattern} are read as one run (to compare the files, use compare)" in dump.warnings
    assert [file.path for file in open_dump(files[::-1]).files] == [file.path for file in dump.files]


def test_file_names_give_the_step_without_a_step_column(tmp_path):
    for step in [3, 12]:
        write(tmp_path / f"d/step_{step:04}.parquet", wide())
        write(tmp_path / f"e/step_{step}.parquet", wide(step=[1, 1]))
    assert [batch.columns["step"].tolist() for batch in batches(open_dump(["d"]))] == [[3, 3], [12, 12]]
    assert [batch.columns["step"].tolist() for batch in batches(open_dump(["e"]))] == [[1, 1], [1, 1]]
    assert not open_dump(["d/step_0003.parquet"]).has("step")


def test_ranks_in_step_folders_are_one_run(tmp_path):
    for step in range(1, 4):
        write(tmp_path / f"exports/step_{step}/rank_0.parquet", wide())
    assert open_dump(["exports"]).warnings == []


def test_symlink_loops_end(tmp_path):
    write(tmp_path / "a/s.parquet", wide())
    os.symlink(tmp_path / "a", tmp_path / "a/again")
    assert len(names("a")) == 1


def test_hostile_names_are_escaped(tmp_path):
    write(tmp_path / "a/\x1b[31m.parquet", wide())
    (file,) = open_dump(["a"]).files
    assert file.path == r"a/\x1b[31m.parquet"
    assert escape_unprintable("é\n\udc80") == r"é\n\udc80"


def test_natural_key_sorts_numbers():
    assert sorted(["b", "a10", "a9", "a9/x2", "a9/x10"], key=natural_key) == [
        "a9",
        "a9/x2",
        "a9/x10",
        "a10",
        "b",
    ]


def sentence(*paths, **options):
    with pytest.raises(DataError) as caught:
        open_dump(paths, **options)
    return str(caught.value)


@pytest.mark.parametrize("path", ["a/gone.parquet", "a", "a/*.parquet", "a/g*"])
def test_broken_symlinks_are_reported(tmp_path, path):
    write(tmp_path / "a/s.parquet", wide())
    os.symlink(tmp_path / "missing", tmp_path / "a/gone.parquet")
    reported = sentence(path)
    assert reported.startswith(f"a/gone.parquet: broken link to {tmp_path}/missing; repair or remove the link")
    assert ("on_bad='skip'" in reported) == (path != "a/gone.parquet")


def test_broken_symlinks_to_folders_are_reported(tmp_path):
    write(tmp_path / "a/s.parquet", wide())
    os.symlink(tmp_path / "missing", tmp_path / "a/step_2")
    os.symlink(tmp_path / "missing", tmp_path / "a/README.md")
    for path in ("a", "a/step*"):
        assert "a/step_2: broken link to" in sentence(path)
    dump = open_dump(["a"], on_bad="skip")
    assert [file.path for file in dump.files] == ["a/s.parquet"]


def test_non_utf8_paths_are_read_and_escaped(tmp_path):
    write(tmp_path / "s.parquet", wide())
    os.makedirs(b"a\xff")
    os.rename("s.parquet", b"a\xff/s\xfe.parquet")
    for path in (b"a\xff", b"a\xff/s\xfe.parquet", b"a\xff/*"):
        dump = open_dump([os.fsdecode(path)])
        assert [file.path for file in dump.files] == ["a\\udcff/s\\udcfe.parquet"]
        assert list(batches(dump))


@pytest.mark.parametrize("path", ["a", "a/s.parquet", "a/bare"])
def test_unreadable_files_are_reported(tmp_path, monkeypatch, path):
    write(tmp_path / "a/s.parquet", wide())
    write(tmp_path / "a/bare", wide())

    def refuse(location):
        raise PermissionError(errno.EACCES, f"Failed to open local file {location!r}. Detail: [errno 13]")

    monkeypatch.setattr("pyarrow.OSFile", refuse)  # a superuser may read anything
    reported = sentence(path)
    assert reported.startswith(f"a/{'bare' if path == 'a/bare' else 's.parquet'}: cannot be opened (Permission denied)")
    assert "change the permissions of the file" in reported and "Parquet" not in reported


def test_unreadable_folders_are_reported(tmp_path, monkeypatch):
    def refuse(path, **_):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr("mismatchctl.data.paths.os.stat", refuse)
    assert sentence("locked/s.parquet").startswith("locked/s.parquet: cannot be opened (Permission denied)")


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl", "json", "csv", "npz", "safetensors", "pt", "pkl"])
def test_pipes_in_folders_are_refused(tmp_path, suffix):
    (tmp_path / "dumps").mkdir()
    os.mkfifo(tmp_path / "dumps" / f"a.{suffix}")
    with pytest.raises(DataError, match="is not a regular file") as caught:
        open_dump([str(tmp_path / "dumps")])
    assert caught.value.file is not None and caught.value.file.endswith(f"dumps/a.{suffix}")


def test_pipes_next_to_dumps_can_be_skipped(tmp_path):
    write(tmp_path / "dumps" / "b.parquet", wide([2]))
    os.mkfifo(tmp_path / "dumps" / "a.parquet")
    dump = open_dump([str(tmp_path / "dumps")], on_bad="skip")
    assert [os.path.basename(path) for path in dump.problems.files] == ["a.parquet"]


@pytest.mark.parametrize(("depth", "words"), [(1500, "contains no dump|is empty"), (3000, "cannot be listed")])
def test_deeply_nested_folders_are_read(tmp_path, depth, words):
    here = os.getcwd()
    try:
        for _ in range(depth):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(here)
    with pytest.raises(DataError, match=words):
        open_dump(["d"])
    subprocess.run(["rm", "-r", "d"], check=True, cwd=here)  # shutil.rmtree recurses


def test_symlinks_to_themselves_are_not_folders(tmp_path):
    write(tmp_path / "dumps" / "b.parquet", wide([2]))
    (tmp_path / "dumps" / "loop").symlink_to("loop")
    (tmp_path / "dumps" / "up").symlink_to("..")
    with pytest.raises(DataError, match="broken link"):
        open_dump([str(tmp_path / "dumps")])
