"""The classes that `compare` returns, and functions that describe a comparison."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from mismatchctl.core.formatting import INTERVAL_LEVEL, format_count, format_label, format_number
from mismatchctl.core.validation import FiniteModel
from mismatchctl.corrections.model import Correction
from mismatchctl.io import __version__
from mismatchctl.results.growth import Growth, Label
from mismatchctl.results.model import Breakdown, Distribution, Value
from mismatchctl.results.summary import Status, percent
from mismatchctl.results.views import (
    HEADLINE_METRICS,
    TableText,
    View,
    format_cell,
    format_value,
    interval_bounds,
    make_frame,
)
from mismatchctl.stats.samples import find_metric

if TYPE_CHECKING:
    import polars as pl

FORMAT = 5
"""Version of the JSON of a Comparison. It increases if a key is removed or changes its meaning."""
CONFIDENCE = INTERVAL_LEVEL
"""Confidence level of all intervals. A change is significant if its adjusted p-value is below 1 - CONFIDENCE."""

Interval = tuple[float, float]
ValuePair = tuple[float | None, float | None]
"""(value in the reference run, value in the compared run)"""


class Side(FiniteModel):
    """One of the compared runs. `growth` describes how K3 grew over the steps of this run."""

    name: str
    source: str
    kind: Literal["dump", "result"]
    clusters_by: str
    clusters: int
    metrics: dict[str, Value]
    growth: Growth
    distribution: Distribution
    breakdowns: dict[str, Breakdown]


class Change(FiniteModel):
    """The change of one metric from the reference run (`reference`) to the compared run (`other`).

    `difference` is other minus reference, with a 95% `interval` from resampled clusters. `p_alone` is the two-sided
    p-value of this metric. `p` is the same p-value after adjustment for the number of tests. `significant` means that
    `p` is below 0.05. `note` explains why a change is not significant although its interval excludes 0. `relative` is
    the difference divided by the reference run's value, for metrics in nats. `better` is true if the compared run has
    the better value, and null if neither has. `status` is "ok", or why the difference or the interval is null.
    """

    reference: Value
    other: Value
    difference: float | None = None
    interval: Interval | None = None
    p_alone: float | None = None
    p: float | None = None
    significant: bool = False
    note: str = ""
    relative: float | None = None
    relative_interval: Interval | None = None
    better: bool | None = None
    status: str = "ok"


class Contribution(FiniteModel):
    """The contribution of one part of the data to the change of K3.

    A part is a bin, a step, or a value of a `--by` column. A bin contains the tokens with `low` <= position < `high`
    (or another quantity). If `high` is null, there is no upper limit. A step or a value has a `label` instead. `tokens`
    is the part's share of all tokens, and `k3` is its mean K3, each as (reference run, compared run). `mix` is how much
    of the run's change of K3 is due to changed `tokens`, and `level` how much is due to changed `k3`. `se` is the
    standard error of the sum `mix + level`, but of `level` alone for a bin or without cluster tables.
    """

    label: Label = None
    low: float | None = None
    high: float | None = None
    tokens: tuple[float, float]
    k3: ValuePair
    mix: float
    level: float
    se: float | None = None

    @property
    def total(self) -> float:
        return self.mix + self.level


class Carrier(FiniteModel):
    """The part of the data that causes most of the change of K3: adjacent bins, adjacent steps, or column values.

    It causes the share `carried` of the change, although it only has the share `weight` of the reference run's K3. It
    has the share `tokens` of the compared run's tokens.
    """

    low: float | None = None
    high: float | None = None
    labels: list[Label] = Field(default_factory=list)
    carried: float
    weight: float
    tokens: float


class Decomposition(FiniteModel):
    """The change of K3 (`difference`), split among bins of a quantity (such as the position), steps, or column values.

    `level` is the change due to the parts' K3, and `mix` due to their token shares. The largest of `parts` is first.
    """

    quantity: str
    ordered: bool
    difference: float
    mix: float
    level: float
    parts: list[Contribution]
    carrier: Carrier | None = None


class Contrast(FiniteModel):
    """One run compared with the reference run. `paired` describes the clusters that the two runs share.

    `changes` contains the change of each mismatch metric, such as `k3`. `corrections` contains the changes of
    correction metrics, for corrections with the same definition in the two runs. `says` has the summary's lines.
    """

    other: str
    clusters_shared: int
    same_tokens: bool
    paired: str
    changes: dict[str, Change]
    corrections: dict[str, dict[str, Change]] = Field(default_factory=dict)
    decompositions: list[Decomposition]
    says: list[str] = Field(default_factory=list)


class Comparison(View, FiniteModel):
    """Several runs. `sides` contains all runs, and `contrasts` compares each later run with the first run."""

    format: int = FORMAT
    tool: str = "mismatchctl"
    version: str = __version__
    confidence: float = CONFIDENCE
    warnings: list[str] = Field(default_factory=list)
    sides: list[Side]
    corrections: list[Correction] = Field(default_factory=list)
    contrasts: list[Contrast]

    @model_validator(mode="after")
    def _belongs_together(self) -> Comparison:
        if not self.contrasts or [one.other for one in self.contrasts] != [side.name for side in self.sides[1:]]:
            raise ValueError("`contrasts` must compare the first side with each other side, in the order of `sides`")
        if not all("tokens" in side.metrics for side in self.sides):
            raise ValueError("each side must contain the metric tokens")
        return self

    @property
    def reference(self) -> Side:
        """Return the first run."""
        return self.sides[0]

    def side(self, name: str) -> Side:
        """Return the run with this name."""
        return next(side for side in self.sides if side.name == name)

    def to_json(self) -> str:
        """Return JSON without NaN and infinity, as `mismatchctl compare --json` prints it."""
        data = self.model_dump(mode="json")
        return json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False) + "\n"

    def to_polars(self) -> pl.DataFrame:
        """Return one row per compared run, correction and metric. The correction is null for mismatch metrics."""
        rows = [
            {"run": found.other, "correction": correction, "metric": name, "reference": change.reference.value,
             "other": change.other.value, "difference": change.difference, **interval_bounds(change.interval),
             "p": change.p, "significant": change.significant, "note": change.note, "status": change.status}
            for found in self.contrasts
            for correction, changes in ((None, found.changes), *found.corrections.items())
            for name, change in changes.items()
        ]  # fmt: skip
        return make_frame(
            rows, ("String", "run correction metric"), ("Float64", "reference other difference low high p"),
            ("Boolean", "significant"), ("String", "note status"),
        )  # fmt: skip

    def _lines(self) -> list[str]:
        return [f"{found.other} compared with {self.sides[0].name}: {found.says[0]}" for found in self.contrasts]

    def _table(self) -> TableText:
        rows = [
            [found.other, name, format_value(change.reference), format_value(change.other),
             format_cell(change.difference), "yes" if change.significant else "no"]
            for found in self.contrasts
            for name, change in found.changes.items()
            if name in HEADLINE_METRICS
        ]  # fmt: skip
        return ["run", "metric", "reference", "other", "difference", "significant"], rows


UNMEASURED_CHANGE = Change(reference=Value(value=None), other=Value(value=None), status="not measured on both sides")
PRIMARY_METRICS = ("k3", "abs_diff_mean", "ess_token", "ess_sequence")
"""Metrics that decide whether a run is better or worse. The chance of any false alarm in all runs is at most 5%."""
MAIN_METRICS = (
    "k3", "abs_diff_mean", "abs_diff_p99", "abs_diff_max", "ratio_mean", "chi2_token", "ess_token", "ess_sequence",
    "prob_corr", "khat_token", "bitwise_share", "drift_k3",
)  # fmt: skip
"""Metrics that always have a row in the table of changes. Other metrics have a row if they changed significantly."""
MAX_LABELS = 6
"""Sentences of the comparison list at most this number of steps or column values."""
EFFECT_METRICS = ("rejected_tokens", "weight_bounded_high", "weight_bounded_low", "rejected_sequences")
"""Metrics that show whether a correction has an effect. If all are 0 in both runs, the correction is not shown."""
UNCLEAR_RISE = 0.25
"""If a change of K3 is not significant, but its interval includes a rise above 25%, the answer is "unclear"."""
MIN_MIX_SHARE = 0.1
"""The summary mentions the mix (parts with more or fewer tokens) if it causes at least this share of the K3 change."""


def k3_change(contrast: Contrast) -> Change:
    return contrast.changes.get("k3", UNMEASURED_CHANGE)


@dataclass(frozen=True)
class ContrastStatus:
    """The verdict on one run compared with the reference run. `key` is the metric that decides the verdict."""

    status: Status
    word: Literal["worse", "better", "changed", "same", "no significant change", "unclear"]
    key: str = "k3"


def judge_contrast(contrast: Contrast) -> ContrastStatus:
    """Judge by the first significant change of PRIMARY_METRICS. Otherwise, judge by K3 and other metrics."""
    for key in PRIMARY_METRICS:
        change = contrast.changes.get(key, UNMEASURED_CHANGE)
        if change.significant:
            return ContrastStatus("OK", "better", key) if change.better else ContrastStatus("FAIL", "worse", key)
    k3 = k3_change(contrast)
    if k3.difference == 0:
        return ContrastStatus("OK", "same")
    if k3.p is None or k3.note or k3.relative_interval is None or k3.relative_interval[1] > UNCLEAR_RISE:
        return ContrastStatus("CHECK", "unclear")
    if any(change.significant and change.better is False for change in contrast.changes.values()):
        return ContrastStatus("CHECK", "changed")
    return ContrastStatus("OK", "no significant change")


def contrast_headline(contrast: Contrast) -> str:
    """Return the summary: whether the run is worse or better, and by how much."""
    found = judge_contrast(contrast)
    change = contrast.changes.get(found.key, UNMEASURED_CHANGE)
    if change.difference is None:
        return f"cannot compare {metric_title(found.key)}: {change.status}"
    if found.word == "same":
        return f"{metric_title(found.key)} is the same: {format_number(change.reference.value)}"
    size = describe_size(found.key, change)
    if found.word == "changed":
        count = sum(each.significant and each.better is False for each in contrast.changes.values())
        return f"{format_count(count, 'other metric')} got worse, but no main metric did ({size}: not significant)"
    if found.word == "unclear":
        return f"unclear: {size}, {'not tested' if change.p is None else 'not significant'}"
    low, high = change.interval or (0.0, 0.0)
    # K3 of most tokens can change significantly although the interval of the mean K3 contains 0
    why = ", significant for most tokens" if change.significant and low < 0 < high else ""
    return f"{found.word}: {size}{why}"


def describe_size(key: str, change: Change, *, interval: bool = True) -> str:
    """Describe a change, with its interval: `K3 rose 26.5x (95% CI 17.5x to 36.0x)`."""
    title, unit = metric_title(key), find_metric(key).metric.unit
    verb = "rose" if (change.difference or 0) > 0 else "fell"
    if change.relative is None or change.other.value == 0:
        before, after = (format_number(side.value, unit) for side in (change.reference, change.other))
        return f"{title} {verb} from {before} to {after}".replace(" %", "%")
    ends = list(change.relative_interval or ())
    if change.relative >= 1:
        shown = [f"{format_number(value + 1)}x" for value in (change.relative, *ends)]
    elif ends and ends[0] < 0 < ends[1]:
        verb, shown = "changed by", [format_signed_percent(value) for value in (change.relative, *ends)]
    else:
        shown = [percent(abs(value)) for value in (change.relative, *sorted(ends, key=abs))]
    return f"{title} {verb} {shown[0]}" + (f" (95% CI {shown[1]} to {shown[2]})" if ends and interval else "")


def metric_title(key: str) -> str:
    return "K3" if key == "k3" else find_metric(key).metric.title


def list_main_metrics(contrast: Contrast) -> list[str]:
    main = [key for key in MAIN_METRICS if key in contrast.changes]
    return [*main, *(key for key, change in contrast.changes.items() if change.significant and key not in main)]


def list_changed_metrics(contrast: Contrast) -> list[str]:
    order = dict.fromkeys([*PRIMARY_METRICS, *MAIN_METRICS, *contrast.changes])
    return [key for key in order if key in contrast.changes and contrast.changes[key].significant]


def active_corrections(contrast: Contrast) -> Iterator[tuple[str, Mapping[str, Change]]]:
    for name, changes in contrast.corrections.items():
        effects = (change for key, change in changes.items() if key in EFFECT_METRICS)
        if any(change.reference.value or change.other.value for change in effects):
            yield name, changes


def change_label(change: Change) -> str:
    if change.difference == 0:
        return "same"
    if change.p is None:
        return ""
    if not change.significant:
        return "n.s.*" if change.note else "n.s."
    return "changed" if change.better is None else "better" if change.better else "worse"


def contrast_details(contrast: Contrast) -> list[str]:
    more = [*describe_carriers(contrast), *describe_mix(contrast)] if k3_change(contrast).significant else []
    return [*describe_doubt(contrast), contrast.paired, *more]


def describe_doubt(contrast: Contrast) -> list[str]:
    """Explain why the change of K3 is uncertain: its test and its interval disagree, or K3 was not tested."""
    k3 = k3_change(contrast)
    return [k3.note] if k3.note else [k3.status] if k3.p is None and k3.status != "ok" else []


def describe_carriers(contrast: Contrast) -> Iterator[str]:
    found = [(d, d.carrier) for d in contrast.decompositions if d.carrier is not None]
    for decomposition, carrier in sorted(found, key=lambda pair: -pair[1].carried / max(pair[1].weight, 1e-9)):
        is_one = len(carrier.labels) == 1
        own = f"{percent(carrier.weight)} of the reference's K3 and " if k3_change(contrast).reference.value else ""
        yield (
            f"{format_carrier(decomposition, carrier)} {'causes' if is_one else 'cause'} "
            f"{carrier.carried:.0%} of the change, with {own}{percent(carrier.tokens)} of the tokens"
        )


def format_carrier(decomposition: Decomposition, carrier: Carrier) -> str:
    """Name the part of the data that causes a change: `positions from 512`, `steps 4 to 8`, `worker 3`."""
    if not carrier.labels:
        nouns = {"surprisal": "probabilities", "position": "positions", "length": "response lengths"}
        # the lowest and the highest bound of all bins are not shown, because no tokens are beyond them
        parts = sorted(decomposition.parts, key=lambda part: part.low or 0.0)
        low = 0.0 if carrier.low == (parts[0].low or 0.0) else carrier.low or 0.0
        high = None if carrier.high == parts[-1].high else carrier.high
        noun = nouns.get(decomposition.quantity, decomposition.quantity)
        return f"{noun} {_format_bounds(decomposition.quantity, low, high)}"
    names = [format_label(one) for one in carrier.labels]
    many = "s" if len(names) > 1 else ""
    if decomposition.ordered and len(names) > 2:
        return f"{decomposition.quantity}s {names[0]} to {names[-1]}"
    shown = ", ".join(names[:MAX_LABELS]) + (f" and {len(names) - MAX_LABELS} more" * (len(names) > MAX_LABELS))
    return f"{decomposition.quantity}{many if decomposition.ordered else ''} {shown}"


def format_part(decomposition: Decomposition, part: Contribution) -> str:
    if part.low is None:
        return f"{decomposition.quantity} {format_label(part.label)}"
    nouns = {"surprisal": "rollout probability", "length": "response length"}
    noun = nouns.get(decomposition.quantity, decomposition.quantity)
    return f"{noun} {_format_bounds(decomposition.quantity, part.low, part.high)}"


def _format_bounds(quantity: str, low: float, high: float | None) -> str:
    """Format the bounds of a bin, such as `512 to 767`. Surprisals are converted to probabilities."""
    if quantity == "surprisal":
        bottom, top = None if high is None else format_number(math.exp(-high)), format_number(math.exp(-low))
        if low == 0:
            return f"above {bottom}"
        return f"below {top}" if bottom is None else f"{bottom} to {top}"
    first, last = max(math.ceil(low), 1), None if high is None else math.ceil(high) - 1
    if last is None:
        return f"from {first:,}"
    return f"{first:,}" if last <= first else f"{first:,} to {last:,}"


def describe_mix(contrast: Contrast) -> Iterator[str]:
    most = max(contrast.decompositions, key=lambda found: abs(found.mix), default=None)
    if most is not None and abs(most.mix) >= MIN_MIX_SHARE * abs(most.difference) > 0:
        yield (
            f"by {most.quantity.replace('surprisal', 'probability')}: {format_signed(most.mix)} of the change comes "
            f"from more or fewer tokens (mix), {format_signed(most.level)} from larger or smaller K3 (level)"
        )


def describe_method(comparison: Comparison) -> str:
    level = f"{100 * (1 - comparison.confidence):.0f}%"
    several = " of all comparisons" if len(comparison.contrasts) > 1 else ""
    return (
        f"The {100 * comparison.confidence:.0f}% intervals come from resampled clusters, and the p-values from "
        f"permutation tests of clusters. P-values are adjusted for multiple tests. The {len(PRIMARY_METRICS)} main "
        f"metrics{several} have a family-wise error rate of {level} (Holm), and all other metrics a "
        f"false-discovery rate of {level} (Benjamini and Hochberg). Intervals are not adjusted."
    )


def format_signed(value: float | None) -> str:
    text = format_number(value)
    return text if value is None or value <= 0 else f"+{text}"


def format_signed_percent(value: float | None) -> str:
    """Format a relative difference as `+50%`, or as `12x` if the new value is at least 10 times the old value."""
    if value is None:
        return format_number(None)
    return f"{format_number(value + 1)}x" if value >= 9 else f"{'+' if value > 0 else ''}{percent(value)}"
