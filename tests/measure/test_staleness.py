"""Weight versions per sequence or token: the age of tokens, and responses that mix versions."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.results.model import Result
from tests.cli import command

LENGTHS = [5, 30, 12, 0, 44, 9, 1, 17]
ROLLOUT: list[list[int | None] | None] = [
    [3] * 5, [2] * 10 + [3] * 20, [4] * 12, [], [1] * 4 + [2] * 30 + [4] * 10, None, [3], [None] * 9 + [4] * 8,
]  # fmt: skip
"""Version of each token. One sequence has no versions, and another has none at its start."""
TRAIN = [4, 4, 4, 4, 5, 5, 5, 5]
MASKED = {(1, at) for at in range(10)} | {(4, 43)}


def dump(path: Path, layout: str = "wide", **more: Any) -> str:
    rng = np.random.default_rng(1)
    rollout = [-rng.exponential(1.0, n) for n in LENGTHS]
    train = [np.minimum(row + rng.normal(0, 0.05, len(row)), 0) for row in rollout]
    mask = [[(at, place) not in MASKED for place in range(n)] for at, n in enumerate(LENGTHS)]
    columns: dict[str, Any] = {
        "rollout_log_probs": rollout, "train_log_probs": train, "response_mask": mask, "rollout_version": ROLLOUT,
    }  # fmt: skip
    if layout == "wide":
        columns |= {"train_version": TRAIN, "step": [0, 0, 0, 0, 1, 1, 1, 1], **more}
    else:
        places = [(at, place) for at, n in enumerate(LENGTHS) for place in range(n)]
        columns = {
            name: [None if values[at] is None else values[at][place] for at, place in places]
            for name, values in columns.items()
        }
        columns |= {"train_version": [TRAIN[at] for at, _ in places], "step": [at // 4 for at, _ in places]}
        columns |= {"sequence_id": [at for at, _ in places], "position": [place for _, place in places]}
    pq.write_table(pa.table(columns), path, row_group_size=3)
    return str(path)


def expected(sequences: range) -> dict[str, float]:
    lags, mixed = [], []
    for at in sequences:
        versions = ROLLOUT[at] or []
        own = [each for place, each in enumerate(versions) if (at, place) not in MASKED and each is not None]
        lags += [TRAIN[at] - each for each in own]
        mixed += [len(set(own)) > 1] if own else []
    return {
        "staleness": sum(lags) / len(lags), "stale_tokens": sum(lag > 0 for lag in lags) / len(lags),
        "mixed_versions": sum(mixed) / len(mixed),
    }  # fmt: skip


@pytest.mark.parametrize("layout", ["wide", "long"])
def test_tokens_of_several_versions_are_measured(tmp_path: Path, layout: str) -> None:
    run = analyze([dump(tmp_path / "a.parquet", layout)]).runs["a"]
    for key, value in expected(range(8)).items():
        assert run.overall.metrics[key].value == pytest.approx(value, rel=1e-12), key
        for step in (0, 1):
            own = expected(range(4 * step, 4 * step + 4))[key]
            assert run.groups.metrics[key].value[step] == pytest.approx(own, rel=1e-8), key
    assert run.overall.metrics["mixed_versions"].value == 1 / 6  # the mask leaves one version of the second sequence
    lag = run.overall.metrics["staleness"]
    assert lag.se is not None and lag.se > 0


def test_sequence_versions_are_weighted_by_tokens(tmp_path: Path) -> None:
    versions = [1, 2, 3, 4, None, 5, 5, 4]
    (found,) = analyze([dump(tmp_path / "a.parquet", rollout_version=versions)]).runs.values()
    counts = [n - sum((at, place) in MASKED for place in range(n)) for at, n in enumerate(LENGTHS)]
    known = [(n, TRAIN[at] - own) for at, (n, own) in enumerate(zip(counts, versions, strict=True)) if own is not None]
    assert found.overall.metrics["staleness"].value == pytest.approx(
        sum(n * lag for n, lag in known) / sum(n for n, _ in known), rel=1e-12
    )
    assert found.overall.metrics["mixed_versions"].value == 0


def test_dumps_without_versions_have_no_staleness(tmp_path: Path) -> None:
    path = dump(tmp_path / "a.parquet", rollout_version=pa.array([None] * 8, pa.int64()))
    assert "staleness" not in analyze([path]).runs["a"].overall.metrics
    path = dump(tmp_path / "b.parquet", train_version=pa.array([None] * 8, pa.int64()))
    metrics = analyze([path]).runs["b"].overall.metrics
    assert (metrics["staleness"].value, metrics["staleness"].status) == (None, "no token has both versions")
    assert metrics["mixed_versions"].value is not None


def test_rules_tables_and_causes_use_staleness(tmp_path: Path) -> None:
    path = dump(tmp_path / "a.parquet", worker=["a", "b"] * 4)

    def run(*words: str) -> tuple[int, str]:
        done = command.run(*words)
        return done.exit_code, done.stdout if "--json" in words else done.output

    assert run("gate", path, "--rule", "mixed_versions:max=0")[0] == 3
    assert run("gate", path, "--rule", "staleness:max=4")[0] == 0
    code, text = run("analyze", path, "--by", "worker", "--html", str(tmp_path / "a.html"), "--json")
    assert code == 0, text
    (found,) = Result.model_validate(json.loads(text)).runs.values()
    assert found.by["worker"].metrics["staleness"].value[0] is not None
    assert "responses that mix versions" in (tmp_path / "a.html").read_text()
    long = dump(tmp_path / "long.parquet", "long")
    for file in (path, long):
        code, text = run("analyze", file, "--by", "rollout_version", "--json")
        assert code == 0, text
        (found,) = Result.model_validate(json.loads(text)).runs.values()
        assert found.by["rollout_version"].labels == [1, 3, 4, None]  # the oldest version of a valid token
        assert math.isclose(sum(found.by["rollout_version"].metrics["tokens"].value), sum(LENGTHS) - len(MASKED))
