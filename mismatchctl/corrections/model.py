"""The class `Correction`: a weight rule, an ordered list of gates, and a loss."""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mismatchctl.core.formatting import format_label
from mismatchctl.core.ratios import LOG_RATIO_BOUND
from mismatchctl.io.yaml import read_data

LOSSES: dict[str, dict[str, float]] = read_data(Path(__file__).with_name("losses.yaml"))
"""Names of losses, with the default of each parameter."""
OWN_RATIO_LOSSES = frozenset(
    ("ppo_bypass", "cispo_bypass", "vespo", "topr", "importance_sampling", "dppo", "ipo", "quadratic")
)
"""Losses that already contain the ratio current/rollout, so they are not multiplied by weights with this ratio."""


def parse_loss(text: str) -> tuple[str, dict[str, float]]:
    name, _, given = text.partition(":")
    if name not in LOSSES:
        near = difflib.get_close_matches(name, LOSSES, n=1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown loss {name!r}{meant}; known: {', '.join(LOSSES)}")
    numbers = dict(LOSSES[name])
    for part in filter(None, given.split(",")):
        key, _, value = part.partition("=")
        if key not in numbers:
            known = ", ".join(numbers) or "none"
            raise ValueError(f"loss {name}: unknown parameter {key!r}; known: {known}")
        try:
            numbers[key] = float(value)
        except ValueError:
            raise ValueError(f"loss {text}: {value!r} is not a number") from None
        if not abs(numbers[key]) < float("inf"):
            raise ValueError(f"loss {text}: {value} is not a finite number")
    return name, numbers


RatioSource = Literal["train/rollout", "current/rollout", "current/train", "proximal/rollout"]
MISMATCH_SOURCE: RatioSource = "train/rollout"
"""Ratio of the trainer's recomputed probability to the rollout engine's probability."""
BYPASS_SOURCE: RatioSource = "current/rollout"
"""Ratio of the current policy's probability to the rollout engine's. Used by trainers that recompute no log-probs."""
ClampLevel = Literal["aggregate", "token", "none"]
Interval = tuple[float | None, float | None]

ARITHMETIC_LEVELS = ("token", "sum", "mean", "min", "max")
STATISTIC_LEVELS = {"ratio": ("token", "sequence", "geometric", "mean", "min", "max"), "age": ("sequence",)}
"""Levels that the statistics `ratio` and `age` support. Other statistics support ARITHMETIC_LEVELS."""


class _CorrectionModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _no_flag_for_a_number(cls, data: Any) -> Any:
        """Refuse true and false as numbers, because pydantic would read `truncate: true` as 1."""
        for name, value in data.items() if isinstance(data, dict) else ():
            parts = value if isinstance(value, (list, tuple)) else (value,)
            if name != "inclusive" and any(part is True or part is False for part in parts):
                raise ValueError(f"{name} needs a number, not true or false")
        return data


def _drop_infinite_bounds(interval: Interval) -> Interval:
    low, high = interval
    return (None if low == -math.inf else low), (None if high == math.inf else high)


def _check_interval(interval: Interval, *, positive: bool) -> Interval:
    low, high = interval = _drop_infinite_bounds(interval)
    for bound in interval:
        if bound is not None and (not math.isfinite(bound) or (positive and bound < 0)):
            wanted = f"a finite number{' >= 0' if positive else ''}, or null for unbounded"
            raise ValueError(f"{format_label(bound)} is not a valid bound; write {wanted}")
    if low is not None and high is not None and low > high:
        raise ValueError(f"lower bound {low} is above upper bound {high}")
    if high is not None and positive and high == 0:
        raise ValueError("an upper bound of 0 on a ratio rejects everything")
    return interval


_CLAMP_LIMIT = Field(
    default=LOG_RATIO_BOUND,
    gt=0,
    allow_inf_nan=False,
    description="largest absolute log ratio. Larger log ratios are clamped to this value",
)
_SOURCE_DESCRIPTION = (
    "the two policies of the ratio. proximal is the policy one update before current. mismatchctl estimates its "
    "log-prob: rollout + (n - 1) / n * (current - rollout), with n = train_version - rollout_version"
)
_SEGMENT_DESCRIPTION = "sequence: all tokens of the sequence. segment: adjacent valid tokens (a turn)"


class Gate(_CorrectionModel):
    """A rule that keeps a token or sequence if its statistic is inside an interval, and otherwise rejects it."""

    statistic: Literal[
        "ratio", "k1", "k2", "k3", "k3_reversed", "abs_log_ratio", "mult_error", "ratio_gap", "prob_diff",
        "abs_prob_diff", "train_prob", "rollout_prob", "binary_kl", "binary_kl_max", "age",
    ] = Field(
        default="ratio",
        description="statistic of each token. train and rollout mean the first and second policy of `source`. "
        "k1: rollout log-prob minus train log-prob. k3_reversed: k3 with rollout and train exchanged. prob_diff: train "
        "probability minus rollout probability. mult_error: exp(|log ratio|). ratio_gap: |ratio - 1|. binary_kl: KL of "
        "rollout from train over two outcomes, this token and all other tokens (probabilities clipped to [1e-8, 1 - "
        "1e-8]). binary_kl_max: the larger of this KL and the KL of train from rollout. "
        "age: number of weight updates from the oldest rollout_version of the sequence to train_version",
    )  # fmt: skip
    level: Literal["token", "sequence", "geometric", "sum", "mean", "min", "max"] = Field(
        default="token",
        description="value that the gate compares with the bounds. token: the statistic of each token. "
        "sequence: the product of the token ratios, or the age of the sequence. geometric: the geometric mean of the "
        "token ratios. sum, mean, min, max: the sum, mean, minimum or maximum of the statistic over the tokens",
    )
    over: Literal["sequence", "segment", "prefix", "batch"] = Field(
        default="sequence",
        description=f"tokens that `level` combines. {_SEGMENT_DESCRIPTION}. prefix: for each token, the token and all "
        "earlier tokens. batch: all tokens of the batch. The gate rejects the tokens "
        "with the largest values until the mean of the other tokens is within the bounds (M2PO)",
    )
    keep: Interval = Field(default=(None, None), description="[lower, upper] bounds. null means no bound")
    inclusive: tuple[bool, bool] = Field(
        default=(True, True), description="flags for the two bounds. true: keep values that are equal to this bound"
    )
    source: RatioSource = Field(default="train/rollout", description=_SOURCE_DESCRIPTION)
    clamp: ClampLevel = Field(
        default="aggregate",
        description="aggregate: clamp the log ratio of the sequence (`ratio` only). token: clamp it for each token",
    )
    limit: float = _CLAMP_LIMIT
    nonfinite: Literal["reject", "keep", "one"] = Field(
        default="reject", description="if the statistic of a token is NaN. one: count its ratio as 1"
    )
    precision: Literal["float64", "float32"] = Field(
        default="float64",
        description="precision of the computation. In float32, rounding errors can change the result for tokens with a "
        "probability near 1, "
        "and for bounds of 1",
    )
    widen: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="exponent. With 0.5, the bounds of token n are multiplied by the square root of n, "
        "so they widen along the sequence. For ratios, the logarithms of the bounds are multiplied",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        description="random seed. With a seed, a value above the upper bound is kept with probability bound / value",
    )
    sees: Literal["original", "remaining"] = Field(
        default="original",
        description="tokens that the gate uses. original: all valid tokens. remaining: tokens that "
        "earlier gates kept. "
        "A gate on sequences rejects all tokens of a sequence, also the tokens that it did not use",
    )
    effect: Literal["mask", "zero"] = Field(
        default="mask",
        description="mask: rejected tokens do not count in the denominator of the loss. zero: they have weight 0, "
        "but count in the denominator",
    )
    when: Literal["always", "positive_advantage", "negative_advantage", "nonpositive_advantage", "drifting"] = Field(
        default="always",
        description="tokens that the gate may reject. drifting: tokens whose log ratio and advantage have the "
        "same sign, so the "
        "update increases the mismatch",
    )

    @field_validator("keep")
    @classmethod
    def _open(cls, value: Interval) -> Interval:
        return _drop_infinite_bounds(value)

    @model_validator(mode="after")
    def _levels_fit(self) -> Gate:
        levels = STATISTIC_LEVELS.get(self.statistic, ARITHMETIC_LEVELS)
        if self.level not in levels:
            raise ValueError(
                f"level {self.level!r} does not fit statistic {self.statistic!r}; use one of {', '.join(levels)}"
            )
        _check_interval(self.keep, positive=self.statistic == "ratio")
        if self.keep == (None, None):
            raise ValueError("keep [null, null] rejects no data; write at least one bound")
        if self.keep[0] == self.keep[1] and not all(self.inclusive):
            raise ValueError(f"keep {list(self.keep)} contains no value; set inclusive: [true, true]")
        if self.over in ("segment", "prefix") and self.level == "token":
            raise ValueError(f"over: {self.over} needs a level other than token")
        if self.over == "batch" and (self.statistic == "ratio" or self.level != "mean" or self.keep[1] is None):
            raise ValueError("over: batch needs level mean, an upper bound, and a statistic other than ratio")
        if self.statistic == "age" and self.over != "sequence":
            raise ValueError("statistic age needs over: sequence, because a sequence has one age")
        if self.widen and self.over != "prefix" and self.level != "token":
            raise ValueError("widen only works with level: token or over: prefix")
        return self

    @property
    def is_usual(self) -> bool:
        """Return True if all rarely used fields (`over`, `limit`, `precision`, ...) have their default values."""
        given = (self.over, self.limit, self.precision, self.widen, self.seed, self.when)
        return given == ("sequence", LOG_RATIO_BOUND, "float64", 0.0, None, "always")

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the interval (lower, upper) of values that the gate keeps. A missing bound is infinite."""
        low, high = self.keep
        return (-math.inf if low is None else low), (math.inf if high is None else high)

    @property
    def per_token(self) -> bool:
        """Return True if the gate rejects single tokens, and False if it rejects sequences or segments."""
        return self.level == "token" or self.over in ("prefix", "batch")

    @property
    def is_veto(self) -> bool:
        """Return True if a single token with a low ratio rejects its sequence."""
        return self.statistic == "ratio" and self.level == "min" and bool(self.keep[0])


class Weight(_CorrectionModel):
    """Rule for importance weights. A weight is a ratio per token or per sequence (`level`), bounded and normalized.

    At most one of the bounds `truncate`, `clip` and `zero` may be given. Without them, the weight is the ratio, whose
    logarithm is clamped to +-`limit` (default 20).
    """

    level: Literal["token", "sequence", "geometric"] = Field(
        default="token",
        description="ratio of the token, product of the sequence's token ratios, or their geometric mean",
    )
    truncate: float | None = Field(default=None, description="upper bound. Larger weights are set to the bound")
    clip: Interval | None = Field(
        default=None, description="[lower, upper] bounds. Weights outside these bounds are set to the nearer bound"
    )
    zero: Interval | None = Field(
        default=None, description="[lower, upper] bounds. Weights outside these bounds are set to 0 (IcePop)"
    )
    watch_low: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="weights below this value count as low in the metrics. The weights do not change",
    )
    normalize: Literal["none", "token", "sequence"] = Field(
        default="none",
        description="token: divide the weights by the mean weight of all tokens. sequence: compute the mean "
        "weight of each sequence, "
        "and divide the weights by the mean of these means",
    )
    normalize_over: Literal["group", "micro_batch"] = Field(
        default="group",
        description="group: take the mean weight over the step. micro_batch: take it over the micro-batch. "
        "Rejected tokens count in this mean",
    )
    normalize_empty: Literal["skip", "count"] = Field(
        default="skip",
        description="skip: leave sequences without valid tokens out of the mean over sequences. count: count them as 0",
    )
    source: RatioSource = Field(default="train/rollout", description=_SOURCE_DESCRIPTION)
    over: Literal["sequence", "segment"] = Field(default="sequence", description=_SEGMENT_DESCRIPTION)
    clamp: ClampLevel = Field(
        default="aggregate",
        description="aggregate: clamp the log ratio of the sequence. token: clamp the log ratio of each token",
    )
    limit: float = _CLAMP_LIMIT
    sees: Literal["original", "remaining"] = Field(
        default="original",
        description="tokens whose ratios the weight uses. original: all valid tokens. remaining: tokens that the "
        "gates kept. If the "
        "gates rejected all tokens, the weight is 1",
    )
    nonfinite: Literal["keep", "one", "zero"] = Field(
        default="keep",
        description="if a weight is NaN or infinite. zero: set the weight to 0. one: set its ratio to 1",
    )
    bound_where: Gate | None = Field(
        default=None,
        description="a gate. The weight's bound only applies to sequences that this gate would reject. null: to all "
        "sequences",
    )

    @field_validator("clip", "zero")
    @classmethod
    def _interval(cls, value: Interval | None) -> Interval | None:
        return None if value is None else _check_interval(value, positive=True)

    @field_validator("truncate")
    @classmethod
    def _upper(cls, value: float | None) -> float | None:
        return None if value is None else _check_interval((None, value), positive=True)[1]

    @model_validator(mode="after")
    def _one_bound(self) -> Weight:
        given = [name for name in ("truncate", "clip", "zero") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; write only one of them")
        if self.watch_low is not None and (self.clip is not None or self.zero is not None):
            raise ValueError("watch_low only works for weights without a lower bound")
        if self.over == "segment" and self.level != "geometric":
            raise ValueError(f"over: segment only works with level: geometric, found {self.level!r}")
        if self.bound_where is not None and self.bound_where.level == "token":
            raise ValueError("bound_where needs a gate on whole sequences, so its level must not be token")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the bounds (lower, upper). Weights between them stay as they are."""
        low, high = self.clip or self.zero or (None, self.truncate)
        return (0.0 if low is None else low), (math.inf if high is None else high)

    @property
    def is_usual(self) -> bool:
        """Return True if all rarely used fields (`over`, `clamp`, `limit`, ...) have their default values."""
        given = (self.over, self.clamp, self.limit, self.sees, self.nonfinite, self.bound_where)
        return given == ("sequence", "aggregate", LOG_RATIO_BOUND, "original", "keep", None)

    @property
    def per_token(self) -> bool:
        """Return True if there is one weight per token, and False if there is one per sequence."""
        return self.level == "token" or self.over == "segment"


