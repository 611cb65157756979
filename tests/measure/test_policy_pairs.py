"""Every metric for each pair of policies, in tables, rules and comparisons."""

import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.measure.columns import PAIRS
from mismatchctl.measure.metrics.evaluation import pair_metrics
from mismatchctl.measure.metrics.registry import MISMATCH_METRICS, SPREAD_METRICS
from tests.cli import command

EVERY = {metric.key for metric in (*MISMATCH_METRICS, *SPREAD_METRICS)}
"""Columns of any dump."""
RNG = np.random.default_rng(3)
LENGTHS = [5, 30, 12, 0, 44, 9, 21, 17]


def columns(*names: str, lack: tuple[int, ...] = ()) -> dict[str, list[list[float] | None]]:
    """Make log-probs with errors around one truth. The named sequences have no reference."""
    truth = [-RNG.exponential(1.0, n) for n in LENGTHS]
    noise = {"rollout": 0.05, "train": 0.01, "current": 0.1, "reference": 0.0}
    return {
        f"{name}_log_probs": [
            None
            if name == "reference" and at in lack
            else np.minimum(own + RNG.normal(0, noise[name], len(own)), 0).tolist()
            for at, own in enumerate(truth)
        ]
        for name in names
    }


def dump(path: Path, found: dict[str, list[list[float] | None]], **more: list[object]) -> str:
    pq.write_table(pa.table({**found, **more}), path)
    return str(path)


def flat(found: dict[str, list[list[float] | None]], name: str, keep: list[int]) -> np.ndarray:
    return np.concatenate([np.array(found[f"{name}_log_probs"][at] or []) for at in keep])


def test_each_pair_has_every_metric(tmp_path: Path) -> None:
    found = columns("rollout", "train", "current", "reference")
    metrics = analyze([dump(tmp_path / "a.parquet", found)]).runs["a"].overall.metrics
    every = list(range(len(LENGTHS)))
    for pair in PAIRS[1:]:
        assert {metric.key for metric in pair_metrics(pair)} <= metrics.keys()
        x = flat(found, pair.policy, every) - flat(found, pair.reference, every)
        assert metrics[pair.key("k3")].value == pytest.approx(np.mean(np.expm1(x) - x), rel=1e-9)
        assert metrics[pair.key("ratio_mean")].value == pytest.approx(np.exp(x).mean(), rel=1e-12)
    assert len(metrics) == len(EVERY) + sum(len(pair_metrics(pair)) for pair in PAIRS[1:])


def test_columns_determine_the_policy_pairs(tmp_path: Path) -> None:
    found = columns("rollout", "train")
    metrics = analyze([dump(tmp_path / "a.parquet", found)]).runs["a"].overall.metrics
    assert metrics.keys() == EVERY


def test_unscored_sequences_are_excluded_from_their_pairs(tmp_path: Path) -> None:
    """`score --worst` leaves some sequences without a score. The mismatch still uses all sequences."""
    found = columns("rollout", "train", "reference", lack=(1, 3, 4))
    run = analyze([dump(tmp_path / "a.parquet", found)]).runs["a"]
    metrics, keep = run.overall.metrics, [0, 2, 5, 6, 7]
    for name in ("rollout", "train"):
        x = flat(found, name, keep) - flat(found, "reference", keep)
        assert metrics[f"{name}_reference_k2"].value == pytest.approx(np.mean(x * x) / 2, rel=1e-12)
    gap = flat(found, "train", keep) - flat(found, "rollout", keep)
    own = flat(found, "rollout", keep) - flat(found, "reference", keep)
    assert metrics["share_rollout"].value == pytest.approx(-(own * gap).sum() / (gap * gap).sum(), rel=1e-9)
    assert metrics["tokens"].value == sum(LENGTHS)
    assert run.sides is not None
    assert run.sides.rollout_share.value == pytest.approx(metrics["share_rollout"].value, rel=1e-9)


def test_shares_of_pairs_sum_to_one(tmp_path: Path) -> None:
    found = columns("rollout", "train", "current", "reference")
    metrics = analyze([dump(tmp_path / "a.parquet", found)]).runs["a"].overall.metrics
    for one, other in (("total_share_mismatch", "total_share_drift"), ("share_rollout", "share_train")):
        assert (metrics[one].value or 0) + (metrics[other].value or 0) == pytest.approx(1, rel=1e-12)
    together = sum((1, -1, -1)[at] * (metrics[key].value or 0) for at, key in enumerate(("total_k3", "k3", "drift_k3")))
    assert metrics["total_k3_together"].value == pytest.approx(together, rel=1e-9)


