"""Commands read framework files and their conversion alike, and `convert` joins files and reports faults."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.data.conversion import convert_dump
from mismatchctl.errors import DataError
from tests.cli.command import run
from tests.paths import FIXTURES, ROOT

DUMPS = FIXTURES / "framework_dumps"
SOURCES = [
    "peers/nemo_rl/logs",
    "peers/prime_rl/token_exports",
    "peers/trl/generation_batch_step1.pt",
    "peers/openrlhf",
    "peers/roll/batch_tensors_step1.pt",
    "peers/areal",
    "peers/skyrl",
    "peers/tinker",
    "slime_miles/slime_seed/train_data",
    "slime_miles/slime_head/train_data",
    "slime_miles/miles_head/train_data",
    "slime_miles/miles_head/train_data_cuda",
    "slime_miles/miles_head/cp2/train_data",
    "slime_miles/miles_head/policy_loss_debug",
]


def nemo(path: Path, sequences: int = 40, length: int = 30, seed: int = 1) -> Path:
    rng = np.random.default_rng(seed)
    with path.open("w") as file:
        for number in range(sequences):
            rollout = -rng.exponential(size=length)
            train = np.minimum(rollout + 0.05 * rng.normal(size=length), 0)
            row = {"input_lengths": [length], "token_loss_mask": [[0] * 2 + [1] * (length - 2)], "idx": number}
            row |= {
                "sample_loss_mask": [1.0],
                "rewards": [float(number % 2)],
                "token_ids": [[number, *[7] * (length - 1)]],
            }
            row |= {"generation_logprobs": [rollout.tolist()], "prev_logprobs": [train.tolist()]}
            file.write(json.dumps(row) + "\n")
    return path


def without_places(result: Any) -> Any:
    """Return a Result without paths, sizes, row numbers and counts per file."""
    if isinstance(result, list):
        return [without_places(one) for one in result]
    if not isinstance(result, dict):
        return result
    skipped = ("inputs", "left_out", "file", "file_index", "row")
    return {name: without_places(one) for name, one in result.items() if name not in skipped}


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_sources_and_conversions_give_the_same_result(source: str, tmp_path: Path) -> None:
    """Some train log-probs of slime's samples are positive. These rows are skipped on each side."""
    place = DUMPS / source
    out = tmp_path / f"{place.stem}.parquet"
    run("convert", place, out, code=0)
    direct, reported = (json.loads(run("analyze", one, "--json", "--on-bad", "skip").stdout) for one in (place, out))
    assert without_places(direct) == without_places(reported)
    inputs = direct["provenance"]["inputs"]
    for one in inputs:
        assert one["path"].startswith(str(place))
        assert one["size"] == Path(one["path"]).stat().st_size
    for name in ("rows", "tokens"):
        assert sum(one[name] for one in inputs) == reported["provenance"]["inputs"][0][name]
    lost = [sum(one["count"] for one in each["provenance"].get("left_out", [])) for each in (direct, reported)]
    assert lost[0] == lost[1]


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    for step in range(1, 4):
        nemo(folder / f"train_data_step{step}.jsonl", seed=step)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["analyze", "{logs}"],
        ["diagnose", "{logs}"],
        ["sweep", "{logs}", "-c", "token_tis", "--vary", "weight.truncate=1.5:3:3"],
        ["compare", "{logs}", "{logs}/train_data_step2.jsonl"],
        ["gate", "{logs}", "--baseline", "{base}"],
        ["analyze", "{logs}/train_data_step1.jsonl", "{logs}/train_data_step2.jsonl"],
    ],
    ids=lambda words: words[0],
)
def test_every_command_reads_framework_files(words: list[str], logs: Path, tmp_path: Path) -> None:
    base = tmp_path / "base.json"
    if words[0] == "gate":
        run("analyze", logs, "-o", base, "-q", code=0)
    done = run(*[word.format(logs=logs, base=base) for word in words])
    assert done.exit_code in (0, 3), done.stderr
    assert done.stdout
    assert sorted(path.name for path in logs.iterdir()) == [f"train_data_step{step}.jsonl" for step in (1, 2, 3)]


def test_errors_name_the_original_file(logs: Path) -> None:
    path = logs / "train_data_step2.jsonl"
    lines = path.read_text().splitlines()
    row = json.loads(lines[5])
    row["prev_logprobs"][0][9] = 0.7
    path.write_text("\n".join([*lines[:5], json.dumps(row), *lines[6:]]))
    done = run("analyze", logs, code=4)
    assert f"{path}, row 5, column train_log_probs: log-probs must not be above 0" in done.stderr
    path.write_text("\n".join([*lines[:5], "{"]))
    assert f"{path}, row 5: not valid JSON" in run("analyze", logs).stderr
    skipped = json.loads(run("analyze", logs, "--json", "--on-bad", "skip").stdout)
    assert [one["file"] for one in skipped["provenance"]["left_out"]] == [str(path)]
    assert len(skipped["provenance"]["inputs"]) == 2


