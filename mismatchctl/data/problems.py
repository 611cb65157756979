"""Problems in the data: bad values, patterns that are the same in all bad rows, and counts of skipped data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mismatchctl.core.batch import Floats, Ints
from mismatchctl.core.formatting import format_count
from mismatchctl.errors import DataError, wording

SORT_REMEDY = "sort the rows by sequence_id and position (after run and step)"


def leave_out(what: str) -> str:
    return f"leave {what} out with " + wording(python="on_bad='skip' of mm.analyze", command="--on-bad skip")


def skip_remedy() -> str:
    return f"correct the dump, or {leave_out('such rows')}"


def mask_remedy() -> str:
    mask = wording(python="on_bad='mask' of mm.analyze", command="--on-bad mask")
    skip = wording(python="on_bad='skip'", command="--on-bad skip")
    return f"leave these tokens out with {mask}, or their rows with {skip}"


@dataclass(frozen=True)
class Fault:
    """One kind of bad value, and the rows that contain it."""

    column: str
    reason: str
    sequences: Ints  # row numbers in ascending order, as in `TokenBatch.rows`
    row: int  # row of the first bad value, which `problem` describes
    problem: str
    remedy: str = field(default_factory=skip_remedy)
    pattern: tuple[str, str] | None = None  # (what all these rows have in common, remedy), if known

    def error(self, path: str, name: str) -> DataError:
        """Return an error that describes the first bad row. `name` is the name of the column in the file."""
        return DataError(self.problem, file=path, row=self.row, column=self._shown(name), remedy=self.remedy)

    def _shown(self, name: str) -> str:
        return self.column if name == self.column else f"{name} ({self.column})"

    def column_error(
        self, path: str, name: str, rows: int, extent: tuple[float, float], count: Callable[[], int]
    ) -> DataError:
        """Build an error about the column if all rows of the file have the fault, else about the first bad row."""
        found = self.pattern or self._describe_all(rows, *extent)
        if rows < _FEWEST_ROWS or found is None or count() < rows:
            return self.error(path, name)
        return DataError(found[0], file=path, column=self._shown(name), remedy=found[1])

    def _describe_all(self, rows: int, low: float, high: float) -> tuple[str, str] | None:
        every = f"all {rows:,} rows"
        absent = "check whether response_mask is 1 on padding, and whether the column was recorded"
        span = f"{every} contain values from {low + 0.0:.3g} to {high:.3g}: these look like negative log-probs"
        above = f"{every} contain values above 0", "check the column: a log-prob is at most 0"
        if low >= 0:
            above = span, "store them with the opposite sign"
        if low >= 0 and high <= 1:
            above = f"{every} contain values between 0 and 1: these look like probabilities", "store their logarithm"
        return {
            "log-prob above 0": above,
            "log-prob below all": (
                f"{every} contain values that are too low for a log-prob",
                "set response_mask to 0 for placeholders",
            ),
            "NaN": (f"{every} contain NaN in valid tokens", absent),
            "null element": (f"{every} contain nulls in valid tokens", absent),
            "infinite": (f"{every} contain infinite values in valid tokens", absent),
            "null list": (f"the list is null in {every}", "record the column, or leave it out"),
            "mask is not 0 or 1": (f"{self.problem}; {every} have this problem", "store 0 and 1 instead of weights"),
            "missing": (f"the value is missing or not finite in {every}", "record the column, or leave it out"),
        }.get(self.reason.rpartition(": ")[2])


_FEWEST_ROWS = 2
"""An error describes a whole column only if all rows are bad and there are at least this number of rows."""
EXAMPLE_ROWS = 32  # maximum number of rows with lists of different lengths to keep as examples, per run
_FEWEST_TOKENS, _AGREES, _CAP = 8, 0.5, 1.0
_ENDS = {
    "last": "the lists agree from the start, so the extra elements are at the end",
    "first": "the lists agree from the end, so the extra elements are at the start",
    "every second": "every second element of the longer list agrees",
}


def find_surplus(pairs: Iterable[tuple[Floats, Floats]], fewest: int = 1) -> str:
    """Return which elements most longer lists have in addition: "first", "last", "every second", or "" if unclear."""
    votes: Counter[str] = Counter()
    pairs = list(pairs)
    for pair in pairs:
        shorter, longer = sorted(pair, key=len)
        short = len(shorter)
        if fewest <= short < len(longer):
            parts = {"last": longer[:short], "first": longer[-short:], "every second": longer[::2][:short]}
            distances = sorted(
                (float(np.mean(np.nan_to_num(np.abs(part - shorter), nan=_CAP).clip(max=_CAP))), order, end)
                for order, (end, part) in enumerate(parts.items())
                if len(part) == short
            )
            votes[distances[0][2]] += distances[0][0] < _AGREES * distances[1][0]
    end, count = votes.most_common(1)[0] if votes else ("", 0)
    return end if count > len(pairs) / 2 else ""


def describe_lengths(
    column: str, reference: str, apart: Ints, pairs: Iterable[tuple[Floats, Floats]]
) -> tuple[str, str] | None:
    """Return a description and a remedy if a column has the same number of extra elements (`apart`) in all rows."""
    if len(apart) < _FEWEST_ROWS or not (apart == apart[0]).all():
        return None
    count = abs(int(apart[0]))
    longer, shorter = (column, reference) if apart[0] > 0 else (reference, column)
    entries = "one element" if count == 1 else f"{count} elements"
    text = f"in every row, {longer} has {entries} more than {shorter}"
    end = find_surplus(pairs)
    if end not in ("first", "last"):
        return text, f"store both columns for the same tokens: remove {entries} from {longer}"
    extra = "the extra element is the" if count == 1 else "the extra elements are the"
    return f"{text}; {extra} {end}", f"remove the {end} {entries.removeprefix('one ')} from {longer}"


@dataclass(frozen=True)
class UnequalRow:
    """A row whose lists have different lengths: the length of each list, and the log-probs to show as an example."""

    file: int
    row: int
    lengths: Mapping[str, int]
    rollout: Floats
    train: Floats

    @property
    def odd_column(self) -> str:
        """Return the column whose list differs in length from all other lists, or "" if several lists differ."""
        common, _ = Counter(list(self.lengths.values())[::-1]).most_common(1)[0]
        odd = [column for column, length in self.lengths.items() if length != common]
        return odd[0] if len(odd) == 1 else ""


@dataclass(frozen=True)
class LengthMismatch:
    """Rows of one run whose lists have different lengths."""

    count: int = 0
    columns: Mapping[str, int] = field(default_factory=dict)  # column -> number of rows with a length unlike rollout
    examples: tuple[UnequalRow, ...] = ()

    def __add__(self, other: LengthMismatch) -> LengthMismatch:
        columns = Counter(self.columns) + Counter(other.columns)
        examples = sorted((*self.examples, *other.examples), key=lambda one: (one.file, one.row))
        return LengthMismatch(self.count + other.count, dict(columns), tuple(examples[:EXAMPLE_ROWS]))

    def describe_odd_column(self) -> str:
        name, _ = Counter(one.odd_column for one in self.examples).most_common(1)[0]
        one = next(one for one in self.examples if one.odd_column == name)
        if not name:
            lengths = ", ".join(f"{column} {length:,}" for column, length in one.lengths.items())
            return f"in row {one.row:,}, all columns have different lengths ({lengths})"
        others = Counter(length for column, length in one.lengths.items() if column != name).most_common(1)[0][0]
        return f"in row {one.row:,}, {name} has {one.lengths[name]:,} elements and the other lists have {others:,}"

    def pattern(self) -> str:
        """Describe the lengths if all examples agree, such as "train_log_probs is always 1 element longer", else ""."""
        pairs = [(len(one.rollout), len(one.train)) for one in self.examples if len(one.rollout) != len(one.train)]
        if len(pairs) < 2:
            return ""
        for short, long, step in (("rollout", "train", 1), ("train", "rollout", -1)):
            for times in (2, 3):
                extra = {b - times * a for a, b in (pair[::step] for pair in pairs)}
                if len(extra) == 1 and abs(offset := extra.pop()) <= 2:
                    more = f" {'+' if offset > 0 else '-'} {abs(offset)}" if offset else ""
                    return f"if {short}_log_probs has n elements, {long}_log_probs has {times}n{more}"
        differences = {b - a for a, b in pairs}
        if len(differences) == 1:
            number = differences.pop()
            return (
                f"train_log_probs is always {format_count(abs(number), 'element')} "
                f"{'longer' if number > 0 else 'shorter'}"
            )
        for name, lengths in zip(("rollout", "train"), map(set, zip(*pairs, strict=True)), strict=True):
            if len(lengths) == 1:
                return (
                    f"{name}_log_probs always has {lengths.pop():,} elements in these rows, as if it was cut at a limit"
                )
        return ""

    def overlap(self) -> str:
        """Describe in what part two log-prob lists of different lengths agree, such as from the start, or return ""."""
        return _ENDS.get(find_surplus(((one.rollout, one.train) for one in self.examples), _FEWEST_TOKENS), "")


class ProblemExample(NamedTuple):
    """The first example of one kind of bad value in a file."""

    row: int
    column: str
    problem: str


@dataclass
class Problems:
    """Counts of the data left out by `--on-bad skip` or `--on-bad mask`. Each thread counts in its own object."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # number of bad sequences by (path, reason)
    examples: dict[tuple[str, str], ProblemExample] = field(default_factory=dict)  # the first example by (path, reason)
    skipped: Counter[str] = field(default_factory=Counter)  # number of sequences left out, by path
    files: dict[str, str] = field(default_factory=dict)  # path of a file that was left out -> reason
    masked: Counter[tuple[str, str]] = field(default_factory=Counter)  # valid tokens without value by (path, column)
    tokens: Counter[str] = field(default_factory=Counter)  # number of tokens in the sequences left out, by path

    def __bool__(self) -> bool:
        return bool(self.counts or self.files or self.masked)

    @property
    def sequences(self) -> int:
        return self.skipped.total()

    def add(self, path: str, faults: Iterable[Fault], tokens: int = 0) -> None:
        rows: set[int] = set()
        for fault in faults:
            rows.update(fault.sequences.tolist())
            example = ProblemExample(fault.row, fault.column, fault.problem)
            self._count(path, fault.reason, len(fault.sequences), example)
        self.skipped[path] += len(rows)
        self.tokens[path] += tokens

    def no_tokens_error(self) -> DataError | None:
        if not self.examples:
            return None
        (path, _), example = next(iter(self.examples.items()))
        problem = f"{example.problem}; if such rows are left out, no valid token is left"
        return DataError(problem, file=path, row=example.row, column=example.column, remedy="correct the dump")

    def _count(self, path: str, reason: str, number: int, example: ProblemExample) -> None:
        key = path, reason
        self.counts[key] += number
        if key not in self.examples or example.row < self.examples[key].row:
            self.examples[key] = example

    def __add__(self, other: Problems) -> Problems:
        both = Problems(files=self.files | other.files)
        for part in (self, other):
            for (path, reason), number in part.counts.items():
                both._count(path, reason, number, part.examples[path, reason])
            both.skipped.update(part.skipped)
            both.masked.update(part.masked)
            both.tokens.update(part.tokens)
        return both
