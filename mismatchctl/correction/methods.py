"""Which methods of the field a Correction is, told by its rules: what frameworks call otherwise is found by these."""

from __future__ import annotations

from collections.abc import Callable

from mismatchctl.correction.model import Correction, Gate, Weight

Rule = Weight | Gate
_DIVERGENCES = ("k1", "k2", "k3", "k3_reversed")


def _weights(level: str) -> Callable[[Rule], bool]:
    """Weights of a level that a bound holds down."""

    def test(rule: Rule) -> bool:
        return (
            isinstance(rule, Weight)
            and (rule.level, rule.over) == (level, "sequence")
            and rule.zero is None
            and (rule.truncate is not None or rule.clip is not None)
        )

    return test


def _gates(statistic: str, *levels: str, when: tuple[str, ...] = ("always",)) -> Callable[[Rule], bool]:
    """Gates on a statistic at one of some levels."""

    def test(rule: Rule) -> bool:
        return (
            isinstance(rule, Gate)
            and (rule.statistic, rule.over) == (statistic, "sequence")
            and (rule.level in levels and rule.when in when)
        )

    return test


def _icepop(rule: Rule) -> bool:
    """Tokens outside an interval contribute nothing, in the nominal batch."""
    if isinstance(rule, Weight):
        return rule.zero is not None and rule.level == "token"
    return _gates("ratio", "token")(rule) and rule.effect == "zero"


_SIGNED = ("positive_advantage", "negative_advantage", "nonpositive_advantage")
METHODS: dict[str, Callable[[Rule], bool]] = {
    "tis": _weights("token"),
    "icepop": _icepop,
    "token-rejection": lambda rule: _gates("ratio", "token")(rule) and getattr(rule, "effect", "") == "mask",
    "sequence-tis": _weights("sequence"),
    "sequence-mask": _gates("ratio", "sequence"),
    "geometric-tis": _weights("geometric"),
    "geometric-mask": _gates("ratio", "geometric"),
    "segment": lambda rule: rule.over == "segment",
    "prefix": lambda rule: rule.over == "prefix",
    "veto": _gates("ratio", "min"),
    "maximum": _gates("ratio", "max"),
    "kl-rejection": lambda rule: (
        isinstance(rule, Gate) and (rule.statistic in _DIVERGENCES and rule.when == "always" and rule.over != "batch")
    ),
    "mult-error": _gates("mult_error", "mean", "token", "max"),
    "dppo": _gates("prob_diff", "token", when=_SIGNED),
    "ipo": _gates("abs_prob_diff", "token"),
    "prob-diff": _gates("prob_diff", "token", "mean", "sum"),
    "binary-kl": lambda rule: isinstance(rule, Gate) and rule.statistic in ("binary_kl", "binary_kl_max"),
    "tv": _gates("ratio_gap", "mean", "token", when=("always", "drifting")),
    "opsm": _gates("k1", "mean", when=("negative_advantage",)),
    "m2po": lambda rule: isinstance(rule, Gate) and rule.over == "batch" and rule.statistic == "k2",
    "trust-region": _gates("k3", "max"),
    "staleness": _gates("age", "sequence"),
    "stochastic": lambda rule: isinstance(rule, Gate) and rule.seed is not None,
    "position-weighted": lambda rule: isinstance(rule, Gate) and rule.widen > 0,
    "self-normalized": lambda rule: isinstance(rule, Weight) and rule.normalize != "none",
}
"""Name -> whether one weight rule or gate is of it."""


def rule_of(method: str, correction: Correction) -> Rule | None:
    """The rule of a Correction that makes it one of a method; None where there is none."""
    rules = ([] if correction.weight is None else [correction.weight]) + [*correction.gates]
    return next((rule for rule in rules if METHODS[method](rule)), None)
