"""Result classes of `advise`, and functions that describe the advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from mismatchctl.core.formatting import format_number
from mismatchctl.core.validation import CappedSum, FiniteModel
from mismatchctl.corrections.labels import short_number
from mismatchctl.results.model import Finding
from mismatchctl.results.summary import LOSS_SCALE_RANGE, is_uncorrectable, percent
from mismatchctl.results.views import ByRun, TableText, TextView, View, add_version, format_cell, json_text, make_frame

if TYPE_CHECKING:
    import polars as pl


class RankedCorrection(FiniteModel):
    """A correction in the ranking, with its gradient error and its costs.

    `mse` is the gradient error: the mean squared distance between the policy gradient with this correction and the true
    policy gradient. It is the sum of `variance` and `bias2`, the squared bias. A negative estimate of `bias2` counts as
    0 (docs/methods/advice.md). `gain` is the relative reduction of `mse`: 0.3 means 30% less error than without a
    correction. `bias2_se` and `gain_se` are standard errors. The correction multiplies the loss by `loss_scale`. `ties`
    is true if the correction is not significantly worse than the first one. `why` explains the rank. `config` contains
    the framework's settings for the correction. `outcome` describes a published run with this correction.
    """

    name: str
    label: str = ""
    correction: dict[str, Any]
    bias2: CappedSum
    bias2_se: CappedSum
    variance: CappedSum
    mse: CappedSum
    gain: CappedSum
    gain_se: CappedSum
    loss_scale: CappedSum = 1.0
    rejected_tokens: float
    rejected_sequences: float
    ess: float
    ties: bool
    why: str
    config: dict[str, Any] | None = None
    outcome: str = ""

    @property
    def title(self) -> str:
        """Return the name of the correction, with its meaning in parentheses."""
        return candidate_label(self.name) if self.name == "none" else f"{self.name} ({self.label})"


class RunAdvice(TextView, FiniteModel):
    """Advice for one run: the bug to fix first, and a ranking of corrections, best first."""

    fix_first: Finding | None = None  # a bug to fix first: the ranking only applies until it is fixed
    growth: float | None = None  # K3 rose by this factor over the steps. The advice is for the average of all steps.
    advice: list[RankedCorrection] = Field(default_factory=list)  # at most five
    yours: list[RankedCorrection] = Field(default_factory=list)  # the user's corrections, without rank or limits
    framework: str = ""  # the framework that each `config` is for, or "" if no framework was given
    batch: int = 0  # sequences per update
    sequences: int = 0
    prompts: int = 0
    default: RankedCorrection | None = None  # token weights truncated at 2, as framework docs recommend
    severity: Literal["negligible", "moderate", "severe", "unknown"] = "unknown"  # from the ESS of `default`
    # "gradient": ranked with the gradients of a simple policy over token ids (Surrogate). "probabilities": the dump
    # lacks token ids, so this policy uses bins of the trainer's probabilities instead. "none": there is no ranking
    basis: Literal["gradient", "probabilities", "none"] = "none"
    reference: str | None = None  # the correction whose gradient counts as unbiased
    # mean over tokens of the sequence weights truncated at 10. From 0.5 to 1.5, these weights are the `reference`
    sequence_mean: float | None = None
    lower_bound: bool = False  # True if the reference may be biased, so that each bias is only a lower bound
    k_hat: float | None = None  # tail index of the sequence weights. Above 0.7 their mean does not converge.
    notes: list[str] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)  # about `framework`
    # name of every candidate -> (bias2, variance, rejected tokens), for the figure
    front: dict[str, tuple[CappedSum, CappedSum, CappedSum]] = Field(default_factory=dict)

    @property
    def uncorrected(self) -> float:
        """Return the gradient error without a correction. An error of 0 becomes 1, so that callers can divide by it."""
        bias2, variance, _ = self.front["none"]
        return bias2 + variance or 1.0

    @property
    def runner_up(self) -> RankedCorrection | None:
        """Return the second correction of the ranking, or `None` if it is missing, or if it mostly shrinks the loss."""
        second = self.advice[1] if len(self.advice) > 1 else None
        return None if second is None or second.loss_scale < MIN_LOSS_SCALE else second

    def _lines(self) -> list[str]:
        return [] if self.fix_first is None else [f"fix first: {self.fix_first.summary}"]

    def _table(self) -> TableText:
        names = ["name", "gain", "rejected_tokens", "ess", "why"]
        return names, [[format_cell(getattr(own, name)) for name in names] for own in (*self.advice, *self.yours)]


@dataclass(frozen=True, repr=False, eq=False)
class Advice(View, ByRun[RunAdvice], Mapping[str, RunAdvice]):
    """The advice for each run. `advice["run"]` contains the ranking, and the bug to fix first if there is one."""

    runs: dict[str, RunAdvice]

    def __iter__(self) -> Iterator[str]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    def to_data(self) -> dict[str, Any]:
        """Return data for JSON: the advice if there is one run, or `{"runs": {name: advice}}` if there are several."""
        data = {run: advice.model_dump(mode="json") for run, advice in self.runs.items()}
        return add_version(next(iter(data.values())) if len(data) == 1 else {"runs": data})

    def to_json(self) -> str:
        """Return strict JSON, as `mismatchctl advise --json` prints it."""
        return json_text(self.to_data())

    def to_polars(self) -> pl.DataFrame:
        """Return a table with one row per run and correction: its errors, gain, rejected shares and ESS."""
        rows = [{"run": run, **vars(own)} for run, found in self.runs.items() for own in (*found.advice, *found.yours)]
        return make_frame(
            rows, ("String", "run name"),
            ("Float64", "bias2 variance mse gain gain_se rejected_tokens rejected_sequences ess"),
            ("Boolean", "ties"), ("String", "why"),
        )  # fmt: skip

    def _lines(self) -> list[str]:
        several = len(self.runs) > 1
        notes = dict.fromkeys(f"note: {text}" for found in self.runs.values() for text in found.warnings)
        return [
            *notes,
            *(f"{run}: {line}" if several else line for run, found in self.runs.items() for line in found._lines()),
        ]

    def _table(self) -> TableText:
        tables = {run: found._table() for run, found in self.runs.items()}
        head = next((head for head, _ in tables.values()), [])
        return ["run", *head], [[run, *row] for run, (_, rows) in tables.items() for row in rows]


MIN_LOSS_SCALE = 0.5
"""Corrections that multiply the loss by less than this rank last, because they mostly lower the learning rate."""

MIN_SHOWN_GAIN = 1e-3
"""If |gain| of a correction is below this value, the text says "the same gradient error"."""


def advice_status(advice: RunAdvice) -> Literal["OK", "CHECK", "FAIL"]:
    """Return FAIL for a bug that no correction repairs, OK if no change is needed, and CHECK otherwise."""
    if advice.fix_first is not None:
        return "FAIL" if is_uncorrectable(advice.fix_first) else "CHECK"
    return "OK" if advice.advice and advice.advice[0].name == "none" and advice.growth is None else "CHECK"


def advice_headline(advice: RunAdvice) -> str:
    bug = advice.fix_first
    if bug is not None and is_uncorrectable(bug):
        return f"fix this first, because no correction repairs it: {bug.title}"
    until = "" if bug is None else f"fix this first: {bug.title}. Until then, "
    if not advice.advice:
        reason = advice.notes[0] if advice.notes else "the dump does not allow a ranking"
        return f"{until}no ranking: {reason}"
    best = advice.advice[0]
    if best.name == "none":
        alone = len(advice.front) == 1 + len(advice.yours)
        why = "every candidate is excluded" if alone else "no candidate is significantly better"
        return f"{until}use no correction: {why}"
    return f"{until}use {best.title}: {describe_gain(best)}"


def describe_gain(own: RankedCorrection) -> str:
    error = "the same gradient error"
    if abs(own.gain) >= MIN_SHOWN_GAIN:
        error = f"{percent(abs(own.gain))} {'less' if own.gain > 0 else 'more'} gradient error"
    cost = f"{percent(own.rejected_tokens)} of tokens" if own.rejected_tokens else "no tokens"
    low, high = LOSS_SCALE_RANGE
    scale = "" if low <= own.loss_scale <= high else f", multiplies the loss by {short_number(own.loss_scale)}"
    return f"{error}, rejects {cost}{scale}"


def candidate_label(name: str) -> str:
    return "no correction" if name == "none" else name


def compare_with_yours(own: RankedCorrection, best: RankedCorrection) -> str:
    """Return a comparison of the user's own correction with the first correction of the ranking."""
    if own.loss_scale < MIN_LOSS_SCALE:
        return f"{own.name} {own.why}"
    if own.ties:
        return f"{own.name} is not significantly worse than {candidate_label(best.name)}"
    times = own.mse / best.mse if best.mse else 1.0
    return f"{own.name} has {format_number(times)} times the gradient error of {candidate_label(best.name)}: {own.why}"
