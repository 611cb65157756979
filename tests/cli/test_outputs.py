"""Output files, stdout and stderr of commands, and lists of presets, metrics and rules."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from mismatchctl.cli.output import escape_text
from mismatchctl.corrections.presets import read_corrections
from mismatchctl.frameworks.registry import load_presets
from tests.cli.command import run
from tests.factories.dumps import write_dump


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    return write_dump(tmp_path / "healthy")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--html", "-"], "cannot be written to stdout"),
        (["--sequences", "-"], "cannot be written to stdout"),
        (["-o", "/dev/null"], "regular file"),
        (["-o", "healthy"], "folder"),
        (["-o", "mine.txt"], "--force"),
        (["-o", "both", "--html", "./both"], "two options write to this file"),
        (["--sequences", "absent/s.parquet"], "absent"),
    ],
)
def test_output_paths_are_checked_first(words: list[str], says: str, dump: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    before = sorted(tmp_path.rglob("*"))
    done = run("analyze", "no-such-dump", *words, code=2)
    assert says in done.stderr
    assert "no-such-dump" not in done.stderr
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_results_replace_results_but_not_dumps(dump: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    run("analyze", dump, "-o", out, "-c", "none", code=0)
    first = out.read_bytes()
    run("analyze", dump, "-o", out, "-c", "token_tis", code=0)
    assert out.read_bytes() != first
    file = next(dump.iterdir())
    held = file.read_bytes()
    run("analyze", dump, "-o", file, code=2)
    assert file.read_bytes() == held


@pytest.mark.parametrize(
    ("words", "holds"),
    [(["gate", "--rule", "k3:max=9", "--on-undecided", "pass"], "k3:max=9"), (["diagnose"], "strongest first")],
)
def test_verdicts_and_findings_write_pages(words: list[str], holds: str, dump: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for _ in range(2):  # the command may replace its own page
        run(*words, dump, "--html", page, "-q", code=0)
    text = page.read_text("utf-8")
    assert text.lower().startswith("<!doctype html>") and holds in text
    page.write_text("mine")
    run(*words, dump, "--html", page, "-q", code=2)


def test_messages_go_to_stderr(dump: Path, tmp_path: Path) -> None:
    done = run("analyze", dump, "-c", "none", "-o", tmp_path / "r.json", "--html", tmp_path / "r.html")
    assert done.stderr.count("wrote ") == 2
    assert "wrote" not in done.stdout


def test_json_output_warns_about_skipped_rows_on_stderr(tmp_path: Path) -> None:
    folder = write_dump(tmp_path / "bad", bad=float("nan"))
    done = run("analyze", folder, "--on-bad", "skip", "--json")
    assert "warning: left out of" in done.stderr
    json.loads(done.stdout)
    assert run("analyze", folder, "--on-bad", "skip", "--json", "-q").stderr == ""


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["-c", "./mis"], ".yaml"),
        (["-c", "{1: 2}"], "unknown key '1'"),
        (["-c", "tokn_tis"], "mismatchctl presets"),
        (["--column", "reward=a", "--column", "reward=b"], "already"),
    ],
)
def test_wrong_rules_are_refused(flags: list[str], says: str, dump: Path) -> None:
    done = run("analyze", dump, *flags, code=2)
    assert says in done.stderr


def test_unnamed_mappings_get_different_names(dump: Path) -> None:
    done = run("analyze", dump, "--json", "-c", "{weight: {truncate: 2}}", "-c", "{weight: {truncate: 3}}")
    assert [c["name"] for c in json.loads(done.stdout)["corrections"]] == ["inline", "inline-2"]


@pytest.mark.process
def test_the_installed_command_names_bad_values(dump: Path) -> None:
    """A separate process is needed, because pyarrow looks for pandas only at its first conversion."""
    odd = dump.parent / "odd.parquet"
    columns = {"sequence_id": ["a"], "rollout_log_probs": [[-1.0]], "train_log_probs": [[0.25]]}
    pq.write_table(pa.table(columns | {"step": [0]}), odd)
    command = [sys.executable, "-c", "from mismatchctl.cli.main import main; main()", "analyze", str(odd)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (4, "")
    assert "row 0, column train_log_probs: log-probs must not be above 0, found 0.25" in done.stderr


@pytest.mark.process
@pytest.mark.parametrize("run_name", ["dense", "moe"])
def test_analyze_does_not_import_pandas(run_name: str) -> None:
    """pyarrow imports an installed pandas at its first conversion, unless the command prevents it."""
    pytest.importorskip("pandas")
    dump = str(Path(__file__).parents[2] / "sample_data" / run_name)
    command = [sys.executable, "-X", "importtime", "-m", "mismatchctl", "analyze", dump, "-v"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout and "pyarrow.lib\n" in done.stderr and "pandas.core" not in done.stderr


@pytest.mark.process
def test_a_process_reads_rows_of_one_token(tmp_path: Path) -> None:
    """pyarrow looks for pandas if it converts arrays of numpy, as for rows of one token."""
    file = tmp_path / "long.csv"
    file.write_text("sequence_id,position,rollout_log_probs,train_log_probs\na,0,-1.0,-1.5\na,1,-0.5,-0.25\n")
    command = [sys.executable, "-m", "mismatchctl", "analyze", str(file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["runs"]["long"]["overall"]["metrics"]["tokens"]["value"] == 2


def test_check_groups_similar_files_of_several_paths(dump: Path, tmp_path: Path) -> None:
    bad = write_dump(tmp_path / "bad", bad=float("nan"))
    (bad / "broken.parquet").write_bytes(b"PAR1")
    done = run("schema", "--check", dump, bad, "-v", code=4)
    assert "fine  " in done.stdout and "and 2 similar files" in done.stdout
    assert "2 of 7 files" in done.stdout.splitlines()[0]
    assert "NaN" in done.stdout
    assert run("schema", "--check", dump, bad, "-q").output == ""
    data = json.loads(run("schema", "--check", dump, bad, "--json").stdout)
    assert [file["sound"] for file in data].count(False) == 2
    run("schema", "--check", code=2)


def test_reference_lists_are_available_as_json() -> None:
    assert {column["name"] for column in json.loads(run("schema", "--json").stdout)} >= {"train_log_probs", "step"}
    assert "k3" in {metric["key"] for metric in json.loads(run("metrics", "--json").stdout)}
    listed = json.loads(run("presets", "list", "--json").stdout)
    assert [preset["name"] for preset in listed] == list(load_presets())
    assert "mismatchctl presets list --json" in run("presets", "--json", "list", code=2).stderr
    assert "show prints YAML" in run("presets", "--json", "show", "geo_rs", code=2).stderr


def test_gate_metrics_are_found_under_any_number() -> None:
    run("metrics", "gate3_tokens_low", code=0)
    assert "0.0001" not in run("metrics", "gate3_tokens_low").stdout


@pytest.mark.parametrize("name", load_presets())
def test_shown_presets_are_read_back(name: str, tmp_path: Path) -> None:
    text = run("presets", "show", name).stdout
    assert yaml.safe_load(text)["name"] == name
    (tmp_path / "shown.yaml").write_text(text)
    assert read_corrections(tmp_path / "shown.yaml") == [load_presets()[name].correction]


@pytest.mark.parametrize("words", ["", "analyze", "report", "schema", "presets", "presets show", "metrics"])
def test_every_command_has_help(words: str) -> None:
    short, long = (run(*words.split(), flag) for flag in ("-h", "--help"))
    assert (short.exit_code, short.stdout) == (0, long.stdout)
    assert "Usage" in short.stdout
    assert "env var" not in short.stdout


@pytest.mark.process
def test_a_closed_pipe_does_not_exit_with_one(dump: Path) -> None:
    script = f"set -o pipefail; {sys.executable} -m mismatchctl metrics | head -n 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) in ((141, ""), (0, ""))


def test_the_columns_variable_sets_the_width(dump: Path) -> None:
    *lines, last = run("analyze", dump, COLUMNS="80").stdout.splitlines()
    assert max(map(len, lines)) <= 80 and last.startswith("Next: ")
    assert max(map(len, run("analyze", dump, COLUMNS="nonsense").stdout.splitlines())) <= 140


def test_invisible_characters_are_escaped() -> None:
    assert escape_text("a\x1b[31m\u202eb\n\udcff") == "a\\x1b[31m\\u202eb\\n\\udcff"
