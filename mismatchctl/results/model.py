"""The Result model, stored as strict JSON with a published schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PlainSerializer, model_serializer

from mismatchctl.core.formatting import INTERVAL_Z, ONE_SIDED_Z, format_count
from mismatchctl.core.schema import REQUIRED_COLUMNS
from mismatchctl.core.validation import FiniteModel
from mismatchctl.corrections.model import Correction
from mismatchctl.errors import suggestion
from mismatchctl.io import __version__
from mismatchctl.results.growth import Growth
from mismatchctl.results.views import (
    ByRun,
    TableText,
    TextView,
    View,
    format_value,
    get_renderer,
    headline_metrics,
    interval_bounds,
    make_frame,
)

if TYPE_CHECKING:
    import polars as pl

    from mismatchctl.results.views import Figure


class Fact(FiniteModel):
    """A number that is evidence for a cause (or against it, if `supports` is false). `interval` is a 95% interval."""

    name: str
    value: float | int | str | None
    interval: tuple[float, float] | None = None
    supports: bool = True
    meaning: str


class RivalCause(FiniteModel):
    """Another cause that would look the same in this dump. `tell` describes how to find out which cause is right."""

    cause: str
    tell: str


class Example(FiniteModel):
    """A sequence that shows the cause. `position` is the index of its first affected token."""

    file: str
    row: int
    position: int | None = None
    step: str | int | float | bool | None = None
    sequence_id: str | int | None = None


Confidence = Literal["high", "medium", "low"]
Side = Literal["rollout", "trainer", "both", "none"]


class Finding(FiniteModel):
    """One cause of the mismatch.

    `share` is the approximate share of the total |log ratio| that the cause explains. `share_k3` is the share of K3
    that it explains, or null if it cannot be separated from the share of another finding. `where` lists the affected
    steps, workers, positions or sequences. `pointless` names the corrections that do not help before the cause is
    fixed.
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
    """Comparison of a logged metric with the dump. The values are from the `step` with the largest difference.

    `steps` is the number of compared steps. `difference` is relative to the larger of the two values. Differences up to
    about `allowed` are normal, because of float32, other ways to average, and rounding in the log.
    """

    steps: int
    difference: float
    allowed: float
    step: str
    dump: float
    log: float
    agrees: bool


class LogComparison(FiniteModel):
    """Comparison of the run's log with the values that the framework would have logged for this dump.

    `missing` contains the metrics that the log lacks at all steps of the dump.
    """

    names: dict[str, Agreement] = Field(default_factory=dict)
    missing: list[str] = Field(default_factory=list)


class MetricLogComparison(LogComparison):
    """Comparison of mismatch metrics in a log with the dump. `metrics` maps logged names to metric keys."""

    metrics: dict[str, str] = Field(default_factory=dict)


class Lag(FiniteModel):
    """Delay of K3 behind a series of the run's log, such as the reward, in `steps`. Negative: K3 changes first.

    `correlation` is the rank correlation of their changes from step to step, and `compared` the number of these steps.
    `steps` is null if the lag is unknown.
    """

    steps: int | None = None
    correlation: float | None = None
    compared: int
    status: str = "ok"

    @property
    def text(self) -> str:
        if self.steps is None:
            return self.status
        count = abs(self.steps)
        how = f"follows it by {format_count(count, 'step')}" if self.steps > 0 else "moves with it"
        if self.steps < 0:
            how = f"leads it by {format_count(count, 'step')}"
        return f"{how} (rank correlation of changes {self.correlation:.2f})"