def invoke(*arguments: str, code: int = 0) -> str:
    done = command.run(*arguments, code=code)
    return done.stdout if code == 0 else done.output


def test_gate_rules_name_pairs(tmp_path: Path) -> None:
    path = dump(tmp_path / "a.parquet", columns("rollout", "train", "current", "reference"))
    text = invoke("gate", path, "--rule", "rollout_reference_k3:max=1e-6", "--json", code=3)
    (check,) = (each for each in json.loads(text)["checks"] if each["rule"].startswith("rollout_reference_k3"))
    assert check["outcome"] == "failed"
    assert check["value"] > 1e-4
    invoke("gate", path, "--rule", "train_reference_k3:max=0.01")
    invoke(
        "gate",
        path,
        "--rule",
        "ois:min=0.9,max=1.1",
        "--rule",
        "total_k3:max=1",
    )


def test_missing_pairs_are_not_judged(tmp_path: Path) -> None:
    path = dump(tmp_path / "a.parquet", columns("rollout", "train"))
    assert "rollout_reference_k3 is missing" in invoke("gate", path, "--rule", "rollout_reference_k3:max=1", code=4)


def test_pairs_are_gated_against_a_baseline(tmp_path: Path) -> None:
    path = dump(tmp_path / "a.parquet", columns("rollout", "train", "reference"))
    baseline = str(tmp_path / "baseline.json")
    rule = "rollout_reference_k3:increase=20%"
    invoke("gate", path, "--rule", rule, "--save-baseline", baseline, "--accept")
    invoke("gate", path, "--rule", rule, "--baseline", baseline)


@pytest.mark.slow
def test_tables_and_comparisons_show_pairs(tmp_path: Path) -> None:
    steps: list[object] = [0, 0, 0, 0, 1, 1, 1, 1]
    paths = [
        dump(tmp_path / f"{name}.parquet", columns("rollout", "train", "current", "reference"), step=steps)
        for name in "ab"
    ]
    text = invoke("analyze", paths[0], "-v")
    for words in ("rollout's error: K3", "trainer's error: K3", "mismatch + drift: K3", "drift: K3"):
        assert words in text
    found = json.loads(invoke("compare", *paths, "--json"))
    assert "rollout_reference_k3" in json.dumps(found)
    page = tmp_path / "report.html"
    invoke("analyze", paths[0], "--html", str(page), "--quiet")
    assert "The rollout" in page.read_text()
    assert "rollout&#39;s error" in page.read_text()


def test_temperature_shifts_logits_by_probability(tmp_path: Path) -> None:
    """A temperature on one side shifts likely tokens up and unlikely ones down, so each bin has its sign."""
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2.5, (4000, 16))
    rollout, train = (
        (z := logits * slope) - np.log(np.exp(z).sum(axis=1, keepdims=True)) for slope in (1.0, 1.1)
    )  # fmt: skip
    tokens = np.array([rng.choice(16, p=np.exp(row)) for row in rollout])
    q, p = (values[np.arange(4000), tokens] for values in (rollout, train))
    cut = np.arange(0, 4001, 50)
    rows = {
        f"{name}_log_probs": [values[a:b].tolist() for a, b in itertools.pairwise(cut)]
        for name, values in (("rollout", q), ("train", p))
    }
    run = analyze([dump(tmp_path / "a.parquet", rows)]).runs["a"]
    assert run.overall.metrics["logit_shift"].value == pytest.approx((p - q).sum() / (1 - np.exp(q)).sum(), rel=1e-9)
    found = run.breakdowns["surprisal"]
    assert found.logit_shift is not None and found.logit_shift_se is not None
    signs = []
    for low, high, shift, se in zip(found.low, found.high, found.logit_shift, found.logit_shift_se, strict=True):
        inside = (-q >= low) & (-q < (high or np.inf))
        assert shift == pytest.approx((p - q)[inside].sum() / (1 - np.exp(q[inside])).sum(), rel=1e-6)
        if se is not None and abs(shift) > 4 * se:
            signs.append(np.sign(shift))
    assert signs[0] == 1 and signs[-1] == -1
    assert run.breakdowns["position"].logit_shift is None
    invoke("analyze", str(tmp_path / "a.parquet"), "--html", str(tmp_path / "page.html"), "--quiet")
    page = (tmp_path / "page.html").read_text()
    assert page.count("shift of the sampled logit") >= 2  # the tables of two kinds of bins
