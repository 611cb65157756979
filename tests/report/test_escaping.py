"""Text from a dump is escaped in every output format: terminal, HTML, Markdown, CSV, XML, figures and notebooks."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mismatchctl as mm
from mismatchctl.core.formatting import escape_csv, escape_github, escape_markdown, escape_terminal
from mismatchctl.io.yaml import parse_yaml
from tests.cli.command import run
from tests.factories.dumps import write_labeled_dump
from tests.factories.hostile_text import HOSTILE

NAMES = tuple(name for name in HOSTILE if name not in ("\ud800", "\x00"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a dump with hostile names of runs, workers and prompts, a log, a layer report, and Results of the dump."""
    folder = tmp_path_factory.mktemp("names")
    table = pq.read_table(write_labeled_dump(folder / "plain.parquet", names=NAMES))
    prompts = [NAMES[row % len(NAMES)] for row in range(len(table))]
    for column, values in (("run", ["".join(NAMES)] * len(table)), ("prompt_id", prompts)):
        table = table.drop_columns([column]) if column in table.column_names else table
        table = table.append_column(column, pa.array(values))
    table = table.append_column("token_ids", pa.array([[1, 2, 3, 4]] * len(table)))
    pq.write_table(table, folder / "d.parquet")
    rows = [{"step": step, **dict.fromkeys(NAMES, 0.5), "rollout_corr/k3_kl": 0.1} for step in range(3)]
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    vocabulary = {name: number for number, name in enumerate(NAMES)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocabulary, "merges": []}}))
    assert run("analyze", folder / "d.parquet", "--by", "worker", "-o", folder / "r.json", "-q").exit_code == 0
    assert run("advise", folder / "d.parquet", "-o", folder / "a.json", "-q").exit_code == 0
    (folder / "out").mkdir()
    return folder


