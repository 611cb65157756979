"""Exit codes, stdout and stderr of commands, and complete output files."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from mismatchctl.api.analyze import analyze as analyze_module
from mismatchctl.cli.options import OutputOptions
from mismatchctl.recorder.recorder import Recorder
from tests.cli.command import run
from tests.factories.dumps import write_dump


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    return write_dump(tmp_path / "healthy")


def test_analyze_without_options_answers(dump: Path) -> None:
    done = run("analyze", dump, code=0)
    assert done.stdout.splitlines()[0].startswith("CHECK  healthy: ")
    for name in ("token_tis", "seq_mis", "geo_rs", "miles-moe-2"):
        assert name in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["analyze", "{dump}", "-c", "geo_sr"], 2, "geo_rs"),
        (["analyze", "{dump}", "-c", "{{weight: {{levl: token}}}}"], 2, "level"),
        (["analyze", "{dump}", "-c", "{{weight: [}}"], 2, "YAML"),
        (["analyze", "{dump}", "-c", "absent.yaml"], 2, "absent.yaml"),
        (["analyze", "{dump}", "-c", "none", "-c", "none"], 2, "none"),
        (["analyze", "{dump}", "--by", "wroker"], 2, "worker"),
        (["analyze", "{dump}", "--column", "train_log_probs"], 2, "COLUMN=NAME"),
        (["analyze", "{dump}", "--column", "train_log_probs=absent"], 4, "absent"),
        (["analyze", "{dump}", "--html", "absent/report.html"], 2, "absent"),
        (["analyze", "{dump}", "-o", "absent/result.json"], 2, "absent"),
        (["analyze", "{dump}", "--json", "-o", "-"], 2, "stdout"),
        (["analyze", "{dump}", "-c", "pure_is"], 4, "current_log_probs"),
        (["analyze", "absent"], 4, "absent"),
        (["analyze", "{empty}"], 4, "empty"),
        (["report", "absent.json"], 4, "absent.json"),
        (["schema", "--check", "{empty}"], 4, "empty"),
        (["presets", "show", "token_ti"], 2, "token_tis"),
    ],
)
def test_errors_have_their_exit_codes(
    words: list[str], code: int, says: str, dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    done = run(*(word.format(dump=dump, empty=empty) for word in words), code=code)
    assert says in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.output
    assert sorted(tmp_path.rglob("*")) == before


def test_remedies_name_options_of_the_command(tmp_path: Path) -> None:
    """`gate` does not have the option `--on-bad`, so its error must not mention it."""
    folder = write_dump(tmp_path / "bad", bad=float("nan"))
    for verb, reported in (("analyze", " with --on-bad skip"), ("gate", " with `mismatchctl analyze --on-bad skip`")):
        error = run(verb, folder, code=4).stderr
        assert error.endswith(f"{reported}\n") and error.count(reported.replace("skip", "mask")) == 1
    pl.DataFrame({"old": [[-1.0]], "train_log_probs": [[-1.0]]}).write_parquet(tmp_path / "d.parquet")
    reported = "missing required column rollout_log_probs; rename the right column to rollout_log_probs; "
    assert reported in run("convert", tmp_path / "d.parquet", tmp_path / "out.parquet", code=4).stderr


def test_bad_data_gives_one_sentence_and_no_output(tmp_path: Path) -> None:
    folder = write_dump(tmp_path / "bad", bad=float("nan"))
    outputs = [tmp_path / name for name in ("result.json", "report.html", "sequences.parquet")]
    words = ["-o", outputs[0], "--html", outputs[1], "--sequences", outputs[2]]
    done = run("analyze", folder, *words, code=4)
    assert len(done.stderr.splitlines()) == 1
    for part in ("step_00001.parquet", "row 2", "train_log_probs", "--on-bad skip"):
        assert part in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad"]


def test_on_bad_skip_counts_skipped_rows(tmp_path: Path) -> None:
    folder = write_dump(tmp_path / "bad", bad=float("inf"))
    page, result = tmp_path / "report.html", tmp_path / "result.json"
    done = run("analyze", folder, "--on-bad", "skip", "-o", result, "--html", page, code=0)
    assert "left out" in done.stdout
    (left_out,) = json.loads(result.read_text())["provenance"]["left_out"]
    assert left_out["count"] == 1
    assert left_out["file"].endswith("step_00001.parquet")
    assert left_out["reason"] in page.read_text()
    assert json.loads(result.read_text())["runs"]["bad"]["overall"]["metrics"]["sequences"]["value"] == 23


def test_json_output_contains_only_the_result(dump: Path, tmp_path: Path) -> None:
    done = run("analyze", dump, "--json", "-c", "token_tis")
    printed = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(name))
    assert set(printed["runs"]["healthy"]["overall"]["metrics"]["k3"]) == {"value", "se", "interval", "status"}
    assert printed["runs"]["healthy"]["overall"]["corrections"]["token_tis"]["weight_mean"]["status"] == "ok"
    written = run("analyze", dump, "-o", tmp_path / "result.json", "-c", "token_tis")
    assert (tmp_path / "result.json").read_text() == done.stdout
    assert "token_tis" in written.stdout
    assert run("analyze", dump, "-o", "-", "-c", "token_tis").stdout == done.stdout


def test_reports_are_rendered_without_the_dump(dump: Path, tmp_path: Path) -> None:
    result, first, second = (tmp_path / name for name in ("result.json", "first.html", "second.html"))
    summary = run("analyze", dump, "-o", result, "--html", first).stdout
    for path in dump.iterdir():
        path.unlink()
    again = run("report", result, "--html", second, code=0)
    assert again.stdout.splitlines()[:-1] == summary.splitlines()[:-1]
    assert again.stdout.endswith(f"Next: mismatchctl report {result} --html report.html\n")
    assert first.read_bytes() == second.read_bytes()


def test_reports_are_not_overwritten_without_force(dump: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("mine")
    refused = run("analyze", dump, "--html", page)
    assert (refused.exit_code, page.read_text()) == (2, "mine")
    assert "--force" in refused.stderr
    run("analyze", dump, "--html", page, "--force", code=0)
    assert page.read_text() != "mine"


def test_outputs_in_the_dump_folder_are_refused(dump: Path, tmp_path: Path) -> None:
    """The next command would read a Parquet output as a part of the dump."""
    before, step = sorted(dump.iterdir()), min(dump.glob("*.parquet"))
    for words in (
        ["analyze", dump, "--figures", dump],
        ["analyze", dump / "*.parquet", "--figures", dump],
        ["compare", step, dump, "--figures", dump],
        ["sweep", step, "--figures", f"{dump}/../healthy"],
        ["analyze", dump, "--sequences", dump / "s.parquet"],
        ["sweep", dump, "-o", dump / "s.parquet"],
    ):
        done = run(*words, "--force")
        assert (done.exit_code, sorted(dump.iterdir())) == (2, before), words
        assert "input dump" in done.stderr and done.stderr.count("\n") == 1, words
    OutputOptions(figures=dump / "figures").check(inputs=[dump])
    run("analyze", dump, "-q", "-o", dump / "r.json", "--html", dump / "r.html", code=0)
    run("analyze", dump, "-q", code=0)


def test_too_long_file_names_are_usage_errors(dump: Path, tmp_path: Path) -> None:
    place = tmp_path / f"{'x' * 300}.json"
    for words in (
        *(["analyze", dump, flag, place] for flag in ("-o", "--html", "--figures")),
        ["convert", dump, place],
    ):
        done = run(*words)
        assert (done.exit_code, done.stderr) == (2, f"error: {place}: the name is too long; choose a shorter one\n")


def test_quiet_prints_no_output(dump: Path, tmp_path: Path) -> None:
    done = run("analyze", dump, "-q", "-o", tmp_path / "result.json")
    assert (done.exit_code, done.output) == (0, "")


def test_corrections_are_read_from_files_and_mappings(dump: Path, tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(
        "corrections:\n- {name: wide, gates: [{level: token, keep: [0.5, 2]}]}\n"
        "- {name: narrow, weight: {truncate: 1.5}}\n"
    )
    (tmp_path / "one.toml").write_text("[weight]\nlevel = 'token'\nclip = [0.5, 2.0]\n")
    inline = "{name: mine, weight: {zero: [0.9, 1.1]}}"
    words = ["-c", tmp_path / "two.yaml", "-c", tmp_path / "one.toml", "-c", inline]
    result = json.loads(run("analyze", dump, "--json", *words).stdout)
    assert [correction["name"] for correction in result["corrections"]] == ["wide", "narrow", "one", "mine"]
    assert result["corrections"][-1]["weight"] == {"zero": [0.9, 1.1]}


def test_sequences(dump: Path, tmp_path: Path) -> None:
    out = tmp_path / "sequences.parquet"
    run("analyze", dump, "--sequences", out, "-c", "miles-moe-2", "--by", "worker", code=0)
    table = pl.read_parquet(out)
    places = [(step, sequence) for step in range(3) for sequence in range(8)]
    assert list(zip(table["step"], table["sequence_id"], strict=True)) == places
    result = json.loads(run("analyze", dump, "--json", "-c", "miles-moe-2").stdout)["runs"]["healthy"]["overall"]
    kept = result["corrections"]["miles-moe-2"]["kept_tokens"]["value"]
    assert table["miles-moe-2.kept_tokens"].sum() == kept
    # normalized weights: their mean over the tokens of each step is 1
    means = table.group_by("step").agg((pl.col("miles-moe-2.weight") * pl.col("tokens")).sum() / pl.col("tokens").sum())
    assert means["miles-moe-2.weight"].to_list() == pytest.approx([1, 1, 1], rel=1e-12)
    assert (table["k3"] * table["tokens"]).sum() / table["tokens"].sum() == pytest.approx(
        result["metrics"]["k3"]["value"], rel=1e-12
    )


def test_sequences_are_written_after_freed_memory_is_returned(
    dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, two million short sequences need a quarter more memory."""
    returned: list[bool] = []
    monkeypatch.setattr(analyze_module, "release_memory", lambda: returned.append((tmp_path / "s.parquet").exists()))
    run("analyze", dump, "--sequences", tmp_path / "s.parquet", code=0)
    assert returned == [False]


