"""An error that concerns all rows names their common fault, and tokens without a value can be masked."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.data.problems import Problems
from mismatchctl.data.reader import open_dump
from mismatchctl.errors import DataError
from tests.cli.command import run

Lists = list[list[float]]
Change = Callable[[Lists, Lists], tuple[Lists, Lists]]
ROWS, LENGTH = 64, 9


def columns(seed: int = 0) -> tuple[Lists, Lists]:
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(size=(ROWS, LENGTH)) - 0.01
    train = np.minimum(rollout + 0.01 * rng.normal(size=rollout.shape), 0)
    return rollout.tolist(), train.tolist()


def write(path: Path, change: Change, groups: int = ROWS) -> Path:
    rollout, train = change(*columns())
    pq.write_table(pa.table({"rollout_log_probs": rollout, "train_log_probs": train}), path, row_group_size=groups)
    return path


def error_of(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        dump = open_dump([str(path)])
        for unit in dump.units:
            list(dump.read(unit, Problems()))
    return str(caught.value)


def exp(values: Lists) -> Lists:
    return np.exp(values).tolist()


def minus(values: Lists) -> Lists:
    return (-np.array(values)).tolist()


COMMON = "in every row, train_log_probs has one element more than rollout_log_probs; the extra element is the"


@pytest.mark.parametrize("groups", [ROWS, 7])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda r, t: (exp(r), exp(t)),
            "all 64 rows contain values between 0 and 1: these look like probabilities; store",
        ),
        (lambda r, t: (minus(r), minus(t)), "these look like negative log-probs; store them with the opposite sign"),
        (
            lambda r, t: ([[*x[:-1], np.nan] for x in r], t),
            "all 64 rows contain NaN in valid tokens; check whether response_mask is 1 on padding",
        ),
        (lambda r, t: ([[*x[:-1], None] for x in r], t), "all 64 rows contain nulls in valid tokens"),
        (lambda r, t: ([[*x[:-1], -np.inf] for x in r], t), "all 64 rows contain infinite values in valid tokens"),
        (lambda r, t: (r, [[*x, -1.0] for x in t]), f"{COMMON} last; remove the last element from train_log_probs"),
        (lambda r, t: (r, [[-1.0, *x] for x in t]), f"{COMMON} first; remove the first element from train_log_probs"),
        (lambda r, t: ([[-1.0, -1.0, *x] for x in r], t), "rollout_log_probs has 2 elements more than train_log_probs"),
    ],
)
def test_faults_of_all_rows_are_reported_for_the_column(
    change: Change, words: str, groups: int, tmp_path: Path
) -> None:
    found = error_of(write(tmp_path / "a.parquet", change, groups))
    assert words in found
    assert "skip" not in found
    assert "row 0" not in found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r, t: (exp(r[:30]) + r[30:], t), "row 0, column rollout_log_probs: log-probs must not be above 0"),
        (
            lambda r, t: (r, [[*x, *[-1.0] * (n % 3)] for n, x in enumerate(t)]),
            "row 1, column train_log_probs: expected ",
        ),
        (
            lambda r, t: (r, [[*x, *[-1.0] * (n % 2)] for n, x in enumerate(t)]),
            "in 32 rows of unequal length, train_log_probs is always 1 element longer and the lists agree from the",
        ),
        (
            lambda r, t: (r, [*t[:-1], [*t[-1], -1.0]]),
            "row 63, column train_log_probs: expected 9 elements as in rollout_log_probs, found 10",
        ),
        (lambda r, t: (r, [[*t[0][:-1], np.nan], *t[1:]]), "leave these tokens out with on_bad='mask'"),
    ],
)
def test_faults_of_some_rows_name_the_first(change: Change, words: str, tmp_path: Path) -> None:
    found = error_of(write(tmp_path / "a.parquet", change))
    assert words in found
    assert "skip" in found


def missing(rollout: Lists, train: Lists) -> tuple[Lists, Lists]:
    """Remove a value in every third row, at a different token in each."""
    for number in range(0, ROWS, 3):
        rollout[number][number % LENGTH] = None if number % 2 else float("nan")
    return rollout, train


@pytest.mark.parametrize("groups", [ROWS, 7])
def test_missing_values_can_be_masked_and_are_counted(groups: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", missing, groups)
    gone = len(range(0, ROWS, 3))
    dump, problems = open_dump([str(path)], on_bad="mask"), Problems()
    batches = [batch for unit in dump.units for batch in dump.read(unit, problems)]
    assert sum(len(batch.rollout) for batch in batches) == ROWS * LENGTH - gone
    assert sum(len(batch) for batch in batches) == ROWS
    assert problems.masked == {("a.parquet", "rollout_log_probs"): gone} or list(problems.masked.values()) == [gone]
    assert not problems.counts
    shown = run("analyze", path, "--on-bad", "mask", "--json", code=0)
    (left_out,) = json.loads(shown.stdout)["provenance"]["left_out"]
    assert (left_out["reason"], left_out["count"], left_out["example"]) == ("masked tokens", gone, "rollout_log_probs")
    assert f"{gone} tokens masked" in run("analyze", path, "--on-bad", "mask", code=0).stdout


def test_masking_missing_values_equals_a_mask(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", missing)
    table = pq.read_table(path)
    mask = [[value is not None and value == value for value in row] for row in table["rollout_log_probs"].to_pylist()]
    pq.write_table(table.append_column("response_mask", pa.array(mask)), tmp_path / "b.parquet")
    found = [
        json.loads(run("analyze", place, *options, "--json", code=0).stdout)["runs"].popitem()[1]["overall"]["metrics"]
        for place, options in ((path, ["--on-bad", "mask"]), (tmp_path / "b.parquet", []))
    ]
    assert found[0] == found[1]


def test_other_faults_stop_despite_masking(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", lambda r, t: ([[0.5, *r[0][1:]], *r[1:]], t))
    assert "log-probs must not be above 0" in run("analyze", path, "--on-bad", "mask", code=4).stderr
