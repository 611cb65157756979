"""Adapter of tinker-cookbook at commit 9dfcc3a2cf44 (2026-08). The Tinker server computes the losses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mismatchctl.core import losses
from mismatchctl.core.losses import Array, LossTerm
from mismatchctl.corrections.model import Correction, Weight
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.adapter import File, Row, read_layout
from mismatchctl.frameworks.options import HIGH, LOW, PlainFramework, Rules, make_adapter, or_zero
from mismatchctl.frameworks.step import ConfiguredStep, Options, Step
from mismatchctl.io.scripts import PythonCall

_LOSS_KEYS = ("loss_fn", "loss_fn_config")
_REQUIRED_KEYS = {"model_name", "log_path", "dataset_builder", "max_tokens"}
"""Required keys of `train.Config`. A call of `Config` without any of them is a call of another class of that name."""
_CLIP_RANGES = {"ppo": (0.8, 1.2), "cispo": (0.0, 1.2)}


class TinkerCookbook(PlainFramework):
    """tinker-cookbook: weights are the ratio of current to rollout probability. By default, they are unbounded."""

    forms = (
        {"loss_fn": "importance_sampling"},
        {"loss_fn": "cispo", "clip_low_threshold": or_zero(LOW), "clip_high_threshold": HIGH},
    )

    traps = {"unbounded": lambda o: o["loss_fn"] == "importance_sampling"}

    def rules(self, options: Options) -> Rules:
        kind = options["loss_fn"]
        if kind not in ("importance_sampling", "ppo", "cispo"):
            raise ConfigError(
                f"tinker-cookbook: the loss {kind!r} runs on the Tinker server, so mismatchctl cannot compute it"
            )
        if kind == "ppo":
            return None, ()
        low, high = self._clips(options) if kind == "cispo" else (None, None)
        clip = None if high is None else (low or None, high)
        return Weight(source="current/rollout", clamp="none", clip=clip), ()

    def _clips(self, options: Options) -> tuple[float, float]:
        low, high = _CLIP_RANGES[options["loss_fn"]]
        given = options["clip_low_threshold"], options["clip_high_threshold"]
        return (low if given[0] is None else given[0]), (high if given[1] is None else given[1])

    def prepared(self, step: Step, options: Options, correction: Correction) -> ConfiguredStep:
        wanted = options["training"]
        return ConfiguredStep(step, options, correction, trained=wanted if step.has(wanted) else "train_log_probs")

    def terms(self, run: ConfiguredStep) -> list[tuple[LossTerm, Array]]:
        kind, ones = run.options["loss_fn"], run.each(1.0)
        if kind == "importance_sampling":
            return [(losses.weighted_loss(run.advantages, run.v), ones)]
        low, high = self._clips(run.options)
        if kind == "ppo":
            return [(losses.ppo_loss(run.advantages, run.v, low, high), ones)]
        return [(losses.cispo_loss(run.advantages, run.v, run.current, low, high), ones)]

    def metrics(self, run: ConfiguredStep) -> dict[str, float]:
        return {
            "optim/kl_sample_train_v1": run.mean(-run.d),
            "optim/kl_sample_train_v2": 0.5 * run.mean(run.d * run.d),
            "optim/entropy": run.mean(-run.rollout),
        }


def read_call(call: PythonCall) -> dict[str, Any] | None:
    """Read the options of a Python call, if it is a `train.Config(...)` call that sets a loss."""
    if _REQUIRED_KEYS.isdisjoint((*call.given, *call.computed)):
        return None
    given = call.values(_LOSS_KEYS)
    return given if not call.function and not given.keys().isdisjoint(_LOSS_KEYS) else None


def _read_rows(file: File) -> Iterator[Row]:
    for line in file.lines():
        row: Row = {"step": file.step}
        for part in ("loss_fn_inputs", "loss_fn_outputs"):
            for name, tensor in line[part].items():
                row[f"{part}.{name}"] = tensor["data"] if isinstance(tensor, dict) else tensor  # a dict of TensorData
        yield row | {"prompt": _read_prompt(line, row)}


def _read_prompt(line: Mapping[str, Any], row: Row) -> list[int] | None:
    """Return the input tokens before the first sampled token, unless the input contains images."""
    chunks, mask = line.get("model_input", {}).get("chunks", []), row.get("loss_fn_inputs.mask") or []
    first = next((place for place, value in enumerate(mask) if value), None)
    if first is None or not all(isinstance(chunk.get("tokens"), list) for chunk in chunks):
        return None
    tokens = [token for chunk in chunks for token in chunk["tokens"]]
    return tokens[: first + 1] if len(tokens) > first else None


LAYOUT = read_layout(__file__, "tinker", _read_rows)

ADAPTER = make_adapter(TinkerCookbook, versions=("2026-08",), layouts=(LAYOUT,), classes={"Config": read_call})
