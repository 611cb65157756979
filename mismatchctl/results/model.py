"""The Result model: everything that is read after a measurement, as strict JSON with a published schema."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, model_serializer

from mismatchctl.core.formatting import format_count
from mismatchctl.core.schema import REQUIRED_COLUMNS
from mismatchctl.core.validation import FiniteModel
from mismatchctl.corrections.model import Correction
from mismatchctl.errors import suggestion
from mismatchctl.io.version import __version__
from mismatchctl.results.growth import Growth
from mismatchctl.results.views import ByRun, ResultViews, RunViews


class Fact(FiniteModel):
    """A number that speaks for a cause, or (`supports` false) against it; `interval` is a 90 % one."""

    name: str
    value: float | int | str | None
    interval: tuple[float, float] | None = None
    supports: bool = True
    meaning: str


class RivalCause(FiniteModel):
    """A cause that this dump cannot tell apart from the one found, and the column or experiment that would."""

    cause: str
    tell: str


class Example(FiniteModel):
    """A sequence that shows the cause; `position` is where, counted as in the file."""

    file: str
    row: int
    position: int | None = None
    step: str | int | float | bool | None = None
    sequence_id: str | int | None = None
    note: str = ""


Confidence = Literal["high", "medium", "low"]
Side = Literal["rollout", "trainer", "both", "none"]


class Finding(FiniteModel):
    """One cause of the mismatch, as far as the dump shows it.

    `share` is about how much of the summed |log ratio| it explains, `share_k3` its part of the K3: those of a run, with
    what is unexplained and what is noise, add up to 1; null for another reading of what a finding beside it holds.
    `where` are the steps, workers, positions or sequences that it concerns, `pointless` the corrections that make no
    sense until it is fixed.
    """

    cause: str
    confidence: Confidence
    title: str
    summary: str
    share: float | None = None
    share_k3: float | None = None
    evidence: list[Fact]
    where: dict[str, str] = Field(default_factory=dict)
    examples: list[Example] = Field(default_factory=list)
    advice: str
    pointless: str = ""
    rivals: list[RivalCause] = Field(default_factory=list)
    side: Side | None = None


class Agreement(FiniteModel):
    """A name of the run's log in the step where log and replay are farthest apart; `steps` is how many have both.

    `difference` is relative to the larger of both, as it is; up to about `allowed` the log cannot tell: float32, the
    framework's reduction, the digits printed.
    """

    steps: int
    difference: float
    allowed: float
    step: str
    dump: float
    log: float
    agrees: bool


class LogComparison(FiniteModel):
    """Names that a framework logs beside the run's log; `missing` are not in it, or in no step of both."""

    names: dict[str, Agreement] = Field(default_factory=dict)
    missing: list[str] = Field(default_factory=list)


class MetricLogComparison(LogComparison):
    """Names of the run's log that stand for a metric of the run, and for which, though no framework was replayed."""

    metrics: dict[str, str] = Field(default_factory=dict)


class Lag(FiniteModel):
    """By how many steps K3 follows (below 0: leads) something that the run logged; null where that cannot be told.

    `correlation` is that of their changes from step to step, by rank; `compared` steps have both.
    """

    steps: int | None = None
    correlation: float | None = None
    compared: int
    status: str = "ok"

    @property
    def text(self) -> str:
        """In words, of K3."""
        if self.steps is None:
            return self.status
        count = abs(self.steps)
        how = f"follows it by {format_count(count, 'step')}" if self.steps > 0 else "moves with it"
        if self.steps < 0:
            how = f"leads it by {format_count(count, 'step')}"
        return f"{how} (rank correlation of changes {self.correlation:.2f})"


FORMAT = 1
"""Version of this format; it grows when a key changes its meaning or goes away."""


class Value(FiniteModel):
    """One value: `se` is its standard error over clusters, `interval` a 90 % interval, `status` "ok" or a reason.

    `tail` is "heavy_tail" where a few clusters or rare weights leave the interval without its 90 %: it `covers` so much
    instead, as measured on other dumps.
    """

    value: float | None
    se: float | None = None
    interval: tuple[float, float] | None = None
    status: str = "ok"
    tail: Literal["heavy_tail"] | None = None
    covers: float | None = None

    @model_serializer
    def _plain(self) -> dict[str, Any]:
        data: dict[str, Any] = {"value": self.value, "se": self.se, "status": self.status}
        data |= {} if self.interval is None else {"interval": list(self.interval)}
        return data if self.tail is None else data | {"tail": self.tail, "covers": self.covers}