def test_by_adds_breakdowns(dump: Path) -> None:
    run_result = json.loads(run("analyze", dump, "--json", "--by", "worker").stdout)["runs"]["healthy"]
    by = run_result["by"]["worker"]
    assert by["labels"] == [0, 1]
    assert sum(by["metrics"]["tokens"]["value"]) == run_result["overall"]["metrics"]["tokens"]["value"]


@pytest.mark.parametrize("verb", ["analyze", "sweep"])
@pytest.mark.parametrize("spread", ["one file", "a few values in each file", "a few values in each step"])
def test_breakdowns_with_too_many_values_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, spread: str
) -> None:
    """Each value needs the memory of a run. Values are counted per batch, step and run."""
    monkeypatch.setattr("mismatchctl.measure.reduction.MOST_VALUES", 20)
    values = np.arange(22)
    parts = {"one file": 1, "a few values in each file": 3, "a few values in each step": 3}[spread]
    with Recorder(tmp_path / "dump") as recorder:
        for number, some in enumerate(np.array_split(values, parts)):
            recorder.write(
                step=number if "step" in spread else 0, rollout_log_probs=[[-1.0]] * len(some),
                train_log_probs=[[-1.1]] * len(some), name=[f"n{value}" for value in some],
            )  # fmt: skip
    done = run(verb, tmp_path / "dump", "--by", "name", code=2)
    assert done.stdout == ""
    assert "--by name: more than 20 values; choose a column with fewer different values" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    {
        "analyze": "missing argument DUMPS; pass a dump",
        "gate d --level x": "--level x: write a probability above 0 and at most 0.5, such as 5%",
        "analyze d --threads 0": "--threads: expected at least 1",
        "gate d --on-undecided x": "'x' is not one of 'fail', 'warn', 'pass'",
        "gate d --rule k33:max=1": "--rule k33:max=1: no metric is called 'k33' (did you mean 'k3'?)",
        "gate d --rule ess_token:max=5": "max=5: ess_token is a share from 0 to 1. Write max=5%",
        "gate d --rule ess_token:max=150%": "max=150%: ess_token is a share from 0 to 1. Write at most 100%",
        "gate d --rule k3:increase=-5%": "increase: the allowed change must not be negative, found -5%",
        "gate d --rule none.yaml": "none.yaml: the file does not exist; check the path",
        "gate d --plan 0%": "--plan 0%: write a rise above 0, such as 20%",
        "sweep tests --geo 0.5": "--geo 0.5: write numbers above 1",
        "advise tests --min-ess x": "--min-ess x: write a share, as in 90% or 0.9",
        "init": "missing argument 'NAME'",
        "init verl --patch tests": "tests: this is a folder; pass a Python file",
        "demo --out README.md": "README.md: this is a file; choose a folder",
        "doctor x": "unexpected argument x; see mismatchctl doctor -h",
        "tests": "unknown command 'tests'; to analyze this dump, type: mismatchctl analyze tests",
        "analyze x --threads two": "--threads: expected a whole number",
        "convert a.jsonl": "missing OUT: add the file to write",
        "sweep x --vary weight.truncate=1,2": "--vary needs --correction or --config",
        "analyze --colum a": "unknown option --colum (did you mean --column?)",
        "gate --nosuch": "unknown option --nosuch; see mismatchctl gate -h",
        "--nosuch": "unknown option --nosuch; see mismatchctl -h",
        "analize d": "unknown command 'analize' (did you mean 'analyze'?)",
    }.items(),
)
def test_wrong_arguments_give_one_sentence(words: str, said: str) -> None:
    done = run(*words.split())
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("error: ") and said in done.stderr


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    folder = write_dump(tmp_path / "evil\x1b[31m[bold]")
    done = run("analyze", folder, code=0)
    assert "\x1b[31m" not in done.stdout
    assert "[bold]" in done.stdout
    missing = run("analyze", tmp_path / "no\x1b[2Jsuch")
    assert "\x1b" not in missing.stderr


