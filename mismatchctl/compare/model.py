"""Comparison: what `compare` finds, as strict JSON; terminal and HTML are renderings of it."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, model_validator

from mismatchctl import __version__
from mismatchctl.correction import Correction
from mismatchctl.finite import FiniteModel
from mismatchctl.result import Breakdown, Distribution, Growth, Value
from mismatchctl.views import ComparisonViews

FORMAT = 2
"""Version of this format; it grows when a key changes its meaning or goes away."""
CONFIDENCE = 0.95
"""Of intervals; what is significant is so at one minus this."""

Interval = tuple[float, float]
Label = str | int | float | bool | None
Both = tuple[float | None, float | None]
"""The same of the reference and of the other side."""


class Side(FiniteModel):
    """One run of one argument: `rollout` and `trainer` are the engines where the argument names them."""

    name: str
    source: str
    kind: Literal["dump", "result"]
    rollout: str | None = None
    trainer: str | None = None
    clusters_by: str
    clusters: int
    metrics: dict[str, Value]
    distribution: Distribution
    breakdowns: dict[str, Breakdown]


class Change(FiniteModel):
    """One metric on both sides: other minus reference.

    `interval` is the 95 % percentile interval over resampled clusters; `p` is two-sided and adjusted for all metrics of
    its family; `relative` is the difference over the reference; `better` whether the other side is nearer to what is
    good; `status` says why there is no difference or no interval.
    """

    reference: Value
    other: Value
    difference: float | None = None
    interval: Interval | None = None
    p: float | None = None
    significant: bool = False
    relative: float | None = None
    relative_interval: Interval | None = None
    better: bool | None = None
    status: str = "ok"


class Contribution(FiniteModel):
    """What one bin, step or value contributes to the change of K3.

    `mix`: more or fewer tokens there, where K3 differs from the mean; `level`: larger or smaller K3 there. A bin is
    `low` <= quantity < `high` (null: open), a value has a `label`. `tokens` are shares of each side. `se` is of the
    whole contribution where the cluster tables tell, as for steps and values, else of the level alone, as for bins.
    """

    label: Label = None
    low: float | None = None
    high: float | None = None
    tokens: tuple[float, float]
    k3: Both
    mix: float
    level: float
    se: float | None = None

    @property
    def total(self) -> float:
        """Mix and level together."""
        return self.mix + self.level


class Carrier(FiniteModel):
    """What carries more of a change than its weight: neighbouring bins or steps, or a few values.

    `carried` is its share of the change, `weight` its share of the reference's K3, `tokens` of the other's tokens.
    """

    low: float | None = None
    high: float | None = None
    labels: list[Label] = Field(default_factory=list)
    carried: float
    weight: float
    tokens: float


class Decomposition(FiniteModel):
    """The change of K3 by one quantity; `mix` and `level` add up to the difference, parts are ranked."""

    quantity: str
    ordered: bool
    difference: float
    mix: float
    level: float
    parts: list[Contribution]
    carrier: Carrier | None = None


class MovedToken(FiniteModel):
    """A token of which K3 changed most; its place is that in the other dump, log-probs are (reference, other)."""

    file: str
    row: int
    position: int
    step: Label = None
    sequence_id: str | int | None = None
    prompt_id: str | int | None = None
    token_id: int | None = None
    context_ids: list[int] | None = None
    rollout_log_prob: tuple[float, float]
    train_log_prob: tuple[float, float]
    log_ratio: tuple[float, float]
    k3_change: float


class TopShare(FiniteModel):
    """What the tokens that moved most carry: of the net change of K3, and of all movement up and down."""

    tokens: int
    of_change: float | None
    of_movement: float


class PairedTokens(FiniteModel):
    """The same tokens on both sides, one by one.

    `matched_by` is what they were recognized by; `same_rollout` and `same_train` whether log-probs agree to the bit.
    `k3_change` is the mean over tokens, with its standard error over clusters; `correlation` that of the log ratios.
    """

    matched_by: Literal["token_ids", "rollout_log_probs", "train_log_probs"]
    same_rollout: bool
    same_train: bool
    sequences: int
    unmatched: tuple[int, int]
    tokens: int
    k3_change: Value
    abs_log_ratio_change: float
    largest_log_ratio_change: float
    correlation: float | None
    moved: float
    shares: list[TopShare]
    most_moved: list[MovedToken]


class GrowthContrast(FiniteModel):
    """Growth over the steps of the reference and of the other side, as the story of each has it.

    `quotient` is that of the other's K3 over the reference's, at the steps that both have: it changes where one grows
    otherwise. `onsets_differ` says whether growth began at another step (no step lies in both 90 % intervals), null
    where a side does not grow.
    """

    reference: Growth
    other: Growth
    quotient: Growth
    onsets_differ: bool | None = None


class Contrast(FiniteModel):
    """One side against the reference; `paired` says what the two have in common.

    `corrections` are changes of the metrics of each correction that both sides were analyzed with; `growth` is that of
    K3 over the steps; `says` what every medium says of it, the headline first.
    """

    other: str
    clusters_shared: int
    same_tokens: bool
    paired: str
    changes: dict[str, Change]
    corrections: dict[str, dict[str, Change]] = Field(default_factory=dict)
    decompositions: list[Decomposition]
    tokens: PairedTokens | None = None
    tokens_status: str = "ok"
    growth: GrowthContrast
    says: list[str] = Field(default_factory=list)


class Cell(FiniteModel):
    """One pair of engines."""

    side: str
    k3: Value
    ess_sequence: Value
    abs_diff_mean: Value
    abs_diff_max: Value


class Matrix(FiniteModel):
    """Pairs of engines: `cells[i][j]` is that of `rollouts[i]` and `trainers[j]`, null where there is no dump."""

    rollouts: list[str]
    trainers: list[str]
    cells: list[list[Cell | None]]

    @model_validator(mode="after")
    def _is_rectangular(self) -> Matrix:
        if [len(row) for row in self.cells] != [len(self.trainers)] * len(self.rollouts):
            raise ValueError("a matrix of other pairs than it names")
        return self


class Comparison(ComparisonViews, FiniteModel):
    """Several runs: each against the first."""

    format: int = FORMAT
    tool: str = "mismatchctl"
    version: str = __version__
    confidence: float = CONFIDENCE
    warnings: list[str] = Field(default_factory=list)
    sides: list[Side]
    corrections: list[Correction] = Field(default_factory=list)
    contrasts: list[Contrast]
    matrix: Matrix | None = None

    @model_validator(mode="after")
    def _belongs_together(self) -> Comparison:
        if not self.contrasts or [one.other for one in self.contrasts] != [side.name for side in self.sides[1:]]:
            raise ValueError("contrasts are not of the sides after the first")
        if not all("tokens" in side.metrics for side in self.sides):
            raise ValueError("a side without its tokens")
        return self

    @property
    def reference(self) -> Side:
        """The first side."""
        return self.sides[0]

    def side(self, name: str) -> Side:
        """A side by its name."""
        return next(side for side in self.sides if side.name == name)

    def to_json(self) -> str:
        """Strict JSON, compact, ending in a newline."""
        data = self.model_dump(mode="json")
        return json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False) + "\n"


def comparison_schema() -> dict[str, Any]:
    """The JSON Schema of a Comparison."""
    schema = Comparison.model_json_schema(mode="serialization")
    return schema | {"$schema": "https://json-schema.org/draft/2020-12/schema"}