FORMAT = 2
"""Version of the file format. The version increases when the meaning of a key changes or a key is removed."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]
StandardError = Annotated[float, Field(ge=0)]
BinEnd = Annotated[float, Field(ge=0, lt=2**63)]
Hash = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]


class Value(FiniteModel):
    """A value with standard error `se` and 95% interval. `status` is "ok", or the reason why the value is null.

    `tail` is "heavy_tail" if a few clusters or a few large weights dominate the value. Then the interval is too narrow.
    In tests on other dumps, such an interval contained the true value in the share `covers` of all cases.
    """

    value: float | None
    se: StandardError | None = None
    interval: tuple[float, float] | None = None
    status: str = "ok"
    tail: Literal["heavy_tail"] | None = None
    covers: Share | None = None

    @model_serializer
    def _plain(self) -> dict[str, Any]:
        data: dict[str, Any] = {"value": self.value, "se": self.se, "status": self.status}
        data |= {} if self.interval is None else {"interval": list(self.interval)}
        return data if self.tail is None else data | {"tail": self.tail, "covers": self.covers}


def _drop_decimal_points(values: Sequence[float | None]) -> list[int | float | None]:
    """Write whole numbers without a decimal point, because this makes large files about 8% smaller."""
    return [int(v) if v is not None and v.is_integer() and abs(v) < 2**53 else v for v in values]


Numbers = Annotated[list[float | None], PlainSerializer(_drop_decimal_points, when_used="json")]

NOT_RECORDED = Value(value=None, status="not recorded")


class Series(FiniteModel):
    """A metric with one value per group, for example per step.

    Mismatch metrics have 9 significant digits, other metrics 5, metrics of corrections 7, `se` and `interval` 3. Counts
    are exact. `se` and `interval` are absent if no group has them. `status` is one string for all groups, such as "ok",
    or maps each status except "ok" to the indices of its groups. `heavy_tail` (for K3, ESS and chi-square) lists the
    indices of groups whose standard error is too small, because a few clusters or large weights dominate the value.
    """

    value: Numbers
    se: list[StandardError | None] | None = None
    interval: list[tuple[float, float] | None] | None = None
    status: str | dict[str, list[int]] = "ok"
    heavy_tail: list[int] = Field(default_factory=list)

    def status_at(self, index: int) -> str:
        if isinstance(self.status, str):
            return self.status
        return next((reason for reason, groups in self.status.items() if index in groups), "ok")

    def value_at(self, index: int) -> Value:
        interval = None if self.interval is None else self.interval[index]
        se = None if self.se is None else self.se[index]
        tail: Literal["heavy_tail"] | None = "heavy_tail" if index in self.heavy_tail else None
        return Value(value=self.value[index], se=se, interval=interval, status=self.status_at(index), tail=tail)


class OverallMetrics(FiniteModel):
    """The metrics of a whole run. `corrections` maps the name of each correction to its metrics."""

    metrics: dict[str, Value]
    corrections: dict[str, dict[str, Value]]


class Clusters(FiniteModel):
    """Table of sums, used to compute standard errors and comparisons with a baseline.

    A row is one cluster (such as a prompt) in one group (such as a step). `hashes` identifies the cluster of each row,
    and `groups` is the index of its group. A table that would be too large is `folded`: each row adds up several
    clusters over all groups, and `groups` is empty. Columns of a correction are named `correction/column`.
    """

    by: Literal["prompt", "sequence", "content"]
    columns: list[str]
    hashes: list[Hash]
    groups: list[int] = Field(default_factory=list)
    folded: bool = False
    sums: list[Annotated[list[float], PlainSerializer(_drop_decimal_points, when_used="json")]]


class Groups(FiniteModel):
    """Metrics per group. The groups are the steps, or the values of a `--by` column. `labels` are their names.

    `clusters` is the cluster table of a `--by` column, or null if the table is too large. For the steps, the cluster
    table is a field of the run instead.
    """

    labels: list[str | int | float | bool | None]
    metrics: dict[str, Series]
    corrections: dict[str, dict[str, Series]]
    clusters: Clusters | None = None

    def series(self, key: str, correction: str | None = None) -> Series:
        """Return a metric (of a correction, if given) in each group. All values are null if it is not recorded."""
        found = (self.metrics if correction is None else self.corrections[correction]).get(key)
        return found or Series(value=[None] * len(self.labels), status=NOT_RECORDED.status)


class Distribution(FiniteModel):
    """Histogram of the log ratio (train minus rollout, nats): tokens and sum of K3 between successive `edges`."""

    edges: list[float]
    tokens: list[Count]
    k3: list[float]


class Breakdown(FiniteModel):
    """Mean K3 and mean |log ratio| of the tokens in each bin of a quantity, with standard errors.

    A bin contains values from `low` up to, but not including, `high`. If `high` is null, there is no upper limit.
    Breakdowns by probability and length also have `logit_shift`, the trainer's logit of a token minus the rollout's.
    It is estimated as sum of log ratios / sum of 1 - p, where p is the rollout probability.
    """

    quantity: str
    low: list[BinEnd]
    high: list[BinEnd | None]
    tokens: list[Count]
    k3: list[float | None]
    k3_se: list[StandardError | None]
    abs_diff: list[float | None]
    abs_diff_se: list[StandardError | None]
    logit_shift: list[float | None] | None = None
    logit_shift_se: list[StandardError | None] | None = None


class JointDistribution(FiniteModel):
    """Number of tokens by rollout and train probability, in hexagons of this `width` with the centers `x` and `y`."""

    width: float
    x: list[float]
    y: list[float]
    tokens: list[Count]


class WorstToken(FiniteModel):
    """A token with a large |log ratio|. Position 0 is the first valid token of the sequence."""

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
    """One of the sequences whose sum of log ratios is farthest from 0."""

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


class FreshBatch(FiniteModel):
    """The predicted share of rejected tokens in a new batch of `sequences` sequences, with a 95% interval.

    `status` is "ok", or the reason why the prediction is uncertain.
    """

    sequences: int
    value: float | None = None
    interval: tuple[float, float] | None = None
    status: str = "ok"


class PresetPoint(FiniteModel):
    """The share of tokens that a preset rejects, and the mean K3 of the tokens that it keeps."""

    rejected_tokens: float
    k3_kept: float | None

    @classmethod
    def from_sums(cls, tokens: float, kept: float, kept_k3: float) -> PresetPoint:
        rejected, k3 = (float(f"{share:.6g}") for share in (1 - kept / tokens, kept_k3 / kept if kept else math.nan))
        return cls(rejected_tokens=rejected, k3_kept=k3)


class SideShare(FiniteModel):
    """The share of the mismatch that comes from the rollout, with a 95% interval. The rest comes from the trainer."""

    value: float | None
    interval: tuple[float, float] | None = None
    status: str = "ok"


class SidesGroup(FiniteModel):
    """Errors of rollout and trainer, as in `Sides`, for one group of tokens such as one step or one worker."""

    label: str
    tokens: int
    rollout_rms: float
    train_rms: float


class Sides(FiniteModel):
    """Errors of rollout and trainer: differences between their log-probs and `reference_log_probs` (high precision).

    Root mean squares in nats: `rollout_rms`, `train_rms` and `gap_rms` (the log ratio: equal errors cancel).
    `correlation` is between the two errors. `rollout_share` and `rollout_share_k3` are the shares of the squared log
    ratio and of K3 that the rollout causes. `reference_over_rollout` is the mean of reference / rollout probability: 1
    if tokens were sampled with the rollout's log-probs. `groups`: errors by step, worker, position, probability.
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


