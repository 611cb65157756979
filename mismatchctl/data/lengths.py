"""Rows whose lists have different lengths: how many, which column is the odd one, and where the lists agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mismatchctl.core.batch import Floats

KEPT = 32
"""Rows whose values are kept as examples."""
_FEWEST, _AGREES, _CAP = 8, 0.5, 1.0


@dataclass(frozen=True)
class UnequalRow:
    """One such row: index of its file, its row there, the length of each list, and both lists of log-probs."""

    file: int
    row: int
    lengths: Mapping[str, int]
    rollout: Floats
    train: Floats


@dataclass(frozen=True)
class LengthMismatch:
    """Rows of one run whose lists have different lengths."""

    count: int = 0
    columns: Mapping[str, int] = field(default_factory=dict)
    examples: tuple[UnequalRow, ...] = ()

    def __add__(self, other: LengthMismatch) -> LengthMismatch:
        columns = Counter(self.columns) + Counter(other.columns)
        examples = sorted((*self.examples, *other.examples), key=lambda one: (one.file, one.row))
        return LengthMismatch(self.count + other.count, dict(columns), tuple(examples[:KEPT]))

    def moved(self, by: int) -> LengthMismatch:
        """The same rows of files that lie `by` places further on in the dump."""
        return replace(self, examples=tuple(replace(one, file=one.file + by) for one in self.examples))

    def odd_column(self) -> str:
        """Which column differs from the others, with the lengths of an example."""
        names = Counter(_odd(one.lengths) for one in self.examples)
        name, _ = names.most_common(1)[0]
        one = next(one for one in self.examples if _odd(one.lengths) == name)
        if not name:
            lengths = ", ".join(f"{column} {length:,}" for column, length in one.lengths.items())
            return f"no two columns agree in row {one.row:,} ({lengths})"
        others = Counter(length for column, length in one.lengths.items() if column != name).most_common(1)[0][0]
        return f"{name} has {one.lengths[name]:,} elements in row {one.row:,} where the other lists have {others:,}"

    def describe(self) -> str:
        """Return the number of rows and their common pattern, empty if it is unknown."""
        known = " and ".join(filter(None, (self.pattern(), self.overlap())))
        return f"in {self.count:,} such rows, {known}" if known else ""

    def pattern(self) -> str:
        """What the lengths of both log-prob lists have in common; empty if nothing."""
        pairs = [(len(one.rollout), len(one.train)) for one in self.examples if len(one.rollout) != len(one.train)]
        if len(pairs) < 2:
            return ""
        for (short, long), turned in ((("rollout", "train"), False), (("train", "rollout"), True)):
            own = [(b, a) if turned else (a, b) for a, b in pairs]
            for times in (2, 3):
                extra = {b - times * a for a, b in own}
                if len(extra) == 1 and abs(offset := extra.pop()) <= 2:
                    more = f" {'+' if offset > 0 else '-'} {abs(offset)}" if offset else ""
                    return f"{long}_log_probs always has {times}n{more} elements for n of {short}_log_probs"
        differences = {b - a for a, b in pairs}
        if len(differences) == 1:
            number = differences.pop()
            return f"train_log_probs is always {abs(number)} {'longer' if number > 0 else 'shorter'}"
        for name, lengths in (("rollout", {a for a, _ in pairs}), ("train", {b for _, b in pairs})):
            if len(lengths) == 1:
                return f"{name}_log_probs always has {lengths.pop():,} elements in these rows, as if cut at a limit"
        return ""

    def overlap(self) -> str:
        """At which end the two lists of log-probs agree; empty if at neither."""
        votes: Counter[str] = Counter()
        for one in self.examples:
            short = min(len(one.rollout), len(one.train))
            if short < _FEWEST or len(one.rollout) == len(one.train):
                continue
            parts = {
                "the lists agree from the start, so the surplus is at the end": slice(0, short),
                "the lists agree from the end, so the surplus is at the start": slice(-short, None),
                "every second element of the longer list agrees": slice(0, None, 2),
            }
            level = {}
            for said, part in parts.items():
                a, b = (
                    values[part if len(values) > short else slice(None)][:short] for values in (one.rollout, one.train)
                )
                if len(a) == len(b):
                    with np.errstate(invalid="ignore"):
                        level[said] = float(np.mean(np.minimum(np.nan_to_num(np.abs(a - b), nan=_CAP), _CAP)))
            ranked = sorted(level.items(), key=lambda item: item[1])
            if len(ranked) > 1 and ranked[0][1] < _AGREES * ranked[1][1]:
                votes[ranked[0][0]] += 1
        said, number = votes.most_common(1)[0] if votes else ("", 0)
        return said if number > len(self.examples) / 2 else ""


def _odd(lengths: Mapping[str, int]) -> str:
    """The one column with another length than the others, empty if it does not exist."""
    common, _ = Counter(reversed(list(lengths.values()))).most_common(1)[0]
    odd = [column for column, length in lengths.items() if length != common]
    return odd[0] if len(odd) == 1 else ""


def unequal(
    lengths: Mapping[str, Sequence[int]],
    rollout: Sequence[Floats],
    train: Sequence[Floats],
    at: Sequence[tuple[int, int]],
) -> LengthMismatch:
    """The rows at `at` (file, row), with the lengths of their lists by column and their log-probs."""
    names = list(lengths)
    first = names[0]
    columns = {name: sum(a != b for a, b in zip(lengths[name], lengths[first], strict=True)) for name in names[1:]}
    examples = tuple(
        UnequalRow(*place, {name: int(lengths[name][i]) for name in names}, rollout[i], train[i])
        for i, place in enumerate(at[:KEPT])
    )
    return LengthMismatch(len(at), {name: count for name, count in columns.items() if count}, examples)