@pytest.mark.process
def test_interrupts_exit_130_without_output(dump: Path, tmp_path: Path) -> None:
    code = (
        "import mismatchctl.api.analyze.analyze as a\n"
        "def interrupt(*args, **kwargs): raise KeyboardInterrupt\n"
        "a.reduce_batch = interrupt\n"
        "from mismatchctl.cli.main import main\n"
        "main()\n"
    )
    out = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-c", code, "analyze", str(dump), "-o", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 130
    assert not out.exists()
    assert "Traceback" not in done.stderr


@pytest.mark.process
def test_a_closed_pipe_gives_no_traceback(dump: Path) -> None:
    command = f"{sys.executable} -m mismatchctl analyze {dump} --json | head -c 10"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.stderr == ""
    assert done.stdout == '{"format":'


def test_schema_prints_columns_and_checks_files(dump: Path, tmp_path: Path) -> None:
    contract = run("schema", "-v").stdout
    assert "rollout_log_probs *" in contract
    assert "old_log_probs" in contract
    run("schema", "--check", dump, code=0)
    bad = run("schema", "--check", write_dump(tmp_path / "bad", bad=3.0), code=4)
    assert "row 2" in bad.stdout
    assert json.loads(run("schema", "--json-schema").stdout)["title"] == "Result"


