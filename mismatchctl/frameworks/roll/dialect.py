"""ROLL: options as a Correction."""

from __future__ import annotations

from typing import Any

from mismatchctl.correction import Gate, Weight
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.plain import PlainFramework, Rules, Trap
from mismatchctl.frameworks.run import Options

_WEIGHT: Options = {"enabled": False, "weight_type": "token", "upper_bound": 1.2, "detach": True}

_FILTER: Options = {
    "enabled": False,
    "agg_type": "token",
    "ratio_enabled": True,
    "ratio_low": 0.8,
    "ratio_high": 1.2,
    "diff_enabled": False,
    "diff_low": -0.2,
    "diff_high": 0.2,
}

_LEVELS: dict[str, dict[str, Any]] = {
    "token": {"level": "token"},
    "geometric": {"level": "geometric"},
    "sequence": {"level": "sequence"},
    "segment": {"level": "geometric", "over": "segment"},
}

_DIFF_LEVELS: dict[str, dict[str, Any]] = {
    "token": {"level": "token"},
    "geometric": {"level": "mean"},
    "sequence": {"level": "sum"},
    "segment": {"level": "mean", "over": "segment"},
}


def _weight_form(kind: str) -> Any:
    return lambda low, high: {"is_weight": {"enabled": True, "weight_type": kind, "upper_bound": high}}


def _filter_form(kind: str, what: str) -> Any:
    def said(low: Any, high: Any) -> Options:
        chosen = {"enabled": True, "agg_type": kind, "ratio_enabled": what == "ratio", "diff_enabled": what == "diff"}
        return {"filters": [chosen | {f"{what}_low": low, f"{what}_high": high}]}

    return said


class RollDialect(PlainFramework):
    """One weight, and filters that do not see each other."""

    name = "roll"
    signs = r"train_infer_correction|is_weight"

    columns = {"infer_logprobs": "rollout_log_probs", "old_log_probs": "train_log_probs"}

    options = {"is_weight": _WEIGHT, "filters": (), "loss_agg_mode": "seq-mean-token-mean"}

    places = ("train_infer_correction",)

    forms = (
        lambda low, high: {},
        *map(_weight_form, _LEVELS),
        *(_filter_form(kind, what) for what in ("ratio", "diff") for kind in _LEVELS),
    )

    source = "alibaba/ROLL@8eb27cc2dc34"
    traps = (
        Trap(
            lambda o: o["loss_agg_mode"] == "token-mean" and any(one.get("enabled") for one in o["filters"]),
            "error",
            "loss_agg_mode",
            "with token-mean the loss ignores the mask: filters reject nothing",
            "use seq-mean-token-mean",
        ),
        Trap(
            lambda o: (
                len({one.get("agg_type", "token") for one in o["filters"] if one.get("enabled")})
                < sum(bool(one.get("enabled")) for one in o["filters"])
            ),
            "warning",
            "train_infer_correction.filters",
            "two filters of one agg_type log under one name: the last is seen",
            "use different agg_types",
        ),
    )

    def _filters(self, options: Options) -> list[Options]:
        found = []
        for given in options["filters"]:
            if unknown := sorted(set(given) - set(_FILTER)):
                raise ConfigError(f"roll: a filter has no {unknown[0]!r}")
            if (_FILTER | dict(given))["enabled"]:
                found.append(_FILTER | dict(given))
        return found

    def rules(self, options: Options) -> Rules:
        """The weight, bounded from above; a gate for each statistic of each filter."""
        given, gates = options["is_weight"], []
        weight = None
        if given["enabled"]:
            weight = Weight(truncate=given["upper_bound"], clamp="none", **_LEVELS[given["weight_type"]])
        for one in self._filters(options):
            common: dict[str, Any] = {"clamp": "none", "effect": "zero"}
            if one["ratio_enabled"]:
                keep = (one["ratio_low"], one["ratio_high"])
                gates.append(Gate(keep=keep, **_LEVELS[one["agg_type"]], **common))
            if one["diff_enabled"]:
                keep = (one["diff_low"], one["diff_high"])
                gates.append(Gate(statistic="prob_diff", keep=keep, **_DIFF_LEVELS[one["agg_type"]], **common))
        return weight, tuple(gates)
