"""Logs as CSV: what W&B and TensorBoard export, or any table with a column of steps."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, TypeGuard

from mismatchctl.errors import DataError

STEPS = ("step", "_step", "global_step", "training/global_step")
"""What the step is called, in any case."""
_ENDS = ("__MIN", "__MAX")
"""Columns that W&B adds to each of its own."""
_ALONE = {"Wall time", "Step", "Value"}


def of_csv(text: str, path: str) -> Iterator[tuple[str, str, Decimal]]:
    """Step, name and value of each cell that is a number.

    Raises:
        DataError: it is no table with a column of steps.
    """
    rows = csv.reader(text.splitlines())
    try:
        heads = next(rows, [])
        place = next((index for index, head in enumerate(heads) if head.lower() in STEPS), None)
        if place is None:
            raise DataError(
                f"no column of steps: one of {', '.join(STEPS)}", file=path, remedy="give the table a column step"
            )
        names = _names(heads, Path(path).stem)
        for row in rows:
            if len(row) > place and row[place].strip():
                step = row[place].strip()
                for name, cell in zip(names, row, strict=False):
                    value = decimal(cell)
                    if name and is_number(value):
                        yield step, name, value
    except csv.Error as error:
        raise DataError(f"no CSV: {error}", file=path, remedy="export the table again") from None


def _names(heads: list[str], called: str) -> list[str]:
    """Names of columns without the run that W&B puts before them, where all are of one run; empty: not a value."""
    if set(heads) == _ALONE:
        return [called if head == "Value" else "" for head in heads]
    kept = ["" if head.endswith(_ENDS) or head.lower() in STEPS else head for head in heads]
    runs = {head.partition(" - ")[0] for head in kept if head}
    one = len(runs) == 1 and all(" - " in head for head in kept if head)
    named = [head.partition(" - ")[2] if one and head else head for head in kept]
    return ["" if name.startswith("_") else name for name in named]


def decimal(text: str) -> Decimal:
    """A number with the digits that it is printed with; NaN where it is none."""
    try:
        return Decimal(text.strip())
    except InvalidOperation:  # or an exponent beyond every float's
        return Decimal("nan")


def is_number(value: Any) -> TypeGuard[Decimal]:
    """Whether it is one that a float can hold."""
    return isinstance(value, Decimal) and value.is_finite() and math.isfinite(float(value))
