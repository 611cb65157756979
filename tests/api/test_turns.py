"""`--by turn`: the turns of a response, and metrics per turn."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.errors import ConfigError
from tests.cli import command

TURNS: list[list[tuple[int, int]]] = [[(3, 2), (4, 1)], [(6, 0)], [], [(2, 3), (5, 1), (7, 0)], [(1, 1), (1, 0)]]
"""Valid tokens of each turn of a response, and the masked tokens after the turn."""


def columns(**more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(4)
    lengths = [sum(a + b for a, b in turns) for turns in TURNS]
    rollout = [-rng.exponential(1.0, n) for n in lengths]
    train = [np.minimum(row + rng.normal(0, 0.1, n), 0) for row, n in zip(rollout, lengths, strict=True)]
    mask = [[bool(v) for a, b in turns for v in [1] * a + [0] * b] for turns in TURNS]
    return {
        "rollout_log_probs": rollout,
        "train_log_probs": train,
        "response_mask": mask,
        "step": [0, 0, 0, 1, 1],
        **more,
    }


def expected(found: dict[str, Any], number: int, steps: tuple[int, ...] = (0, 1)) -> list[np.ndarray]:
    """Return the log ratios of turn number `turn`, from each response that has this turn."""
    parts = []
    for at, turns in enumerate(TURNS):
        if len(turns) >= number and found["step"][at] in steps:
            start = sum(a + b for a, b in turns[: number - 1])
            stop = start + turns[number - 1][0]
            parts.append((found["train_log_probs"][at] - found["rollout_log_probs"][at])[start:stop])
    return parts


def write(path: Path, found: dict[str, Any], layout: str = "wide") -> str:
    if layout == "long":
        places = [(at, place) for at, row in enumerate(found["rollout_log_probs"]) for place in range(len(row))]
        ids = {"sequence_id": [at for at, _ in places], "position": [place for _, place in places]}
        found = {
            name: [values[at] if np.isscalar(values[at]) else values[at][place] for at, place in places]
            for name, values in found.items()
        } | ids
    pq.write_table(pa.table(found), path, row_group_size=2 if layout == "wide" else None)
    return str(path)


def check(path: str, found: dict[str, Any], labels: list[Any]) -> None:
    run = analyze([path], by=["turn"]).runs["a"]
    groups = run.by["turn"]
    assert groups.labels == labels
    for index in range(len(labels)):
        parts = expected(found, index + 1)
        x = np.concatenate(parts)
        metrics = {key: series.value[index] for key, series in groups.metrics.items()}
        assert metrics["tokens"] == len(x) and metrics["sequences"] == len(parts)
        assert metrics["k3"] == pytest.approx(np.mean(np.expm1(x) - x), rel=1e-8)
        assert metrics["log_ppl_abs_diff"] == pytest.approx(np.mean([abs(part.mean()) for part in parts]), rel=1e-8)
        assert metrics["beyond_1_1"] == pytest.approx(np.mean(np.abs(x) > np.log(1.1)), rel=1e-4)
        sums = np.array([[len(part), (np.expm1(part) - part).sum()] for part in parts])  # a cluster is a response
        scatter = (
            ((sums[:, 1] - np.mean(np.expm1(x) - x) * sums[:, 0]) ** 2).sum() * len(parts) / max(len(parts) - 1, 1)
        )
        assert groups.metrics["k3"].se is not None
        assert (groups.metrics["k3"].se[index] is None) == (len(parts) == 1)
        assert len(parts) == 1 or groups.metrics["k3"].se[index] == pytest.approx(np.sqrt(scatter) / len(x), rel=5e-3)
    assert sum(groups.metrics["tokens"].value) == run.overall.metrics["tokens"].value
    assert run.overall.metrics == analyze([path]).runs["a"].overall.metrics


@pytest.mark.parametrize("layout", ["wide", "long"])
def test_masked_tokens_separate_turns(tmp_path: Path, layout: str) -> None:
    found = columns()
    check(write(tmp_path / "a.parquet", found, layout), found, [1, 2, 3])


@pytest.mark.parametrize("layout", ["wide", "long"])
def test_token_columns_define_turns(tmp_path: Path, layout: str) -> None:
    turn = [[10 * (at + 1) for at, (a, b) in enumerate(turns) for _ in range(a + b)] for turns in TURNS]
    found = columns(turn=turn)
    for row in found["response_mask"]:
        row[:] = [True] * len(row)
    joined = [[(a + b, 0) for a, b in turns] for turns in TURNS]
    path = write(tmp_path / "a.parquet", found, layout)
    groups = analyze([path], by=["turn"]).runs["a"].by["turn"]
    assert groups.labels == [10, 20, 30]
    sizes = [sum(turns[at][0] for turns in joined if len(turns) > at) for at in range(3)]
    assert groups.metrics["tokens"].value == sizes
    assert groups.metrics["sequences"].value == [sum(len(turns) > at for turns in joined) for at in range(3)]


def test_sequence_columns_named_turn_are_breakdowns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", columns(turn=[1, 1, 1, 3, 2]))
    run = analyze([path], by=["turn"]).runs["a"]
    assert run.by["turn"].labels == [1, 2, 3]
    assert run.by["turn"].metrics["sequences"].value == [2, 1, 1]


def test_text_columns_are_refused_as_turns(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"turn contains text .* another name"):
        analyze([write(tmp_path / "a.parquet", columns(turn=["a", "a", "b", "b", "b"]))], by=["turn"])


def test_turns_work_with_other_columns_and_corrections(tmp_path: Path) -> None:
    found = columns(worker=["a", "b", "a", "b", "a"], prompt_id=[0, 0, 1, 1, 2])
    path = write(tmp_path / "a.parquet", found)
    done = command.run("analyze", path, "-c", "token_tis", "--by", "worker", "--by", "turn", "--json", code=0)
    result = json.loads(done.stdout)
    assert result["provenance"]["by"] == ["worker", "turn"]
    by = result["runs"]["a"]["by"]
    assert list(by["worker"]["corrections"]) == ["token_tis"]
    assert by["turn"]["labels"] == [1, 2, 3]
    again = analyze([path], by=["worker", "turn"])
    assert again.runs["a"].by["turn"].metrics["k3"].value == by["turn"]["metrics"]["k3"]["value"]
    page = tmp_path / "page.html"
    command.run("analyze", path, "--by", "turn", "--html", page, "--quiet", code=0)
    assert "By turn" in page.read_text()


def test_rules_and_comparisons_work_by_turn(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", columns())
    done = command.run(
        "gate", path, "--rule", "k3:per=turn,max=1e-9", code=4
    )  # too few responses for a cause, but the turn is named
    assert re.search(r"K3 at most 1e-9 in turn 3 +undecided +0\.0\d+", done.stdout)
    assert "K3 at most 1e-9 in turn 3: the rule needs at least 5 clusters, found 1" in done.stdout
    other = write(tmp_path / "b.parquet", columns())
    command.run("compare", path, other, "--by", "turn", code=0)
    command.run("sweep", path, "--geo", "1.001:1.01:3", "--by", "turn", code=2)
