"""Bad data: the faults of a block, and a record of everything that was left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mismatchctl.core.batch import Ints
from mismatchctl.errors import DataError, wording

SORT_REMEDY = "sort the rows by sequence_id and position (after run and step)"


def skip_remedy() -> str:
    """Return the remedy for bad rows."""
    skip = wording(python="on_bad='skip' of mm.analyze", command="--on-bad skip")
    return f"correct the dump, or leave such rows out with {skip}"


def mask_remedy() -> str:
    """Return the remedy for valid tokens without a value."""
    mask = wording(python="on_bad='mask' of mm.analyze", command="--on-bad mask")
    skip = wording(python="on_bad='skip'", command="--on-bad skip")
    return f"leave these tokens out with {mask}, or their rows with {skip}"


@dataclass(frozen=True)
class Fault:
    """One kind of bad value in the rows of a block."""

    column: str
    reason: str
    sequences: Ints
    row: int
    problem: str
    remedy: str = field(default_factory=lambda: skip_remedy())
    pattern: tuple[str, str] | None = None

    def error(self, path: str, name: str) -> DataError:
        """Return the fault as an error. The column is called `name` in the file at `path`."""
        column = self.column if name == self.column else f"{name} ({self.column})"
        return DataError(self.problem, file=path, row=self.row, column=column, remedy=self.remedy)


@dataclass(frozen=True)
class ProblemExample:
    """First bad value of a kind in a file."""

    row: int
    column: str
    problem: str


@dataclass
class Problems:
    """Data left out by `--on-bad skip` or `mask`. Use one per thread and add them."""

    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    examples: dict[tuple[str, str], ProblemExample] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    masked: dict[tuple[str, str], int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.counts or self.files or self.masked)

    @property
    def sequences(self) -> int:
        """Total number of sequences left out."""
        return sum(self.skipped.values())

    def add(self, path: str, faults: Iterable[Fault], tokens: int = 0) -> None:
        """Count the faults of one block of a file, and the tokens of the affected sequences."""
        rows: set[int] = set()
        for fault in faults:
            rows.update(fault.sequences.tolist())
            example = ProblemExample(fault.row, fault.column, fault.problem)
            self._count(path, fault.reason, len(fault.sequences), example)
        self.skipped[path] = self.skipped.get(path, 0) + len(rows)
        self.tokens[path] = self.tokens.get(path, 0) + tokens

    def add_masked(self, path: str, masked: Mapping[str, int]) -> None:
        """Count tokens of a block that were masked, by column."""
        for column, number in masked.items():
            self.masked[path, column] = self.masked.get((path, column), 0) + number

    def add_unreadable(self, path: str, sequences: int, row: int, problem: str, tokens: int = 0) -> None:
        """Count the sequences and tokens of a part of a file that could not be decoded."""
        self._count(path, "cannot be decoded", sequences, ProblemExample(row, "-", problem))
        self.skipped[path] = self.skipped.get(path, 0) + sequences
        self.tokens[path] = self.tokens.get(path, 0) + tokens

    def add_file(self, path: str, problem: str) -> None:
        self.files.setdefault(path, problem)

    def no_tokens_error(self) -> DataError | None:
        """Return an error with the first bad value, if rows were left out."""
        if not self.examples:
            return None
        (path, _), example = next(iter(self.examples.items()))
        problem = f"{example.problem}; without such rows no valid token is left"
        return DataError(problem, file=path, row=example.row, column=example.column, remedy="correct the dump")

    def _count(self, path: str, reason: str, number: int, example: ProblemExample) -> None:
        key = path, reason
        self.counts[key] = self.counts.get(key, 0) + number
        if key not in self.examples or example.row < self.examples[key].row:
            self.examples[key] = example

    def __add__(self, other: Problems) -> Problems:
        both = Problems(
            dict(self.counts), dict(self.examples), dict(self.skipped), dict(self.files), dict(self.masked),
            dict(self.tokens),
        )  # fmt: skip
        for (path, reason), number in other.counts.items():
            both._count(path, reason, number, other.examples[path, reason])
        for path, number in other.skipped.items():
            both.skipped[path] = both.skipped.get(path, 0) + number
        for path, number in other.tokens.items():
            both.tokens[path] = both.tokens.get(path, 0) + number
        for path, problem in other.files.items():
            both.add_file(path, problem)
        for key, number in other.masked.items():
            both.masked[key] = both.masked.get(key, 0) + number
        return both