class RunContent(FiniteModel):
    """Facts about the rows of a run, apart from the mismatch: repeated sequences, masked tokens, token ids, models.

    Attributes:
        sequences: number of sequences with a valid token.
        tokens: number of valid tokens.
        repeated: number of sequences with the same log-probs as an earlier sequence (estimated in large runs).
        repeated_tokens: number of valid tokens in the repeated sequences.
        example: one repeated sequence and the earlier sequence with the same log-probs.
        hidden: share of masked tokens, among the tokens with a rollout log-prob and a train log-prob.
        hidden_abs_diff: mean of min(|log ratio|, 1) over these masked tokens, in nats.
        shown_abs_diff: mean of min(|log ratio|, 1) over the valid tokens, in nats.
        loud: share of masked tokens with a larger |log ratio| than 99.9% of the valid tokens.
        holes: share of masked tokens among the tokens from the first to the last valid token of each row.
        clipped: share of valid tokens with exactly the largest |log ratio| or, if larger, share with the lowest rollout
            log-prob and the lowest train log-prob. It is 0 if chance explains the share.
        doubts: causes with high confidence that make the values of a column invalid, such as unmasked padding.
        vocabulary: number of tokens by token id modulo 64.
        id_p95: 95% quantile of the token ids.
        responses: hash of all responses (their order does not matter), empty unless all rows have token ids.
        models: names of the models in the rows.
        engines: names of the inference engines in the rows.
    """

    sequences: Count = 0
    tokens: Count = 0
    repeated: Count = 0
    repeated_tokens: Count = 0
    example: str = ""
    hidden: Share = 0.0
    hidden_abs_diff: Share = 0.0
    shown_abs_diff: Share = 0.0
    loud: Share = 0.0
    holes: Share = 0.0
    clipped: Share = 0.0
    doubts: list[str] = Field(default_factory=list)
    vocabulary: list[Count] = Field(default_factory=list)
    id_p95: int | None = None
    responses: str = ""
    models: list[str] = Field(default_factory=list)
    engines: list[str] = Field(default_factory=list)


Question = Literal["how bad", "since when", "why", "what to do"]


class K3Standing(FiniteModel):
    """The typical range that contains K3, such as "dense". `sure` is true if the interval of K3 is inside it."""

    range: RangeName
    sure: bool = True
    text: str