def test_presets_and_metrics_are_listed_and_shown() -> None:
    assert "geo_rs" in run("presets").stdout == run("presets", "list").stdout
    shown = run("presets", "show", "geo_rs").stdout
    assert "keep:" in shown
    assert shown.startswith("# verl")
    assert "exp(x) - 1 - x" in run("metrics", "k3").stdout
    assert "khat_token" in run("metrics", "-v").stdout


def test_version_is_printed() -> None:
    assert run("--version").stdout.startswith("mismatchctl ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["analyze", "{dump}", "-c", "{weight: {level: " + "x" * 3000 + "}}"],
            "weight.level must be 'token', 'sequence'",
        ),
        (
            ["analyze", "{dump}", "-c", "{weight: {level: token, truncate: [" + "1, " * 900 + "1]}}"],
            "found a list of 901",
        ),
        (["sweep", "{dump}", "-c", "token_tis", "--vary", "weight.truncate=" + "1:" * 1500], "only :log is allowed"),
        (["analyze", "x" * 3000], "the file or folder does not exist"),
    ],
)
def test_long_arguments_are_shortened_in_errors(dump: Path, words: list[str], says: str) -> None:
    done = run(*(word.format(dump=dump) if word == "{dump}" else word for word in words))
    assert done.exit_code in (2, 4)
    assert says in done.stderr
    assert len(done.stderr) < 1100