def _drop_decimal_points(values: Sequence[float | None]) -> list[int | float | None]:
    """Whole numbers without a point: in a long run, a twelfth of the file."""
    return [int(v) if v is not None and v.is_integer() and abs(v) < 2**53 else v for v in values]


Numbers = Annotated[list[float | None], PlainSerializer(_drop_decimal_points, when_used="json")]


NOT_RECORDED = Value(value=None, status="not recorded")


class Series(FiniteModel):
    """One metric over groups: 9 significant digits, 7 for corrections, 3 for `se` and `interval`; counts are exact.

    `se` and `interval` are absent where no group has one.

    `status` is a word for all groups, or the indices of those that are not "ok" by reason; `heavy_tail` are the indices
    of those in which a few clusters or rare weights make the standard error too small.
    """

    value: Numbers
    se: list[float | None] | None = None
    interval: list[tuple[float, float] | None] | None = None
    status: str | dict[str, list[int]] = "ok"
    heavy_tail: list[int] = Field(default_factory=list)

    def status_at(self, index: int) -> str:
        """The status of one group."""
        if isinstance(self.status, str):
            return self.status
        return next((reason for reason, groups in self.status.items() if index in groups), "ok")

    def at(self, index: int) -> Value:
        """The value of one group."""
        interval = None if self.interval is None else self.interval[index]
        se = None if self.se is None else self.se[index]
        tail: Literal["heavy_tail"] | None = "heavy_tail" if index in self.heavy_tail else None
        return Value(value=self.value[index], se=se, interval=interval, status=self.status_at(index), tail=tail)


class OverallMetrics(FiniteModel):
    """All metrics of a run, and of each correction on it."""

    metrics: dict[str, Value]
    corrections: dict[str, dict[str, Value]]


class Clusters(FiniteModel):
    """Sums by cluster and group, one row each: what uncertainty, comparisons and baselines are read from.

    `hashes` name the clusters, `groups` are indices into the labels. Where there are too many rows, they are folded:
    each stands for several clusters of any group, and `groups` is empty. Columns of a correction are `name/column`.
    """

    by: Literal["prompt", "sequence", "content"]
    columns: list[str]
    hashes: list[str]
    groups: list[int] = Field(default_factory=list)
    folded: bool = False
    sums: list[Annotated[list[float], PlainSerializer(_drop_decimal_points, when_used="json")]]


class Groups(FiniteModel):
    """The same per group: `labels` are the steps (or the values of a `--by` column) that the series run over.

    `clusters` is the table by value of a `--by` column, where it is small; that of the steps is the run's.
    """

    labels: list[str | int | float | bool | None]
    metrics: dict[str, Series]
    corrections: dict[str, dict[str, Series]]
    clusters: Clusters | None = None

    def series(self, key: str, correction: str | None = None) -> Series:
        """A metric over the groups, or one of a correction; nothing where it was not recorded."""
        found = (self.metrics if correction is None else self.corrections[correction]).get(key)
        return found or Series(value=[None] * len(self.labels), status=NOT_RECORDED.status)


class Distribution(FiniteModel):
    """Tokens and their K3 by bin of the log ratio (train minus rollout, nats); bins lie between the `edges`."""

    edges: list[float]
    tokens: list[int]
    k3: list[float]


class Breakdown(FiniteModel):
    """Mean K3 and mean |log ratio| by bin `low` <= quantity < `high` (`high` null: open), with standard errors.

    By probability and by length also `logit_shift`: sum of the log ratio over the sum of 1 - p, p the rollout's.
    """

    quantity: str
    low: list[float]
    high: list[float | None]
    tokens: list[int]
    k3: list[float | None]
    k3_se: list[float | None]
    abs_diff: list[float | None]
    abs_diff_se: list[float | None]
    logit_shift: list[float | None] | None = None
    logit_shift_se: list[float | None] | None = None


class JointDistribution(FiniteModel):
    """Tokens by rollout probability `x` and train probability `y`: centres of hexagons `width` apart in x."""

    width: float
    x: list[float]
    y: list[float]
    tokens: list[int]


