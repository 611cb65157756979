"""Model of a layer report: the next steps, and the logit noise that a dump implies."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict

from mismatchctl.core.batch import Float64s

REPLAY_COMMAND = "mismatchctl score DUMPS --replay worst.jsonl --worst 8"
COMPARE_COMMAND = "python -m sglang.srt.debug_utils.comparator --baseline-path BASELINE --target-path TARGET"
_HOOK_VARIABLES = "DUMPER_ENABLE=1 DUMPER_NON_INTRUSIVE_MODE=all"
_FILTER_VARIABLE = r"""DUMPER_FILTER='layer_id in [{commas}] or search(r"layers\.{names}\.", name)'"""
SGLANG_SYNTAX = f"run both sides with `{_HOOK_VARIABLES} {_FILTER_VARIABLE}`, then `{COMPARE_COMMAND}`"
"""Spelling of names: `layer_id` in dumps placed by hand, module names in dumps of hooks."""
SLIME_SYNTAX = (
    "dump these layers on each side, then `python tests/glm52_layerwise_comparator.py --megatron-dir MEGATRON "
    "--sglang-dir SGLANG --layers {layers} --output-json layerwise.json`"
)
_MSPROBE = "msprobe compare -tp TARGET/stepN -gp GOLDEN/stepN -o OUT"
MSPROBE_SYNTAX = (
    f'dump both sides with `"task": "tensor"` and `"list": [{{quoted}}]` in msprobe\'s config.json, then `{_MSPROBE}`'
)
EVERY_LAYER_COMMAND = f"run both sides with `{_HOOK_VARIABLES}`, then `{COMPARE_COMMAND}`"


class NextStep(BaseModel):
    """A step towards the first report of layers. `commands` are the commands in `text` (the parts in backticks)."""

    model_config = ConfigDict(extra="forbid")

    name: str
    text: str
    commands: list[str]

    @classmethod
    def of(cls, name: str, text: str) -> NextStep:
        return cls(name=name, text=text, commands=text.split("`")[1::2])


def describe_rerun(syntax: str, layers: Sequence[int]) -> str:
    """Describe how to compare some layers with a tool."""
    texts = [str(layer) for layer in layers]
    names = texts[0] if len(texts) == 1 else f"({'|'.join(texts)})"
    said = syntax.format(
        layers=" ".join(texts), commas=", ".join(texts), names=names,
        quoted=", ".join(f'"layers.{text}."' for text in texts),
    )  # fmt: skip
    return f"{said}; the worst sequences are enough: `{REPLAY_COMMAND}`"


def plan_first_comparison(wrong: str | None, *, in_layers: bool) -> list[NextStep]:
    """List the steps to the first report of layers, if a layer may have the fault."""
    if wrong == "none" or not (wrong or in_layers):
        return []
    one = {"rollout": "the engine", "trainer": "the trainer"}.get(wrong or "")
    against = f"{one}, and the checkpoint in float32," if one else "the engine and the trainer"
    steps = {
        "replay": f"`{REPLAY_COMMAND}` writes the worst sequences, to be scored in one prefill; needs prompt_token_ids",
        "hook": f"score them with {against} each with `{_HOOK_VARIABLES} DUMPER_DIR=DIR`: two folders of every layer",
        "compare": f"`{COMPARE_COMMAND}` writes TARGET/comparator_report.jsonl",
        "msprobe": f'or instead: dump each side with "task": "tensor" in msprobe\'s config.json, then `{_MSPROBE}`',
        "read": "`mismatchctl diagnose DUMPS --layers TARGET` (the report in it; or OUT) names the first bad tensor",
    }
    return [NextStep.of(name, text) for name, text in steps.items()]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null")


class Tensor(_Model):
    """Compared tensor.

    `layer` counts from 0 and is null for a tensor outside the layers. `value` is in the unit of the report. `why` is
    the reason why the tool rejected the tensor, or empty.
    """

    name: str
    layer: int | None
    step: int | None
    value: float | None
    why: str


@dataclass(frozen=True)
class LayerTable:
    """Tensors of one report in order of execution.

    `again` describes how to compare some layers, and `unlayered` how to compare all layers.
    """

    tool: str
    measure: str
    rows: Sequence[Tensor]
    notes: Sequence[str] = ()
    rank: str | None = None
    again: str = SGLANG_SYNTAX
    unlayered: str = ""


class LayerReport(_Model):
    """Report of a comparator with its conclusions.

    `first_bad` is the first tensor outside the tool's tolerance. `first_apart` is the first tensor that differs far
    more than the layers before it. `before` and `last_good` describe the layers before both of these tensors. `growth`
    has the largest value of each layer, and `next` the next comparison.
    """

    file: str
    tool: str
    measure: str
    tensors: int
    failed: int
    first_bad: Tensor | None
    first_apart: Tensor | None
    before: float | None
    last_good: int | None
    growth: list[tuple[int, float | None]]
    notes: list[str]
    rank: str | None = None
    next: str | None = None


_LAYER_PATTERN = re.compile(
    r"(?:^|[._/])(?:(?:layers?|h|blocks?|blk|decoder_layers?)[._\[]|layer)(\d{1,6})(?=$|[._/\]])"
)


def parse_layer(name: str) -> int | None:
    """Return the layer number in a module path, for example 3 in `model.layers.3.mlp.output`."""
    found = _LAYER_PATTERN.search(name)
    return int(found[1]) if found else None


def to_finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def parse_number(text: str) -> float | None:
    try:
        return to_finite(float(text))
    except ValueError:
        return None


USUAL_LOGIT_SPREAD = (0.3, 30.0)
"""Standard deviations of a token's logits in language models, nats."""