class Correction(_CorrectionModel):
    """A correction: a rule for importance weights, gates that reject data, and the loss.

    Weights never reject data. With `sees: remaining`, the weight rule ignores tokens that gates reject.
    """

    name: str = Field(
        default="correction", min_length=1, max_length=80, description="name of the correction in tables and files"
    )
    about: str = Field(default="", description="source and purpose")
    weight: Weight | None = Field(default=None, description="weight rule. null: every weight is 1")
    gates: tuple[Gate, ...] = Field(
        default=(), description="gates in the order in which they are applied. A token is kept if every gate keeps it"
    )
    loss: str = Field(
        default="ppo",
        description="ppo: PPO with train as the old policy. ppo_bypass: PPO with rollout as the old policy. "
        f"policy_gradient: REINFORCE with weights. Other losses: {', '.join(list(LOSSES)[3:])}. Parameters "
        "follow a colon, "
        "as in gspo:low=0.9997,high=1.0004. Ratios are limited to exp(-20) and exp(20)",
    )

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, value: str) -> str:
        parse_loss(value)
        return value

    @property
    def _gates(self) -> tuple[Gate, ...]:
        where = None if self.weight is None else self.weight.bound_where
        return self.gates if where is None else (*self.gates, where)

    @property
    def sources(self) -> set[str]:
        """Return the ratios that the weight and the gates use. `train/rollout` is trainer / rollout probability."""
        rules: list[Weight | Gate] = [*self._gates] if self.weight is None else [self.weight, *self._gates]
        return {rule.source for rule in rules}

    @property
    def weights_loss(self) -> bool:
        """Return True if the loss is multiplied by the weights.

        False without weights, or if the loss contains them: `vespo`, and OWN_RATIO_LOSSES with `current/rollout`.
        """
        name = parse_loss(self.loss)[0]
        own = name == "vespo" or (
            self.weight is not None and name in OWN_RATIO_LOSSES and self.weight.source == "current/rollout"
        )
        return self.weight is not None and not own

    @property
    def needed_columns(self) -> frozenset[str]:
        """Return the optional columns that the weight and the gates use."""
        found = {"current_log_probs"} if self.sources - {"train/rollout"} else set()
        found |= {"advantages"} if any(gate.when != "always" for gate in self.gates) else set()
        aged = any(gate.statistic == "age" for gate in self._gates) or "proximal/rollout" in self.sources
        return frozenset(found | ({"rollout_version", "train_version"} if aged else set()))

    @property
    def normalizes_micro_batches(self) -> bool:
        """Return True if the weights of each micro-batch are divided by their mean."""
        return (
            self.weight is not None and self.weight.normalize != "none" and self.weight.normalize_over == "micro_batch"
        )

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as plain data for YAML."""
        return self.model_dump(mode="json", exclude_defaults=True)
