"""Weights and kept tokens of ten frameworks by row, written from their documentation and code.

Every function takes a configuration in the framework's keys and the rows of a step, and returns the weights and kept
tokens of each row. It computes in the dtype of its input and does not remove NaN and infinity. No code of mismatchctl
is used.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

Values = np.ndarray[Any, Any]
Config = dict[str, Any]
Made = list[tuple[Values, Values]]


@dataclass(frozen=True)
class Row:
    """The valid tokens of a sequence: log-probs of rollout, trainer and current policy, advantages, positions."""

    mu: Values
    old: Values
    cur: Values
    adv: Values
    place: Values

    @property
    def d(self) -> Values:
        return self.old - self.mu

    @property
    def v(self) -> Values:
        return self.cur - self.mu

    def runs(self) -> list[slice]:
        ends = [0, *(np.flatnonzero(np.diff(self.place) != 1) + 1).tolist(), len(self.place)]
        return [slice(a, b) for a, b in itertools.pairwise(ends)]


def _mean(x: Values) -> Any:
    return x.sum() / max(len(x), 1)


def _inside(x: Any, low: float | None, high: float | None) -> Any:
    return (x >= (-np.inf if low is None else low)) & (x <= (np.inf if high is None else high))


def _bounded(x: Any, low: float | None, high: float | None) -> Any:
    return np.clip(x, -np.inf if low is None else low, np.inf if high is None else high)


def _each(value: Any, row: Row) -> Values:
    return np.full(len(row.mu), value, row.mu.dtype)


def trl(c: Config, rows: list[Row]) -> Made:
    made = []
    for row in rows:
        w = np.exp(_each(row.d.sum(), row) if c["mode"].startswith("sequence") else row.d)
        if c["mode"].endswith("truncate"):
            w = _bounded(w, c["cmin"], c["cmax"])
        else:
            out = np.zeros(len(w), bool)
            out |= w < c["cmin"] if c["cmin"] is not None else False
            out |= w > c["cmax"] if c["cmax"] is not None else False
            w = np.where(out, 0, w)
        made.append((w, w != 0))
    return made


def nemo_rl(c: Config, rows: list[Row]) -> Made:
    loss, limit, made = c["loss"], c.get("seq_logprob_error_threshold"), []
    for row in rows:
        alive = limit is None or not len(row.d) or bool(_mean(np.exp(np.abs(row.d))) <= limit)
        w = np.exp(_each(row.d.sum(), row) if loss.get("sequence_level_importance_ratios") else row.d)
        w = np.nan_to_num(w, nan=0, posinf=0, neginf=0)
        kind = loss.get("truncated_importance_sampling_type")
        low, high = (loss.get(f"truncated_importance_sampling_ratio{end}") for end in ("_min", ""))
        if kind == "tis":
            w = _bounded(w, low or 0, high)
        elif kind == "icepop":
            w = np.where(_inside(w, low, high), w, 0)
        elif kind == "seq-mask-tis":
            geometric = np.exp(_mean(np.nan_to_num(row.d, nan=0, posinf=0, neginf=0)))
            w = w if _inside(geometric, low, high) else w * 0
        w = w if alive else w * 0
        made.append((w, w > 0))
    return made


def openrlhf(c: Config, rows: list[Row]) -> Made:
    (low, high), made = c["vllm_is_truncated_threshold"], []
    for row in rows:
        w = np.exp(row.d)
        if c["vllm_is_correction_type"] == "tis":
            w = _bounded(w, low, high)
        elif c["vllm_is_correction_type"] == "icepop":
            w = w * _inside(w, low, high)
        else:
            w = w * _inside(np.exp(_mean(row.d)), low, high)
        made.append((w, w != 0))
    return made


def prime_rl(c: Config, rows: list[Row]) -> Made:
    made = []
    for row in rows:
        moved = np.exp(row.cur) - np.exp(row.mu)
        if c["type"] == "ipo":
            keep = ~(np.abs(moved) > c["ipo_threshold"])
        else:
            keep = ~np.where(row.adv > 0, moved > c["dppo_mask_high"], moved < -c["dppo_mask_low"])
        made.append((np.exp(row.v) * keep * c["adv_tau"], keep))
    return made


def prime_rl_2026_09(c: Config, rows: list[Row]) -> Made:
    made = []
    for row in rows:
        if c["type"] == "ipo":
            keep = ~(np.abs(np.exp(row.cur) - np.exp(row.mu)) > c["eps"])
        else:
            keep = ~((row.v < np.log(c["ratio_low"])) | (row.v > np.log(c["ratio_high"])))
        made.append((np.where(keep, np.exp(row.v), 0), keep))
    return made


def prime_rl_2026_10(c: Config, rows: list[Row]) -> Made:
    made = []
    for row in rows:
        w = np.exp(row.v)
        if c["type"] == "cispo":
            made.append((_bounded(w, c["ratio_low"], c["ratio_high"]), np.ones(len(w), bool)))
            continue
        if c["type"] == "ipo":
            top, bottom = np.maximum(row.cur, row.mu), np.minimum(row.cur, row.mu)
            keep = ~(np.exp(top) * -np.expm1(bottom - top) > c["eps"])
            w = np.minimum(w, c["max_importance_ratio"])
        else:
            keep = ~((row.v < np.log(c["ratio_low"])) | (row.v > np.log(c["ratio_high"])))
        made.append((np.where(keep, w, 0), keep))
    return made


def areal(c: Config, rows: list[Row]) -> Made:
    alive = [np.ones(len(row.d), bool) for row in rows]
    if c.get("m2_threshold") is not None:
        squares = [np.nan_to_num(row.d.astype(np.float64) ** 2, nan=np.inf, posinf=np.inf) for row in rows]
        every = sorted(((square, r, t) for r, own in enumerate(squares) for t, square in enumerate(own)), reverse=True)
        total = [square for square, _, _ in every]
        while len(total) > 1 and sum(total) / len(total) >= c["m2_threshold"]:
            total.pop(0)
        for _, r, t in every[: len(every) - len(total)]:
            alive[r][t] = False
    rule, made = c["rejection_sampling"], []
    metric, low, high = rule["metric"], rule["lower"], rule["upper"]
    for row, left in zip(rows, alive, strict=True):
        d = np.where(np.isfinite(row.d), row.d, 0)
        w, statistic = np.exp(d), _areal_statistic(metric, row)
        if rule["level"] == "token":
            inside = _inside(np.exp(statistic) if metric == "ratio" else statistic, low, high)
            if rule["action"] == "clamp":
                w, inside = _bounded(w, low or 0, high), inside | True
        else:
            total = statistic[left].sum()
            largest = np.where(left, statistic, -np.inf).max(initial=-np.inf)
            value = {"sum": total, "mean": total / max(left.sum(), 1), "max": largest}[rule["agg"]]
            good = not left.any() or bool(_inside(np.exp(value) if metric == "ratio" else value, low, high))
            w = np.exp(_each(_mean(d[left]), row)) if metric == "ratio" else w
            if rule["action"] == "clamp":
                w, good = (w if good else _bounded(w, low or 0, high)), True
            inside = np.full(len(w), good)
        keep = left & inside
        made.append((np.where(keep, w, 0), keep))
    return made


def _areal_statistic(metric: str, row: Row) -> Values:
    d = row.d
    if metric == "ratio":
        return np.where(np.isfinite(d), d, 0)
    if metric == "binary_kl":
        one = np.float32
        p, q = (np.clip(np.exp(x.astype(np.float64)).astype(one), one(1e-8), one(1 - 1e-8)) for x in (row.old, row.mu))
        b, a = (
            p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)),
            q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p)),
        )
        return np.where(np.isnan(a) | np.isnan(b), np.nan, np.maximum(a, b))
    return {"kl_k1": d, "kl_k2": d * d / 2, "kl_k3": np.expm1(-d) + d}[metric]


def skyrl(c: Config, rows: list[Row]) -> Made:
    own, made = c["off_policy_correction"], []
    for row in rows:
        rho, mask = np.exp(np.clip(row.d, -20, 20)), np.ones(len(row.d))
        low, high = own.get("outlier_token_is_threshold_low"), own.get("outlier_token_is_threshold_high")
        if (low is not None and (rho < low).any()) or (high is not None and (rho > high).any()):
            mask *= 0
        low, high = own.get("token_mask_is_threshold_low"), own.get("token_mask_is_threshold_high")
        if low is not None and high is not None:
            mask *= _inside(rho, low, high)
        w = np.ones(len(rho), rho.dtype)
        if own.get("tis_ratio_type") == "token":
            w = np.minimum(rho, own["token_tis_ratio_clip_high"])
        elif own.get("tis_ratio_type") == "sequence":
            total = np.exp(np.clip((row.d * mask).sum(), -20, 20))
            w = _each(np.minimum(total, own["sequence_tis_ratio_clip_high"]), row)
        metric = own.get("sequence_mask_metric")
        if metric is not None:
            value = (row.d * mask).sum() / (max(mask.sum(), 1) if metric == "geometric" else 1)
            ratio, name = np.exp(np.clip(value, -20, 20)), {"geometric": "geo", "product": "product"}[metric]
            mask *= ~((ratio < own[f"{name}_mask_low"]) | (ratio > own[f"{name}_mask_high"]))
        made.append((w, mask > 0))
    return made


def roll(c: Config, rows: list[Row]) -> Made:
    made = []
    for row in rows:
        apart = np.exp(row.old) - np.exp(row.mu)

        def at(level: str, x: Values, row: Row = row) -> Values:
            if level == "segment":
                return np.concatenate([x[:0], *(np.full(len(x[run]), _mean(x[run])) for run in row.runs())])
            whole = {"geometric": _mean(x), "sequence": x.sum()}
            return x if level == "token" else _each(whole[level], row)

        w, keep = np.ones(len(row.d), row.d.dtype), np.ones(len(row.d), bool)
        weight = c.get("is_weight", {})
        if weight.get("enabled"):
            w = _bounded(np.exp(at(weight["weight_type"], row.d)), 0, weight["upper_bound"])
        for one in c.get("filters", ()):
            if one["ratio_enabled"]:
                keep &= _inside(np.exp(at(one["agg_type"], row.d)), one["ratio_low"], one["ratio_high"])
            if one["diff_enabled"]:
                keep &= _inside(at(one["agg_type"], apart), one["diff_low"], one["diff_high"])
        made.append((w, keep))
    return made


def open_instruct(c: Config, rows: list[Row]) -> Made:
    made = []
    for row in rows:
        d = np.clip(row.old - np.where(np.isnan(row.mu), 1.0, row.mu), -10, 10).astype(row.mu.dtype)
        low, high = c["rho_mask_lower_bound"] or -np.inf, c["rho_mask_upper_bound"] or np.inf
        rho = np.exp(d)
        if c["rho_mask_tv_divergence"]:
            apart = _mean(np.abs(rho - 1))
            out = np.full(len(d), (apart < low) | (apart > high)) & (np.sign(d) * row.adv > 0)
        else:
            rho = np.exp(_each(_mean(d), row)) if c["rho_mask_sequence_level"] else rho
            out = (rho < low) | (rho > high)
        w = _bounded(rho, c["rho_clamp_lower_bound"] or None, c["rho_clamp_upper_bound"] or None)
        made.append((np.where(out, 0, w), ~out))
    return made


def ms_swift(c: Config, rows: list[Row]) -> Made:
    mode, high, made = c["rollout_importance_sampling_mode"], c["rollout_importance_sampling_threshold"], []
    for row in rows:
        d = np.clip(row.d, -20, 20)
        rho, geometric, keep = np.exp(d), np.exp(_mean(d)), np.ones(len(d), bool)
        if mode == "token_truncate":
            w = np.minimum(rho, high)
        elif mode == "token_mask":
            keep = rho <= high
            w = np.where(keep, rho, 0)
        elif mode == "sequence_truncate":
            w = _each(np.minimum(geometric, high), row)
        else:
            keep = _each(geometric, row) <= high
            w = rho * keep
        delta = c["off_policy_sequence_mask_delta"]
        if delta is not None and len(d) and _mean(-row.v) > delta and _mean(row.adv) < 0:
            keep = keep & False
        made.append((w, keep))
    return made
