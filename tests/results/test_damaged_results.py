"""Saved results that are incomplete, inconsistent or not finite are refused with one message."""

import copy
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatchctl.core.validation import OVERFLOW_STATUS, FiniteModel, round_significant
from mismatchctl.errors import DataError
from mismatchctl.results.model import Value
from mismatchctl.results.reader import read_result
from tests.cli.command import run
from tests.factories.dumps import write_labeled_dump


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    out = folder / "r.json"
    run("analyze", write_labeled_dump(folder / "d.parquet"), "--by", "worker", "-o", out, "-q", code=0)
    read_result(out)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def only(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(data["runs"].values()))
    return found


def grown(table: dict[str, Any], column: str) -> None:
    place = table["columns"].index(column)
    table["sums"][0][place] += 0.01 * max(abs(sums[place]) for sums in table["sums"])


def dropped(table: dict[str, Any], column: str) -> None:
    place = table["columns"].index(column)
    del table["columns"][place]
    for sums in table["sums"]:
        del sums[place]


def scaled(table: dict[str, Any], column: str, factor: float) -> None:
    place = table["columns"].index(column)
    for sums in table["sums"]:
        sums[place] = round(sums[place] * factor + (factor > 1))


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "ragged": lambda run: run["clusters"]["sums"][0].pop(),
    "short": lambda run: run["clusters"]["sums"].pop(),
    "not hexadecimal": lambda run: run["clusters"]["hashes"].__setitem__(0, "zz"),
    "empty hash": lambda run: run["clusters"]["hashes"].__setitem__(0, ""),
    "long hash": lambda run: run["clusters"]["hashes"].__setitem__(0, "f" * 40),
    "no such group": lambda run: run["clusters"]["groups"].__setitem__(0, 99),
    "column twice": lambda run: run["clusters"]["columns"].__setitem__(0, run["clusters"]["columns"][1]),
    "negative": lambda run: run["clusters"]["sums"][0].__setitem__(0, -1.0),
    "another |x|": lambda run: grown(run["clusters"], "abs"),
    "another excess of the ratio": lambda run: grown(run["clusters"], "excess"),
    "another mean": lambda run: run["overall"]["metrics"]["abs_diff_mean"].__setitem__("value", 1e-9),
    "other K3": lambda run: run["overall"]["metrics"]["k3"].__setitem__("value", 1e-9),
    "more tokens": lambda run: run["overall"]["metrics"]["tokens"].__setitem__("value", 1e6),
    "half a token": lambda run: run["overall"]["metrics"]["tokens"].__setitem__("value", 47.5),
    "no value": lambda run: run["overall"]["metrics"]["k3"].__setitem__("value", None),
    "negative error": lambda run: run["overall"]["metrics"]["k3"].__setitem__("se", -1.0),
    "short series": lambda run: run["groups"]["metrics"]["k3"]["value"].pop(),
    "label twice": lambda run: run["groups"]["labels"].__setitem__(0, run["groups"]["labels"][1]),
    "edges": lambda run: run["distribution"]["edges"].reverse(),
    "tokens of a bin": lambda run: run["distribution"]["tokens"].__setitem__(0, -5),
    "text": lambda run: run["overall"]["metrics"]["k3"].__setitem__("value", "small"),
    "no tokens": lambda run: dropped(run["clusters"], "tokens"),
    "no sequences": lambda run: dropped(run["clusters"], "sequences"),
    "no tokens of a worker": lambda run: dropped(run["by"]["worker"]["clusters"], "tokens"),
    "no number of tokens": lambda run: run["overall"]["metrics"].pop("tokens"),
    "more tokens in a bin": lambda run: scaled(run["clusters"], "tokens@0", 100),
    "no tokens in a bin": lambda run: scaled(run["clusters"], "tokens@1", 0),
    "more K3 in a bin": lambda run: scaled(run["clusters"], "k3@0<-5", 100),
    "more identical tokens": lambda run: scaled(run["clusters"], "identical", 100),
    "shorter sequences": lambda run: scaled(run["clusters"], "squared_length", 0),
    "bit-identical": lambda run: run["overall"]["metrics"]["bitwise_all"].__setitem__("value", 1.0),
    "repeated sequences": lambda run: run["content"].__setitem__("repeated", 10**6),
    "fewer tokens of the content": lambda run: run["content"].__setitem__("tokens", 1),
    "a share above 1": lambda run: run["content"].__setitem__("hidden", 1.5),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_results_are_refused(damage: str, whole: dict[str, Any], tmp_path: Path) -> None:
    data = copy.deepcopy(whole)
    DAMAGE[damage](only(data))
    path = tmp_path / "r.json"
    path.write_text(json.dumps(data))
    with pytest.raises(DataError, match="damaged result: runs"):
        read_result(path)
    done = run("gate", path, "--baseline", path)
    assert done.exit_code == 4 and done.stderr.startswith(f"error: {path}: damaged result: ")