class LogitNoise(BaseModel):
    """RMS of the log ratios of a run, and bounds of the logit noise that explains it, in nats."""

    model_config = ConfigDict(extra="forbid")

    log_ratio_rms: float
    logit_noise: tuple[float, float]


def estimate_logit_noise(rollout: Float64s, train: Float64s) -> LogitNoise | None:
    """Estimate the noise on each logit from log-probs of valid, finite tokens [T]."""
    with np.errstate(over="ignore"):
        squares = float(np.square(train - rollout).sum())
    doubt = float(np.square(-np.expm1(np.minimum(rollout, 0.0))).sum())
    if not rollout.size or doubt <= 0 or not np.isfinite(squares):
        return None
    high = float(np.sqrt(squares / doubt))
    return LogitNoise(log_ratio_rms=float(np.sqrt(squares / rollout.size)), logit_noise=(high / np.sqrt(2), high))


def compare_with_noise(report: LayerReport, noise: LogitNoise) -> str:
    """Compare the differences of the layers with the log ratios of the dump."""
    low, high = noise.logit_noise
    asked = f"log ratios of {noise.log_ratio_rms:.2g} (rms) imply noise of {low:.2g} to {high:.2g} on each logit"
    last = next((value for _, value in reversed(report.growth) if value is not None), None)
    if "elative" not in report.measure or last is None:
        return f"{asked}; this report's values are not relative, so they cannot be compared with the dump"
    if last == 0:
        same = "which equal layers cannot cause: look after the layers (logits, sampling parameters, masks, weights)"
        return asked if high == 0 else f"{asked}, {same}"
    needed = high / last
    said = f"{asked}; layers {last:.2g} apart at the end cause this if a token's logits spread by {needed:.2g}"
    if needed > USUAL_LOGIT_SPREAD[1]:
        return (
            f"{said}. In models they spread less, so the layers explain only part of the noise: look for a second cause"
        )
    if needed < USUAL_LOGIT_SPREAD[0]:
        return f"{said}. In models they spread more, so the compared runs differ more than the two sides of the dump"
    return f"{said}, which is usual for models: the layers explain the dump"