def test_skipped_rows_of_a_source_are_reported(tmp_path: Path) -> None:
    place = tmp_path / "train_data"
    shutil.copytree(DUMPS / "slime_miles/slime_seed/train_data", place)
    shutil.copy(place / "0_0.pt", place / "0_2.pt")
    result = json.loads(run("analyze", place, "--json", "--on-bad", "skip").stdout)
    assert f"{place}: 4 sequences are in several files and are read only once" in result["warnings"]
    done = run("convert", place, tmp_path / "out.parquet")
    assert "4 sequences are in several files and are read only once" in done.stderr


def test_paths_are_shown_as_given(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(logs.parent)
    (logs / "train_data_step2.jsonl").write_text("[]")
    assert run("analyze", "logs").stderr.startswith("error: logs/train_data_step2.jsonl, row 0: ")


@pytest.mark.process
def test_no_temporary_files_remain(logs: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    words = [sys.executable, "-m", "mismatchctl", "analyze", str(logs), "-q", "--json"]
    subprocess.run(words, check=True, env=environment, cwd=ROOT, capture_output=True)
    assert [path for path in temporary.iterdir() if path.name.startswith("mismatchctl")] == []


def test_converted_files_are_optimized_for_the_reader(logs: Path, tmp_path: Path) -> None:
    nemo(logs / "train_data_step9.jsonl", sequences=600, length=4)
    convert_dump(logs, tmp_path / "out.parquet")
    metadata = pq.read_metadata(tmp_path / "out.parquet")
    assert [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)] == [40, 40, 40, 512, 88]
    columns = {metadata.row_group(0).column(leaf).path_in_schema: leaf for leaf in range(metadata.num_columns)}
    for name in ("rollout_log_probs", "train_log_probs"):
        leaf = columns[f"{name}.list.element"]
        assert "BYTE_STREAM_SPLIT" in metadata.row_group(0).column(leaf).encodings
        assert metadata.row_group(0).column(leaf).compression == "ZSTD"
        assert metadata.schema.column(leaf).max_definition_level == 1  # neither the list nor its values are nullable
    assert metadata.row_group(3).column(columns["step"]).statistics.min == 9


@pytest.mark.process
def test_rows_of_a_killed_recorder_are_converted(tmp_path: Path) -> None:
    code = f"""
import numpy as np
from mismatchctl.recorder import Recorder
rng = np.random.default_rng(1)
with Recorder({str(tmp_path / "dumps")!r}) as recorder:
    step = 0
    while True:
        rollout = [-rng.exponential(size=20) for _ in range(5)]
        train = [np.minimum(one + rng.normal(0, 0.1, 20), 0) for one in rollout]
        recorder.write(step=step, rollout_log_probs=rollout, train_log_probs=train, sequence_id=np.arange(5))
        step += 1
        print(step, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 5:
                break
        process.send_signal(signal.SIGKILL)
    out = tmp_path / "dumps.parquet"
    (tmp_path / "dumps/.step_99999.parquet.tmp").write_bytes(b"PAR1 cut off")
    run("convert", tmp_path / "dumps", out, code=0)
    rows = pq.read_table(out).to_pylist()
    recorded = [
        row for path in sorted((tmp_path / "dumps").glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]
    assert rows == recorded
    assert len(rows) >= 25
    results = [json.loads(run("analyze", one, "--json").stdout) for one in (tmp_path / "dumps", out)]
    assert without_places(results[0])["runs"]["dumps"]["overall"]["metrics"].keys()
    for name, value in results[0]["runs"]["dumps"]["overall"]["metrics"].items():
        other = results[1]["runs"]["dumps"]["overall"]["metrics"][name]
        assert value["value"] == pytest.approx(other["value"], rel=1e-9, abs=1e-12)


def test_parquet_keeps_all_columns_under_schema_names(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "step=3"
    folder.mkdir(parents=True)
    nullable = pa.list_(pa.float64())
    table = pa.table(
        {
            "rollout_log_probs": pa.array([[-1.0, -2.0], [-3.0]], nullable),
            "old_log_probs": pa.array([[-1.5, -2.5], [-3.5]], nullable),
            "sequence_id": ["a", "b"],
            "environment": ["math", None],
        }
    )
    pq.write_table(table, folder / "part.parquet")
    run("convert", tmp_path / "run", tmp_path / "out.parquet", code=0)
    written = pq.read_table(tmp_path / "out.parquet", partitioning=None)
    assert written.to_pylist() == [
        {"rollout_log_probs": [-1.0, -2.0], "train_log_probs": [-1.5, -2.5], "sequence_id": "a", "environment": "math"}
        | {"step": 3},
        {"rollout_log_probs": [-3.0], "train_log_probs": [-3.5], "sequence_id": "b", "environment": None, "step": 3},
    ]
    assert not written.schema.field("train_log_probs").type.value_field.nullable


def rollout_only(path: Path) -> Path:
    """Write framework files with sequence ids and rollout log-probs only."""
    shutil.copytree(DUMPS / "slime_miles/slime_head/train_data", path)
    return path


def test_columns_are_joined_by_id(tmp_path: Path) -> None:
    source = rollout_only(tmp_path / "train_data")
    names = [str(number) for number in range(8)]
    table = pa.table({"sequence_id": names[::-1], "prompt_id": [f"p{name}" for name in names[::-1]]})
    pq.write_table(table, tmp_path / "prompts.parquet")
    done = run("convert", source, tmp_path / "out.parquet", "--join", tmp_path / "prompts.parquet", code=0)
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["prompt_id"] for row in rows] == [f"p{row['sequence_id']}" for row in rows]
    pq.write_table(table.slice(0, 7), tmp_path / "few.parquet")
    done = run("convert", source, tmp_path / "out2.parquet", "--join", tmp_path / "few.parquet", code=4)
    assert "sequence_id 0 is not in" in done.stderr
    pq.write_table(pa.concat_tables([table, table]), tmp_path / "twice.parquet")
    done = run("convert", source, tmp_path / "out2.parquet", "--join", tmp_path / "twice.parquet", code=4)
    assert "rows 0 and 8 have the same identifier, " in done.stderr
    assert "; remove duplicate rows. The rows of the two files are matched by sequence_id" in done.stderr
    assert not (tmp_path / "out2.parquet").exists()


def test_columns_are_joined_to_rows_without_a_step(tmp_path: Path) -> None:
    keys = {"sequence_id": ["a", "b"], "step": pa.array([None, None], pa.int64())}
    sides = {side: [[-1.0, -2.0]] * 2 for side in ("rollout_log_probs", "train_log_probs")}
    pq.write_table(pa.table({**keys, **sides}), tmp_path / "dump.parquet")
    pq.write_table(pa.table({**keys, "prompt_id": ["p", "q"]}), tmp_path / "more.parquet")
    out = tmp_path / "out.parquet"
    run("convert", tmp_path / "dump.parquet", out, "--join", tmp_path / "more.parquet", code=0)
    assert pq.read_table(out)["prompt_id"].to_pylist() == ["p", "q"]


@pytest.mark.parametrize(
    ("column", "values", "says"),
    [
        ("token_ids", [b"\xff\xfe", b"\x01"], "has no list for sequence a, which has 2 tokens"),
        ("prompt_token_ids", [[1, None], [2]], "has nulls for sequence a"),
        ("prompt_token_ids", [b"\xff\xfe", None], "has no list for sequence a"),
    ],
)
def test_joined_lists_contain_numbers(column: str, values: list[Any], says: str, tmp_path: Path) -> None:
    sides = {side: [[-1.0, -2.0], [-1.0]] for side in ("rollout_log_probs", "train_log_probs")}
    pq.write_table(pa.table({"sequence_id": ["a", "b"], **sides}), tmp_path / "dump.parquet")
    pq.write_table(pa.table({"sequence_id": ["a", "b"], column: values}), tmp_path / "more.parquet")
    with pytest.raises(DataError, match=says):
        convert_dump(tmp_path / "dump.parquet", tmp_path / "out.parquet", join=tmp_path / "more.parquet")


def test_empty_lists_without_a_type_are_converted(tmp_path: Path) -> None:
    lists = [[-1.0], [-2.0]]
    pq.write_table(
        pa.table({"rollout_log_probs": lists, "train_log_probs": lists, "token_ids": [[], []]}), tmp_path / "a.parquet"
    )
    pq.write_table(pa.table({"rollout_log_probs": [[]], "train_log_probs": [[]]}), tmp_path / "b.parquet")
    for name in ("a", "b"):
        convert_dump(tmp_path / f"{name}.parquet", tmp_path / "out.parquet")
        converted, given = (pq.read_table(tmp_path / f"{file}.parquet").to_pylist() for file in ("out", name))
        assert converted == given


def test_rollouts_need_joined_train_log_probs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from mismatchctl.data.importers.rows import all_layouts

    layout = all_layouts()["slime"]
    columns = {name: one for name, one in layout.columns.items() if name != "train_log_probs"}
    monkeypatch.setitem(all_layouts(), "slime", replace(layout, columns=columns))
    source = rollout_only(tmp_path / "train_data")
    done = run("convert", source, tmp_path / "out.parquet", "--from", "slime", code=4)
    assert "files of slime lack train log-probs, so no comparison is possible" in done.stderr
    assert "--join train.parquet" in done.stderr
    monkeypatch.undo()
    convert_dump(source, tmp_path / "whole.parquet")
    whole = pq.read_table(tmp_path / "whole.parquet")
    pq.write_table(whole.select(["step", "sequence_id", "train_log_probs"]), tmp_path / "train.parquet")
    monkeypatch.setitem(all_layouts(), "slime", replace(layout, columns=columns))
    done = run("convert", source, tmp_path / "out.parquet", "--join", tmp_path / "train.parquet", code=0)
    joined = pq.read_table(tmp_path / "out.parquet")
    assert (
        joined.select(sorted(joined.column_names)).to_pylist() == whole.select(sorted(whole.column_names)).to_pylist()
    )


def test_files_of_two_frameworks_are_not_mixed(logs: Path) -> None:
    shutil.copy(DUMPS / "peers/prime_rl/token_exports/step_1/rank_0.jsonl", logs / "rank_0.jsonl")
    for words in (["analyze", logs], ["convert", logs, logs.parent / "out.parquet"]):
        done = run(*words, code=4)
        assert "is a file of nemo-rl, but" in done.stderr and "is a file of prime-rl" in done.stderr
    run("convert", logs, logs.parent / "out.parquet", "--from", "nemo-rl", code=0)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["convert", "{logs}", "{out}", "--from", "nemo"], 2, "did you mean 'nemo-rl'?"),
        (["convert", "{logs}", "{out}.csv"], 2, "convert writes Parquet; choose a file name that ends in .parquet"),
        (["convert", "{empty}", "{out}"], 4, "empty"),
        (["convert", "{logs}x", "{out}"], 4, "similar names"),
        (["convert", "{strange}", "{out}"], 4, "Parquet"),
        (["convert", "{torch}", "{out}"], 4, "missing required column rollout_log_probs"),
        (
            ["convert", "{logs}", "{out}", "--join", "{empty}"],
            4,
            "--join needs a Parquet file or a framework's file",
        ),
    ],
)
def test_mistakes_give_one_sentence(words: list[str], code: int, says: str, logs: Path, tmp_path: Path) -> None:
    import torch

    places = {"logs": str(logs), "out": str(tmp_path / "out.parquet"), "empty": str(tmp_path / "empty")}
    places |= {"strange": str(tmp_path / "notes.txt"), "torch": str(tmp_path / "model.pt")}
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    torch.save({"weights": torch.zeros(3)}, tmp_path / "model.pt")
    done = run(*[word.format(**places) for word in words], code=code)
    assert says in done.stderr
    assert not (tmp_path / "out.parquet").exists()


def test_json_and_quiet_outputs(logs: Path, tmp_path: Path) -> None:
    done = run("convert", logs, tmp_path / "a.parquet", "--json")
    expected = {"out": str(tmp_path / "a.parquet"), "rows": 120, "tokens": 120 * 28, "missing": 0}
    expected |= {"copies": 0, "passed_over": []}
    assert json.loads(done.stdout) == expected
    done = run("convert", logs, tmp_path / "b.parquet", "--quiet")
    assert (done.stdout, done.stderr) == ("", "")
    (tmp_path / "b.parquet").write_bytes(b"somebody's")
    run("convert", logs, tmp_path / "b.parquet", code=2)


def test_progress_counts_bytes_up_to_the_total(logs: Path, tmp_path: Path) -> None:
    reported: list[tuple[int, int]] = []
    convert_dump(logs, tmp_path / "out.parquet", progress=lambda done, total: reported.append((done, total)))
    total = sum(path.stat().st_size for path in logs.iterdir())
    assert reported[-1] == (total, total)
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)


MEASURE = """
import re, sys
from pathlib import Path
from mismatchctl.data.conversion import convert_dump
convert_dump(Path(sys.argv[1]), Path(sys.argv[2]))
print(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_conversion_memory_is_bounded(tmp_path: Path) -> None:
    """Four times as many lines need hardly more memory."""
    peaks = []
    line = nemo(tmp_path / "train_data_step0.jsonl", sequences=1, length=300).read_text()
    for step, lines in ((1, 700), (2, 2800)):
        source = tmp_path / f"train_data_step{step}.jsonl"
        source.write_text(line * lines)
        words = [sys.executable, "-c", MEASURE, str(source), str(tmp_path / f"{step}.parquet")]
        done = subprocess.run(words, check=True, capture_output=True, text=True, cwd=ROOT)
        peaks.append(int(done.stdout))
    assert peaks[1] < 1.25 * peaks[0]
