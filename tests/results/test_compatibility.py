"""Files of earlier versions load: `compat/` holds what each format looked like, and never changes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.results.model import FORMAT
from mismatchctl.results.reader import read_result
from tests.cli.command import run
from tests.paths import FIXTURES

COMPAT = FIXTURES / "earlier_versions"
RESULTS = sorted(COMPAT.glob("result_*.json"))
BASELINES = sorted(COMPAT.glob("baseline_*.json"))
LOG_RATIOS = [[((row * 7 + token * 3) % 11 - 5) / 100 for token in range(3 + row % 2)] for row in range(24)]
"""Of the dump that the files in `compat/` were made of: x of each token of each sequence."""


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run.parquet"
    table = {
        "rollout_log_probs": [[-1.0 for _ in row] for row in LOG_RATIOS],
        "train_log_probs": [[-1.0 + x for x in row] for row in LOG_RATIOS],
        "step": [number % 3 for number in range(len(LOG_RATIOS))],
        "prompt_id": [f"p{number // 2}" for number in range(len(LOG_RATIOS))],
    }
    pq.write_table(pa.table(table), path)
    return path


def test_each_earlier_format_has_a_fixture() -> None:
    for files in (RESULTS, BASELINES):
        assert [json.loads(file.read_text())["format"] for file in files] == list(range(1, FORMAT + 1))


@pytest.mark.parametrize("path", RESULTS + BASELINES, ids=lambda path: path.name)
def test_values_of_earlier_results_are_read(path: Path) -> None:
    tokens = [x for row in LOG_RATIOS for x in row]
    overall = next(iter(read_result(path).runs.values())).overall.metrics
    assert overall["tokens"].value == len(tokens)
    assert overall["k3"].value == pytest.approx(sum(math.expm1(x) - x for x in tokens) / len(tokens), rel=1e-6)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_earlier_results_render_a_report(path: Path, tmp_path: Path) -> None:
    run("report", path, "--html", tmp_path / "r.html", code=0)
    assert (tmp_path / "r.html").stat().st_size > 10_000


@pytest.mark.parametrize("path", RESULTS + BASELINES, ids=lambda path: path.name)
def test_a_dump_passes_against_its_earlier_baseline(path: Path, dump: Path) -> None:
    done = run("gate", dump, "--baseline", path, "--json", "-q")
    assert json.loads(done.stdout)["outcome"] == "passed" and done.exit_code == 0, done.output


def test_the_90_percent_intervals_of_format_1_are_dropped(tmp_path: Path, dump: Path) -> None:
    rule = ["--rule", "abs_diff_p50:increase=25%"]
    for number, outcome in ((1, "undecided"), (2, "passed")):
        overall = next(iter(read_result(COMPAT / f"result_{number}.json").runs.values())).overall.metrics
        assert (overall["k3"].interval is not None) == (number == 2) and overall["k3"].se is not None
        done = run("gate", dump, "--baseline", COMPAT / f"baseline_{number}.json", *rule, "--json", "-q")
        check = json.loads(done.stdout)["checks"][0]
        assert check["outcome"] == outcome and ("save a new baseline" in check["reason"]) == (number == 1)
    older = tmp_path / "older.json"
    older.write_text(json.dumps(json.loads(RESULTS[1].read_text()) | {"format": 1}))
    assert next(iter(read_result(older).runs.values())).overall.metrics["abs_diff_p50"].interval is None


@pytest.mark.parametrize("path", RESULTS[-1:] + BASELINES[-1:], ids=lambda path: path.name)
def test_every_reader_refuses_a_newer_format(path: Path, tmp_path: Path, dump: Path) -> None:
    newer = tmp_path / "newer.json"
    newer.write_text(json.dumps(json.loads(path.read_text()) | {"format": FORMAT + 1}))
    for words in (["report", newer], ["gate", dump, "--baseline", newer], ["compare", newer, newer]):
        done = run(*words, code=4)
        assert f"result format {FORMAT + 1}, this version reads {FORMAT}; install a newer mismatchctl" in done.stderr
