"""What a report of a comparator says, whoever wrote it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from mismatchctl.frameworks.layers.next import SGLANG


@dataclass(frozen=True)
class LayerRow:
    """One compared tensor, in the order in which the report has them: that of execution.

    Attributes:
        name: of the tensor, as the report has it.
        layer: zero-based decoder layer; None for what lies before, after or beside the layers.
        step: training or decoding step; None where the report knows none.
        value: how far the sides are apart, in the unit of the report's measure; None where there is no number.
        failed: the tool's own verdict, NaN counted as failed.
        why: what is wrong with it, for a person; "" where nothing is.
    """

    name: str
    layer: int | None = None
    step: int | None = None
    value: float | None = None
    failed: bool = False
    why: str = ""


@dataclass(frozen=True)
class LayerTable:
    """The rows of one file, before anything is concluded from them.

    Attributes:
        tool: who wrote it.
        measure: what the values are, with their unit, and the limit that `failed` goes by.
        rows: in the order of execution.
        notes: what the report cannot know or leaves out, in sentences.
        rank: of the process, where the report is of one.
        again: how the tool compares some layers alone, with places as `next.again` fills them.
        unlayered: how layers are compared after a report that has none.
    """

    tool: str
    measure: str
    rows: Sequence[LayerRow]
    notes: Sequence[str] = ()
    rank: str | None = None
    again: str = SGLANG
    unlayered: str = ""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null")


class Tensor(_Model):
    """A tensor that stands out: `layer` is zero-based, null beside the layers; `value` in the report's measure."""

    name: str
    layer: int | None
    step: int | None
    value: float | None
    why: str


class LayerReport(_Model):
    """One report of a comparator, and what follows from it.

    `first_bad` is the first tensor outside the tool's own tolerance; `first_apart` the first that parts from all the
    layers before it, whatever the tolerance; `before` the largest value of the layers before the earlier of the two,
    and `last_good` the last layer compared before it. `growth` is the largest value of each compared layer, in order;
    `next` is what to compare next, to come nearer to the operator.
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


_LAYER = re.compile(r"(?:^|[._/])(?:(?:layers?|h|blocks?|blk|decoder_layers?)[._\[]|layer)(\d{1,6})(?=$|[._/\]])")


def layer_in(name: str) -> int | None:
    """The decoder layer that a module path names: `model.layers.3.mlp.output` is layer 3."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def finite(value: object) -> float | None:
    """A number that can be compared; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def number_in(text: str) -> float | None:
    """The number that a text is, and that can be compared; None for any other text."""
    try:
        return finite(float(text))
    except ValueError:
        return None


@dataclass
class Notes:
    """Sentences about what a report lacks, each said once with its count and first example."""

    seen: dict[str, list[str]] = field(default_factory=dict)

    def add(self, what: str, name: str) -> None:
        """Take note of one tensor of which `what` holds."""
        self.seen.setdefault(what, []).append(name)

    def sentences(self) -> list[str]:
        """One sentence for each kind."""
        return [
            f"{names[0]} {what}" + (f", like {len(names) - 1:,} more" if len(names) > 1 else "")
            for what, names in self.seen.items()
        ]
