"""The Advice model and its messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from mismatchctl.core.validation import CappedSum, FiniteModel
from mismatchctl.results.model import Answer, AnswerLevel, Fact, Finding, Result
from mismatchctl.results.summary import get_summary
from mismatchctl.results.views import AdviceViews, ByRun, RunAdviceViews, add_version, json_text


class ExpectedRejection(FiniteModel):
    """Expected share of rejected sequences with a 90% interval, null with the reason in `status`."""

    value: float | None
    interval: tuple[float, float] | None = None
    status: str = "ok"


class RankedCorrection(FiniteModel):
    """One correction and its cost.

    Errors are errors of the gradient of one update at the requested batch size, in units of the surrogate. `mse` is
    `bias2_counted` plus `variance`, and `bias2_counted` is the part of `bias2` above its standard error, at least 0.
    `gain` is the share of the uncorrected error that the correction removes, with its standard error. `ties` is true if
    the error does not differ significantly from the first. `why` explains the rank. `kept_reward_difference` and
    `kept_length_difference` are the mean reward and length of rejected minus kept sequences, null if none or all are
    rejected.
    """

    name: str
    correction: dict[str, Any]
    bias2: CappedSum
    bias2_se: CappedSum
    bias2_counted: CappedSum
    variance: CappedSum
    mse: CappedSum
    gain: CappedSum
    gain_se: CappedSum
    rejected_tokens: float
    rejected_sequences: float
    ess: float
    ties: bool
    why: str
    kept_reward_difference: float | None = None
    kept_length_difference: float | None = None
    next_batch: ExpectedRejection | None = None
    twice_the_length: ExpectedRejection | None = None
    config: dict[str, Any] | None = None


class Outlook(FiniteModel):
    """Validity of the advice if the trend of the mismatch continues.

    `steps` is the horizon, and `k3_factor` the K3 at its end relative to this sample. `outgrown_in` is the number of
    steps until another correction (`instead`) is better, or until the advised one exceeds a limit (`instead` is null).
    0: already at the last step. null: the advice remains valid.
    """

    steps: float
    k3_factor: float
    outgrown_in: float | None = None
    instead: str | None = None
    text: str


class TippingPoint(FiniteModel):
    """Factor on each `bias2` (at least 1) above which `instead` has less error than the advised correction."""

    factor: float
    instead: str


class RunAdvice(RunAdviceViews, FiniteModel):
    """The advice for one run: what to fix first, or a ranking, best first.

    Attributes:
        fix_first: a bug that a correction cannot compensate. The ranking then applies until it is fixed.
        advice: at most five corrections.
        yours: corrections to compare with the ranking, in the same units, without limits.
        batch: sequences of one update. Errors are estimated for this size.
        sequences, prompts: size of the sample.
        basis: basis of the ranking: the gradient of a surrogate over token ids, or over ranks of probabilities if
            the dump lacks ids. "none" if a ranking is not possible.
        reference: the least biased correction that converges, used as unbiased.
        sequence_mean: mean over tokens of sequence weights truncated at 10. Outside 0.5 to 1.5 they are not used as
            reference.
        lower_bound: True if the reference omits bias that the sample cannot show. Biases are then lower bounds, and
            each `bias2` is `bias_counts` times its estimate.
        holds_to: factor on each `bias2` from which another correction is better: 1 if the whole estimates count,
            including their noise. null above ten times the estimate.
        stable: share of random halves of the prompts that give the same first correction, or a tie with it.
        stable_later: the same for splits into earlier and later steps, null without numbered steps.
        outlook: how long the advice is valid, null without a trend of the mismatch.
        k_hat: tail index of the sequence weights. Above 0.7 their mean does not converge. null if undefined.
        notes: messages about limits of the advice.
        front: (bias2_counted, variance, rejected tokens) of every candidate by name, for the figure.
    """

    fix_first: Finding | None = None
    advice: list[RankedCorrection] = Field(default_factory=list)
    yours: list[RankedCorrection] = Field(default_factory=list)
    batch: int = 0
    sequences: int = 0
    prompts: int = 0
    basis: Literal["gradient", "probabilities", "none"] = "none"
    reference: str | None = None
    sequence_mean: float | None = None
    lower_bound: bool = False
    bias_counts: float = 1.0
    holds_to: TippingPoint | None = None
    stable: float | None = None
    stable_later: float | None = None
    outlook: Outlook | None = None
    k_hat: float | None = None
    notes: list[str] = Field(default_factory=list)
    front: dict[str, tuple[CappedSum, CappedSum, CappedSum]] = Field(default_factory=dict)

    @property
    def uncorrected(self) -> float:
        """Error without a correction in units of the surrogate, 1 if it is 0."""
        bias2, variance, _ = self.front["none"]
        return bias2 + variance or 1.0


@dataclass(frozen=True, repr=False, eq=False)
class Advice(AdviceViews, ByRun[RunAdvice], Mapping[str, RunAdvice]):
    """What `advise` found: `advice["run"]` is the ranking for a run, best first, and what to fix before.

    Attributes:
        runs: The advice for each run.
    """

    runs: dict[str, RunAdvice]

    def __iter__(self) -> Iterator[str]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    def to_data(self) -> dict[str, Any]:
        """Return what the JSON contains: the advice of a single run, or of several by name."""
        data = {run: advice.model_dump(mode="json") for run, advice in self.runs.items()}
        return add_version(next(iter(data.values())) if len(data) == 1 else {"runs": data})

    def to_json(self) -> str:
        """Return strict JSON, as `mismatchctl advise --json` prints it."""
        return json_text(self.to_data())


def advice_headline(advice: RunAdvice) -> str:
    """Summarize the advice."""
    until = ""
    if advice.fix_first is not None:
        if not advice.advice:
            return f"fix this first, nothing corrects it: {advice.fix_first.title}"
        until = f"fix this first: {advice.fix_first.title}; until then, "
    if not advice.advice:
        return "nothing can be ranked"
    best = advice.advice[0]
    size = f"at {advice.batch:,} sequences an update"
    if best.name == "none":
        alone = len(advice.front) == 1 + len(advice.yours)
        why = "nothing else is within the limits" if alone else "nothing beats it beyond noise"
        return f"{until}no correction: {why}{'' if alone else f' {size}'}"
    cost = f"rejects {best.rejected_tokens:.1%} of the tokens" if best.rejected_tokens else "rejects nothing"
    gain = f"{best.gain:.0%} less error of the gradient than no correction {size}"
    return "; ".join(filter(None, (f"{until}{best.name}: {gain}", cost, _describe_ties(advice))))


def candidate_label(name: str) -> str:
    """Return the label of a candidate in running text."""
    return "no correction" if name == "none" else name


def _describe_ties(advice: RunAdvice) -> str:
    ties = sorted((own.name for own in advice.advice[1:] if own.ties), key=lambda name: name != "none")
    more = f" and {len(ties) - 1} more" if len(ties) > 1 else ""
    return f"not told apart from {candidate_label(ties[0])}{more}" if ties else ""


def compare_with_yours(own: RankedCorrection, best: RankedCorrection) -> str:
    """Compare your correction with the first."""
    if own.ties:
        return f"{own.name} cannot be told from {best.name}"
    times = own.mse / best.mse if best.mse else 1.0
    return f"{own.name} has {times:.2g} times the error of the gradient that {best.name} has: {own.why}"


def set_advice_answers(result: Result, found: Mapping[str, RunAdvice]) -> None:
    """Replace the last answer of each run by the advice."""
    for name, advice in found.items():
        run = result.runs.get(name)
        if run is None:
            continue
        run.story = get_summary(run).model_copy()
        run.story.answers = [*run.story.answers[:-1], advice_answer(advice)]


def advice_answer(advice: RunAdvice) -> Answer:
    """Return the advice as an answer with its numbers."""
    if not advice.advice:
        key = "fix_first" if advice.fix_first is not None else "unranked"
        return Answer(question="what to do", key=key, level="bad" if advice.fix_first else "unknown",
                      text=advice_headline(advice))  # fmt: skip
    best = advice.advice[0]
    facts = [
        Fact(name="correction", value=best.name, meaning="what is advised"),
        Fact(name="gain", value=best.gain, meaning="share of the gradient's error that it takes away"),
        Fact(name="rejected_tokens", value=best.rejected_tokens, meaning="its price in tokens"),
        Fact(name="ess", value=best.ess, meaning="effective sample size of the tokens that is left"),
        Fact(name="batch", value=advice.batch, meaning="sequences of one update"),
    ]
    level: AnswerLevel = "bad" if advice.fix_first else "good" if best.name == "none" else "fair"
    key = "fix" if advice.fix_first else "none" if best.name == "none" else "correct"
    return Answer(question="what to do", key=key, level=level, text=advice_headline(advice), evidence=facts)
