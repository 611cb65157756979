"""Dumps in common formats give the same result as Parquet, and other files give an error."""

import json
import pickle
import re
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

import mismatchctl as mm
from mismatchctl.data.importers.tables import READERS, read_table
from mismatchctl.data.reader import open_dump
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.frameworks.registry import column_aliases
from tests.cli.command import run
from tests.factories.dump_files import batches
from tests.factories.format_files import FORMATS, make_rows, write_truth
from tests.paths import ROOT

VERBS = {
    "analyze": ["analyze", "{dump}", "--json"],
    "diagnose": ["diagnose", "{dump}", "--json"],
    "sweep": ["sweep", "{dump}", "-c", "token_tis", "--vary", "weight.truncate=1.5:3:3", "--json"],
    "gate": ["gate", "{dump}", "--rule", "k3:max=0.5", "--json"],
}


def opened(path: Path, **options: Any) -> list[Any]:
    return list(batches(open_dump([str(path)], aliases=column_aliases(), **options)))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_equals_parquet(name: str, tmp_path: Path) -> None:
    rows = make_rows()
    FORMATS[name](tmp_path / name, rows)
    expected, found = opened(write_truth(tmp_path / "truth.parquet", rows)), opened(tmp_path / name)
    for attribute in ("rollout", "train"):
        values = [np.concatenate([getattr(batch, attribute) for batch in part]) for part in (expected, found)]
        assert np.array_equal(*values)
    if name != "inner.pt":  # one step for all rows
        steps = [np.concatenate([batch.columns["step"] for batch in part]) for part in (expected, found)]
        assert np.array_equal(*steps)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_command_reads_every_format(name: str, verb: str, tmp_path: Path) -> None:
    FORMATS[name](tmp_path / name, make_rows(sequences=36))
    done = run(*[word.format(dump=tmp_path / name) for word in VERBS[verb]], code=0)
    assert json.loads(done.stdout)


def test_folders_of_step_files_are_one_run(tmp_path: Path) -> None:
    for step in (2, 10):
        rows = [{name: value for name, value in row.items() if name != "step"} for row in make_rows(step)]
        FORMATS["wide.jsonl"](tmp_path / f"step_{step}.jsonl", rows)
    (tmp_path / "config.json").write_text("{}")
    found = json.loads(run("analyze", tmp_path, "--json", code=0).stdout)
    (run_result,) = found["runs"].values()
    assert run_result["groups"]["labels"] == [2, 10]
    found = json.loads(run("analyze", tmp_path / "step_2.jsonl", tmp_path / "step_10.jsonl", "--json", code=0).stdout)
    assert len(found["runs"]) == 1


@pytest.mark.parametrize("name", ["rows.json", "wide.jsonl"])
def test_the_column_option_accepts_a_name_that_is_replaced_while_reading(name: str, tmp_path: Path) -> None:
    rows = [{"rollout_log_probs": [-1.0], "train_log_probs": [-1.5], "responses": [number]} for number in range(4)]
    FORMATS[name](tmp_path / name, rows)
    options = ("analyze", tmp_path / name, "--json", "--column")
    named, default = run(*options, "token_ids=responses"), run(*options[:-1])
    assert named.exit_code == 0 and json.loads(named.stdout)["runs"] == json.loads(default.stdout)["runs"]
    assert "no file has a column other" in run(*options, "token_ids=other").stderr


def test_the_column_option_renames_columns(tmp_path: Path) -> None:
    rows = [{"mine": row["rollout_log_probs"], "other": row["train_log_probs"]} for row in make_rows()]
    FORMATS["wide.jsonl"](tmp_path / "a.jsonl", rows)
    names = ["--column", "rollout_log_probs=mine", "--column", "train_log_probs=other"]
    run("analyze", tmp_path / "a.jsonl", *names, "--json", code=0)
    failed = run("analyze", tmp_path / "a.jsonl", code=4)
    assert "missing required column rollout_log_probs" in failed.stderr
    assert "the columns of the file are mine, other" in failed.stderr


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.npz", "a.pt"])
def test_an_error_lists_the_columns_as_they_are_in_the_file(name: str, tmp_path: Path) -> None:
    ids = [[1, 2], [3, 4]]
    rows = [{"prompt": "a", "responses": row, "lp": [-1.0, -2.0]} for row in ids]
    write = {
        "a.jsonl": lambda path: path.write_text("".join(f"{json.dumps(row)}\n" for row in rows)),
        "a.json": lambda path: path.write_text(json.dumps(rows)),
        "a.csv": lambda path: path.write_text('prompt,responses,lp\na,"[1, 2]","[-1.0, -2.0]"\n'),
        "a.npz": lambda path: np.savez(path, prompt=np.array(ids), responses=np.array(ids), lp=-np.ones((2, 2))),
        "a.pt": lambda path: torch.save(rows, path),
    }
    write[name](tmp_path / name)
    for words in ((), ("--column", "train_log_probs=other")):
        done = run("analyze", tmp_path / name, *words, code=4)
        assert done.stderr.strip().endswith("; the columns of the file are prompt, responses, lp")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("a.jsonl", r"part 0 of .*; raise the limit to \d+MB, or split the file"),
        ("a.parquet", r"row group 0 of .*; raise the limit to \d+MB, or write smaller row groups"),
        ("a.arrow", r"record batch 0 of .*; raise the limit to \d+MB, or write smaller record batches"),
    ],
)
def test_the_remedy_for_memory_fits_the_format(name: str, remedy: str, tmp_path: Path) -> None:
    path = tmp_path / name
    lists = [[-1.0] * 100_000]
    table = pa.table({"rollout_log_probs": lists, "train_log_probs": lists})
    if name == "a.parquet":
        pq.write_table(table, path)
    elif name == "a.arrow":
        feather.write_feather(table, path)
    else:
        path.write_text(json.dumps(table.to_pylist()[0]) + "\n")
    done = run("analyze", path, "--memory-limit", "451MB", code=2)
    assert re.search(rf"is too little to read {remedy}$", done.stderr.strip())