def test_the_help_says_that_corrections_replace_the_usual_ones(dump: Path) -> None:
    for verb, found in (("analyze", "corrections"), ("sweep", "studies")):
        words = ["-c", "token_tis", *(["--vary", "weight.truncate=2,3"] if verb == "sweep" else [])]
        assert len(json.loads(run(verb, dump, "--json", *words, code=0).stdout)[found]) == 1
    for verb in ("analyze", "sweep", "advise"):
        assert "correction instead of" in " ".join(run(verb, "--help", code=0).stdout.split())


def test_no_arguments_print_the_help() -> None:
    done = run(code=2)
    assert done.stdout.startswith("Usage: ") and "  analyze   " in done.stdout and done.stderr == ""


@pytest.mark.parametrize("verb", ["analyze", "diagnose", "sweep", "advise", "compare", "gate"])
def test_a_run_of_empty_responses_gives_no_traceback(tmp_path: Path, verb: str) -> None:
    path = tmp_path / "empty.parquet"
    values = [[-0.5, -1.0], [-0.2], [], []]
    columns = {"run": ["a", "a", "b", "b"], "rollout_log_probs": values, "train_log_probs": values}
    pl.DataFrame(columns, schema_overrides={name: pl.List(pl.Float32) for name in list(columns)[1:]}).write_parquet(
        path
    )
    done = run(verb, path, *(["--rule", "k3:max=1"] if verb == "gate" else []))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in (0, 3, 4) and (done.stdout or done.stderr)


def test_saved_results_given_as_dumps_name_the_report_command(dump: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    saved = folder / "result.json"
    run("analyze", dump, "-q", "-o", saved, code=0)
    for named in (folder, saved):
        done = run("analyze", named, code=4)
        remedy = f"show it with mismatchctl report {saved}"
        assert done.stderr == f"error: {saved}: this file is a saved Result, which contains no tokens; {remedy}\n"
    assert "K3" in run("report", saved, code=0).stdout


def test_each_of_two_targets_has_a_title(dump: Path) -> None:
    words = ["sweep", dump, "--geo", "1.001,1.01", "--target-rejection", "30%"]
    done = run(*words, "--target-rejection", "sequences=5%", code=0)
    titles = [f"To drop {target}:\n" for target in ("30% of the tokens", "5% of the sequences")]
    assert 0 < done.stdout.index(titles[0]) < done.stdout.index(titles[1])
    assert titles[0] not in run(*words, code=0).stdout


def test_compressed_files_get_one_note(tmp_path: Path) -> None:
    row = json.dumps({"rollout_log_probs": [-1.0, -0.5], "train_log_probs": [-1.0, -0.25], "step": 0})
    (tmp_path / "0.jsonl").write_text(f"{row}\n")
    (tmp_path / "1.jsonl.gz").write_bytes(gzip.compress(f"{row}\n".encode()))
    done = run("analyze", tmp_path, "-c", "none", COLUMNS="1000", code=0)
    assert done.stdout.count("1.jsonl.gz") == 1
    note = "1.jsonl.gz: archives are not read; unpack archives that belong to the run"
    assert note in " ".join(done.stdout.split())  # a long temporary path wraps the line


@pytest.mark.parametrize("target", [("--target-rejection", "5%"), ("--target-ess", "0.5")])
def test_targets_for_empty_dumps_give_one_sentence(tmp_path: Path, target: tuple[str, str]) -> None:
    values = pl.Series([[], []], dtype=pl.List(pl.Float32))
    pl.DataFrame({"rollout_log_probs": values, "train_log_probs": values}).write_parquet(tmp_path / "empty.parquet")
    done = run("sweep", tmp_path / "empty.parquet", *target, code=4)
    assert done.stderr.count("\n") == 1 and "no valid token" in done.stderr
