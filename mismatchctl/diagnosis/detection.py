"""The result of a test for a cause, the facts that support it, and helpers that format numbers and lists."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

from mismatchctl.core.batch import Bools, Ints
from mismatchctl.core.formatting import INTERVAL_Z
from mismatchctl.diagnosis.case import BFLOAT16_NOISE, FLOAT32_NOISE, Case
from mismatchctl.results.model import Confidence, Fact

Place = tuple[int, int, int]  # (index of a file, row, token position). A negative position means the whole row.


@dataclass(frozen=True)
class Detection:
    """The result of a test that has found a cause.

    Attributes:
        share: Share of the total |log ratio| that the cause explains. It is computed from `tokens` if they are set.
        where: Description of the affected tokens. The default is {"tokens": "all"} if `everywhere` is True.
        examples: Indices of sampled sequences that show the cause.
        positions: A token position in each of the examples.
        places: More examples, also of rows that are not in the sample.
        rivals: For each other possible cause, a measurement that shows which of the two causes is right.
        tokens: True for the tokens that the cause explains [T].
        leaves: The case for the next tests, without this cause. Default: the tested case without `tokens`.
        k3: Share of K3 that the cause explains, if it cannot be computed from `leaves`.
        everywhere: True if the cause affects all tokens.
        outside_k3: True if the cause affects data that K3 does not include.
        symptom_of: Another cause that may explain this result. If it is found too, the two results are merged.
    """

    confidence: Confidence
    summary: str
    share: float = 1.0
    evidence: tuple[Fact, ...] = ()
    where: Mapping[str, str] | None = None
    examples: Ints | None = None
    positions: Ints | None = None
    places: tuple[Place, ...] = ()
    rivals: Mapping[str, str] = field(default_factory=dict)
    tokens: Bools | None = None
    leaves: Case | None = None
    k3: float | None = None
    everywhere: bool = False
    outside_k3: bool = False
    symptom_of: str = ""


_SAMPLED = "0 if the rollout column belongs to the sampling distribution"
_TRAINER_SAMPLED = "0 if the trainer's column belongs to the sampling distribution"
STATISTICS = {
    "noise": f"noise of the logits (below {FLOAT32_NOISE:g} for float32, below {BFLOAT16_NOISE:g} for bfloat16)",
    "spread": "noise of the logits that would cause this K3",
    "tail_k3": "share of K3 from tokens that differ by more than 12 times the noise",
    "systematic": "share of the variance that depends only on the token id (0 if the weights agree)",
    "along_learning": "correlation of the log ratios with the policy's next update, over token ids",
    "likely": "direction of the log ratios of likely tokens (0 for noise, 1 or -1 if all have the same sign)",
    "unlikely": "direction of the log ratios of unlikely tokens (opposite to likely tokens if the temperature differs)",
    "late_over_early": "median difference (in logits) late in responses divided by the difference of the first tokens",
    "times": "difference (in logits) of tokens in these rows, divided by the difference in other rows",
    "ratio_mean_minus_one": f"E[ratio] - 1 ({_SAMPLED})",
    "inverse_ratio_mean_minus_one": f"E[1 / ratio] - 1 ({_TRAINER_SAMPLED})",
    "ratio_mean_z": f"E[ratio] - 1 in standard errors ({_SAMPLED})",
    "inverse_ratio_mean_z": f"E[1 / ratio] - 1 in standard errors ({_TRAINER_SAMPLED})",
}
"""Name of a statistic -> its meaning. A statistic can be evidence for one cause and against another."""


def make_fact(
    name: str, value: SupportsFloat | str | None, meaning: str = "", *, against: bool = False, interval: Any = None
) -> Fact:
    """Create a fact, and round its value to four digits. Without a `meaning`, use the text in `STATISTICS`."""
    ends = None if interval is None else (round_value(interval[0]), round_value(interval[1]))
    shown = value if value is None or isinstance(value, str) else round_value(value)
    return Fact(name=name, value=shown, interval=ends, supports=not against, meaning=meaning or STATISTICS[name])


def make_share_fact(name: str, found: Bools, among: Bools, meaning: str, *, perhaps: Bools | None = None) -> Fact:
    """Create a fact: the share of `among` sequences that are `found`. Its upper limit also counts `perhaps`."""
    total, z = max(int(among.sum()), 1), INTERVAL_Z

    def bound(sequences: Bools, sign: int) -> float:
        share = int((sequences & among).sum()) / total
        half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
        return min(max((share + z * z / (2 * total) + sign * half) / (1 + z * z / total), 0.0), 1.0)

    ends = bound(found, -1), bound(found if perhaps is None else found | perhaps, 1)
    return make_fact(name, int((found & among).sum()) / total, meaning, interval=ends)


def format_interval(interval: tuple[float, float] | None) -> str:
    if interval is None:
        return ""
    digits = next((digits for digits in (3, 4, 5) if f"{interval[0]:.{digits}g}" != f"{interval[1]:.{digits}g}"), 3)
    return f"({interval[0]:.{digits}g} to {interval[1]:.{digits}g}) "


def round_value(value: SupportsFloat) -> float | int:
    """Round to four significant digits. Whole numbers stay exact."""
    number = float(value)
    return int(number) if number.is_integer() else float(f"{number:.4g}")


def format_list(values: Iterable[Any], most: int = 8) -> str:
    texts = [str(value) for value in values]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def percent(share: SupportsFloat) -> str:
    value = 100 * float(share)
    return f"{value:.3g}%" if abs(value) < 99.95 else f"{value:,.0f}%"