class BaselineRatio(FiniteModel):
    """K3 of a run divided by K3 of the baseline, with a 95% interval. `baseline` is the path of the baseline."""

    baseline: str
    k3: float | None
    factor: float | None = None
    interval: tuple[float, float] | None = None
    text: str

    @property
    def rose(self) -> bool:
        """Return True if K3 is significantly higher than in the baseline (one-sided test at 5%)."""
        if self.factor is None or self.interval is None:
            return False
        return math.log(self.factor) * INTERVAL_Z > math.log(self.interval[1] / self.factor) * ONE_SIDED_Z


class Judgement(FiniteModel):
    """An important warning. `key` identifies its type, and `detail` contains the numbers behind it."""

    key: str
    text: str
    detail: str = ""


class Answer(FiniteModel):
    """The answer to one question of the summary. `key` identifies the answer. `level` rates it, such as "good"."""

    question: Question
    key: str
    level: AnswerLevel
    text: str
    evidence: list[Fact] = Field(default_factory=list)


class RunSummary(FiniteModel):
    """Summary of a run. `judgements` are warnings. `answers` contains a short text for each question of the summary."""

    standing: K3Standing
    growth: Growth
    judgements: list[Judgement] = Field(default_factory=list)
    against: BaselineRatio | None = None
    answers: list[Answer]

    def answer(self, question: Question) -> Answer:
        return next(answer for answer in self.answers if answer.question == question)


class RunResult(TextView, FiniteModel):
    """The result of one run. `findings` are the causes of its mismatch, strongest first.

    Attributes:
        sides: the errors of rollout and trainer (null without `reference_log_probs`).
        story: the summary that terminal, report and notebook show (null in a Result that you build, until it is shown).
        logged: for each correction, the metrics that the framework would have logged, with one value per step.
        log: the values of the run's own log (`--against`), with one value per step.
        order: description of the order of the changes of K3 and the series of `log`, or "".
        lags: for each series of the log, how many steps later K3 changes.
        against: for each correction, a comparison of `log` with `logged`.
        against_metrics: a comparison of other metrics in the log, which are not in `logged`.
        fresh_batches: for each correction, the predicted share of rejected tokens in a new batch.
        presets: for each preset, a point of a chart (only filled if an HTML page was written).
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
    content: RunContent | None = None
    fresh_batches: dict[str, FreshBatch] = Field(default_factory=dict)
    presets: dict[str, PresetPoint] = Field(default_factory=dict)
    findings: list[Finding] = Field(default_factory=list)
    sides: Sides | None = None
    story: RunSummary | None = None
    logged: dict[str, dict[str, list[float | None]]] = Field(default_factory=dict)
    log: dict[str, list[float | None]] = Field(default_factory=dict)
    order: str = ""
    lags: dict[str, Lag] = Field(default_factory=dict)
    against: dict[str, LogComparison] = Field(default_factory=dict)
    against_metrics: MetricLogComparison | None = None

    def __getattr__(self, name: str) -> Value:
        metrics = self.__dict__["overall"].metrics if "overall" in self.__dict__ else {}
        if name in metrics:
            found: Value = metrics[name]
            return found
        raise AttributeError(f"unknown metric {name!r}{suggestion(name, metrics)}")

    @property
    def steps(self) -> pl.DataFrame:
        """Return a table with one row per training step: its label, and the value of every metric."""
        import polars as pl

        metrics = {name: series.value for name, series in self.groups.metrics.items()}
        return pl.DataFrame({"step": self.groups.labels, **metrics}, strict=False)

    def plot(self, name: str = "k3") -> Figure:
        """Draw one figure of the report with matplotlib.

        Args:
            name: `k3`, `distribution`, `joint`, `k3_by_position`, `corrections`, `over-rejected_tokens`, ... The
                error for an unknown name lists all names. Example: `run.plot("k3_by_position")`.

        Raises:
            ConfigError: The figure is unknown.
        """
        return get_renderer().figure(self, name)

    def _lines(self) -> list[str]:
        return [f"{answer.question}: {answer.text}" for answer in (self.story.answers if self.story else ())]

    def _table(self) -> TableText:
        metrics = self.overall.metrics
        names = headline_metrics(metrics)
        return names, [[format_value(metrics[name]) for name in names]]


class InputFile(FiniteModel):
    """An input file. `dtypes` are the types of its numeric columns. `skipped` is how many sequences were left out."""

    path: str
    run: str
    size: Count
    rows: Count
    tokens: Count
    layout: str
    dtypes: dict[str, str]
    skipped: int = 0
    skipped_tokens: int = 0


MASKED_TOKENS = "masked tokens"
"""The `reason` of tokens that `--on-bad mask` masked. Their `example` names the column with the missing value."""


class SkippedData(FiniteModel):
    """Data that `--on-bad skip` or `mask` left out of a file, with the reason and the first example.

    `count` is the number of these sequences or tokens. If the whole file was left out, `size` is its size in bytes.
    """

    file: str
    reason: str
    count: Count
    example: str
    size: int = 0


class Acceptance(FiniteModel):
    """The reason why a Result may be a baseline: it passed the gate, or a person accepted it (`by_hand`)."""

    verdict: Literal["passed", "failed", "undecided"]
    by_hand: bool
    rules: list[str]


class Provenance(FiniteModel):
    """Origin of a Result: the input files and the options of the analysis.

    `framework` is the name and version of the framework whose metrics are in `RunResult.logged`. `replay` contains the
    micro-batch size and dtype for these metrics, if not the default. `device` is the GPU that was used. `log` is
    the path of the run's log. `unread` are files in the given folders with dump data, but without the name of a dump.
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
    unread: list[str] = Field(default_factory=list)
    accepted: Acceptance | None = None


