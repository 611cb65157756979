"""The Advice model and the sentences that describe it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from mismatchctl.core.validation import CappedSum, FiniteModel
from mismatchctl.results.model import Answer, AnswerLevel, Fact, Finding, Result
from mismatchctl.results.summary import get_summary
from mismatchctl.results.views import AdviceViews


class ExpectedRejection(FiniteModel):
    """Rejected share of sequences that is to be expected, with a 90 % interval; null with the reason in `status`."""

    value: float | None
    interval: tuple[float, float] | None = None
    status: str = "ok"


class RankedCorrection(FiniteModel):
    """One correction and its price.

    Errors are those of the gradient of one update at the batch asked for, in the units of the surrogate: `mse` is
    `bias2_counted` plus `variance`, and `bias2_counted` what of `bias2` is beyond its standard error (0: nothing is).
    `gain` is the share of the uncorrected error that it takes away, with the standard error of that share; `ties` says
    that it can't be told from the first. `why` is why it stands behind the first, or what speaks for it.
    `kept_reward_difference` and `kept_length_difference` say for whom it rejects: mean reward and length of rejected
    less kept sequences, null where it rejects none or all.
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
    """How long the advice holds, if the trend of the mismatch over the steps goes on.

    `steps` is how far ahead the trend is followed, and `k3_factor` how many times the K3 of this sample it leads to by
    then. `outgrown_in` are the steps until another correction (`instead`) is advised, or until what the advised one
    costs is out of the question (`instead` is null); 0: it is so at the last step already; null: the advice holds.
    """

    steps: float
    k3_factor: float
    outgrown_in: float | None = None
    instead: str | None = None
    text: str


class TippingPoint(FiniteModel):
    """Times each `bias2` (1 and above) from which `instead` has less error than what is advised."""

    factor: float
    instead: str


class Advice(AdviceViews, FiniteModel):
    """The advice for one run: what to fix first, or a ranking, best first.

    Attributes:
        fix_first: a bug that no correction mends; then the ranking, where there is one, is for the time until then.
        advice: at most five corrections.
        yours: what was to be held against them, in the same units, whatever the limits.
        batch: sequences of one update that the errors are at.
        sequences, prompts: what the sample holds.
        basis: what the ranking rests on: the gradient of a surrogate by token ids, or by ranks of probabilities where
            the dump has no ids; none where nothing can be ranked.
        reference: the least biased correction that converges, which stands for no bias.
        sequence_mean: mean over tokens of sequence weights truncated at 10: outside 0.5 to 1.5 they are not it.
        lower_bound: whether it leaves some out that the sample cannot show: squared biases are larger than estimated,
            and each `bias2` is `bias_counts` times its estimate.
        holds_to: from how many times each `bias2` on something else is better: 1 where it is so if the whole estimates
            are bias, not only what is beyond their noise; null where it is beyond ten times what was estimated.
        stable: share of random halves of the prompts that give the same first correction, or one that ties with it.
        stable_later: share of cuts between earlier and later steps that do so; null without numbered steps.
        outlook: how long the advice holds; null where the mismatch has no trend.
        k_hat: tail index of the sequence weights, above 0.7 their mean does not converge; null where undefined.
        notes: what limits it, in sentences.
        front: every candidate's (bias2_counted, variance, rejected tokens) by name, for the figure.
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
        """Error without a correction, in the units of the surrogate; 1 where there is none."""
        bias2, variance, _ = self.front["none"]
        return bias2 + variance or 1.0


def advice_headline(advice: Advice) -> str:
    """The answer in one sentence."""
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
    """A candidate in a sentence."""
    return "no correction" if name == "none" else name


def _describe_ties(advice: Advice) -> str:
    """What the first cannot be told from, of all first no correction."""
    ties = sorted((own.name for own in advice.advice[1:] if own.ties), key=lambda name: name != "none")
    more = f" and {len(ties) - 1} more" if len(ties) > 1 else ""
    return f"not told apart from {candidate_label(ties[0])}{more}" if ties else ""


def compare_with_yours(own: RankedCorrection, best: RankedCorrection) -> str:
    """What you have against the first, in one sentence."""
    if own.ties:
        return f"{own.name} cannot be told from {best.name}"
    times = own.mse / best.mse if best.mse else 1.0
    return f"{own.name} has {times:.2g} times the error of the gradient that {best.name} has: {own.why}"


def set_advice_answers(result: Result, found: Mapping[str, Advice]) -> None:
    """Let the advice for each run be the answer to what to do: a correction with its price, or what to fix first."""
    for name, advice in found.items():
        run = result.runs.get(name)
        if run is None:
            continue
        run.story = get_summary(run).model_copy()
        run.story.answers = [*run.story.answers[:-1], advice_answer(advice)]


def advice_answer(advice: Advice) -> Answer:
    """The advice as an answer, with its numbers."""
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