VERBS: dict[str, list[str]] = {
    "watch": ["watch", "d.parquet", "--until-idle", "0.01s", "--every", "0.01s", "--rule", "k3:max=1e-12"],
    "markdown": ["analyze", "d.parquet", "--by", "worker", "--markdown", "-"],
    "figures": ["analyze", "d.parquet", "--by", "worker", "-q", "--figures", "out/figures"],
    "tokens": ["analyze", "d.parquet", "-q", "--tokens", "out/t.html", "--tokenizer", "tokenizer.json"],
    "log": ["analyze", "plain.parquet", "--framework", "verl", "--against", "log.jsonl", "--html", "out/log.html"],
    "diagnose": ["diagnose", "d.parquet"],
    "advise": ["advise", "d.parquet"],
    "saved": ["report", "a.json", "--html", "out/both.html", "--markdown", "-"],
    "gate": ["gate", "r.json", "--rule", "k3:max=1e-12,per=worker", "--markdown", "-"],
    "compare": ["compare", "r.json", "r.json"],
}


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_hostile_names_stay_text(verb: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    done = run(*VERBS[verb])
    assert done.exit_code in (0, 3, 4), (done.stderr, done.exception)
    output = re.sub("(?<=[@:])\u200b", "", done.stdout) if "-" in VERBS[verb] else done.stdout  # Markdown: no links
    lines = (output + done.stderr).split("\n")
    assert all(line.isprintable() for line in lines), [line for line in lines if not line.isprintable()]
    ours = ("::error title=mismatch", "::warning title=mismatch")
    assert not [
        line for line in lines if "forged" in line and line.lstrip().startswith("::") and not line.startswith(ours)
    ]
    if "-" in VERBS[verb]:
        plain = [line.replace("\\<", "") for line in lines if not line.startswith(ours)]
        assert not [line for line in plain if "<script>" in line or "<img" in line]


@pytest.mark.slow
def test_pages_and_figures_contain_no_foreign_markup(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    for words in (VERBS["figures"], VERBS["tokens"], VERBS["saved"]):
        assert run(*words, "--force").exit_code in (0, 3)
    made = [path for path in (place / "out").rglob("*") if path.suffix in (".html", ".svg")]
    assert {path.suffix for path in made} == {".html", ".svg"}
    for path in made:
        text = path.read_text()
        assert "<script>alert" not in text and "<img src=x" not in text, path
        assert not set("\u2028\u202e\x1b") & set(text), path
    for path in (place / "out").rglob("*.csv"):
        cells = [cell for row in csv.reader(path.read_text().splitlines()) for cell in row]
        assert not [
            cell for cell in cells if cell.startswith(("=", "@")) or (cell[:1] in "+-" and not _is_number(cell))
        ]


def test_long_names_are_shortened_on_pages(tmp_path: Path) -> None:
    """The two names have 50,000 characters and differ at the end."""
    table = pq.read_table(write_labeled_dump(tmp_path / "plain.parquet", names=("a", "b")))
    long = ["x" * 50_000 + f"-{row % 2}" for row in range(len(table))]
    for column in ("worker", "prompt_id"):
        table = table.drop_columns([column]) if column in table.column_names else table
        table = table.append_column(column, pa.array(long))
    pq.write_table(table, tmp_path / "d.parquet")
    page, result = tmp_path / "r.html", tmp_path / "r.json"
    done = run("analyze", tmp_path / "d.parquet", "--by", "worker", "--html", page, "-o", result, "--markdown", "-")
    assert done.exit_code == 0, done.stderr
    assert "x-0" in page.read_text() and "x-1" in page.read_text()
    assert "x" * 500 not in page.read_text() + done.stdout
    assert "x-0" in result.read_text() and "x" * 500 not in result.read_text()


def test_notebooks_escape_names(place: Path) -> None:
    shown: list[Any] = [mm.analyze(str(place / "d.parquet")), mm.diagnose(str(place / "d.parquet"))]
    for each in shown:
        text = each._repr_html_()
        assert "<script>alert" not in text and "<img src=x" not in text


@pytest.mark.parametrize("text", HOSTILE)
def test_each_format_escapes_control_characters(text: str) -> None:
    shown = escape_terminal(text)
    assert shown.isprintable() and not shown.lstrip().startswith("::") and "##[" not in shown
    assert not escape_csv(text).startswith(("=", "+", "-", "@", "\t", "\r"))
    assert "\n" not in escape_github(text) and not set(escape_github(text, of_property=True)) & set(":,\n\r")
    assert not any(sign in escape_markdown(text).replace(f"\\{sign}", "") for sign in "|*_[]<>`")
    assert "`" not in escape_markdown(text, code=True) and "|" not in escape_markdown(text, code=True).replace(
        "\\|", ""
    )
    escape_terminal(text).encode()


@pytest.mark.slow
def test_hostile_labels_stay_text_in_every_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = tuple(name for name in HOSTILE if name not in ("\ud800", "\x00"))
    path = write_labeled_dump(tmp_path / "d.parquet", names=names)
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    name = "::error::forged"
    verbs: list[list[object]] = [
        ["analyze", path, "--by", "worker", "--html", out / "r.html", "-o", out / "r.json"],
        ["analyze", path, "-c", f"{{name: '{name}', weight: {{truncate: 2}}}}"],
        ["sweep", path, "--by", "worker", "-o", out / "s.csv", "--html", out / "s.html"],
        ["compare", path, path, "--by", "worker", "--html", out / "c.html"],
        ["gate", path, "--rule", "k3:max=1e-12,per=worker", "--junit", out / "j.xml", "--markdown", out / "m.md"],
    ]
    for words in verbs:
        done = run(*words)
        assert done.exit_code in (0, 3, 4), (words, done.stderr, done.exception)
        lines = (done.stdout + done.stderr).split("\n")
        forged = [line for line in lines if "forged" in line and line.lstrip().startswith("::")]
        assert not [
            line for line in forged if not line.startswith(("::error title=mismatch", "::warning title=mismatch"))
        ]
        assert all(line.isprintable() for line in lines)
    for page in out.glob("*.html"):
        assert "<script>alert" not in page.read_text() and "<img src=x" not in page.read_text()
        assert "\u2028" not in page.read_text() and "\u202e" not in page.read_text()
    for row in csv.reader(io.StringIO((out / "s.csv").read_text())):
        assert not [cell for cell in row if cell.startswith(("=", "@")) or (cell[:1] in "+-" and not _is_number(cell))]


def _is_number(cell: str) -> bool:
    try:
        float(cell or "0")
    except ValueError:
        return False
    return True


def test_azure_commands_and_markdown_links_stay_text() -> None:
    assert escape_terminal("##vso[task.setvariable]x ##[error]y") == "#\\#vso[task.setvariable]x #\\#[error]y"
    shown = escape_markdown("@octocat #12 https://evil.example www.evil.example GH-7 a##VSO[x]")
    for link in ("@octocat", "#12", "https://", "www.evil", "GH-7", "##VSO"):
        assert link not in shown, link
    assert shown.replace("\u200b", "").startswith("@octocat #12 https://evil.example www.evil.example")


@pytest.mark.parametrize("sign", ["::error::x", "##vso[task.complete]", "##[error]x"])
@pytest.mark.parametrize("options", [[], ["--as", "verl"]])
def test_presets_print_no_ci_commands(sign: str, options: list[str], tmp_path: Path) -> None:
    """Name and description are escaped, and the text is read back unchanged."""
    path = tmp_path / "mine.yaml"
    long = "word " * 30
    data = {"name": f"a\n{sign}", "about": f"{long}\n{sign} {long}{sign}", "weight": {"truncate": 2.0}}
    path.write_text(json.dumps(data))
    shown = run("presets", "show", path, *options, code=0).stdout
    assert not any(line.strip().lstrip("# ").startswith(("::", "##")) for line in shown.splitlines())
    if not options:
        assert parse_yaml(shown) == data


def test_words_of_metric_names_list_their_metrics() -> None:
    shown = run("metrics", "ess", code=0).stdout
    for key in ("ess_token", "ess_sequence", "drift_ess_token"):
        assert key in shown
    assert run("metrics", "K3", code=0).stdout == run("metrics", "k3", code=0).stdout
