"""Adapter of open-instruct at commit e6c3044aa620 (2026-08)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mismatchctl.core import losses
from mismatchctl.core.losses import Array, LossTerm, exp
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.adapter import File, Row, read_layout
from mismatchctl.frameworks.options import HIGH, LOW, PlainFramework, Rules, make_adapter, or_zero
from mismatchctl.frameworks.step import ConfiguredStep, Options, Step

_MASK = {"rho_mask_lower_bound": or_zero(LOW), "rho_mask_upper_bound": or_zero(HIGH)}


class OpenInstruct(PlainFramework):
    """open-instruct: log ratios are clamped to ±10. All sequences in a packed row count as one sequence."""

    forms = (
        {"rho_clamp_lower_bound": or_zero(LOW), "rho_clamp_upper_bound": or_zero(HIGH)},
        _MASK | {"rho_clamp_upper_bound": 0.0},
        _MASK,
        _MASK | {"rho_mask_tv_divergence": True},
        _MASK | {"rho_mask_sequence_level": True},
        {"use_rho_correction": False},
    )

    traps = {
        "packed_rows": lambda o: bool(o["rho_mask_sequence_level"] or o["rho_mask_tv_divergence"]),
        "drops_near": lambda o: bool(o["rho_mask_tv_divergence"] and o["rho_mask_lower_bound"]),
    }

    def rules(self, options: Options) -> Rules:
        if not options["use_rho_correction"]:
            return None, ()
        if options["use_vllm_logprobs"]:
            raise ConfigError(
                "open-instruct refuses use_vllm_logprobs together with use_rho_correction, which is on by default"
            )
        means = options["rho_mask_sequence_level"] and not options["rho_mask_tv_divergence"]
        level: Any = "geometric" if means else "token"
        common: dict[str, Any] = {"clamp": "token", "limit": 10.0}
        clip = (options["rho_clamp_lower_bound"] or None, options["rho_clamp_upper_bound"] or None)
        weight = Weight(level=level, clip=None if clip == (None, None) else clip, **common)
        keep = (options["rho_mask_lower_bound"] or None, options["rho_mask_upper_bound"] or None)
        if keep == (None, None):
            return weight, ()
        if options["rho_mask_tv_divergence"]:
            gate = Gate(statistic="ratio_gap", level="mean", keep=keep, when="drifting", effect="zero", **common)
        else:
            gate = Gate(level=level, keep=keep, effect="zero", **common)
        return weight, (gate,)

    def prepared(self, step: Step, options: Options, correction: Correction) -> ConfiguredStep:
        """Replace NaN in the rollout log-probs by 1, as open-instruct does."""
        return ConfiguredStep(step, options, correction, unknown=1.0)

    def terms(self, run: ConfiguredStep) -> list[tuple[LossTerm, Array]]:
        options = run.options
        low, high = 1 - options["clip_lower"], 1 + options["clip_higher"]
        if options["loss_fn"] == "cispo":
            term = losses.cispo_loss(run.advantages, run.u, run.current, -np.inf, high)
        else:
            term = losses.ppo_loss(run.advantages, run.u, low, high)
        return [(term, run.weights)]

    def metrics(self, run: ConfiguredStep) -> dict[str, float]:
        d = np.nan_to_num(run.d)
        apart = np.abs(d)
        logged = {
            "debug/vllm_vs_local_logprob_diff_mean": float(np.mean(apart)),
            "debug/vllm_vs_local_logprob_diff_max": float(apart.max(initial=0)),
            "debug/vllm_vs_local_logprob_diff_std": float(np.std(apart, ddof=1)),
            "debug/vllm_local_reverse_kl": run.mean(exp(run.rollout) * -d),
        }
        if run.correction.weight is not None:
            none = np.zeros(run.tokens, np.bool_)
            low, high = none, none
            for outcome in run.applied.gates:
                low, high = outcome.low.expand(), outcome.high.expand()
            raw = run.applied.weights.raw if run.applied.weights else none
            raw = raw if len(raw) == run.tokens else run.segments.spread(raw)
            clamped = run.raw_weights != raw.astype(run.step.dtype)
            logged |= {
                "val/rho_drop_frac": run.mean(~run.keep),
                "val/rho_drop_low_frac": run.mean(low),
                "val/rho_drop_high_frac": run.mean(high),
                "val/rho_weight": run.mean(run.weights),
                "val/rho_clipfrac": run.mean(clamped),
            }
        if run.has_loss:
            ratio = exp(run.u)
            low_bound, high_bound = 1 - run.options["clip_lower"], 1 + run.options["clip_higher"]
            if run.options["loss_fn"] == "cispo":
                flags = ratio > high_bound
            else:
                flags = -run.advantages * ratio.clip(low_bound, high_bound) > -run.advantages * ratio
            flags = flags & run.keep
            logged["policy/clipfrac_avg"] = run.mean(flags)
            logged["loss/policy_avg"] = losses.sum_terms(self.terms(run))[0] / max(run.tokens, 1)
        return logged


def _read_rows(file: File) -> Iterator[Row]:
    for line in file.lines():
        yield {**line, "sequence_id": line["sample_idx"], "mask": [1] * len(line["response_tokens"])}


LAYOUT = read_layout(__file__, "open-instruct", _read_rows)

ADAPTER = make_adapter(OpenInstruct, versions=("2026-08",), layouts=(LAYOUT,))
