"""Read a dump in one pass, block by block."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from mismatchctl.core.batch import Ints, TokenBatch
from mismatchctl.core.ratios import compute_ratios
from mismatchctl.core.schema import COLUMNS_BY_NAME, VERSION_COLUMNS
from mismatchctl.corrections.application import Selection, Trim, measure_gate
from mismatchctl.corrections.model import Correction, Gate
from mismatchctl.data.blocks import Rows
from mismatchctl.data.catalog import ReadUnit
from mismatchctl.data.engines import Engine, LocalEngine, list_shards
from mismatchctl.data.paths import DumpSource
from mismatchctl.data.problems import Problems
from mismatchctl.data.reader import BadDataPolicy, Dump, open_dump
from mismatchctl.errors import ConfigError, DataError, option
from mismatchctl.frameworks.registry import column_aliases
from mismatchctl.measure.reduction import split_steps
from mismatchctl.measure.sums import LabelValue

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ReadOptions(TypedDict, total=False):
    """Options shared by all functions that read dumps. `mm.analyze` explains them."""

    rename: Mapping[str, str] | None
    on_bad: BadDataPolicy
    micro_batch_size: int | None
    threads: int | None
    engine: Engine | None
    progress: Callable[[int, int], None] | None


NO_MICRO_BATCHES = "the dump lacks the column micro_batch"

MicroBatches = Mapping[int, Ints]
"""File index -> micro-batch number of each row in the file. The first micro-batch of a step has the number 0."""


def number_micro_batches(dump: Dump, size: int) -> MicroBatches:
    """Divide the rows of each step, in dump order, into micro-batches of `size` rows. This reads the dump again."""
    seen: Counter[tuple[object, object]] = Counter()
    numbers = {file.index: np.zeros(file.rows, np.int64) for file in dump.files}
    for unit in dump.units:
        for batch in dump.read(unit, Problems()):
            runs = batch.columns.get("run", np.full(len(batch), unit.file.run, object))
            steps = batch.columns.get("step", np.full(len(batch), None, object))
            places = (values.tolist() for values in (batch.file, batch.rows, runs, steps))
            for file, row, run, step in zip(*places, strict=True):
                numbers[file][row] = seen[run, step] // size
                seen[run, step] += 1
    return numbers


def whole_step_warning(corrections: Iterable[Correction]) -> str:
    names = dict.fromkeys(c.name.split(" at point ")[0] for c in corrections if c.normalizes_micro_batches)
    return (
        f"{', '.join(names)}: weights are normalized within micro-batches, and {NO_MICRO_BATCHES}: "
        f"each step was used as one micro-batch. {option('micro_batch_size', int)} divides each step into "
        "micro-batches of N rows, as the trainer did"
    )


RunStep = tuple[str, LabelValue]
"""(name of the run, label of the step)."""
_PLACE_COLUMN = "\0place"


@dataclass(frozen=True)
class TrimThresholds:
    """For each gate with `over: batch`, the smallest value that the gate drops, by (run, step)."""

    thresholds: Mapping[Gate, Mapping[RunStep, float]] = field(default_factory=dict)

    def add_to(self, batch: TokenBatch, run: str) -> TokenBatch:
        """Return a copy of the batch with the thresholds of each row's step. Rows without run name belong to `run`."""
        if not self.thresholds:
            return batch
        trims = {gate: np.full(len(batch), np.inf) for gate in self.thresholds}
        for step, places, _ in _split_by_step(batch, run):
            for gate, known in self.thresholds.items():
                trims[gate][places] = known[step]
        return replace(batch, trims=trims)


def find_trims(dump: Dump, corrections: Iterable[Correction]) -> TrimThresholds:
    """Read the dump again to find the thresholds of gates with `over: batch`, which depend on a whole step."""
    gates = _batch_gates(corrections)
    units = dump.units if gates else ()
    return _collect_trims(gates, ((batch, unit.file.run) for unit in units for batch in dump.read(unit, Problems())))


def apply_trims(batch: TokenBatch, corrections: Iterable[Correction]) -> TokenBatch:
    """Return the batch with thresholds for gates with `over: batch`. The batch must contain all rows of its steps."""
    return _collect_trims(_batch_gates(corrections), [(batch, "")]).add_to(batch, "")


