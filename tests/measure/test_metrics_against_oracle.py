"""Every value, standard error and status of `analyze` on random ragged dumps, compared with the oracle."""

import decimal
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.corrections.model import Correction
from mismatchctl.measure.columns import PAIRS
from mismatchctl.measure.kernels.kernel import Kernel
from mismatchctl.measure.metrics.evaluation import (
    METRICS_NOT_BY_STEP,
    METRICS_WITH_GROUP_ERRORS,
    OTHER_METRICS_WITH_ERRORS,
    REPEATED_METRICS,
    other_metrics,
)
from mismatchctl.measure.metrics.registry import MISMATCH_METRICS, correction_metrics
from mismatchctl.results.model import Groups, OverallMetrics, RunResult, Series, Value
from tests.factories.random_dumps import Files, Rows, Shape, corrections, make_rows, shapes, write
from tests.oracles import metrics as oracle
from tests.oracles.corrections import Applied, apply, correction_truths
from tests.oracles.estimates import CONTEXT, Truth

Expected = list[dict[str, Truth]]
VALUE_DIGITS, OTHER_DIGITS, CORRECTION_DIGITS, SE_DIGITS = 5e-9, 5e-5, 5e-7, 5e-3
"""Relative error of series over groups, which are stored with 9 digits (standard errors with 3)."""
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("row_groups_apart")]
MANY = settings(
    derandomize=True,
    max_examples=12,
    phases=[Phase.explicit, Phase.generate],  # shrinking a seed is useless
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(autouse=True)
def _precisely() -> Iterator[None]:
    with decimal.localcontext(CONTEXT):
        yield


def check_value(truth: Truth, value: float | None, place: str, digits: float = 0.0) -> None:
    """Compare to 1e-9 relative, to the rounding error of float64 sums, or to the width of a bin."""
    if value is None and truth.value is not None and not truth.slack().is_finite():
        return
    if truth.value is None:
        assert value is None, f"{place}: {value}, should be undefined"
        return
    assert value is not None, f"{place}: undefined, should be {truth.value:.12g}"
    assert math.isfinite(value), place
    off = abs(Decimal(value) - truth.value)
    allowed = Decimal(truth.accuracy + digits) * abs(truth.value)
    if off > allowed:
        allowed += truth.slack()
    assert off <= allowed, f"{place}: {value!r}, should be {truth.value:.17g} within {allowed:.2g}"


def check_se(truth: Truth, se: float | None, place: str, digits: float = 0.0) -> None:
    """Compare standard errors. A value without an estimate or with a single cluster has none."""
    expected = truth.se if truth.value is not None else None
    if expected is None:
        assert se is None, f"{place}: se {se}, should have none"
        return
    if se is None:
        assert truth.estimate is not None
        assert not truth.estimate.se_slack().is_finite(), f"{place}: no se, should be {expected:.12g}"
        return
    off, allowed = abs(Decimal(se) - expected), Decimal(1e-9 + digits) * expected
    if off > allowed:
        assert truth.estimate is not None
        allowed += truth.estimate.se_slack()
    assert off <= allowed, f"{place}: se {se!r}, should be {expected:.17g} within {allowed:.2g}"


def check_status(truth: Truth, status: str, undefined: str, place: str) -> None:
    assert (status == "ok") == (truth.value is not None) or not truth.slack().is_finite(), f"{place}: {status}"
    assert status in ("ok", undefined, "no valid token"), f"{place}: {status}"


def truths(
    rows: Rows, applied: Mapping[str, Sequence[Applied]], given: Sequence[Correction], has: AbstractSet[str]
) -> Expected:
    """Return the mismatch of each pair of policies and each correction, for some sequences."""
    metrics = oracle.mismatch(rows)
    for pair in PAIRS[1:]:
        if {*pair.policies} - {"rollout", "train"} <= has:
            scored = [row for row in rows if {*pair.policies} <= row.keys()]
            own = oracle.mismatch(scored, *pair.policies)
            metrics |= {pair.key(key): truth for key, truth in own.items() if key not in oracle.COUNTS}
    metrics |= oracle.splits(rows, has) | oracle.spread(rows)
    metrics |= oracle.rewards(rows) if "reward" in has else {}
    return [metrics, *(correction_truths(c, rows, applied[c.name]) for c in given)]


PLAIN = {metric.key for metric in MISMATCH_METRICS}
WITH_GROUP_ERRORS = METRICS_WITH_GROUP_ERRORS | OTHER_METRICS_WITH_ERRORS | {"reward_mean"}
REASONS = {metric.key: metric.undefined for metric in (*MISMATCH_METRICS, *other_metrics())}


LOSSES = {
    "loss", "loss_change", "loss_clip_fraction", "gradient_cosine", "gradient_norm", "loss_seq_sum", "loss_seq_mean",
}  # fmt: skip
"""Metrics that test_losses.py compares with torch and loops."""


def reasons(given: Sequence[Correction]) -> list[dict[str, str]]:
    return [REASONS, *({m.key: m.undefined for m in correction_metrics(c)} for c in given)]


def check_overall(expected: Expected, found: OverallMetrics, given: Sequence[Correction], place: str) -> None:
    sections: list[Mapping[str, Value]] = [found.metrics, *(found.corrections[c.name] for c in given)]
    for name, truth_of, section, why in zip(["", *found.corrections], expected, sections, reasons(given), strict=True):
        assert truth_of.keys() == section.keys() - LOSSES
        for key, truth in truth_of.items():
            value, where = section[key], f"{place}: {name} {key}"
            check_value(truth, value.value, where)
            check_se(truth, value.se, where)
            check_status(truth, value.status, why[key], where)
            if value.interval is not None:
                assert value.interval[0] <= value.interval[1], where
                assert value.se is not None or key not in PLAIN or within(value.interval, section["abs_diff_max"]), (
                    where
                )


def within(interval: tuple[float, float], most: Value) -> bool:
    return most.value is not None and interval[0] >= 0 and interval[1] <= most.value


def check_group(expected: Expected, found: Groups, index: int, given: Sequence[Correction], place: str) -> None:
    absent = METRICS_NOT_BY_STEP if place.startswith("step ") else REPEATED_METRICS
    sections: list[Mapping[str, Series]] = [found.metrics, *(found.corrections[c.name] for c in given)]
    for name, truth_of, section, why in zip(["", *found.corrections], expected, sections, reasons(given), strict=True):
        assert truth_of.keys() - absent == section.keys() - LOSSES
        for key in section.keys() - LOSSES:
            truth = truth_of[key]
            series, where = section[key], f"{place}: {name} {key}"
            digits = CORRECTION_DIGITS if name else VALUE_DIGITS if key in PLAIN else OTHER_DIGITS
            check_value(truth, series.value[index], where, digits)
            if (name or key not in PLAIN) and key not in WITH_GROUP_ERRORS:
                assert series.se is None, where
            else:
                check_se(truth, series.se and series.se[index], where, SE_DIGITS)
            check_status(truth, series.status_at(index), why[key], where)


def check_run(rows: Rows, given: Sequence[Correction], run: RunResult, by: Sequence[str] = ()) -> None:
    labels = list(dict.fromkeys(row.get("step") for row in rows))
    assert sorted(labels, key=str) == sorted(run.groups.labels, key=str)
    applied: dict[str, list[Any]] = {c.name: [None] * len(rows) for c in given}
    for step in labels:
        places = [i for i, row in enumerate(rows) if row.get("step") == step]
        group = [rows[i] for i in places]
        for c in given:
            for i, own in zip(places, apply(c, group), strict=True):
                applied[c.name][i] = own

    has = {name for name in ("current", "reference", "reward") if any(row.get(name) is not None for row in rows)}

    def part(places: Sequence[int]) -> Expected:
        parts = {name: [own[i] for i in places] for name, own in applied.items()}
        return truths([rows[i] for i in places], parts, given, has)

    check_overall(part(range(len(rows))), run.overall, given, "overall")
    for column, groups in (("step", run.groups), *((c, run.by[c]) for c in by)):
        for index, label in enumerate(groups.labels):
            places = [i for i, row in enumerate(rows) if row.get(column) == label]
            assert places
            check_group(part(places), groups, index, given, f"{column} {label}")


@st.composite
def dumps(draw: st.DrawFn) -> tuple[Shape, list[Correction]]:
    shape = draw(shapes())
    return shape, [draw(corrections(shape, name)) for name in ("first", "second")]


def agrees(shape: Shape, given: Sequence[Correction]) -> None:
    rows = make_rows(shape)
    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder) / "a", shape.row_group, shape.float32, shape.mask_type)
        write(rows, files, [len(rows) // shape.files] * (shape.files - 1))
        result = analyze([str(files.folder)], given, by=["worker"], threads=1)
    check_run(rows, given, result.runs["a"], ["worker"])


@MANY
@given(dumps())
def test_every_number_matches_the_oracle(dump: tuple[Shape, list[Correction]]) -> None:
    agrees(*dump)


@settings(MANY, max_examples=5)
@given(dumps())
def test_other_kernels_match_the_oracle(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, dump: tuple[Shape, list[Correction]]
) -> None:
    monkeypatch.setattr("mismatchctl.api.analyze.analyze.choose_kernel", lambda *_: kernel)
    agrees(*dump)


def test_constants_leave_only_rounding(tmp_path: Path) -> None:
    """With one log ratio everywhere, metrics that divide by its variance are undefined."""
    for seed in range(8):
        rows = make_rows(Shape(seed, sequences=11, longest=13, flavours=("stuck",), current="none"))
        run = analyze([str(write(rows, Files(tmp_path / str(seed) / "a")))]).runs["a"]
        check_run(rows, [], run)
        undefined = {key for key, value in run.overall.metrics.items() if value.value is None}
        assert undefined == {"prob_corr", "autocorr_lag1", "inflation", "khat_token", "khat_sequence"}
        assert run.overall.metrics["prob_diff_std"].value == 0.0
