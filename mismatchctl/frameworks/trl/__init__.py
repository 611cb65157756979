"""Adapter of the GRPO trainer in TRL 1.10 (commit f2cd57710ae3, 2026-07)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from mismatchctl.core import losses
from mismatchctl.core.batch import Bools
from mismatchctl.core.losses import Array, LossTerm, exp
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.adapter import File, Row, read_layout
from mismatchctl.frameworks.lint import LintMessage
from mismatchctl.frameworks.options import HIGH, LOW, PlainFramework, Rules, make_adapter, make_off_policy_gate
from mismatchctl.frameworks.step import ConfiguredStep, Options

_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

_MIN_LOG_WEIGHT = float(np.log(1e-8))


class Trl(PlainFramework):
    """TRL. A sequence ratio is the product of token ratios. Rejected tokens get weight 0, but count in means."""

    forms = (
        *({"correct": True, "mode": mode, "cmin": LOW, "cmax": HIGH} for mode in _MODES),
        {"correct": False},
    )

    traps = {
        "product": lambda o: bool(o["correct"]) and str(o["mode"]).startswith("sequence"),
        "cispo_bound": lambda o: o["loss_type"] == "cispo" and o["eps"][1] < 1,
        "no_vllm": lambda o: bool(o["correct"]) and not o["use_vllm"],
    }

    def read(self, native: Mapping[str, Any]) -> Options:
        options = super().read(native)
        low = options["epsilon"]
        if low is not None or options["epsilon_high"] is not None:
            usual = options["eps"]
            high = options["epsilon_high"]
            low = usual[0] if low is None else low
            options |= {"eps": (low, low if high is None else high), "epsilon": None, "epsilon_high": None}
        return options

    def unavailable_names(self, correction: Correction, columns: Collection[str]) -> dict[str, str]:
        """Return `entropy`, which `replay` cannot compute, because it depends on the whole vocabulary."""
        return {"entropy": ""}

    def lint(self, native: Mapping[str, Any], unknown: Collection[str] = ()) -> list[LintMessage]:
        """Report a missing `use_vllm` only if the configuration contains a key of the correction."""
        found = super().lint(native, unknown)
        return [one for one in found if one.place != "use_vllm" or self.recognizes(native)]

    def known_names(self, native: Mapping[str, Any], text: str = "") -> dict[str, Any]:
        """Add `use_vllm: True` if the file contains `fast_inference=True`, because Unsloth then samples with vLLM."""
        samples = re.search(r"\bfast_inference\s*=\s*True\b", text) is not None
        native = super().known_names(native)
        return {"use_vllm": True, **native} if samples and native.get("use_vllm") is None else native

    def rules(self, options: Options) -> Rules:
        gates: list[Gate] = []
        weight = None
        if options["correct"] and options["use_vllm"]:
            mode, keep = options["mode"], (options["cmin"], options["cmax"])
            if mode not in _MODES:
                raise ConfigError(f"trl supports the modes {', '.join(_MODES)}, not {mode!r}")
            if mode.endswith("truncate") and keep == (None, None):
                raise ConfigError(
                    f"{mode} needs vllm_importance_sampling_clip_max or vllm_importance_sampling_clip_min"
                )
            level: Any = mode.partition("_")[0]
            weight = Weight(level=level, clamp="none", clip=keep if mode.endswith("truncate") else None)
            if mode.endswith("mask"):
                gates.append(Gate(level=level, keep=keep, clamp="none", effect="zero", nonfinite="keep"))
        if options["opsm"] is not None:
            gates.append(make_off_policy_gate(options["opsm"], effect="zero"))
        return weight, tuple(gates)

    def shown_keep(self, run: ConfiguredStep) -> Any:
        return self._passed(run) & (self.shown_weights(run) != 0)

    @staticmethod
    def _passed(run: ConfiguredStep) -> Bools:
        return run.passed(lambda gate: gate.statistic == "ratio")

    def shown_weights(self, run: ConfiguredStep) -> Array:
        return np.where(self._passed(run), run.raw_weights, 0).astype(run.step.dtype)

    def _x(self, run: ConfiguredStep) -> Array:
        return run.u if run.options["level"] == "token" else run.segments.spread(run.row_means(run.u))

    def terms(self, run: ConfiguredStep) -> list[tuple[LossTerm, Array]]:
        options, kind = run.options, run.options["loss_type"]
        low, high = options["eps"]
        sequences = None if options["level"] == "token" else run.segments
        x, factors = self._x(run), run.weights
        if kind == "cispo":
            term = losses.cispo_loss(run.advantages, x, run.current, -np.inf, high)
        elif kind == "sapo":
            term = losses.sapo_loss(run.advantages, x, options["sapo"][0], options["sapo"][1], sequences)
        elif kind == "vespo":
            phi = run.segments.spread(self._phi(run)).astype(run.step.dtype)
            term, factors = losses.factor_loss(run.advantages, run.current, phi), run.keep.astype(float)
        else:
            term = losses.ppo_loss(run.advantages, x, 1 - low, 1 + high, cap=options["delta"], mean_over=sequences)
        shares = run.by_rows() if kind in ("grpo", "sapo") else run.each(1 / max(run.tokens, 1))
        return [(term, factors * shares)]

    def _phi(self, run: ConfiguredStep) -> Array:
        vespo = run.options["vespo"]
        ratio = np.clip(np.log(np.maximum(self.shown_weights(run), 1e-300)), _MIN_LOG_WEIGHT, 20)
        log_weight = np.clip(run.segments.sum(np.clip(run.u, -20, 20)) + run.segments.sum(ratio), _MIN_LOG_WEIGHT, 20)
        first = run.row_means(run.advantages)
        ups, downs = (losses.vespo_gate(log_weight, *vespo[side]) for side in ("positive", "negative"))
        return np.nan_to_num(np.where(first >= 0, ups, downs), posinf=0.0)

    def metrics(self, run: ConfiguredStep) -> dict[str, float]:
        apart = np.abs(run.d)
        logged = {
            "sampling/sampling_logp_difference/mean": run.mean(apart),
            "sampling/sampling_logp_difference/max": float(apart.max(initial=0)),
        }
        weights = self.shown_weights(run)
        if run.correction.weight is not None and run.correction.weight.level == "sequence":
            firsts = np.ones(len(run.step))
            some = run.lengths > 0
            firsts[some] = weights[run.segments.offsets[:-1][some]]
            weights = firsts
        if run.correction.weight is not None:
            for how, value in (("min", weights.min()), ("mean", weights.mean()), ("max", weights.max())):
                logged[f"sampling/importance_sampling_ratio/{how}"] = float(value)
        logged["entropy"] = 0.0
        if not run.has_loss:
            return logged
        kind, (low, high) = run.options["loss_type"], run.options["eps"]
        ratio = exp(self._x(run))
        if kind == "cispo":
            logged["cispo_clip_ratio"] = run.mean((ratio > high) & (run.advantages > 0))
        elif kind == "vespo":
            logged["vespo/phi_seq_mean"] = float(self._phi(run).mean())
        elif kind != "sapo":
            below, above = (ratio < 1 - low) & (run.advantages < 0), (ratio > 1 + high) & (run.advantages > 0)
            token = run.options["level"] == "token"
            if not token:
                below, above = (run.segments.max(flags.astype(float)) > 0 for flags in (below, above))
            lows, highs = float(np.mean(below)), float(np.mean(above))
            ends = [run.row_means(flags) if token else flags for flags in (below, above)]
            logged |= {
                "clip_ratio/low_mean": lows,
                "clip_ratio/high_mean": highs,
                "clip_ratio/region_mean": lows + highs,
            }
            logged |= {"clip_ratio/low_min": ends[0].min(), "clip_ratio/high_max": ends[1].max()}
        return logged


def _read_rows(file: File) -> Iterator[Row]:
    for row in file.batch({*LAYOUT.columns.values(), "completion_mask", "tool_mask", "prompt_ids", "prompt_mask"}):
        mask = np.asarray(row["completion_mask"])
        tools = row.get("tool_mask")  # at padding, it is 1, but completion_mask is 0
        prompt, kept = row.get("prompt_ids"), row.get("prompt_mask")
        if prompt is not None and kept is not None:
            prompt = np.asarray(prompt)[np.asarray(kept) != 0]
        yield {**row, "mask": mask if tools is None else mask * np.asarray(tools), "prompt": prompt}


LAYOUT = read_layout(__file__, "trl", _read_rows)
COMPLETIONS_LAYOUT = read_layout(__file__, "trl-completions", lambda path: iter(()))

ADAPTER = make_adapter(
    Trl,
    versions=("2026-08",),
    layouts=(LAYOUT, COMPLETIONS_LAYOUT),
    classes={"GRPOConfig": lambda call: call.values(Trl.aliases)},
)
