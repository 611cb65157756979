"""SkyRL: options as a Correction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mismatchctl.correction import Gate, Weight
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.plain import PlainFramework, Rules, Trap
from mismatchctl.frameworks.run import Options

_BLOCK: Options = {
    "tis_ratio_type": None,
    "token_tis_ratio_clip_high": 2.0,
    "sequence_tis_ratio_clip_high": 5.0,
    "sequence_mask_metric": None,
    "geo_mask_low": 0.99,
    "geo_mask_high": 1.01,
    "product_mask_low": 0.5,
    "product_mask_high": 2.0,
    "outlier_token_is_threshold_low": None,
    "outlier_token_is_threshold_high": None,
    "token_mask_is_threshold_low": None,
    "token_mask_is_threshold_high": None,
}

_LOSSES = ("regular", "dual_clip", "gspo", "sapo", "cispo", "rollout_is", "dppo", "importance_sampling")


def _form(**names: str) -> Any:
    fixed = {key: value for key, value in names.items() if key not in ("low", "high")}

    def said(low: Any, high: Any) -> Options:
        bounds = {names[side]: value for side, value in (("low", low), ("high", high)) if side in names}
        return {"off_policy_correction": {**fixed, **bounds}}

    return said


def _rollout_is(low: Any, high: Any) -> Options:
    ends = {"eps_clip_low": None if low is None else 1 - low, "eps_clip_high": None if high is None else high - 1}
    return {"policy_loss_type": "rollout_is"} | {
        name: None if value is None else round(value, 12) for name, value in ends.items()
    }


def _dppo_form(kind: str, side: str) -> Any:
    def said(low: Any, high: Any) -> Options:
        delta = high if kind == "binary_kl" or side == "high" else None if low is None else -low
        return {"policy_loss_type": "dppo", "dppo": {"dppo_type": kind, f"delta_{side}": delta}}

    return said


class SkyRlDialect(PlainFramework):
    """A fixed stack: veto, mask of tokens, weight, mask of sequences, each on what is left; denominators stay."""

    name = "skyrl"
    signs = (
        r"off_policy_correction|tis_ratio_type|policy_loss_type|\w+_tis_ratio_clip_high"
        r"|sequence_mask_metric|outlier_token_is_threshold_\w+|use_tis|tis_imp_ratio_cap"
    )

    columns = {
        "rollout_logprobs": "rollout_log_probs",
        "action_log_probs": "train_log_probs",
        "base_action_log_probs": "ref_log_probs",
        "loss_mask": "response_mask",
    }

    options = {
        "off_policy_correction": _BLOCK,
        "use_tis": False,
        "tis_imp_ratio_cap": -1.0,
        "policy_loss_type": "regular",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.2,
        "clip_ratio_c": 3.0,
        "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
        "cispo": {"cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": 4.0, "cispo_anchor": "old"},
        "dppo": {"dppo_type": "binary_tv", "delta_low": 0.2, "delta_high": 0.2},
    }

    places = ("trainer", "algorithm")

    forms = (
        lambda low, high: {},
        _form(tis_ratio_type="token", high="token_tis_ratio_clip_high"),
        _form(tis_ratio_type="sequence", high="sequence_tis_ratio_clip_high"),
        _form(sequence_mask_metric="geometric", low="geo_mask_low", high="geo_mask_high"),
        _form(sequence_mask_metric="product", low="product_mask_low", high="product_mask_high"),
        _form(low="token_mask_is_threshold_low", high="token_mask_is_threshold_high"),
        _form(low="outlier_token_is_threshold_low", high="outlier_token_is_threshold_high"),
        _rollout_is,
        *(_dppo_form(kind, side) for kind in ("binary_tv", "binary_kl") for side in ("low", "high")),
    )

    source = "NovaSky-AI/SkyRL@a9564572eb8e"
    traps = (
        Trap(
            lambda o: (
                o["off_policy_correction"]["outlier_token_is_threshold_high"] is not None
                and o["off_policy_correction"]["outlier_token_is_threshold_low"] is None
            ),
            "info",
            "off_policy_correction.outlier_token_is_threshold_low",
            "only ratios above the bound veto",
            "give 1e-4 as the lower one",
        ),
        Trap(
            lambda o: (
                sum(o["off_policy_correction"][f"token_mask_is_threshold_{side}"] is None for side in ("low", "high"))
                == 1
            ),
            "error",
            "off_policy_correction.token_mask_is_threshold_low",
            "the mask of tokens needs both bounds: with one it does nothing",
            "give both",
        ),
    )

    def read(self, native: Mapping[str, Any]) -> Options:
        """As every shelf, and what use_tis stands for, which is deprecated."""
        options = super().read(native)
        if options["use_tis"]:
            tis = {"tis_ratio_type": "token", "token_tis_ratio_clip_high": options["tis_imp_ratio_cap"]}
            options |= {"off_policy_correction": options["off_policy_correction"] | tis, "use_tis": False}
        return options

    def rules(self, options: Options) -> Rules:
        """The stack in its order; or the mask of a loss that brings its own."""
        given = options["off_policy_correction"]
        kind = options["policy_loss_type"]
        if kind not in _LOSSES:
            raise ConfigError(f"skyrl knows the losses {', '.join(_LOSSES)}, not {kind!r}")
        common: dict[str, Any] = {"clamp": "token", "effect": "zero"}
        gates: list[Gate] = []
        low, high = given["outlier_token_is_threshold_low"], given["outlier_token_is_threshold_high"]
        if low is not None:
            gates.append(Gate(level="min", keep=(low, None), nonfinite="keep", **common))
        if high is not None:
            gates.append(Gate(level="max", keep=(None, high), nonfinite="keep", **common))
        keep = given["token_mask_is_threshold_low"], given["token_mask_is_threshold_high"]
        if None not in keep:
            gates.append(Gate(keep=keep, **common))
        weight = None
        if given["tis_ratio_type"] is not None:
            sequences = {"token": False, "sequence": True}[given["tis_ratio_type"]]
            bound = given["sequence_tis_ratio_clip_high" if sequences else "token_tis_ratio_clip_high"]
            rule: dict[str, Any] = {"level": "sequence", "sees": "remaining"} if sequences else {}
            weight = Weight(truncate=bound, **rule)
        metric = given["sequence_mask_metric"]
        if metric is not None:
            level: Any = {"geometric": "geometric", "product": "sequence"}[metric]
            prefix = {"geometric": "geo", "product": "product"}[metric]
            keep = given[f"{prefix}_mask_low"], given[f"{prefix}_mask_high"]
            seen: dict[str, Any] = {"sees": "remaining", "clamp": "aggregate", "nonfinite": "keep", "effect": "zero"}
            gates.append(Gate(level=level, keep=keep, **seen))
        if kind == "rollout_is":
            keep = 1 - options["eps_clip_low"], 1 + options["eps_clip_high"]
            gates.append(Gate(source="current/rollout", keep=keep, inclusive=(False, False), **common))
        return weight, (*gates, *self._dppo(options, common))

    @staticmethod
    def _dppo(options: Options, common: dict[str, Any]) -> tuple[Gate, ...]:
        if options["policy_loss_type"] != "dppo":
            return ()
        dppo: Options = options["dppo"]
        sides: Any = (("positive_advantage", dppo["delta_high"]), ("negative_advantage", dppo["delta_low"]))
        if dppo["dppo_type"] == "binary_tv":
            bounds = [(None, sides[0][1]), (-sides[1][1], None)]
            return tuple(
                Gate(statistic="prob_diff", source="current/rollout", keep=keep, when=when, nonfinite="keep", **common)
                for keep, (when, _) in zip(bounds, sides, strict=True)
            )
        return tuple(
            Gate(
                statistic="binary_kl",
                source="current/rollout",
                keep=(None, delta),
                when=when,
                nonfinite="keep",
                **common,
            )
            for when, delta in sides
        )
