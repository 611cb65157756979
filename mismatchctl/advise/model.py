"""What `advise` answers, as data."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mismatchctl.finite import FiniteModel, Sum
from mismatchctl.result import Finding
from mismatchctl.views import AdviceViews


class Ahead(FiniteModel):
    """Rejected share of sequences that is to be expected, with a 90 % interval; null with the reason in `status`."""

    value: float | None
    interval: tuple[float, float] | None = None
    status: str = "ok"


class Advised(FiniteModel):
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
    bias2: Sum
    bias2_se: Sum
    bias2_counted: Sum
    variance: Sum
    mse: Sum
    gain: Sum
    gain_se: Sum
    rejected_tokens: float
    rejected_sequences: float
    ess: float
    ties: bool
    why: str
    kept_reward_difference: float | None = None
    kept_length_difference: float | None = None
    next_batch: Ahead | None = None
    twice_the_length: Ahead | None = None
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


class Tipping(FiniteModel):
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
    advice: list[Advised] = Field(default_factory=list)
    yours: list[Advised] = Field(default_factory=list)
    batch: int = 0
    sequences: int = 0
    prompts: int = 0
    basis: Literal["gradient", "probabilities", "none"] = "none"
    reference: str | None = None
    sequence_mean: float | None = None
    lower_bound: bool = False
    bias_counts: float = 1.0
    holds_to: Tipping | None = None
    stable: float | None = None
    stable_later: float | None = None
    outlook: Outlook | None = None
    k_hat: float | None = None
    notes: list[str] = Field(default_factory=list)
    front: dict[str, tuple[Sum, Sum, Sum]] = Field(default_factory=dict)

    @property
    def uncorrected(self) -> float:
        """Error without a correction, in the units of the surrogate; 1 where there is none."""
        bias2, variance, _ = self.front["none"]
        return bias2 + variance or 1.0