def test_nan_is_read_from_json_and_csv(tmp_path: Path) -> None:
    """Python's json module writes NaN. A valid token with NaN is bad data."""
    text = json.dumps({"rollout_log_probs": [-1.0, float("nan")], "train_log_probs": [-1.0, -2.0]})
    (tmp_path / "a.jsonl").write_text(text + "\n" + text)
    (tmp_path / "a.csv").write_text('rollout_log_probs,train_log_probs\n"[-1.0, NaN]","[-1.0, -2.0]"\n')
    for name in ("a.jsonl", "a.csv"):
        with pytest.raises(DataError, match=r"NaN in valid tokens|expected a finite number, found NaN"):
            opened(tmp_path / name)


def test_bad_rows_of_arrow_files_of_polars_are_left_out(tmp_path: Path) -> None:
    """Polars writes strings as views, whose values pyarrow cannot select."""
    good, bad = [-1.0, -2.0], [-1.0, float("nan")]
    names = ["a", "b" * 2000, None, "d", "d"]
    columns = {"rollout_log_probs": [good, good, bad, good, good], "train_log_probs": [good] * 5, "prompt_id": names}
    pl.DataFrame(columns).write_ipc(tmp_path / "a.arrow")
    (found,) = opened(tmp_path / "a.arrow", on_bad="skip", wanted=["prompt_id"])
    assert [str(name)[:1] for name in found.columns["prompt_id"]] == ["a", "b", "d", "d"]
    with pytest.raises(DataError, match="row 2"):
        opened(tmp_path / "a.arrow", wanted=["prompt_id"])


def test_prompts_without_ids_are_identified_by_tokens(tmp_path: Path) -> None:
    rows = [
        {**{name: value for name, value in row.items() if name != "prompt_id"}, "prompt_token_ids": [1, number // 4]}
        for number, row in enumerate(make_rows())
    ]
    FORMATS["wide.jsonl"](tmp_path / "a.jsonl", rows)
    ids = read_table(tmp_path / "a.jsonl")["prompt_id"].to_pylist()
    assert len(set(ids)) == 3
    assert ids[0] == ids[3] != ids[4]


LARGE_IDS = ([2**64, 2**64 + 1], [1, 2**64 + 1], [-1, 2**63], [2**128 - 1, 7], [10**50, 10**50 + 1])


@pytest.mark.parametrize("ids", LARGE_IDS)
def test_large_ids_in_memory_are_kept_or_refused_in_one_sentence(ids: list[int]) -> None:
    lists = [[-1.0, -2.0]] * 2
    columns = {"rollout_log_probs": lists, "train_log_probs": lists, "prompt_id": ids}
    tables = [columns, columns | {"prompt_id": np.array(ids, object)}]
    for kind, end in ((pl.Int128, 2**100), (pl.UInt128, 2**128)) if min(ids) > 0 else ():
        tables += [pl.DataFrame(columns | {"prompt_id": pl.Series(ids, dtype=kind)})] if max(ids) < end else []
    for table in tables:
        assert mm.analyze(table).prompts.value == 2
    if max(ids) >= 2**64:
        with pytest.raises(ConfigError, match="prompt_id contains integers above 64 bits; store ids as text"):
            mm.analyze(pd.DataFrame(columns | {"prompt_id": pd.Series(ids, dtype=object)}))


@pytest.mark.parametrize("ids", [["a", 10], [7, "b"], ["a", 10**30]])
def test_ids_that_mix_text_and_integers_become_text(ids: list[object], tmp_path: Path) -> None:
    rows = [{"rollout_log_probs": [-1.0], "train_log_probs": [-1.5], "prompt_id": one} for one in ids]
    for name in ("rows.json", "wide.jsonl"):
        FORMATS[name](tmp_path / name, rows)
        assert read_table(tmp_path / name)["prompt_id"].to_pylist() == [*map(str, ids)]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    assert mm.analyze(columns).prompts.value == 2
    with pytest.raises(ConfigError, match="column prompt_id"):
        mm.analyze(pd.DataFrame(columns))


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("wide.jsonl", [2**63 + 5, 2**63 + 6]),
        ("wide.jsonl", [2**65, -1]),
        ("wide.csv", [2**63 + 5, 2**63 + 6]),
        ("rows.json", [2**63 + 5, 2**63 + 6]),
        *((name, ids) for name in ("wide.jsonl", "wide.csv", "rows.json") for ids in LARGE_IDS),
    ],
)
def test_ids_above_int64_are_kept(name: str, ids: list[int], tmp_path: Path) -> None:
    rows = make_rows()
    for number, row in enumerate(rows):
        row["prompt_id"] = ids[number % 2]
    FORMATS[name](tmp_path / name, rows)
    found = np.concatenate([batch.columns["prompt_id"] for batch in opened(tmp_path / name)])
    assert list(map(str, found)) == [str(row["prompt_id"]) for row in rows]


