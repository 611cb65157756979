"""Adapter of OpenRLHF 0.11 (commit 3c3be6234e0c) and 0.11.2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mismatchctl.core import losses
from mismatchctl.core.losses import Array, LossTerm, exp
from mismatchctl.corrections.model import Gate, Weight
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.adapter import read_layout
from mismatchctl.frameworks.options import HIGH, LOW, PlainFramework, Rules, make_adapter, or_zero
from mismatchctl.frameworks.step import ConfiguredStep, Options

_TYPES = ("tis", "icepop", "seq-mask-tis")
_LEVELS = ("off", "token", "seq")
_GATINGS: dict[str, str] = {"binary_kl": "binary_kl", "tv": "abs_prob_diff"}
"""OpenRLHF's name of a statistic (except ratio) -> mismatchctl's name."""

_SCHEMES = (
    {"is_correction_level": "token", "is_correction_mode": "clip"},
    {"is_correction_level": "token", "is_correction_mode": "mask"},
    {"is_correction_level": "seq", "is_correction_mode": "mask"},
    *(
        {"is_correction_level": level, "is_correction_gating": gating}
        for level in ("token", "seq")
        for gating in _GATINGS
    ),
)
"""Options of version 0.11.2 for TIS, IcePop, seq-mask-tis and trust regions. `OpenRlhf` adds the thresholds."""


class OpenRlhf(PlainFramework):
    """OpenRLHF. Rejected tokens get weight 0, but count in means."""

    def __init__(self, version: str) -> None:
        super().__init__(version)
        self.renamed = version == "0.11.2"
        if self.renamed:
            bounds = {"is_correction_threshold": (or_zero(LOW), HIGH)}
            self.forms = (*(one | bounds for one in _SCHEMES), {"is_correction_level": "off"})
            self.traps = {
                "unbounded": lambda o: o["is_correction_level"] == "seq",
                "gspo": lambda o: o["policy_loss_type"] == "gspo" and o["is_correction_level"] != "off",
            }
        else:
            known = ({"correct": True, "type": kind, "threshold": (LOW, HIGH)} for kind in _TYPES)
            self.forms = (*known, {"correct": False})
            self.traps = {
                "unbounded": lambda o: o["type"] == "seq-mask-tis",
                "gspo": lambda o: o["policy_loss_type"] == "gspo" and bool(o["correct"]),
            }

    @classmethod
    def version_of(cls, native: Mapping[str, Any]) -> str:
        said = {str(key).lstrip("-") for _, inner in cls("0.11").levels(native) for key in inner}
        if said & {"is_correction_level", "is_correction_mode", "is_correction_gating"}:
            return "0.11.2"
        return "0.11" if said & cls._old_names() else ""

    @classmethod
    def _old_names(cls) -> set[str]:
        return set(cls("0.11").aliases) - {"is_correction_threshold"}

    def read(self, native: Mapping[str, Any]) -> Options:
        """Read all options. In version 0.11.2, raise a ConfigError for option names of 0.11, as OpenRLHF does."""
        given = {str(key).lstrip("-") for _, inner in self.levels(native) for key in inner}
        if self.renamed and (gone := sorted(given & self._old_names())):
            raise ConfigError(
                f"{self.title} does not support {gone[0]}; write is_correction_level, is_correction_mode and "
                "is_correction_gating"
            )
        options = super().read(native)
        if self.renamed:
            limits = options["is_correction_threshold"]
            limits = list(limits) if isinstance(limits, (list, tuple)) else [limits]
            options["is_correction_threshold"] = tuple([0.0, *limits] if len(limits) == 1 else limits)
        return options

    def corrects(self, options: Options) -> bool:
        return options["is_correction_level"] != "off" if self.renamed else bool(options["correct"])

    def rules(self, options: Options) -> Rules:
        if self.renamed:
            return self._renamed_rules(options)
        if not options["correct"] or options["policy_loss_type"] == "gspo":
            return None, ()
        kind, bounds = options["type"], options["threshold"]
        if not isinstance(bounds, (list, tuple)) or len(bounds) != 2:
            raise ConfigError(f"is_correction_threshold takes two numbers, low and high, not {bounds!r}")
        low, high = bounds
        if kind not in _TYPES:
            raise ConfigError(f"the correction type must be {', '.join(_TYPES[:-1])} or {_TYPES[-1]}, found {kind!r}")
        if kind == "tis":
            return Weight(clip=(low, high), clamp="none"), ()
        level: Any = "token" if kind == "icepop" else "geometric"
        return Weight(clamp="none"), (Gate(level=level, keep=(low, high), clamp="none", effect="zero"),)

    def _renamed_rules(self, options: Options) -> Rules:
        level, mode, gating = (options[f"is_correction_{name}"] for name in ("level", "mode", "gating"))
        low, high = self._limits(options)
        for name, value, choices in (
            ("level", level, _LEVELS),
            ("mode", mode, ("mask", "clip")),
            ("gating", gating, ("ratio", *_GATINGS)),
        ):
            if value not in choices:
                raise ConfigError(f"is_correction_{name} must be {'/'.join(choices)}, got {value}")
        if mode == "clip" and (level == "seq" or gating != "ratio"):
            raise ConfigError(
                "is_correction_mode=clip requires is_correction_level=token and is_correction_gating=ratio"
            )
        if gating != "ratio" and level != "off" and low > 0:
            raise ConfigError(f"with is_correction_gating={gating}, is_correction_threshold must be one number")
        if level == "off" or options["policy_loss_type"] == "gspo":
            return None, ()
        if mode == "clip":
            return Weight(clip=(low, high), clamp="none"), ()
        rule: dict[str, Any] = {"keep": (low, high), "level": "geometric"}
        if gating != "ratio":
            rule = {"keep": (None, high), "level": "mean", "statistic": _GATINGS[gating]}
        if level == "token":
            rule["level"] = "token"
        return Weight(clamp="none"), (Gate(**rule, clamp="none", effect="zero"),)

    @staticmethod
    def _limits(options: Options) -> tuple[float, float]:
        limits = options["is_correction_threshold"]
        if len(limits) != 2:
            raise ConfigError("is_correction_threshold takes one number (HIGH) or two numbers (LOW HIGH)")
        return limits[0], limits[1]

    def shown_weights(self, run: ConfiguredStep) -> Array:
        """Return the weights: ratio times mask. As in OpenRLHF, an infinite ratio times mask 0 gives NaN."""
        return (run.raw_weights * run.keep).astype(run.step.dtype)

    def shown_keep(self, run: ConfiguredStep) -> Any:
        return self.shown_weights(run) != 0

    def _gspo_ratio(self, run: ConfiguredStep) -> Array:
        return run.segments.spread(run.row_means(run.v if self.corrects(run.options) else run.u))

    def terms(self, run: ConfiguredStep) -> list[tuple[LossTerm, Array]]:
        options = run.options
        low, high = 1 - options["clip_eps_low"], 1 + options["clip_eps_high"]
        shares = run.by_rows(rows=float((run.lengths > 0).sum()))
        if options["policy_loss_type"] == "gspo":
            term = losses.ppo_loss(run.advantages, self._gspo_ratio(run), low, high, mean_over=run.segments)
            return [(term, shares)]
        term = losses.ppo_loss(run.advantages, run.u.clip(-20, 20), low, high, dual=options["dual_clip"])
        if options["token_level_loss"]:
            shares = run.each(1 / max(run.tokens, 1))
        return [(term, self.shown_weights(run) * shares)]

    def metrics(self, run: ConfiguredStep) -> dict[str, float]:
        logged: dict[str, float] = {}
        gspo = run.options["policy_loss_type"] == "gspo"
        if run.has_loss:
            ((term, _),) = self.terms(run)
            logged["ppo_clip_ratio"] = run.mean(np.asarray(term.clipped))
            logged["ppo_kl"] = run.mean(-run.u)
        if not gspo and self.corrects(run.options):
            logged["vllm_kl"] = run.mean(-run.d)
            if self.renamed:
                logged["is_filter_ratio"] = self._filtered_share(run)
        return logged

    def _filtered_share(self, run: ConfiguredStep) -> float:
        options = run.options
        if options["is_correction_mode"] == "clip":
            (low, high), ratio = self._limits(options), exp(run.d)
            return run.mean((ratio < low) | (ratio > high))
        rejected = ~run.keep
        if options["is_correction_level"] == "token":
            return run.mean(rejected)
        rows = run.segments.sum(rejected) > 0
        return float(rows[run.lengths > 0].mean())


ADAPTER = make_adapter(OpenRlhf, versions=("0.11.2", "0.11"), layouts=(read_layout(__file__, "openrlhf"),))