def _batch_gates(corrections: Iterable[Correction]) -> list[Gate]:
    gates: dict[Gate, None] = {}
    for correction in corrections:
        for number, gate in enumerate(correction.gates):
            if gate.over == "batch" and number and gate.sees == "remaining":
                raise ConfigError(
                    f"correction {correction.name}: only the first gate can have both `over: batch` and "
                    f"`sees: remaining`. Put gates.{number} first, or write `sees: original` in it"
                )
            if gate.over == "batch":
                gates[gate] = None
    return [*gates]


def _collect_trims(gates: list[Gate], batches: Iterable[tuple[TokenBatch, str]]) -> TrimThresholds:
    known: dict[Gate, dict[RunStep, Trim]] = {gate: {} for gate in gates}
    for batch, run in batches if gates else ():
        for step, _, part in _split_by_step(batch, run):
            ratios, everything = (
                compute_ratios(part, {gate.source for gate in gates}),
                Selection.everything(part.segments),
            )
            for gate, trims in known.items():
                values = measure_gate(gate, ratios[gate.source], everything, part)
                trims[step] = trims.get(step, Trim(gate)).add_values(values)
    return TrimThresholds(
        {gate: {step: trim.threshold() for step, trim in trims.items()} for gate, trims in known.items()}
    )


def _split_by_step(batch: TokenBatch, run: str) -> Iterator[tuple[RunStep, Ints, TokenBatch]]:
    placed = replace(batch, columns={**batch.columns, _PLACE_COLUMN: np.arange(len(batch))})
    for name, (step, _), part in split_steps(placed, run):
        yield (name, step), part.columns[_PLACE_COLUMN], part


OPTIONAL_COLUMNS = (
    "current_log_probs", "advantages", "reward", "prompt_id", "sequence_id", "step", "run", *VERSION_COLUMNS,
)  # fmt: skip
"""Optional columns that are read if the dump has them, because corrections or metrics use them."""
GroupMayGrow = Callable[[str, LabelValue], bool]
"""A function (run, step) that returns True if later parts of the dump may contain more rows of this step."""


class UnitBatches:
    """Reads the batches of one block of rows (a unit) when the caller iterates."""

    def __init__(
        self, dump: Dump, unit: ReadUnit, micro_batches: MicroBatches | None = None, trims: TrimThresholds | None = None
    ) -> None:
        self._dump, self._unit, self._micro_batches, self._trims = dump, unit, micro_batches, trims or TrimThresholds()
        self.path = unit.file.path
        self.tokens: Counter[int] = Counter()
        self.problems = Problems()

    def __iter__(self) -> Iterator[TokenBatch]:
        return self.read(None)

    def read(self, watch: Callable[[Rows], None] | None) -> Iterator[TokenBatch]:
        """Yield the batches. Before each batch, call `watch` with its rows as they are stored in the file."""
        for batch in self._dump.read(self._unit, self.problems, watch):
            self._count(batch)
            if self._micro_batches is not None:
                numbers = self._micro_batches[self._unit.file.index][batch.rows]
                batch = replace(batch, columns={**batch.columns, "micro_batch": numbers})
            yield self._trims.add_to(batch, self._unit.file.run)

    def rows(self) -> Iterator[Rows]:
        """Yield the rows as they are stored in the file, including masked tokens and bad values."""
        for rows in self._dump.rows(self._unit, self.problems):
            self._count(rows)
            yield rows

    def _count(self, found: TokenBatch | Rows) -> None:
        self.tokens[self._unit.file.index] += found.segments.tokens


BatchTask = Callable[[UnitBatches, str], Any]
"""A function (batches of a block of rows, run name) -> partial result. Rows without a run name get this name."""


@dataclass(frozen=True)
class _PartResult:
    part: Any
    tokens: Counter[int]  # index of a file -> number of valid tokens
    problems: Problems

    def __add__(self, other: _PartResult) -> _PartResult:
        return _PartResult(self.part + other.part, self.tokens + other.tokens, self.problems + other.problems)


def _read_part(
    work: BatchTask, micro_batches: MicroBatches | None, trims: TrimThresholds, dump: Dump, unit: ReadUnit
) -> _PartResult:
    batches = UnitBatches(dump, unit, micro_batches, trims)
    return _PartResult(work(batches, unit.file.run), batches.tokens, batches.problems)


