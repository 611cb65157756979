"""Adapter of SkyRL at commit a9564572eb8e (2026-08)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mismatchctl.core import losses
from mismatchctl.core.losses import Array, LossTerm, exp
from mismatchctl.corrections.application import GateOutcome
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.frameworks.adapter import File, Row, find_similar, read_layout, take_prompt, to_array
from mismatchctl.frameworks.options import HIGH, LOW, PlainFramework, Rules, make_adapter, negated, read_choice
from mismatchctl.frameworks.step import ConfiguredStep, Options
from mismatchctl.io.stores import first_error_line

_LOSSES = ("regular", "dual_clip", "gspo", "sapo", "cispo", "rollout_is", "dppo", "importance_sampling")
_VETO, _MASK = "outlier_token_is_threshold", "token_mask_is_threshold"
_COVARIANCE = ("clip_cov", "kl_cov")
_NOT_COMPUTED = (*_COVARIANCE, "cross_entropy")  # losses of SkyRL that mismatchctl does not compute


def _bounds(options: Options, name: str) -> tuple[Any, Any]:
    return options[f"{name}_low"], options[f"{name}_high"]


def _from_one(bound: Any) -> Any:
    return lambda low, high: None if (value := bound(low, high)) is None else round(abs(1 - value), 12)


class SkyRl(PlainFramework):
    """SkyRL applies veto, token mask, weight and sequence mask in this order. Its means also count rejected tokens."""

    # fmt: off
    forms = (
        {},
        *({"off_policy_correction": form} for form in (
            {"tis_ratio_type": "token", "token_tis_ratio_clip_high": HIGH},
            {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": HIGH},
            {"sequence_mask_metric": "geometric", "geo_mask_low": LOW, "geo_mask_high": HIGH},
            {"sequence_mask_metric": "product", "product_mask_low": LOW, "product_mask_high": HIGH},
            {"token_mask_is_threshold_low": LOW, "token_mask_is_threshold_high": HIGH},
            {"outlier_token_is_threshold_low": LOW, "outlier_token_is_threshold_high": HIGH},
        )),
        {"policy_loss_type": "rollout_is", "eps_clip_low": _from_one(LOW), "eps_clip_high": _from_one(HIGH)},
        *({"policy_loss_type": "dppo", "dppo": form} for form in (
            {"dppo_type": "binary_tv", "delta_low": negated(LOW)},
            {"dppo_type": "binary_tv", "delta_high": HIGH},
            {"dppo_type": "binary_kl", "delta_low": HIGH},
            {"dppo_type": "binary_kl", "delta_high": HIGH},
        )),
    )

    # fmt: on
    traps = {
        "own_loss": lambda o: o["policy_loss_type"] not in (*_LOSSES, *_NOT_COMPUTED),
        "upper_veto_only": lambda o: (
            [one is None for one in _bounds(o["off_policy_correction"], _VETO)] == [True, False]
        ),
        "one_bound": lambda o: _bounds(o["off_policy_correction"], _MASK).count(None) == 1,
    }

    def read(self, native: Mapping[str, Any]) -> Options:
        options = super().read(native)
        if options["use_tis"]:
            tis = {"tis_ratio_type": "token", "token_tis_ratio_clip_high": options["tis_imp_ratio_cap"]}
            options |= {"off_policy_correction": options["off_policy_correction"] | tis, "use_tis": False}
        return options

    def rules(self, options: Options) -> Rules:
        given = options["off_policy_correction"]
        kind = options["policy_loss_type"]
        if isinstance(kind, str) and kind not in (*_LOSSES, *_NOT_COMPUTED) and (near := find_similar(kind, _LOSSES)):
            raise ConfigError(f"skyrl: unknown policy_loss_type {kind!r} (did you mean {near!r}?)")
        if kind in _COVARIANCE and (given["tis_ratio_type"] or given["sequence_mask_metric"]):
            raise ConfigError(
                "`trainer.algorithm.off_policy_correction` doesn't support clip_cov or kl_cov policy loss types "
                "(skyrl/train/utils/utils.py raises NotImplementedError)"
            )
        common: dict[str, Any] = {"clamp": "token", "effect": "zero"}
        gates: list[Gate] = []
        low, high = _bounds(given, _VETO)
        if low is not None:
            gates.append(Gate(level="min", keep=(low, None), nonfinite="keep", **common))
        if high is not None:
            gates.append(Gate(level="max", keep=(None, high), nonfinite="keep", **common))
        keep = _bounds(given, _MASK)
        if None not in keep:
            gates.append(Gate(keep=keep, **common))
        weight = None
        if given["tis_ratio_type"] is not None:
            sequences = read_choice({"token": False, "sequence": True}, given, "tis_ratio_type")
            bound = given["sequence_tis_ratio_clip_high" if sequences else "token_tis_ratio_clip_high"]
            rule: dict[str, Any] = {"level": "sequence", "sees": "remaining"} if sequences else {}
            weight = Weight(truncate=bound, **rule)
        metric = given["sequence_mask_metric"]
        if metric is not None:
            level: Any = read_choice({"geometric": "geometric", "product": "sequence"}, given, "sequence_mask_metric")
            keep = _bounds(given, "geo_mask" if metric == "geometric" else "product_mask")
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
        moves = dppo["dppo_type"] == "binary_tv"  # True: bound the change of the probability, False: the KL
        statistic: Any = "prob_diff" if moves else "binary_kl"
        rise, fall = (None, dppo["delta_high"]), (-dppo["delta_low"], None) if moves else (None, dppo["delta_low"])
        sides: Any = (("positive_advantage", rise), ("negative_advantage", fall))
        common = {"source": "current/rollout", "nonfinite": "keep", **common}
        return tuple(Gate(statistic=statistic, keep=keep, when=when, **common) for when, keep in sides)

    def _mask(self, run: ConfiguredStep) -> tuple[GateOutcome, ...]:
        return tuple(outcome for outcome in run.applied.gates if outcome.gate.source == "train/rollout")

    def _loss_drops(self, run: ConfiguredStep) -> Any:
        """Flag the tokens that the loss `rollout_is` or `dppo` drops. `dppo` also checks the sign of the advantage."""
        drops = np.zeros(run.tokens, np.bool_)
        for outcome in run.applied.gates:
            if outcome.gate.source != "current/rollout":
                continue
            flags = outcome.rejected
            if outcome.gate.statistic == "binary_kl":
                moved = run.v > 0 if outcome.gate.when == "positive_advantage" else run.v < 0
                flags = flags & moved & ~np.isneginf(run.rollout)  # 0 times an infinite log-prob is NaN
            drops |= flags
        return drops

    def shown_keep(self, run: ConfiguredStep) -> Any:
        return run.passed(lambda gate: gate.source == "train/rollout")

    def shown_weights(self, run: ConfiguredStep) -> Array:
        return self._weighed(run).raw_weights

    @staticmethod
    def _weighed(run: ConfiguredStep) -> ConfiguredStep:
        """Return the run without the gates that SkyRL applies after it has computed the weights (the sequence mask)."""
        rules = run.correction
        early = tuple(gate for gate in rules.gates if gate.sees == "original")
        return replace(run, correction=Correction(weight=rules.weight, gates=early, loss=rules.loss))

    def terms(self, run: ConfiguredStep) -> list[tuple[LossTerm, Array]]:
        if run.options["policy_loss_type"] not in _LOSSES:
            raise ConfigError(f"mismatchctl cannot compute skyrl's loss {run.options['policy_loss_type']}")
        options, kind = run.options, run.options["policy_loss_type"]
        low, high = 1 - options["eps_clip_low"], 1 + options["eps_clip_high"]
        share, left = run.each(1.0), self.shown_keep(run)  # no division: SkyRL divides the advantages instead
        advantages, x, both = run.advantages, run.u.clip(-20, 20), run.v.clip(-20, 20)
        if kind in ("rollout_is", "dppo"):  # these losses use their own mask, and no weights
            of_ratio = losses.weighted_loss(advantages, both)
            term = of_ratio if kind == "dppo" else losses.factor_loss(advantages, run.current, exp(both))
            return [(term, share * (~self._loss_drops(run) & left))]
        if kind == "cispo":
            bounds = 1 - options["cispo"]["cispo_eps_clip_low"], 1 + options["cispo"]["cispo_eps_clip_high"]
            term = losses.cispo_loss(advantages, self._cispo(run), run.current, *bounds)
        elif kind == "sapo":
            term = losses.sapo_loss(advantages, run.u, options["sapo"]["tau_pos"], options["sapo"]["tau_neg"])
        elif kind == "importance_sampling":
            term = losses.weighted_loss(advantages, run.u)
        else:
            if kind == "gspo":
                x = run.segments.spread(run.row_means(run.u, left)).clip(-20, 10)
            dual = options["clip_ratio_c"] if kind == "dual_clip" else None
            term = losses.ppo_loss(advantages, x, low, high, dual=dual)
        return [(term, share * self.shown_weights(run) * left)]

    def _cispo(self, run: ConfiguredStep) -> Array:
        return (run.v if run.options["cispo"]["cispo_anchor"] == "rollout" else run.u).clip(-20, 20)

    def metrics(self, run: ConfiguredStep) -> dict[str, float]:
        given = run.options["off_policy_correction"]
        stages = self._stages(run, given) if self._is_on(given) else {}
        logged = dict(stages)
        if run.has_loss:
            logged |= {f"loss_metrics/{name}": value for name, value in (self._loss_metrics(run) | stages).items()}
        apart = np.abs(run.d)
        prefix = "policy/rollout_train_logprobs_abs_diff_"
        logged |= {
            prefix + "max": float(apart.max(initial=0)),
            prefix + "min": float(apart.min(initial=np.inf)),
            prefix + "mean": run.mean(apart),
            prefix + "std": float(np.std(apart, ddof=1)) if len(apart) > 1 else np.nan,
        }
        if run.has_loss:
            moved, prefix = np.abs(run.v), "minibatch_rollout_logprobs_abs_diff_"
            padded = len(run.step) * run.width > run.tokens  # SkyRL's minimum includes 0 at masked positions
            logged |= {
                prefix + "mean": run.mean(moved),
                prefix + "sq_mean": run.mean(moved * moved),
                prefix + "max": float(moved.max(initial=0)),
                prefix + "min": 0.0 if padded and not np.isnan(moved).any() else float(moved.min(initial=np.inf)),
            }
        return logged

    @staticmethod
    def _is_on(given: Options) -> bool:
        stated = given["tis_ratio_type"] is not None or given["sequence_mask_metric"] is not None
        return stated or _bounds(given, _VETO) != (None, None) or None not in _bounds(given, _MASK)

    def _stages(self, run: ConfiguredStep, given: Options) -> dict[str, float]:
        rows = len(run.step)
        ratio = exp(run.d.clip(-20, 20)).astype(np.float64)
        padded = np.concatenate([ratio, np.zeros(rows * run.width - run.tokens)])
        if not len(padded):
            raise DataError("response_mask must contain at least one valid token (1)", column="response_mask")
        mean = run.mean(ratio)
        logged = {
            "is_ratio_mean": mean,
            "is_ratio_std": float(np.std(padded, ddof=1)),
            "is_ratio_max": float(padded.max()),
            "is_ratio_min": float(padded.min()),
        }
        low, high = _bounds(given, _VETO)
        if low is not None or high is not None:
            sums = run.segments.sum
            below = sums(ratio < low) > 0 if low is not None else np.zeros(rows, np.bool_)
            above = sums(ratio > high) > 0 if high is not None else np.zeros(rows, np.bool_)
            logged |= self._shares("outlier_seq", below, above)
        left = np.ones(run.tokens, np.bool_)
        for outcome in self._mask(run):
            flags = outcome.rejected
            if outcome.gate.level == "token":
                logged["token_mask_ratio"] = run.mean(flags, left)
            left &= ~flags
        weights = self._weighed(run).applied.weights
        if weights is not None and given["tis_ratio_type"] == "token":
            before = run.passed(lambda gate: gate.source == "train/rollout" and gate.sees == "original")
            logged["tis_token_clip_high_ratio"] = run.mean(weights.high, before)
        elif weights is not None:
            logged["tis_seq_clip_high_ratio"] = float(weights.high.mean())
        if given["sequence_mask_metric"] is not None:
            outcome = self._mask(run)[-1]
            name = {"geometric": "geo", "product": "product"}[given["sequence_mask_metric"]]
            logged |= self._shares(f"{name}_sequence_mask", outcome.low.sequences, outcome.high.sequences)
        return logged

    @staticmethod
    def _shares(name: str, below: Any, above: Any) -> dict[str, float]:
        shares = {"masked": below | above, "over_high": above, "under_low": below}
        return {f"{name}_{what}_ratio": float(flags.mean()) for what, flags in shares.items()}

    def _loss_metrics(self, run: ConfiguredStep) -> dict[str, float]:
        options, kind = run.options, run.options["policy_loss_type"]
        left = self.shown_keep(run)
        if kind == "cispo":
            ratio = exp(self._cispo(run))
            low, high = 1 - options["cispo"]["cispo_eps_clip_low"], 1 + options["cispo"]["cispo_eps_clip_high"]
            bounded = ratio.clip(low, high)
            return {
                "clip_ratio": run.mean((ratio < low) | (ratio > high), left),
                "cispo/ratio_mean": run.mean(ratio, left),
                "cispo/ratio_clamped_mean": run.mean(bounded, left),
                "cispo/ratio_max": float(ratio.max()),
                "cispo/ratio_min": float(ratio.min()),
            }
        if kind in ("rollout_is", "dppo"):
            return {"clip_ratio": run.mean(self._loss_drops(run), left)}
        if kind in ("sapo", "importance_sampling"):
            return {"clip_ratio": 0.0}
        x = run.segments.spread(run.row_means(run.u, left)) if kind == "gspo" else run.u
        ratio = exp(x)
        low, high = 1 - options["eps_clip_low"], 1 + options["eps_clip_high"]
        return {"clip_ratio": run.mean(-run.advantages * ratio.clip(low, high) > -run.advantages * ratio)}


_MODULE = "skyrl.backends.skyrl_train.training_batch"
PICKLE_CLASSES = {
    (_MODULE, "_rebuild_tensor_batch"): lambda cls, state: state,
    (_MODULE, "TrainingInputBatch"): None,
}


def _read_tensor(file: File, name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return None
    kind = value.get("format", "numpy")
    try:
        if kind == "torch":  # for bfloat16, which numpy lacks
            return to_array(file.torch(value["data"]))
        if kind != "numpy":
            raise DataError(f"expected one tensor, found the format {kind!r}", file=str(file.path), column=name)
        return file.array(value["data"], value["dtype"], value["shape"])
    except (KeyError, TypeError, ValueError) as error:
        problem = f"this value is not an array ({first_error_line(error)})"
        raise DataError(problem, file=str(file.path), column=name, remedy="let SkyRL write the file again") from error


def _read_rows(file: File) -> Iterator[Row]:
    state = file.pickle(PICKLE_CLASSES)
    if not isinstance(state, dict) or not isinstance(state.get("batch_dict"), dict):
        raise DataError("this file does not contain a TrainingInputBatch", file=str(file.path))
    wanted = {*LAYOUT.columns.values(), "sequences", "attention_mask"}
    columns = {name: _read_tensor(file, name, value) for name, value in state["batch_dict"].items() if name in wanted}
    if columns.get("loss_mask") is None:
        raise DataError("the file does not contain this column", file=str(file.path), column="loss_mask")
    rows, width = columns["loss_mask"].shape
    metadata = state.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    count, uids = rows - int(metadata.get("pad_size") or 0), metadata.get("uids")
    uids = uids if isinstance(uids, (list, tuple, np.ndarray)) and len(uids) >= count else [None] * count
    for number in range(count):
        row: Row = {name: None if value is None else value[number] for name, value in columns.items()}
        if row.get("sequences") is not None:
            row["response_ids"] = row["sequences"][-width:]
            row["prompt"] = take_prompt(row["sequences"], width, row.pop("attention_mask", None))
        yield {**row, "uid": uids[number], "step": file.step}


LAYOUT = read_layout(__file__, "skyrl", _read_rows)

ADAPTER = make_adapter(SkyRl, versions=("2026-08",), layouts=(LAYOUT,))
