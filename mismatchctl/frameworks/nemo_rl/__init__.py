"""Adapter of NeMo-RL at commit 7ea279abfbeb (2026-08)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from mismatchctl.core import losses
from mismatchctl.core.losses import Array, LossTerm, exp
from mismatchctl.corrections.model import Gate, Weight
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.frameworks.adapter import File, Row, read_layout
from mismatchctl.frameworks.options import HIGH, LOW, PlainFramework, Rules, make_adapter
from mismatchctl.frameworks.step import ConfiguredStep, Options, k3

_CORRECTS = {"use_importance_sampling_correction": True}
_BOUNDS = {"truncated_importance_sampling_ratio": HIGH, "truncated_importance_sampling_ratio_min": LOW}
_PER_SEQUENCE = {"sequence_level_importance_ratios": True, "token_level_loss": False}


class NemoRl(PlainFramework):
    """NeMo-RL: non-finite weights become 0. Only seq_logprob_error_threshold excludes tokens from means."""

    forms = (
        *(
            {"loss": _CORRECTS | level | ({"truncated_importance_sampling_type": kind} | _BOUNDS if kind else {})}
            for level in ({}, _PER_SEQUENCE)
            for kind in ("", "tis", "icepop", "seq-mask-tis")
        ),
        {},
        {"seq_logprob_error_threshold": HIGH},
    )

    traps = {
        "type_without_correction": lambda o: (
            o["loss"]["truncated_importance_sampling_type"] is not None
            and not o["loss"]["use_importance_sampling_correction"]
        ),
        "overflow": lambda o: bool(o["loss"]["use_importance_sampling_correction"]),
        "unbounded": lambda o: (
            o["loss"]["truncated_importance_sampling_type"] is None
            and o["loss"]["truncated_importance_sampling_ratio"] is not None
        ),
        "no_recomputation": lambda o: bool(o["loss"]["force_on_policy_ratio"]),
    }

    def rules(self, options: Options) -> Rules:
        loss, gates = options["loss"], []
        limit = options["seq_logprob_error_threshold"]
        if limit is not None:
            gates.append(Gate(statistic="mult_error", level="mean", keep=(None, limit), clamp="none"))
        if not loss["use_importance_sampling_correction"]:
            return None, tuple(gates)
        kind = loss["truncated_importance_sampling_type"]
        level: Any = "sequence" if loss["sequence_level_importance_ratios"] else "token"
        keep = (loss["truncated_importance_sampling_ratio_min"], loss["truncated_importance_sampling_ratio"])
        rule: dict[str, Any] = {"level": level, "clamp": "none", "nonfinite": "zero"}
        if kind == "tis":
            rule["clip"] = keep
        elif kind in ("icepop", "seq-mask-tis"):
            if None in keep:
                raise ConfigError(
                    f"nemo-rl: {kind} needs truncated_importance_sampling_ratio and "
                    "truncated_importance_sampling_ratio_min"
                )
            by: Any = level if kind == "icepop" else "geometric"
            undefined: Any = "reject" if kind == "icepop" else "one"
            gates.append(Gate(level=by, keep=keep, clamp="none", effect="zero", nonfinite=undefined))
        elif kind is not None:
            raise ConfigError(f"the correction type must be tis, icepop or seq-mask-tis, found {kind!r}")
        return Weight(**rule), tuple(gates)

    def shown_keep(self, run: ConfiguredStep) -> Any:
        return run.keep & (run.weights > 0)

    def terms(self, run: ConfiguredStep) -> list[tuple[LossTerm, Array]]:
        loss, left = run.options["loss"], run.counted
        sequences = run.segments if loss["sequence_level_importance_ratios"] else None
        x = run.u if sequences is None else run.segments.spread(run.row_means(run.u))
        low, high = 1 - loss["ratio_clip_min"], 1 + loss["ratio_clip_max"]
        if loss["use_cispo"]:
            term = losses.cispo_loss(run.advantages, x, run.current, low, high)
        else:
            term = losses.ppo_loss(run.advantages, x, low, high, dual=loss["ratio_clip_c"], mean_over=sequences)
        terms = [(term, run.weights * left * self._shares(run))]
        if sequences is not None and np.isnan(self._padding_sum(run, exp(x))):
            terms.append((LossTerm(run.each(np.nan), run.each(0.0)), run.each(1.0)))
        return terms

    @staticmethod
    def _padding_sum(run: ConfiguredStep, ratio: Array) -> float:
        """Return NaN if a padded row has an infinite ratio, else 0. NeMo-RL multiplies it by 0, and inf * 0 is NaN."""
        infinite = run.segments.max(np.isinf(ratio)) > 0
        return float("nan") if (infinite & (run.lengths < run.width)).any() else 0.0

    def _shares(self, run: ConfiguredStep) -> Array:
        left = run.counted
        if run.options["loss"]["token_level_loss"]:
            return run.each(1 / (left.sum() + 1e-8))
        rows = float(self._kept_rows(run).sum())
        return run.segments.spread(1 / (run.segments.sum(left) + 1e-8)) / (rows + 1e-8)

    def _kept_rows(self, run: ConfiguredStep) -> Any:
        """Return flags of kept rows [S]. A row without valid tokens counts as kept."""
        return ~((run.lengths > 0) & (run.segments.sum(run.counted) == 0))

    def _mean(self, run: ConfiguredStep, values: Array) -> float:
        left = run.counted
        return float(np.sum(values * left, dtype=np.float64) / (left.sum() + 1e-8))  # NaN times 0 is NaN, as in NeMo-RL

    def metrics(self, run: ConfiguredStep) -> dict[str, float]:
        loss, left = run.options["loss"], run.counted
        d, samples = run.d, self._kept_rows(run)
        logged: dict[str, float] = {}
        if run.has_loss:
            x = run.u
            if loss["sequence_level_importance_ratios"]:
                x = run.segments.spread(run.row_means(run.u)).astype(run.step.dtype)
            ratio = exp(x)
            clamped = np.clip(ratio, 1 - loss["ratio_clip_min"], 1 + loss["ratio_clip_max"])
            for name, values in (("probs_ratio", ratio), ("probs_ratio_clamped", clamped)):
                logged[name] = self._mean(run, values)
                if loss["sequence_level_importance_ratios"]:
                    logged[name] += self._padding_sum(run, values)
                logged[f"{name}_min"] = float(values[left].min(initial=np.inf))
                logged[f"{name}_max"] = float(values[left].max(initial=-np.inf))
            logged["kl_penalty"] = 0.0
            logged["approx_entropy"] = -self._mean(run, exp(run.v) * run.current)
            logged["positive_nll_loss"] = 0.0
        kind = loss["reference_policy_kl_type"]
        estimate = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": k3}[kind]
        logged["token_mult_prob_error"] = self._mean(run, exp(np.abs(d)))
        logged["gen_kl_error"] = self._mean(run, estimate(d))
        logged["policy_kl_error"] = self._mean(run, estimate(-d))
        mixed = np.log(0.5 * exp(run.train) + 0.5 * exp(run.rollout))
        logged["js_divergence_error"] = self._mean(run, 0.5 * (k3(run.train - mixed) + k3(run.rollout - mixed)))
        logged["num_valid_samples"] = float(samples.sum())
        logged["sampling_importance_ratio"] = self._mean_weight(run)
        if loss["truncated_importance_sampling_type"] is not None and loss["use_importance_sampling_correction"]:
            logged["is_oob_ratio"] = self._out_of_bounds(run)
        return logged | self._filter(run, samples)

    def _mean_weight(self, run: ConfiguredStep) -> float:
        weights, sequences = run.weights, run.options["loss"]["sequence_level_importance_ratios"]
        if not run.options["loss"]["use_importance_sampling_correction"]:
            weights = self._raw_ratio(run)  # logged even if not applied
        if not sequences:
            return self._mean(run, weights)
        each = np.where(run.lengths > 0, run.row_means(weights), 1.0)  # a row without tokens has the weight exp(0)
        return float(each[self._kept_rows(run)].sum())  # a sum, because NeMo-RL's mean divides by 1 here

    def _out_of_bounds(self, run: ConfiguredStep) -> float:
        loss = run.options["loss"]
        kind = loss["truncated_importance_sampling_type"]
        low, high = loss["truncated_importance_sampling_ratio_min"] or 0.0, loss["truncated_importance_sampling_ratio"]
        if kind == "seq-mask-tis":
            values = exp(run.row_means(np.where(np.isfinite(run.d), run.d, 0)))
            samples = self._kept_rows(run)
            outside = (values < low) | (values > high)
            return float(outside[samples].sum() / (samples.sum() + 1e-8))
        raw = self._raw_ratio(run)
        return self._mean(run, (raw < low) | (raw > high))

    @staticmethod
    def _raw_ratio(run: ConfiguredStep) -> Array:
        """Return the ratio per token or per sequence, as configured. Replace non-finite ratios by 0."""
        sequences = run.options["loss"]["sequence_level_importance_ratios"]
        raw = exp(run.segments.spread(run.segments.sum(run.d)) if sequences else run.d)
        return np.where(np.isfinite(raw), raw, 0.0)

    def _filter(self, run: ConfiguredStep, samples: Any) -> dict[str, float]:
        errors = run.row_means(exp(np.abs(run.d)))
        some = run.lengths > 0
        found = {}
        for when, chosen in (("", some), ("_after_mask", some & samples)):
            for how, reduce in (("max", np.max), ("mean", np.mean), ("min", np.min)):
                found[f"seqmask/{how}_seq_mult_prob_error{when}"] = (
                    float(reduce(errors[chosen])) if chosen.any() else 0.0
                )
        rejected = some & ~samples
        found["seqmask/num_masked_seqs"] = float(rejected.sum())
        if run.step.has("reward"):
            correct = run.step.table["reward"].to_numpy(zero_copy_only=False) == 1
        else:
            correct = run.row_means(run.advantages) > 0  # an approximation, because rewards are missing
        right = float(correct[rejected].mean()) if rejected.any() else 0.0
        return found | {"seqmask/masked_correct_pct": right}


PADDED_COLUMNS = ("token_ids", "token_loss_mask", "advantages", "generation_logprobs", "prev_logprobs")


def _unwrap(name: str, value: Any) -> Any:
    """Replace a list of one value by the value. NeMo-RL writes such lists for micro-batches of one row."""
    if not isinstance(value, list) or len(value) != 1 or (name in PADDED_COLUMNS and not isinstance(value[0], list)):
        return value
    return value[0]


def _read_rows(file: File) -> Iterator[Row]:
    step = re.search(r"step(\d+)", file.path.name)
    for number, line in enumerate(file.lines()):
        row = {name: _unwrap(name, value) for name, value in line.items()}
        lists = {name: row[name] for name in PADDED_COLUMNS if isinstance(row.get(name), list)}
        if several := next((name for name in lists if len(row[name]) > 1 and isinstance(row[name][0], list)), None):
            problem = f"contains {len(row[several])} samples in one line, but each line must contain one sample"
            remedy = "write one line per sample"
            raise DataError(problem, file=str(file.path), row=number, column=several, remedy=remedy)
        row |= {name: values[: row.get("input_lengths")] for name, values in lists.items()}
        rollout, previous = row.get("generation_logprobs"), row.get("prev_logprobs")
        if isinstance(previous, list) and isinstance(rollout, list) and any(rollout) and not any(previous):
            problem = "all values are zero: the run skipped the recomputation (force_on_policy_ratio)"
            remedy = "switch force_on_policy_ratio off to record the trainer's log-probs"
            raise DataError(problem, file=str(file.path), row=number, column="prev_logprobs", remedy=remedy)
        if row.get("sample_loss_mask") == 0 and isinstance(row.get("token_loss_mask"), list):
            row["token_loss_mask"] = [0] * len(row["token_loss_mask"])
        yield {**row, "step": int(step[1]) if step else None}


LAYOUT = read_layout(__file__, "nemo-rl", _read_rows)

ADAPTER = make_adapter(NemoRl, versions=("2026-08",), layouts=(LAYOUT,))