class DumpReading:
    """Reads an open dump in parts (ranges of rows), which may be read at the same time."""

    def __init__(self, dump: Dump, corrections: Sequence[Correction] = (), **options: Unpack[ReadOptions]) -> None:
        self.dump, self.options = dump, options
        self.engine = options.get("engine") or LocalEngine(options.get("threads"))
        self.has = frozenset(column for column in COLUMNS_BY_NAME if dump.has(column))
        self.expected_tokens = sum(unit.tokens for unit in dump.units)
        self.tokens = dict.fromkeys((file.index for file in dump.files), 0)
        self.problems = dump.problems
        self._corrections = corrections
        unnamed = any(one.normalizes_micro_batches for one in corrections) and not dump.has("micro_batch")
        size = options.get("micro_batch_size")
        self._numbered_size = size if unnamed else None
        self.warnings = [whole_step_warning(corrections)] if unnamed and not size else []

    @classmethod
    def open(
        cls,
        paths: Sequence[DumpSource],
        corrections: Sequence[Correction],
        by: Sequence[str],
        *,
        extra: Sequence[str] = (),
        watched: Sequence[str] = (),
        **options: Unpack[ReadOptions],
    ) -> DumpReading:
        scoped = any(correction.normalizes_micro_batches for correction in corrections)
        correction_columns = sorted({column for correction in corrections for column in correction.needed_columns})
        needed = dict.fromkeys([*OPTIONAL_COLUMNS, *(["micro_batch"] if scoped else []), *correction_columns, *extra])
        check_correction_names(corrections)
        dump = open_dump(
            paths, rename=options.get("rename"), aliases=column_aliases(), by=by, wanted=[*needed], watched=watched,
            on_bad=options.get("on_bad", "error"),
        )  # fmt: skip
        _check_columns(corrections, dump)
        return cls(dump, corrections, **options)

    def parts(self, work: BatchTask) -> Iterator[tuple[Any, GroupMayGrow]]:
        """Yield the result of `work` for each part, and a function that checks if a step may go on in later parts."""
        may_grow, done, progress = _find_open_groups(self.dump.units), 0, self.options.get("progress")
        size = self._numbered_size
        micro_batches = None if size is None else number_micro_batches(self.dump, size)
        reading = partial(_read_part, work, micro_batches, find_trims(self.dump, self._corrections))
        for shard, read in self.engine.map(reading, self.dump, list_shards(self.dump)):
            self.problems = self.problems + read.problems
            for file, tokens in read.tokens.items():
                self.tokens[file] += tokens
            done += sum(read.tokens.values())
            if progress is not None:
                progress(done, self.expected_tokens)
            yield read.part, partial(may_grow, shard[-1].index)

    def require_tokens(self) -> None:
        self.dump.require_tokens(sum(self.tokens.values()), self.problems)


def _find_open_groups(units: Sequence[ReadUnit]) -> Callable[[int, str, LabelValue], bool]:
    """Return a function of (part, run, step) that returns True if a later part may still contain rows of this step."""
    named = any("run" in unit.file.columns or "run" in unit.file.partition for unit in units)
    # for each run, with its last part first: the negated index of each part (for bisect), and the range of steps in
    # this part and all later parts, as the footers of the files contain it
    indices: dict[str, list[int]] = {}
    ranges: dict[str, list[tuple[float, float]]] = {}
    for unit in reversed(units):
        run = "" if named else unit.file.run
        own = ranges.setdefault(run, [])
        low, high = unit.step_range or (-math.inf, math.inf)
        own.append((min(low, own[-1][0]), max(high, own[-1][1])) if own else (low, high))
        indices.setdefault(run, []).append(-unit.index)

    def may_grow(index: int, run: str, step: LabelValue) -> bool:
        key = "" if named else run
        later = bisect_left(indices[key], -index)
        if later == 0:
            return False
        low, high = ranges[key][later - 1]
        return step is None or isinstance(step, str) or low <= step <= high

    return may_grow


def check_correction_names(corrections: Iterable[Correction]) -> None:
    seen: set[str] = set()
    for correction in corrections:
        if correction.name in seen:
            raise ConfigError(f"two corrections are called {correction.name!r}: give one of them another name")
        seen.add(correction.name)


def _check_columns(corrections: Iterable[Correction], dump: Dump) -> None:
    for correction in corrections:
        for column in sorted(correction.needed_columns):
            for file in dump.files:
                if column not in file.columns and column not in file.partition:
                    problem = f"correction {correction.name} needs this column, which is missing"
                    remedy = "leave the correction out, or record the column"
                    raise DataError(problem, file=file.path, column=column, remedy=remedy)
