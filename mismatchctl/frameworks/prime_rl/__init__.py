"""Adapter of prime-rl at commit 559b44772e47 (2026-08), and of the changed losses of 2026-09 and 2026-10."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mismatchctl.core import losses
from mismatchctl.core.losses import Array, LossTerm, exp
from mismatchctl.corrections.model import Gate, Weight
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.frameworks.adapter import File, Row, read_layout
from mismatchctl.frameworks.options import HIGH, LOW, PlainFramework, Rules, make_adapter, or_zero
from mismatchctl.frameworks.step import ConfiguredStep, Options, Step, k3

_LATER_KEYS = ("eps", "max_importance_ratio", "score_centering", "ratio_low", "ratio_high")

_REMOVED_KEYS = {"dppo_mask_low", "dppo_mask_high", "ipo_threshold"}
"""Keys that prime-rl reads only in versions before 2026-09."""

_MAX_EXPM1 = 1e30


def _lower_median(values: Array) -> float:
    """Return the median as torch does: the lower of the two middle values."""
    if not len(values) or np.isnan(values).any():
        return float("nan")
    return float(np.sort(values)[(len(values) - 1) // 2])


class PrimeRl(PlainFramework):
    """prime-rl: the trainer does not recompute log-probs. The weight is the ratio of current to rollout probability."""

    traps = {"penalty_on_dropped": lambda o: o["kl_tau"] > 0, "default_gone": lambda o: o["type"] == "default"}

    def __init__(self, version: str) -> None:
        super().__init__(version)
        self.later = version in ("2026-09", "2026-10")
        others: list[Options] = [{"type": "default", "dppo_mask_high": HIGH}]
        if self.later:
            others = [{"type": "ppo"}] if version == "2026-10" else []
            others.append({"type": "icepop", "ratio_low": LOW, "ratio_high": HIGH})
            others.append({"type": "cispo", "ratio_low": or_zero(LOW), "ratio_high": HIGH})
        self.forms = ({"type": "ipo", "eps": HIGH}, *others)

    @classmethod
    def version_of(cls, native: Mapping[str, Any]) -> str:
        newest = cls("2026-10")
        said = [(name, value) for _, name, value in newest.find(native)]
        later = any(
            name in _LATER_KEYS or (name == "type" and value in ("icepop", "ppo", "cispo")) for name, value in said
        )
        return "2026-10" if later else ""

    def read(self, native: Any) -> Options:
        given = {key: inner[key] for _, inner in self.levels(native) for key in inner}
        if self.later and (_REMOVED_KEYS & set(given) or given.get("type") == "default"):
            raise ConfigError(
                f"{self.title} does not support `type: default` or the keys {', '.join(sorted(_REMOVED_KEYS))}. "
                "Use `type: ipo` with `eps`"
            )
        return super().read(native)

    def rules(self, options: Options) -> Rules:
        kind = options["type"]
        cap = options.get("max_importance_ratio")
        source: Any = "current/rollout"
        weight = Weight(source=source, clamp="none", truncate=cap if kind == "ipo" else None)
        common: dict[str, Any] = {"source": source, "effect": "zero", "clamp": "none", "nonfinite": "keep"}
        if kind == "ipo":
            return weight, (Gate(statistic="abs_prob_diff", keep=(None, options["eps"]), **common),)
        if kind == "default" and not self.later:
            high = Gate(
                statistic="prob_diff", keep=(None, options["dppo_mask_high"]), when="positive_advantage", **common
            )
            low = Gate(
                statistic="prob_diff", keep=(-options["dppo_mask_low"], None), when="nonpositive_advantage", **common
            )
            return weight, (high, low)
        if kind not in ("icepop", "ppo", "cispo") or not self.later or (kind != "icepop" and self.version == "2026-09"):
            raise ConfigError(f"{self.title}: unknown loss type {kind!r}")
        if kind == "icepop":
            return weight, (Gate(keep=self._bounds(options), **common),)
        if kind == "cispo":
            low_bound, high_bound = self._bounds(options)
            return Weight(source=source, clamp="none", clip=(low_bound, high_bound)), ()
        return None, ()

    def _bounds(self, options: Options) -> tuple[float | None, float | None]:
        usual = {"icepop": (0.2, 5.0), "ppo": (0.8, 1.2), "cispo": (0.0, 5.0)}[options["type"]]
        low, high = (
            given if given is not None else default
            for given, default in zip((options["ratio_low"], options["ratio_high"]), usual, strict=True)
        )
        return (low or None), high

    def prepared(self, step: Step, options: Options, correction: Any) -> ConfiguredStep:
        current = "current_log_probs" if step.has("current_log_probs") else "train_log_probs"
        single = self.version != "2026-10" and options["type"] != "icepop"  # icepop and losses of 2026-10 use float64
        return ConfiguredStep(step, options, correction, trained=current, single=single)

    def shown_weights(self, run: ConfiguredStep) -> Array:
        if self.later:
            return run.weights
        made: Array = run.raw_weights * run.keep * run.options["adv_tau"]  # an infinite weight times 0 is NaN
        return made.astype(run.step.dtype)

    def terms(self, run: ConfiguredStep) -> list[tuple[LossTerm, Array]]:
        options, kind = run.options, run.options["type"]
        share = run.each(1 / max(run.tokens, 1))
        advantages = run.advantages * options["adv_tau"]
        cap = options.get("max_importance_ratio")
        if kind == "cispo":
            return [(losses.factor_loss(advantages, run.current, run.weights), share)]
        if kind == "ppo":
            low, high = self._bounds(options)
            x = run.v if cap is None else np.minimum(run.v, np.log(cap))
            term = losses.ppo_loss(advantages, x, low or 0.0, np.inf if high is None else high)
            if cap is not None and cap == high:  # at the cap, two terms are equal, and one has no gradient
                term = replace(term, slope=np.where(x < run.v, term.slope / 2, term.slope))
            return [(term, share)]
        term = losses.weighted_loss(advantages, run.v, cap if kind == "ipo" else None)
        terms = [(term, share * run.keep)]
        if options["kl_tau"] and kind != "icepop":
            terms.append((losses.quadratic_penalty(run.v, options["kl_tau"]), share))
        return terms

    def _kl(self, run: ConfiguredStep) -> Array:
        if self.version != "2026-10":
            return k3(run.v)
        return np.minimum(np.expm1(run.v.astype(np.float64)), _MAX_EXPM1) - run.v

    def metrics(self, run: ConfiguredStep) -> dict[str, float]:
        kl, options = self._kl(run), run.options
        logged = {
            "mismatch_kl/mean": float(np.mean(kl)),
            "mismatch_kl/median": _lower_median(kl),
            "mismatch_kl/std": float(np.std(kl, ddof=1)) if len(kl) > 1 else float("nan"),
            "mismatch_kl/min": float(np.min(kl)),
            "mismatch_kl/max": float(np.max(kl)),
        }
        if options["type"] in ("ppo", "cispo"):
            return logged | self._clips(run)
        dropped = ~run.keep
        parts = {
            "masked_mismatch_kl": run.row_means(kl, dropped),
            "unmasked_mismatch_kl": run.row_means(kl, ~dropped),
            "is_masked": run.row_means(dropped),
        }
        if options["type"] == "default":
            sides = [outcome.rejected for outcome in run.applied.gates]  # the first gate is for positive advantages
            negative = run.advantages < 0
            parts |= {"is_masked_low": run.row_means(sides[1] & negative), "is_masked_high": run.row_means(sides[0])}
            parts["masked_advantage_positive"] = run.row_means(run.advantages > 0, dropped)
            parts["masked_advantage_negative"] = run.row_means(run.advantages < 0, dropped)
        return logged | {f"{name}/mean": float(values.mean()) for name, values in parts.items()}

    def _clips(self, run: ConfiguredStep) -> dict[str, float]:
        low, high = self._bounds(run.options)
        ratio = exp(run.v)
        above, below = ratio > (np.inf if high is None else high), ratio < (low or 0.0)
        flags = (above & (run.advantages > 0)) | (below & (run.advantages < 0))
        found = {}
        if run.options["type"] == "cispo":
            flags = above | below
        else:
            found["ratio_capped/mean"] = float(run.row_means(ratio > run.options["max_importance_ratio"]).mean())
        return {"is_clipped/mean": float(run.row_means(flags).mean())} | found


_SCHEMA_VERSION = 1  # the supported schema version of the exported lines


def _read_rows(file: File) -> Iterator[Row]:
    for number, line in enumerate(file.lines()):
        version = line.get("schema_version", _SCHEMA_VERSION)
        if version != _SCHEMA_VERSION:
            problem = f"this file has version {version!r}, but only {_SCHEMA_VERSION} is supported"
            remedy = "update mismatchctl, or record a dump"
            raise DataError(problem, file=str(file.path), row=number, column="schema_version", remedy=remedy)
        rank, index = line.get("rank", 0), line.get("export_sequence_idx")
        yield {**line, "sequence_id": None if index is None else f"{rank}:{index}"}


LAYOUT = read_layout(__file__, "prime-rl", _read_rows)

ADAPTER = make_adapter(PrimeRl, versions=("2026-10", "2026-09", "2026-08"), default="2026-08", layouts=(LAYOUT,))