class WorstToken(FiniteModel):
    """One of the tokens with the largest |log ratio|; `position` counts from the sequence's first valid token."""

    file: str
    row: int
    position: int
    step: str | int | float | bool | None = None
    sequence_id: str | int | None = None
    prompt_id: str | int | None = None
    token_id: int | None = None
    context_ids: list[int] | None = None
    rollout_log_prob: float
    train_log_prob: float
    log_ratio: float


class WorstSequence(FiniteModel):
    """One of the sequences with the largest |sum of the log ratio|."""

    file: str
    row: int
    step: str | int | float | bool | None = None
    sequence_id: str | int | None = None
    prompt_id: str | int | None = None
    tokens: int
    log_ratio_sum: float
    k3: float
    abs_diff_mean: float
    token_ids: list[int] | None = None


class SideShare(FiniteModel):
    """The rollout's share of what the two sides disagree on; the trainer's is the rest, `interval` a 90 % one."""

    value: float | None
    interval: tuple[float, float] | None = None
    status: str = "ok"


class SidesGroup(FiniteModel):
    """Both sides' errors (root mean square, nats) on the tokens of one step or worker."""

    label: str
    tokens: int
    rollout_rms: float
    train_rms: float


class Sides(FiniteModel):
    """Which side is wrong, by a reference in high precision: errors against it are root mean squares in nats.

    `correlation` is that of the two errors: what they share is in no gap. `rollout_share` is the rollout's part of the
    squared log ratio, `rollout_share_k3` of K3. `reference_over_rollout` is 1 in expectation where the rollout's column
    is what sampled. `groups` are by step and worker.
    """

    side: Side
    confidence: Confidence
    summary: str
    tokens: int
    rollout_rms: float
    train_rms: float
    gap_rms: float
    correlation: float | None
    rollout_share: SideShare
    rollout_share_k3: SideShare
    reference_over_rollout: Value
    groups: dict[str, list[SidesGroup]]
    notes: list[str] = Field(default_factory=list)


AnswerLevel = Literal["good", "fair", "bad", "unknown"]
RangeName = Literal["identical", "below", "dense", "moe", "above", "undefined"]
Question = Literal["how bad", "since when", "why", "what to do"]


class K3Standing(FiniteModel):
    """Where K3 lies against the ranges that models usually show; `sure`: its error stays on one side of their ends."""

    range: RangeName
    sure: bool = True
    text: str


class BaselineRatio(FiniteModel):
    """K3 beside that of a Result that was accepted: their quotient, with a 90 % interval from both errors."""

    baseline: str
    k3: float | None
    factor: float | None = None
    interval: tuple[float, float] | None = None
    text: str


class Judgement(FiniteModel):
    """Something that a reader should not overlook: `key` names it, `detail` has its figures."""

    key: str
    text: str
    detail: str = ""

    @property
    def sentence(self) -> str:
        """Both in one."""
        return f"{self.text} ({self.detail})" if self.detail else self.text


class Answer(FiniteModel):
    """One of the four answers that come first: which case it is, how grave, in words, and what that rests on."""

    question: Question
    key: str
    level: AnswerLevel
    text: str
    evidence: list[Fact] = Field(default_factory=list)


class RunSummary(FiniteModel):
    """All that is said of a run beside its numbers; `answers` are four lines, one to each question."""

    standing: K3Standing
    growth: Growth
    judgements: list[Judgement] = Field(default_factory=list)
    against: BaselineRatio | None = None
    answers: list[Answer]

    def answer(self, question: Question) -> Answer:
        """The answer to a question."""
        return next(answer for answer in self.answers if answer.question == question)


class RunResult(RunViews, FiniteModel):
    """One run; `findings` are the causes of its mismatch, strongest first, `sides` who is wrong by a third column.

    `story` is what every medium says of it; null in a Result that was put together by hand.

    `logged` is what a framework would have logged: by correction and name, one value per group. `log` is what the run
    itself logged (`--against`), every name of it by group, `lags` how K3 follows each, and `against` how log and
    replay agree, by correction; `against_metrics` does so for what was not replayed and stands for a metric here.
    """

    overall: OverallMetrics
    groups: Groups
    by: dict[str, Groups]
    distribution: Distribution
    breakdowns: dict[str, Breakdown]
    joint: JointDistribution
    worst_tokens: list[WorstToken]
    worst_sequences: list[WorstSequence]
    clusters: Clusters
    findings: list[Finding] = Field(default_factory=list)
    sides: Sides | None = None
    story: RunSummary | None = None
    logged: dict[str, dict[str, list[float | None]]] = Field(default_factory=dict)
    log: dict[str, list[float | None]] = Field(default_factory=dict)
    lags: dict[str, Lag] = Field(default_factory=dict)
    against: dict[str, LogComparison] = Field(default_factory=dict)
    against_metrics: MetricLogComparison | None = None

    def __getattr__(self, name: str) -> Value:
        metrics = self.__dict__["overall"].metrics if "overall" in self.__dict__ else {}
        if name in metrics:
            found: Value = metrics[name]
            return found
        raise AttributeError(f"a run has no metric {name!r}{suggestion(name, metrics)}")