def test_safetensors_of_every_type_keep_their_values(tmp_path: Path) -> None:
    exact = [[-0.5, -1.25], [-2.0, -0.0078125]]  # exact in bfloat16
    for kind in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        columns = {"rollout_log_probs": torch.tensor(exact, dtype=kind), "train_log_probs": torch.tensor(exact)}
        save_file(columns | {"response_mask": torch.ones(2, 2, dtype=torch.bool)}, tmp_path / "a.safetensors")
        table = read_table(tmp_path / "a.safetensors")
        assert table["rollout_log_probs"].to_pylist() == table["train_log_probs"].to_pylist() == exact
        assert table["response_mask"].to_pylist() == [[True, True]] * 2
    narrow = torch.tensor(exact).to(torch.float8_e4m3fn)
    save_file({"rollout_log_probs": narrow, "train_log_probs": torch.tensor(exact)}, tmp_path / "a.safetensors")
    with pytest.raises(DataError, match="a tensor has the type F8_E4M3, expected one of F64"):
        read_table(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b"", "this file is empty"),
        ("a.jsonl", b'{"rollout_log_probs": [1', "not valid JSON"),
        ("a.jsonl", b"[1, 2]\n", "the line is not a JSON object"),
        ("a.jsonl", b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        ("a.json", b"[" * 100_000, "nested too deeply"),
        ("a.json", b'"text"', "contains a str instead of a table of columns"),
        ("a.json", b"\xff\xfe", "not UTF-8"),
        ("a.csv", b"\x00\x01\x02", "contains no log-probs"),
        (
            "a.csv",
            b'rollout_log_probs,train_log_probs\n"[-1","[-1]"\n',
            "row 0, column rollout_log_probs: not valid JSON",
        ),
        ("a.npz", b"PK\x03\x04", "is not a complete NPZ file"),
        ("a.safetensors", b"\xff" * 40, "is not a complete safetensors file"),
        ("a.pt", b"PK\x03\x04", "cannot be read"),
        ("a.pkl", b"\x80\x04", "cannot be read"),
        (
            "1.jsonl",
            b'{"input": "a", "output": "b", "score": 1.0, "step": 1}\n',
            "files of verl-rollout-data lack log-probs",
        ),
        ("a.jsonl", b'{"text": "a", "n": 1}\n', "this file contains no log-probs. The columns are text, n"),
    ],
)
def test_other_files_give_one_sentence(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        opened(tmp_path / name)
    assert words in str(caught.value)
    assert caught.value.remedy


class Attack:
    def __reduce__(self) -> Any:
        return print, ("ran",)


def test_files_are_never_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"rollout_log_probs": Attack()}))
    torch.save({"rollout_log_probs": Attack()}, tmp_path / "a.pt")
    np.savez(tmp_path / "a.npz", rollout_log_probs=np.array([Attack()], object))
    for name in ("a.pkl", "a.pt", "a.npz"):
        with pytest.raises(DataError):
            read_table(tmp_path / name)
    assert "ran" not in capsys.readouterr().out


def test_many_short_rows_take_little_memory(tmp_path: Path) -> None:
    sides = np.full((200_000, 1), -1.0, np.float32)
    np.savez_compressed(tmp_path / "a.npz", rollout_log_probs=sides, train_log_probs=sides)
    read_table(tmp_path / "a.npz")  # import what reading needs
    tracemalloc.start()
    assert read_table(tmp_path / "a.npz").num_rows == len(sides)
    assert tracemalloc.get_traced_memory()[1] < 12 * sides.nbytes
    tracemalloc.stop()


def test_growing_archives_are_refused(tmp_path: Path) -> None:
    header = b"\x93NUMPY\x01\x00"
    text = b"{'descr': '<f8', 'fortran_order': False, 'shape': (100000000000,), }".ljust(117) + b"\n"
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("rollout_log_probs.npy", header + len(text).to_bytes(2, "little") + text)
    with pytest.raises(DataError, match="an array is longer than its file"):
        read_table(tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "b.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rollout_log_probs.npy", b"\0" * (1 << 29))
    with pytest.raises(DataError, match="which is more than a dump needs"):
        read_table(tmp_path / "b.npz")


def test_every_suffix_is_documented() -> None:
    page = (ROOT / "docs/guides/files.md").read_text()
    assert all(f"`{suffix}`" in page for suffix in READERS)
