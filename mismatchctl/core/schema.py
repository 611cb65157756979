"""The schema of a dump: its columns with their type, unit and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from mismatchctl.io.yaml import read_data

MIN_LOG_PROB = -1e40
"""Lower limit of log-probs. It allows the lowest float32 (-3.4e38), which some frameworks write for masked tokens."""
POSITIVE_TOLERANCE = 1e-3
"""A positive log-prob up to this value is accepted as a rounding error. A larger value is not a log-prob."""


class ColumnKind(Enum):
    """The type of a column. The text describes the content of one row, if each row is a sequence."""

    LOG_PROBS = "log-probs, one per token"
    MASK = "0/1 or true/false, one per token"
    TOKENS = "integers, one per token"
    PER_TOKEN_OR_SCALAR = "numbers, one per token or one per sequence"
    EXPERTS = "lists of expert ids, one list per token"
    TOP_IDS = "lists of token ids, one list per token"
    TOP_LOG_PROBS = "lists of log-probs, one list per token"
    PROMPT = "integers, a list of any length"
    NUMBER = "a number"
    ID = "an integer or a string"


NESTED_KINDS = (ColumnKind.EXPERTS, ColumnKind.TOP_IDS, ColumnKind.TOP_LOG_PROBS)
"""Kinds of columns that contain a list per token. All lists of a column have the same length."""


@dataclass(frozen=True)
class DumpColumn:
    """One column of a dump: its type, unit and meaning."""

    name: str
    kind: ColumnKind
    unit: str
    meaning: str
    required: bool

    @property
    def per_token(self) -> bool:
        return self.kind in (ColumnKind.LOG_PROBS, ColumnKind.MASK, ColumnKind.TOKENS, *NESTED_KINDS)


REQUIRED_COLUMNS = ("rollout_log_probs", "train_log_probs")
COLUMNS = tuple(
    DumpColumn(name, ColumnKind[kind], unit, meaning, name in REQUIRED_COLUMNS)
    for name, (kind, unit, meaning) in read_data(Path(__file__).with_suffix(".yaml")).items()
)
COLUMNS_BY_NAME: dict[str, DumpColumn] = {column.name: column for column in COLUMNS}
VERSION_COLUMNS: tuple[str, ...] = ("rollout_version", "train_version")
"""Columns of weight versions. If a dump has one version per token, the sequence gets the oldest of them."""
TURN_COLUMN = "turn"
"""Column with the turn number of each token. It is only read for `--by turn` and for diagnosis."""
REFERENCE_COLUMN = "reference_log_probs"
"""Column with log-probs of a third scorer (not the rollout engine, and not the trainer)."""
PARTIAL_COLUMNS: tuple[str, ...] = (
    "ref_log_probs",
    REFERENCE_COLUMN,
    *(column.name for column in COLUMNS if column.kind in NESTED_KINDS),
    *VERSION_COLUMNS,
    TURN_COLUMN,
)
"""Columns that may lack values for some sequences. Metrics of such a column skip these sequences."""
LONG_LAYOUT_REQUIRED: tuple[str, ...] = (*REQUIRED_COLUMNS, "sequence_id", "position")


def list_aliases(name: str, aliases: Mapping[str, str]) -> list[str]:
    return sorted(alias for alias, canonical in aliases.items() if canonical == name)


def build_schema_data(aliases: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "name": column.name,
            "required": column.required,
            "kind": column.kind.value,
            "unit": column.unit,
            "meaning": column.meaning,
            "also": list_aliases(column.name, aliases),
        }
        for column in COLUMNS
    ]
