"""`mismatchctl compare`: exit codes, streams, files and hostile names."""

import json
import os
import re
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.api.analyze.analyze import analyze
from tests.cli import command
from tests.factories.dump_pairs import make_tokens, write_tokens
from tests.factories.results import HOSTILE

BASE = make_tokens(prompts=24, steps=2, longest=60)
WORSE = BASE.scaled(lambda index, _, __: 3.0 if BASE.worker[index] == 3 else 1.0)


run = partial(command.run, "compare", COLUMNS="140")


@pytest.fixture
def dumps(tmp_path: Path) -> tuple[Path, Path]:
    return write_tokens(tmp_path / "base.parquet", BASE), write_tokens(tmp_path / "worse.parquet", WORSE)


@pytest.mark.parametrize("width", ["80", "120"])
def test_the_first_line_is_the_answer(dumps: tuple[Path, Path], width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are at most 24 lines without trailing blanks, and the last line is the next command."""
    monkeypatch.chdir(dumps[0].parent)  # short paths take one line
    done = run(dumps[0].name, dumps[1].name, "--by", "worker", COLUMNS=width, code=0)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"FAIL   worse: K3 rose [\d.]+x \(95% CI [\d.]+x to [\d.]+x\)", lines[0])
    assert len(lines) <= 24
    assert max(map(len, lines)) <= int(width)
    assert not any(line.endswith(" ") for line in lines)
    assert lines[-1].endswith(f"Next: mismatchctl diagnose {dumps[1].name}")
    reported = " ".join(done.stdout.split())
    assert "worse compared with base, paired: both runs have the same responses to 24 prompts, with equal" in reported
    assert "where worker 3 causes 100% of the change" in reported


def test_only_changed_metrics_are_shown(dumps: tuple[Path, Path]) -> None:
    """Each shown metric is significant. `-v` adds the others with the same label for K3."""
    found = json.loads(run(*dumps, "--json").stdout)["contrasts"][0]["changes"]
    shown = run(*dumps, COLUMNS="80").stdout
    table = shown.split("metric ")[1].splitlines()[2:9]
    assert all(re.search(r" (worse|better|changed)$", line) for line in table)
    significant = sum(change["significant"] for change in found.values())
    assert f"{significant - 7} more changed metrics: -v" in shown
    full = run(*dumps, "-v", COLUMNS="80").stdout
    assert full.splitlines()[0] == shown.splitlines()[0]
    assert "n.s." in full and "n.s." not in shown
    for text in (shown, full):
        assert "\nK3 KL " in text and "\nk3 " not in text
    assert "abs_diff_mean" not in full


def test_unchanged_runs_are_ok(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    other = write_tokens(tmp_path / "other.parquet", make_tokens(77, prompts=24, steps=2, longest=60))
    same = run(dumps[0], dumps[0], COLUMNS="80", code=0).stdout
    assert same.startswith("OK     K3 is the same: ")
    calm = run(dumps[0], other, COLUMNS="80", code=0).stdout
    assert calm.startswith("OK     no significant change: K3 changed by ")
    better = run(dumps[1], dumps[0], COLUMNS="80", code=0).stdout
    assert re.match(r"OK     better: K3 fell [\d.]+% \(95% CI [\d.]+% to [\d.]+%\)\n", better)
    several = run(dumps[0], dumps[1], other, COLUMNS="80", code=0).stdout
    assert several.startswith("FAIL   1 of 2 runs needs attention\n\nReference: base, K3 ")


@pytest.mark.slow
@pytest.mark.parametrize("width", ["80", "120"])
def test_many_runs_fit_one_screen(dumps: tuple[Path, Path], width: str) -> None:
    """The first run is the reference, the worst run comes first, and omitted runs are named."""
    done = run(dumps[0], *([dumps[1], dumps[0]] * 9), COLUMNS=width, code=0)
    lines = done.stdout.splitlines()
    assert lines[0] == "FAIL   9 of 18 runs need attention"
    assert len(lines) <= 24 and max(map(len, lines[:-1])) <= int(width)  # the last line is a command
    assert "7 more runs: 7 OK" in done.stdout
    statuses = [word for line in lines for word in re.findall(r" (FAIL|OK) ", line)]
    assert statuses == ["FAIL"] * 9 + ["OK"] * 2


def test_non_utf8_names_are_written(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path / "b") + b"\xff.parquet"))
    odd.write_bytes(dumps[1].read_bytes())
    out = tmp_path / "c.json"
    assert run(dumps[0], odd, "-o", out, "--html", tmp_path / "c.html", code=0).stderr.count("wrote") == 2
    assert json.loads(out.read_text(encoding="utf-8"))["sides"][1]["source"].endswith("b\\udcff.parquet")
    twice = json.loads(run(dumps[0], odd, odd, "--json", code=0).stdout)
    assert len({side["name"] for side in twice["sides"]}) == 3


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "missing argument"),
        (["{a}", "{b}", "--nonsense"], 2, "--nonsense"),
        (["{a}"], 4, "needs two runs, found one"),
        (["{a}", "absent"], 4, "absent"),
        (["{a}", "{empty}"], 4, "empty"),
        (["{a}", "{text}"], 4, "not a mismatchctl result"),
        (["{a}", "{b}", "--by", "wroker"], 2, "worker"),
        (["{a}", "{b}", "--column", "train_log_probs=absent"], 4, "absent"),
        (["{a}", "{b}", "--html", "absent/page.html"], 2, "absent"),
        (["{a}", "{b}", "--html", "{text}"], 2, "--force"),
        (["{a}", "{b}", "--json", "-o", "-"], 2, "stdout"),
    ],
)
def test_errors_have_their_exit_codes(
    words: list[str], code: int, says: str, dumps: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    done = run(
        *(w.format(a=dumps[0], b=dumps[1], empty="empty", text=tmp_path / "other.json") for w in words), code=code
    )
    assert says in done.stderr
    assert done.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_json_and_files_are_written(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    out, page = tmp_path / "found.json", tmp_path / "found.html"
    done = run(*dumps, "--json", "-o", out, "--html", page, code=0)
    data = json.loads(done.stdout)
    assert json.loads(out.read_text()) == data
    assert [side["name"] for side in data["sides"]] == ["base", "worse"]
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert sorted(done.stderr.splitlines()) == [f"wrote {page}", f"wrote {out}"]
    run(*dumps, "--html", page, code=0)  # its own
    page.write_text("somebody's notes")
    run(*dumps, "--html", page, code=2)
    quiet = run(*dumps, "--html", page, "--force", "--quiet")
    assert (quiet.exit_code, quiet.stdout, quiet.stderr) == (0, "", "")


def test_results_are_recognized_by_content(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    kept = tmp_path / "kept.bin"
    kept.write_text(analyze([str(dumps[0])]).to_json())
    done = run(kept, dumps[1], code=0)
    assert done.stdout.startswith("FAIL   worse: K3 rose ")
    command.run("gate", dumps[0], "--save-baseline", tmp_path / "ok.json", "--accept", "-q", code=0)
    accepted = run(tmp_path / "ok.json", dumps[1], "--html", tmp_path / "page.html", code=0)
    assert accepted.stdout.splitlines()[0] == done.stdout.splitlines()[0]


def test_bad_rows_stop_or_are_skipped(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    broken = BASE.scaled(lambda _, __, ___: 1.0)
    broken.train[3][2] = float("nan")
    bad = write_tokens(tmp_path / "bad.parquet", broken)
    refused = run(dumps[0], bad, code=4)
    assert "row 3" in refused.stderr
    done = run(dumps[0], bad, "--on-bad", "skip", "--json", code=0)
    (contrast,) = json.loads(done.stdout)["contrasts"]
    assert contrast["paired"] == "paired: 24 prompts in common (of 24 and 24)"
    assert "left out" in done.stderr


def test_columns_can_be_renamed(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    extra = {"mine": [row.tolist() for row in WORSE.train]}
    renamed = [write_tokens(tmp_path / f"{n}.parquet", BASE, leave_out=("train_log_probs",), **extra) for n in "xy"]
    done = run(*renamed, "--column", "train_log_probs=mine", "--json", code=0)
    assert json.loads(done.stdout)["contrasts"][0]["changes"]["k3"]["difference"] == 0


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    worker = [HOSTILE[index % len(HOSTILE)].replace("\0", "") for index in range(len(BASE.name))]
    paths = [
        write_tokens(tmp_path / f"{name}\x1b[31m[bold]\u202e.parquet", tokens, leave_out=("worker",), host=worker)
        for name, tokens in (("a", BASE), ("b", WORSE))
    ]
    done = run(*paths, "--by", "host", "--html", tmp_path / "page.html", code=0)
    page = (tmp_path / "page.html").read_text()
    for text in (done.stdout, page):
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "[bold]" in text
    assert "<script>alert" not in page
    assert "<img" not in page


def test_compare_works_without_color_or_unicode(dumps: tuple[Path, Path]) -> None:
    run(*dumps, PYTHONIOENCODING="ascii", NO_COLOR="1", code=0)


def test_different_storage_types_give_a_warning(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    table = pq.read_table(dumps[0])
    column = table.schema.get_field_index("train_log_probs")
    values = table["train_log_probs"]
    other = pa.float32() if "double" in str(values.type) else pa.float64()
    narrow = values.cast(pa.large_list(other) if pa.types.is_large_list(values.type) else pa.list_(other))
    pq.write_table(table.set_column(column, "train_log_probs", narrow), tmp_path / "narrow.parquet")
    same, found = (json.loads(run(dumps[0], path, "--json").stdout) for path in (dumps[1], tmp_path / "narrow.parquet"))
    assert not any("is stored as" in warning for warning in same["warnings"])
    assert any(warning.startswith("train_log_probs is stored as") for warning in found["warnings"])