class Result(View, FiniteModel, ByRun[RunResult]):
    """The result of `analyze`. K3 is `result["run"].k3.value`. With a single run, it is also `result.k3.value`."""

    format: int = FORMAT
    provenance: Provenance
    corrections: list[Correction]
    warnings: list[str]
    runs: dict[str, RunResult]

    def __getattr__(self, name: str) -> Value:
        runs: dict[str, RunResult] = self.__dict__.get("runs", {})
        if name.startswith("_") or len(runs) != 1:
            hint = f": write result[RUN].{name}" if len(runs) > 1 else ""
            raise AttributeError(f"unknown attribute {name!r} of a Result with {len(runs)} runs{hint}")
        return next(iter(runs.values())).__getattr__(name)

    def to_data(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        data = {"format": self.format} | self.model_dump(mode="json", exclude_defaults=True)
        data["provenance"] = {"tool": self.provenance.tool, "version": self.provenance.version} | data["provenance"]
        return data

    def to_json(self) -> str:
        """Return compact strict JSON with a final newline."""
        return json.dumps(self.to_data(), allow_nan=False, separators=(",", ":"), ensure_ascii=False) + "\n"

    @property
    def steps(self) -> pl.DataFrame:
        """Return a table with one row per training step. The Result must have a single run."""
        return self._single_run("steps").steps

    def plot(self, name: str = "k3") -> Figure:
        """Draw one figure of the report with matplotlib. The Result must have a single run.

        Args:
            name: `k3`, `distribution`, `k3_by_position`, ... The error for an unknown name lists all names.

        Raises:
            ConfigError: The figure is unknown.
            KeyError: The Result has several runs.
        """
        return self._single_run("plot").plot(name)

    def to_polars(self) -> pl.DataFrame:
        """Return a row per overall value: run, correction (or null), metric, value, se, low, high, status."""
        rows = [
            {"run": run, "correction": correction, "metric": name, "value": value.value, "se": value.se,
             **interval_bounds(value.interval), "status": value.status}
            for run, found in self.runs.items()
            for correction, values in ((None, found.overall.metrics), *found.overall.corrections.items())
            for name, value in values.items()
        ]  # fmt: skip
        return make_frame(
            rows, ("String", "run correction metric"), ("Float64", "value se low high"), ("String", "status")
        )

    def _single_run(self, name: str) -> RunResult:
        if len(self.runs) != 1:
            raise KeyError(f"there are {len(self.runs)} runs: choose one, as in result[RUN].{name}")
        return next(iter(self.runs.values()))

    def _lines(self) -> list[str]:
        if len(self.runs) == 1:
            return self._single_run("summary")._lines()
        stories = ((run, found.story) for run, found in self.runs.items())
        return [f"{run}: {story.answers[0].text}" for run, story in stories if story is not None and story.answers]

    def _table(self) -> TableText:
        first = next(iter(self.runs.values())).overall.metrics if self.runs else {}
        names = headline_metrics(first)
        rows = [
            [run, *(format_value(found.overall.metrics.get(name)) for name in names)]
            for run, found in self.runs.items()
        ]
        return ["run", *names], rows


def find_run(result: Result, name: str) -> str | None:
    """Return `name` if a run has this name, else the name of the only run. With several runs, return `None`."""
    return name if name in result.runs else next(iter(result.runs)) if len(result.runs) == 1 else None


def storage_types(result: Result, run: str) -> dict[str, str]:
    """Return the data type (such as `float`) of each log-prob column in the files of a run.

    If the files contain several runs (column `run`), each run gets the types of all files.
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
    return Result.model_json_schema(mode="validation") | {"$schema": "https://json-schema.org/draft/2020-12/schema"}
