"""Adapter of ms-swift with the Transformers backend, at commit 3602360a5 (2026-08)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mismatchctl.core import losses
from mismatchctl.core.losses import Array, LossTerm, exp
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.adapter import File, Row, read_layout, take_prompt
from mismatchctl.frameworks.options import HIGH, PlainFramework, Rules, make_adapter, make_off_policy_gate
from mismatchctl.frameworks.step import ConfiguredStep, Options, Step

_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

_PREFIX = "rollout_correction/"
_SAMPLING = "rollout_importance_sampling"


class MsSwift(PlainFramework):
    """ms-swift: rules have only upper bounds. Sequence modes use geometric mean ratios. Mask modes only reject."""

    forms = (
        *({f"{_SAMPLING}_mode": mode, f"{_SAMPLING}_threshold": HIGH} for mode in _MODES),
        {"off_policy_sequence_mask_delta": HIGH},
        {},
    )

    traps = {
        "geometric": lambda o: str(o["rollout_importance_sampling_mode"]).startswith("sequence"),
        "cispo_bound": lambda o: o["loss_type"] == "cispo" and (o["epsilon_high"] is None or o["epsilon_high"] < 1),
        "ess_of_mask": lambda o: str(o["rollout_importance_sampling_mode"]).endswith("mask"),
    }

    def rules(self, options: Options) -> Rules:
        mode, high = options["rollout_importance_sampling_mode"], options["rollout_importance_sampling_threshold"]
        weight, gates = None, []
        if mode is not None:
            if mode not in _MODES:
                raise ConfigError(f"ms-swift supports the modes {', '.join(_MODES)}, not {mode!r}")
            truncates, sequences = mode.endswith("truncate"), mode.startswith("sequence")
            level: Any = "geometric" if sequences and truncates else "token"
            weight = Weight(level=level, truncate=high if truncates else None, clamp="token")
            if not truncates:
                by: Any = "geometric" if sequences else "token"
                gates.append(Gate(level=by, keep=(None, high), clamp="token", effect="zero"))
        if options["off_policy_sequence_mask_delta"] is not None:
            gates.append(make_off_policy_gate(options["off_policy_sequence_mask_delta"], nonfinite="keep"))
        return weight, tuple(gates)

    def prepared(self, step: Step, options: Options, correction: Correction) -> ConfiguredStep:
        if options["single_update"]:
            return ConfiguredStep(step, options, correction, trained="current_log_probs")
        if options["rollout_log_probs"] is None:
            return ConfiguredStep(step, options, correction, anchored="train_log_probs")
        return ConfiguredStep(step, options, correction)

    def shown_weights(self, run: ConfiguredStep) -> Array:
        """Return the weights that multiply the loss. OPSM does not change them, because it masks tokens instead."""
        flags = run.passed(lambda gate: gate.effect == "zero")
        by_rows = run.options["rollout_importance_sampling_mode"] == "sequence_mask"  # multiplies by 0, which keeps NaN
        made = run.raw_weights * flags if by_rows else np.where(flags, run.raw_weights, 0)
        return made.astype(run.step.dtype)

    def _high(self, run: ConfiguredStep) -> float:
        options = run.options
        return float(options["epsilon"] if options["epsilon_high"] is None else options["epsilon_high"])

    def terms(self, run: ConfiguredStep) -> list[tuple[LossTerm, Array]]:
        options, kind, left = run.options, run.options["loss_type"], run.counted
        low, high = options["epsilon"], self._high(run)
        level = options["importance_sampling_level"]
        x = run.u if level == "token" else run.segments.spread(run.row_means(run.u, left))
        over = run.segments if level == "sequence" else None
        if kind == "cispo":
            term = losses.cispo_loss(run.advantages, x, run.current, -np.inf, high)
        elif kind == "sapo":
            term = losses.sapo_loss(run.advantages, x, options["tau_pos"], options["tau_neg"], over)
        else:
            term = losses.ppo_loss(run.advantages, x, 1 - low, 1 + high, cap=options["delta"], mean_over=over)
        if kind == "bnpo":
            shares = run.each(1 / max(left.sum(), 1))
        elif kind in ("dapo", "cispo"):
            shares = run.each(1 / max(run.tokens, 1))
        elif kind == "dr_grpo":
            shares = run.each(1 / (len(run.step) * options["max_completion_length"]))
        else:
            shares = run.by_rows(where=left)
        return [(term, self.shown_weights(run) * left * shares)]

    def metrics(self, run: ConfiguredStep) -> dict[str, float]:
        options = run.options
        mode = options["rollout_importance_sampling_mode"]
        logged: dict[str, float] = {}
        if (mode is not None or options["log_rollout_offpolicy_metrics"]) and options["rollout_log_probs"] is not None:
            logged |= {_PREFIX + name: value for name, value in self._offpolicy(run).items()}
            if mode is not None:
                logged |= {_PREFIX + name: value for name, value in self._weights(run).items()}
        return logged | (self._clips(run) if run.has_loss else {})

    def _offpolicy(self, run: ConfiguredStep) -> dict[str, float]:
        train, rollout = run.row_means(run.train), run.row_means(run.rollout)
        apart = rollout - train
        d = run.d.clip(-20, 20).astype(np.float64)
        geometric = np.exp(run.row_means(run.d))
        return {
            "training_ppl": float(np.exp(-train).mean()),
            "training_log_ppl": float(-train.mean()),
            "kl": run.mean(-run.d),
            "k3_kl": run.mean(np.clip(np.expm1(d) - d, -10, 10)),
            "rollout_ppl": float(np.exp(-rollout).mean()),
            "rollout_log_ppl": float(-rollout.mean()),
            "log_ppl_diff": float(apart.mean()),
            "log_ppl_abs_diff": float(np.abs(apart).mean()),
            "log_ppl_diff_max": float(apart.max()),
            "log_ppl_diff_min": float(apart.min()),
            "ppl_ratio": float(np.exp(apart).mean()),
            "chi2_token": run.mean(np.exp(2 * d)) - 1,
            "chi2_seq": float((geometric**2).mean()) - 1,
        }

    def _weights(self, run: ConfiguredStep) -> dict[str, float]:
        mode, limit = (run.options[f"{_SAMPLING}_{name}"] for name in ("mode", "threshold"))
        weights = self.shown_weights(run)
        ratio = exp(run.d.clip(-20, 20))
        bounded = np.minimum(np.maximum(weights, 1 / limit), limit).astype(np.float64)
        if mode == "token_truncate":
            clipped = run.mean(ratio > limit)
        elif mode == "token_mask":
            clipped = run.mean(weights == 0)
        else:
            geometric = np.exp(run.row_means(run.d.clip(-20, 20))).astype(run.step.dtype)
            clipped = float((geometric > limit).mean())
        ess = 1 / run.mean((bounded / bounded.mean()) ** 2) if len(bounded) else 0.0
        return {"is_weight_mean": run.mean(weights), "ess": ess, "clipped_frac": clipped}

    def _clips(self, run: ConfiguredStep) -> dict[str, float]:
        options, kind, left = run.options, run.options["loss_type"], run.counted
        if kind == "sapo":
            return {}
        low, high = options["epsilon"], self._high(run)
        token = options["importance_sampling_level"] == "token"
        ratio = exp(run.u if token else run.segments.spread(run.row_means(run.u, left)))
        if kind == "cispo":
            return {"cispo_clip_ratio": run.mean((ratio > high) & (run.advantages > 0), left)}
        below = run.mean((ratio < 1 - low) & (run.advantages < 0), left)
        above = run.mean((ratio > 1 + high) & (run.advantages > 0), left)
        found = {"clip_ratio/low_mean": below, "clip_ratio/low_min": below}
        found |= {"clip_ratio/high_mean": above, "clip_ratio/high_max": above}
        return found | {"clip_ratio/region_mean": below + above}


def _read_rows(file: File) -> Iterator[Row]:
    names = {*LAYOUT.columns.values(), "input_ids", "attention_mask"}
    for row in file.batch(names):
        width, tokens, attention = len(row["completion_mask"]), row.get("input_ids"), row.pop("attention_mask", None)
        if tokens is not None and len(tokens) > width:
            row["completion_tokens"], row["prompt"] = tokens[-width:], take_prompt(tokens, width, attention)
        yield row


LAYOUT = read_layout(__file__, "ms-swift", _read_rows)

ADAPTER = make_adapter(MsSwift, versions=("2026-08",), layouts=(LAYOUT,))