class InputFile(FiniteModel):
    """One file that was read: `dtypes` of the columns that numbers are measured on, sequences `skipped` as bad."""

    path: str
    run: str
    size: int
    rows: int
    tokens: int
    layout: str
    dtypes: dict[str, str]
    skipped: int = 0


class SkippedData(FiniteModel):
    """What `--on-bad skip` left out: how often, and the first example."""

    file: str
    reason: str
    count: int
    example: str


class Acceptance(FiniteModel):
    """Why a Result may serve as a baseline: the gate passed it under these rules, or somebody accepted it as it was."""

    verdict: Literal["passed", "failed", "undecided"]
    by_hand: bool
    rules: list[str]


class Provenance(FiniteModel):
    """Where a Result comes from; `framework` is the one, at which version, that `logged` is of, `replay` how it ran.

    `device` is what did the arithmetic over tokens, where that was not the CPU; `log` the file of the run's own log.
    """

    tool: str = "mismatchctl"
    version: str = __version__
    inputs: list[InputFile]
    left_out: list[SkippedData] = Field(default_factory=list)
    by: list[str] = Field(default_factory=list)
    device: str | None = None
    framework: str | None = None
    replay: dict[str, str | int] | None = None
    log: str | None = None
    accepted: Acceptance | None = None


class Result(ResultViews, FiniteModel, ByRun[RunResult]):
    """What `analyze` computes, `report` renders and `gate` judges.

    `sections` are what other verbs found of the same runs, each as its own JSON: `report -o` puts them here, and the
    Result's page shows them.
    """

    format: int = FORMAT
    provenance: Provenance
    corrections: list[Correction]
    warnings: list[str]
    runs: dict[str, RunResult]
    sections: list[dict[str, Any]] = Field(default_factory=list)

    def __getattr__(self, name: str) -> Value:
        runs: dict[str, RunResult] = self.__dict__.get("runs", {})
        if name.startswith("_") or len(runs) != 1:
            hint = f": write result[RUN].{name}" if len(runs) > 1 else ""
            raise AttributeError(f"a Result of {len(runs)} runs has no {name!r}{hint}")
        return next(iter(runs.values())).__getattr__(name)

    def to_data(self) -> dict[str, Any]:
        """What stands in its JSON."""
        data = {"format": self.format} | self.model_dump(mode="json", exclude_defaults=True)
        data["provenance"] = {"tool": self.provenance.tool, "version": self.provenance.version} | data["provenance"]
        return data

    def to_json(self) -> str:
        """Strict JSON, compact, ending in a newline."""
        return json.dumps(self.to_data(), allow_nan=False, separators=(",", ":"), ensure_ascii=False) + "\n"


def storage_types(result: Result, run: str) -> dict[str, str]:
    """What the log-probs of a run are stored as, by column: `float`, say; several if files differ.

    Runs that a column names within files are stored as all files are.
    """
    files = [file for file in result.provenance.inputs if file.run == run] or result.provenance.inputs
    found = {
        column: {_number_type(file.dtypes[column]) for file in files if column in file.dtypes}
        for column in REQUIRED_COLUMNS
    }
    return {column: " and ".join(sorted(dtypes)) or "unknown" for column, dtypes in found.items()}


def _number_type(dtype: str) -> str:
    named = re.search(r"\b(halffloat|float|double)\b", dtype)
    return named.group() if named else dtype


def result_schema() -> dict[str, Any]:
    """The JSON Schema of a Result."""
    return Result.model_json_schema(mode="validation") | {"$schema": "https://json-schema.org/draft/2020-12/schema"}