@pytest.mark.parametrize(("version", "advice"), [(1, "analyze the dump again"), (3, "install a newer mismatchctl")])
def test_other_formats_are_refused(version: int, advice: str, whole: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(whole | {"format": version}))
    for words in (["report", path], ["gate", path, "--baseline", path], ["compare", path, path]):
        done = run(*words, code=4)
        assert f"result format {version}, but this version reads format 2; {advice}" in done.stderr


def test_results_without_a_summary_get_one(whole: dict[str, Any], tmp_path: Path) -> None:
    data, path = copy.deepcopy(whole), tmp_path / "r.json"
    story = only(data).pop("story")
    path.write_text(json.dumps(data))
    found = next(iter(read_result(path).to_data()["runs"].values()))
    assert found["story"] == story


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999", "[" * 3000])
def test_non_finite_numbers_in_results_are_refused(text: str, whole: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    content = json.dumps(whole)
    value = json.dumps(only(whole)["overall"]["metrics"]["k3"]["value"])
    path.write_text(content.replace(value, text, 1))
    for words in (["gate", path, "--baseline", path], ["report", path], ["compare", path, path]):
        done = run(*words)
        assert done.exit_code == 4 and done.stderr.startswith(f"error: {path}: not JSON: ")


def test_non_finite_values_get_a_status() -> None:
    assert Value(value=math.inf, se=math.nan, interval=(0.0, math.inf)) == Value(value=None, status=OVERFLOW_STATUS)

    class Needed(FiniteModel):
        value: float

    with pytest.raises(ValueError, match="finite"):
        Needed(value=math.nan)


@pytest.mark.parametrize("value", [-1e300, -1e308])
def test_impossible_log_probs_are_refused_in_one_sentence(value: float, tmp_path: Path) -> None:
    path = write_labeled_dump(tmp_path / "d.parquet", value)
    done = run("analyze", path)
    assert done.exit_code == 4 and "is too low for a log-prob" in done.stderr and "row 3" in done.stderr


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("swept")
    words = (
        "-c",
        "token_tis",
        "--vary",
        "weight.truncate=1.5,2",
        "--target-rejection",
        "0.1",
        "--at-step",
        "+2",
        "--batch",
        "16",
    )
    run("sweep", write_labeled_dump(folder / "d.parquet"), *words, "-o", folder / "s.json", "-q", code=0)
    found: dict[str, Any] = json.loads((folder / "s.json").read_text())
    return found


SWEPT_DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a format to come": lambda data: data.__setitem__("format", 3),
    "no table": lambda data: data.__setitem__("table", {}),
    "no rows": lambda data: [column.clear() for column in data["table"].values()],
    "ragged": lambda data: data["table"]["k3_kept"].pop(),
    "a metric less": lambda data: data["table"].pop("ess_token"),
    "text for a number": lambda data: data["table"]["ess_token"].__setitem__(0, "x"),
    "a number for text": lambda data: data["table"]["run"].__setitem__(0, 1),
    "a list in a cell": lambda data: data["table"]["ess_token"].__setitem__(0, [1]),
    "a point twice": lambda data: data["table"]["point"].__setitem__(1, 0),
    "no such point": lambda data: data["table"]["point"].__setitem__(0, 9),
    "no such correction": lambda data: data["table"]["correction"].__setitem__(0, "x"),
    "another correction": lambda data: data["studies"][0]["correction"].__setitem__("name", "x"),
    "no axis": lambda data: data["studies"][0].__setitem__("axes", []),
    "an axis of nothing": lambda data: data["studies"][0]["axes"][0].__setitem__("path", "weight.x"),
    "text for an axis": lambda data: data["studies"][0]["axes"][0].__setitem__("values", ["x", "y"]),
    "a target on no run": lambda data: data["targets"][0].__setitem__("run", "x"),
    "a target of text": lambda data: data["targets"][0].__setitem__("threshold", "x"),
    "no correction": lambda data: data["targets"][0].__setitem__("correction", {"gates": 3}),
    "a forecast of no point": lambda data: data["predictions"][0].__setitem__("point", 99),
    "a forecast of text": lambda data: data["predictions"][0]["predictions"][0].__setitem__("value", "x"),
}


def damaged(whole: dict[str, Any], damage: Callable[[dict[str, Any]], Any], folder: Path) -> Path:
    data, path = copy.deepcopy(whole), folder / "saved.json"
    path.write_text(json.dumps(data))
    run("report", path, "-q", code=0)
    damage(data)
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize("damage", SWEPT_DAMAGE)
def test_damaged_sweeps_are_refused(damage: str, swept: dict[str, Any], tmp_path: Path) -> None:
    path = damaged(swept, SWEPT_DAMAGE[damage], tmp_path)
    done = run("report", path, "--html", tmp_path / "s.html")
    assert (done.exit_code, done.stderr.count("\n")) == (4, 1), done.stderr
    assert not (tmp_path / "s.html").exists()


@pytest.mark.parametrize(
    "words", ["compare d.parquet {}", "gate {} --rule k3:max=1", "report {}", "analyze {}", "compare {} d.parquet"]
)
def test_pipes_are_refused_without_waiting(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_labeled_dump(Path("d.parquet"))
    os.mkfifo("pipe.json")
    done = run(*words.format("pipe.json").split())
    assert (done.exit_code, done.stderr.count("\n")) == (4, 1), done.stderr
    assert "pipe.json: " in done.stderr and "similar names" not in done.stderr


COMPARED_DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a side less": lambda data: data["sides"].pop(),
    "a side twice": lambda data: data["sides"].append(data["sides"][1]),
    "no contrast": lambda data: data["contrasts"].clear(),
    "another name": lambda data: data["contrasts"][0].__setitem__("other", "x"),
    "no tokens": lambda data: data["sides"][0]["metrics"].pop("tokens"),
    "an unknown part": lambda data: data.__setitem__("matrix", {"rollouts": ["a"], "trainers": [], "cells": []}),
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = write_labeled_dump(tmp_path_factory.mktemp("compared") / "d.parquet")
    found: dict[str, Any] = json.loads(run("compare", path, path, "--json").stdout)
    return found


@pytest.mark.parametrize("damage", COMPARED_DAMAGE)
def test_damaged_comparisons_are_refused(damage: str, compared: dict[str, Any], tmp_path: Path) -> None:
    done = run("report", damaged(compared, COMPARED_DAMAGE[damage], tmp_path), "--markdown", "-")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (4, "", 1), done.stderr


EXTREMES = (1e308, -1e308, 1e300, 5e-324, 10**400, 2**63, -1.0, 0)
Place = tuple[str | int, ...]


def number_places(data: Any, place: Place = ()) -> Iterator[Place]:
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        if isinstance(value, (dict, list)):
            yield from number_places(value, (*place, key))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield (*place, key)


@pytest.fixture(scope="module")
def saved(
    whole: dict[str, Any], swept: dict[str, Any], compared: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any], dict[str, list[tuple[str, Place]]]]:
    """Return a folder, the JSON of each command, and the places of all numbers by their path without indices."""
    folder = tmp_path_factory.mktemp("saved")
    path = write_labeled_dump(folder / "d.parquet")
    verdict = run("gate", path, "--rule", "k3:max=1", "--rule", "abs_diff_mean:max=1", "--json").stdout
    advice = run("advise", path, "--json").stdout
    every = {"analyze": whole, "sweep": swept, "compare": compared}
    every |= {"gate": json.loads(verdict), "advise": json.loads(advice)}
    places: dict[str, list[tuple[str, Place]]] = {}
    for verb, data in every.items():
        for place in number_places(data):
            shape = ".".join(str(key) for key in (verb, *place) if isinstance(key, str))
            places.setdefault(shape, []).append((verb, place))
    return folder, every, places


def check_report(folder: Path, original: dict[str, Any], places: list[Place], value: float) -> None:
    data = copy.deepcopy(original)
    for place in places:
        parent = data
        for key in place[:-1]:
            parent = parent[key]  # type: ignore[index]
        parent[place[-1]] = value  # type: ignore[index]
    path = folder / "edited.json"
    path.write_text(json.dumps(data))
    done = run("report", path, "-v", "--html", folder / "page.html", "--markdown", folder / "page.md", "--force")
    assert done.exit_code in (0, 4), (places[0], value, done.exception)
    assert done.exit_code == 0 or done.stderr.count("\n") == 1, done.stderr


@settings(max_examples=60, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from(EXTREMES), st.booleans())
def test_extreme_numbers_give_a_page_or_one_sentence(
    saved: tuple[Path, dict[str, Any], dict[str, list[tuple[str, Place]]]], number: int, value: float, one: bool
) -> None:
    folder, every, places = saved
    shape = sorted(places)[number % len(places)]
    chosen = places[shape][: 1 if one else None]
    check_report(folder, every[chosen[0][0]], [place for _, place in chosen], value)


@pytest.mark.parametrize(
    ("ending", "value"),
    [("table.ess_token_se", 1e308), ("table.ess_token_se", -1.0), ("table.rejected_tokens", -1e308),
     ("breakdowns.surprisal.k3", 1e308), ("breakdowns.surprisal.low", -1e308),
     ("breakdowns.length.low", 1e300), ("breakdowns.surprisal.high", 1e300),
     ("changes.beyond_1_05.reference.value", -1e308), ("changes.beyond_2.reference.interval", 1e308),
     ("overall.metrics.beyond_2.value", -1e308),
     ("by.worker.metrics.ess_sequence.se", -1e308), ("distribution.tokens", 10**400)],
)  # fmt: skip
def test_known_extreme_numbers_give_a_page_or_one_sentence(
    ending: str, value: float, saved: tuple[Path, dict[str, Any], dict[str, list[tuple[str, Place]]]]
) -> None:
    folder, every, places = saved
    shapes = [shape for shape in places if shape.endswith(ending)]
    assert shapes
    for verb, place in (places[shape][0] for shape in shapes):
        check_report(folder, every[verb], [place], value)


@pytest.mark.parametrize("digits", [5, 9])
def test_rounding_matches_decimal_text(digits: int) -> None:
    rng = np.random.default_rng(0)
    halves = (rng.integers(10 ** (digits - 1), 10**digits, 2000) + 0.5) * 10.0 ** rng.integers(-25, 25, 2000)
    special = [0.0, -0.0, 5e-324, 1e300, -1e300, 999_999_999.5, 99_999.5, 1e8, 1e9, 1e22, 1e23, 0.5, -2.5]
    usual = rng.standard_normal(5000) * 10.0 ** rng.integers(-30, 30, 5000)
    values = np.concatenate([halves, special, usual, rng.integers(0, 10**12, 2000).astype(np.float64)])
    expected = np.array([float(f"{value:.{digits}g}") for value in values.tolist()])
    np.testing.assert_array_equal(round_significant(values, digits).view(np.int64), expected.view(np.int64))
