"""Read the metrics that a run logged at each step, and compare them with the metrics of a dump."""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, TypeGuard

import numpy as np
import pyarrow as pa

from mismatchctl.api.scan import RunStep
from mismatchctl.core.batch import Float64s, TokenBatch
from mismatchctl.core.formatting import format_label
from mismatchctl.core.validation import replace_nonfinite
from mismatchctl.corrections.model import Correction
from mismatchctl.errors import ConfigError, DataError, describe_os_error
from mismatchctl.frameworks.adapter import Framework, ReplayOptions
from mismatchctl.frameworks.glossary import find_certain_metric
from mismatchctl.io.files import read_regular_file
from mismatchctl.io.stores import walk_files
from mismatchctl.io.yaml import TextError, decode_utf8, parse_json
from mismatchctl.measure.sums import LabelValue
from mismatchctl.results.growth import Growth, Label, fit_growth
from mismatchctl.results.model import Agreement, Lag, LogComparison, MetricLogComparison

MAX_LOG_BYTES = 1 << 30
"""Reading a log with more bytes is an error."""
_MIN_DIGITS = 4  # with fewer digits, a metric may have lost trailing zeros, so the digits of the whole log are used
_REMEDY = "pass the run's log: JSON lines, TensorBoard events or CSV"
_NOT_FINITE = frozenset({"nan", "inf", "+inf", "-inf", "infinity", "-infinity"})

STEP_NAMES = ("step", "_step", "global_step", "training/global_step")
"""Possible names of the step column of a log. In CSV files, they may also be in upper case, such as `Step`."""
_WANDB_SUFFIXES = ("__MIN", "__MAX")
"""Suffixes of additional columns in a W&B export (NAME__MIN and NAME__MAX), which are ignored."""
_CSV_KEYS = {"Wall time", "Step", "Value"}


def read_csv_cells(text: str, path: str) -> Iterator[tuple[str, str, Decimal]]:
    """Yield (step, metric name, value) for each cell that contains a number, NaN or infinity."""
    rows = csv.reader(text.splitlines())
    try:
        heads = next(rows, [])
        place = next((index for index, head in enumerate(heads) if head.lower() in STEP_NAMES), None)
        if place is None:
            problem = f"no step column: expected one of {', '.join(STEP_NAMES)}"
            raise DataError(problem, file=path, remedy="add a column named step to the table")
        names = _metric_names(heads, Path(path).stem)
        for row in rows:
            if len(row) > place and row[place].strip():
                step = row[place].strip()
                for name, cell in zip(names, row, strict=False):
                    value = parse_decimal(cell)
                    if name and (is_number(value) or cell.strip().lower() in _NOT_FINITE):
                        yield step, name, value
    except csv.Error as error:
        raise DataError(f"not a valid CSV file: {error}", file=path, remedy="export the table again") from None


def _metric_names(heads: list[str], called: str) -> list[str]:
    """Return the metric name of each column, without the W&B prefix "RUN - ". Columns without a metric become ""."""
    if set(heads) == _CSV_KEYS:
        return [called if head == "Value" else "" for head in heads]
    kept = ["" if head.endswith(_WANDB_SUFFIXES) or head.lower() in STEP_NAMES else head for head in heads]
    runs = {head.partition(" - ")[0] for head in kept if head}
    one = len(runs) == 1 and all(" - " in head for head in kept if head)
    named = [head.partition(" - ")[2] if one and head else head for head in kept]
    return ["" if name.startswith("_") else name for name in named]


def parse_decimal(text: str) -> Decimal:
    """Parse a number as a Decimal, which keeps its printed digits. Other text becomes NaN."""
    try:
        return Decimal(text.strip())
    except InvalidOperation:  # no number, or an exponent out of range
        return Decimal("nan")


def is_number(value: Any) -> TypeGuard[Decimal]:
    return isinstance(value, Decimal) and value.is_finite() and math.isfinite(float(value))


@dataclass(frozen=True)
class PrintedDigits:
    """The precision of the printed numbers of a log. The precision determines their rounding errors."""

    place: int = 0  # exponent of the last digit of the number with the most decimals, such as -3 for 0.125
    count: int = 0  # largest number of digits

    @classmethod
    def of(cls, printed: Sequence[Decimal]) -> PrintedDigits:
        shown = [value.as_tuple() for value in printed]
        places = [parts.exponent for parts in shown if isinstance(parts.exponent, int)]
        return cls(min(places, default=0), max((len(parts.digits) for parts in shown), default=0))

    def unit(self, value: Decimal) -> float:
        """Return one unit of the last digit: 0.001 for 0.125. Zeros at the end count, even if the log omits them."""
        place = max(self.place, value.adjusted() - self.count + 1) if value else self.place
        return 10.0 ** max(place, -400)


@dataclass(frozen=True)
class RunLog:
    """The values that a run logged at each step, read from a log file."""

    path: str
    # step -> name -> value, with the digits that were printed
    rows: Mapping[str, Mapping[str, Decimal]] = field(default_factory=dict)
    not_finite: Mapping[str, int] = field(default_factory=dict)  # how often each name was logged as NaN or infinity

    def series(self, labels: Sequence[str]) -> dict[str, list[float | None]]:
        """Return the values of each logged name at the given steps. Missing values are `None`."""
        names = dict.fromkeys(name for label in labels for name in self.rows.get(label, {}))
        found = {name: [self.rows.get(label, {}).get(name) for label in labels] for name in names}
        return {name: [None if value is None else float(value) for value in values] for name, values in found.items()}

    @cached_property
    def digits(self) -> dict[str, PrintedDigits]:
        printed: dict[str, list[Decimal]] = {}
        for row in self.rows.values():
            for name, value in row.items():
                printed.setdefault(name, []).append(value)
        whole = PrintedDigits.of([value for values in printed.values() for value in values])
        own = {name: PrintedDigits.of(values) for name, values in printed.items()}
        return {name: whole if digits.count < _MIN_DIGITS else digits for name, digits in own.items()}


def read_run_log(path: str | Path) -> RunLog:
    """Read a log from JSON lines, a CSV file, a TensorBoard event file, or a folder of event files.

    A JSON row is `{step, data: {name: value}}` or `{step, name: value, ...}`. Rows of the same step are merged.
    """
    place = Path(path)
    if place.is_dir() or is_event_file(place):
        return _collect_log(path, _read_events(place))
    if place.suffix.lower() == ".csv":
        return _collect_log(path, read_csv_cells(_read_text(place), str(path)))
    return _collect_log(path, _read_json_cells(place))


def _read_text(place: Path) -> str:
    try:
        return decode_utf8(read_regular_file(place, MAX_LOG_BYTES))
    except (OSError, TextError) as error:
        problem = describe_os_error(error) if isinstance(error, OSError) else str(error)
        raise DataError(problem, file=str(place), remedy=_REMEDY) from None


def is_event_file(path: Path) -> bool:
    return "tfevents" in path.name


def _read_events(place: Path) -> Iterator[tuple[str, str, Decimal]]:
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError:
        raise ConfigError(
            f"{place}: reading TensorBoard events needs the package tensorboard: pip install 'mismatchctl[tensorboard]'"
        ) from None
    for file in sorted(filter(is_event_file, walk_files(place))) if place.is_dir() else [place]:
        if file.stat().st_size > MAX_LOG_BYTES:
            raise DataError(f"the log is larger than {MAX_LOG_BYTES >> 20:,} MB", file=str(file), remedy=_REMEDY)
        try:
            for record in RawEventFileLoader(str(file)).Load():
                event = Event.FromString(record)
                for value in event.summary.value:
                    scalar = _read_scalar(value)
                    if value.tag and scalar is not None:
                        yield str(event.step), value.tag, scalar
        except (DecodeError, OSError, ValueError, MemoryError, OverflowError) as error:  # raised for damaged records
            raise DataError(
                f"this is not an event file of TensorBoard ({error})", file=str(file), remedy=_REMEDY
            ) from None


def _read_scalar(value: Any) -> Decimal | None:
    if value.HasField("simple_value"):
        return _printed(np.float32(value.simple_value))
    if not value.HasField("tensor") or any(dim.size != 1 for dim in value.tensor.tensor_shape.dim):
        return None
    from tensorboard.util.tensor_util import make_ndarray

    try:
        array = np.asarray(make_ndarray(value.tensor))
    except (TypeError, ValueError):
        return None
    return _printed(array.reshape(-1)[0]) if array.size == 1 and array.dtype.kind == "f" else None


def _printed(value: np.floating[Any]) -> Decimal:
    return Decimal(np.format_float_scientific(value)) if np.isfinite(value) else Decimal("nan")


def _collect_log(path: str | Path, found: Iterable[tuple[str, str, Decimal]]) -> RunLog:
    rows: dict[str, dict[str, Decimal]] = {}
    not_finite: Counter[str] = Counter()
    for step, name, value in found:
        if not is_number(value):
            not_finite[name] += 1
            continue
        number = parse_decimal(step)
        rows.setdefault(step_label(number) if is_number(number) else step, {})[name] = value
    if not rows:
        raise DataError("contains no metric", file=str(path), remedy=_REMEDY)
    return RunLog(str(path), rows, dict(not_finite))


def _read_json_cells(path: Path) -> Iterator[tuple[str, str, Decimal]]:
    """Yield (step, name, value) from JSON objects: one per line, or a list (`log_history` of `trainer_state.json`)."""
    for number, row in _json_rows(_read_text(path), path):
        if not isinstance(row, dict):
            remedy = "write one JSON object per line, with a step and values"
            raise DataError("the row is not a JSON object", file=str(path), row=number, remedy=remedy)
        nested = row.get("data")
        values: Mapping[str, Any] = nested if isinstance(nested, dict) else row
        step = next((found[key] for found in (row, values) for key in STEP_NAMES if found.get(key) is not None), None)
        if step is None:
            raise DataError("missing step", file=str(path), row=number, remedy="add a key named step to each row")
        label = step_label(step)
        for name, value in values.items():
            if isinstance(value, float) or (isinstance(value, str) and value.strip().lower() in _NOT_FINITE):
                value = Decimal("nan")
            if isinstance(value, Decimal) and name not in STEP_NAMES:
                yield label, name, value


def _json_rows(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix.lower() == ".json":
        try:
            whole = parse_json(text, as_python_writes=True, number=parse_decimal)
        except ValueError:
            whole = None
        history = whole.get("log_history") if isinstance(whole, dict) else whole
        if isinstance(history, list):
            yield from enumerate(history)
            return
    for number, line in enumerate(text.split("\n")):
        if line.strip():
            try:
                yield number, parse_json(line, as_python_writes=True, number=parse_decimal)
            except ValueError:
                yield number, None


def step_label(step: Any) -> str:
    if isinstance(step, (float, Decimal)):
        number = float(step)
        return str(int(number)) if number.is_integer() else str(number)
    return str(step)


LAG_SIGNIFICANCE = 0.01
"""Significance level for a correlation between K3 and a logged metric that is shifted by some steps."""
MIN_STEPS = 16
"""Minimum number of steps to estimate a lag."""
_MAX_LAG = 20
_MIN_OVERLAP = 8

Health = Literal["reward", "entropy", "gradient norm"]

_HEALTH: dict[Health, tuple[re.Pattern[str], ...]] = {
    "gradient norm": (re.compile(r"grad_?norm", re.IGNORECASE),),
    "reward": (
        re.compile(r"rewards?/mean$|(^|/)reward(_mean)?$|score/mean$", re.IGNORECASE),
        re.compile(r"reward|return", re.IGNORECASE),
        re.compile(r"score|accuracy", re.IGNORECASE),
    ),
    "entropy": (re.compile(r"entropy(_mean|/mean)?$", re.IGNORECASE), re.compile(r"entropy", re.IGNORECASE)),
}
"""Health metric -> patterns of the names with which frameworks log it, the most reliable pattern first."""
_LARGEST = 1e150  # logged values with a larger absolute value count as missing, because their squares would overflow
PARTS = re.compile(r"/(min|max|std|p\d+)$|_(min|max|std)$", re.IGNORECASE)


def find_health_names(names: Iterable[str]) -> dict[Health, str]:
    whole = [name for name in names if not PARTS.search(name)]
    found = {}
    for role, patterns in _HEALTH.items():
        chosen = next((name for pattern in patterns for name in whole if pattern.search(name)), None)
        if chosen is not None:
            found[role] = chosen
    return found


def fit_logged_growth(labels: Sequence[Label], values: Sequence[float | None], metric: str) -> Growth:
    return fit_growth(labels, shift_above_zero(values), [None] * len(values), metric)


def shift_above_zero(values: Sequence[float | None]) -> list[float | None]:
    """If a value is not positive, add a constant that makes all values positive, as growth detection needs."""
    kept = [None if value is None or abs(value) > _LARGEST else value for value in values]
    known = [value for value in kept if value is not None]
    if not known or min(known) > 0:
        return kept
    low, reach = min(known), max(known) - min(known)
    return [None if value is None else value - low + (reach or 1.0) for value in kept]


def describe_order(labels: Sequence[Label], k3: Growth, log: Mapping[str, Sequence[float | None]]) -> str:
    """Describe in which order K3 and the health metrics changed. If K3 or no health metric changed, return ""."""
    changes = [
        ("K3", k3),
        *((name, fit_logged_growth(labels, log[name], name)) for name in find_health_names(log).values()),
    ]
    places = {label: place for place, label in enumerate(labels)}

    def ends(growth: Growth) -> tuple[int, int]:
        low, high = growth.onset_interval or (0, 0)
        return places.get(low, 0), places.get(high, 0)

    found = sorted(
        ((name, growth) for name, growth in changes if growth.changed),
        key=lambda item: (places.get(item[1].onset, 0), ends(item[1])),
    )
    if len(found) < 2 or not k3.changed:
        return ""
    text = f"{found[0][0]} {_describe_change(found[0][1])}"
    for (_, before), (name, growth) in pairwise(found):
        joint = ", then" if ends(growth)[0] > ends(before)[1] else " and at about the same time"
        text += f"{joint} {name} {_describe_change(growth)}"
    return text


def _describe_change(growth: Growth) -> str:
    verb = "rose" if growth.verdict == "grew" else "fell"
    return f"{verb} {'at' if growth.shape == 'jump' else 'from'} step {format_label(growth.onset)}"


def estimate_lag(k3: Sequence[float | None], logged: Sequence[float | None]) -> Lag:
    """Estimate by how many steps K3 follows the metric `logged`. A negative lag means that K3 changes first."""
    ours = np.array([math.log(value) if value else np.nan for value in k3], np.float64)
    theirs = np.array([np.nan if value is None else value for value in logged], np.float64)
    known = np.isfinite(ours) & np.isfinite(theirs)
    count = int(known.sum())
    if count < MIN_STEPS:
        return Lag(compared=count, status=f"only {count} steps have K3 and this metric, and a lag needs {MIN_STEPS}")
    first, last = np.flatnonzero(known)[[0, -1]]
    if count < last - first + 1:
        return Lag(compared=count, status="some steps are missing in the log or in the dump")
    x, y = _ranked_changes(ours[first : last + 1]), _ranked_changes(theirs[first : last + 1])
    if not x.any() or not y.any():
        return Lag(compared=count, status="K3 or this metric does not vary")
    reach = min(_MAX_LAG, (len(x) - _MIN_OVERLAP) // 2)
    shifts = np.arange(-reach, reach + 1)
    found = np.array([_lagged_correlation(x, y, int(shift)) for shift in shifts])
    limit = NormalDist().inv_cdf(1 - LAG_SIGNIFICANCE / 2 / len(shifts)) * math.sqrt(_correlation_scale(x, y))
    strength = np.abs(found) * np.sqrt(len(x) - np.abs(shifts))
    best = int(np.argmax(strength))
    if strength[best] < limit:
        return Lag(compared=count, status="no significant lag")
    return Lag(steps=int(shifts[best]), correlation=float(found[best]), compared=count)


def _ranked_changes(values: Float64s) -> Float64s:
    """Rank the changes from step to step, and scale the ranks to mean 0 and variance 1."""
    changes = np.diff(values)
    order = np.unique(changes, return_inverse=True, return_counts=True)
    counts = order[2]
    middle = np.cumsum(counts) - (counts + 1) / 2
    ranks = middle[order[1].ravel()]
    spread = ranks.std()
    return (ranks - ranks.mean()) / spread if spread > 0 else np.zeros(len(ranks))


def _lagged_correlation(x: Float64s, y: Float64s, shift: int) -> float:
    """Return the correlation of x at each step with y at the step `shift` steps earlier."""
    if shift > 0:
        x, y = x[shift:], y[:-shift]
    elif shift < 0:
        x, y = x[:shift], y[-shift:]
    return float(np.mean(x * y))


def _correlation_scale(x: Float64s, y: Float64s) -> float:
    """Return the factor that corrects the variance of a correlation for autocorrelation (Bartlett 1946)."""
    most = min(_MAX_LAG, len(x) // 4)
    return max(
        1.0, 1 + 2 * sum(_lagged_correlation(x, x, k) * _lagged_correlation(y, y, k) for k in range(1, most + 1))
    )


REPLAY_COLUMNS = ("micro_batch", "rollout_ids")
"""Columns with groups of rows: a framework adds up the rows that have the same value in one of these columns."""
StepTables = list[tuple[RunStep, pa.Table]]
"""Pairs ((run, step), table with rows of this step), in the order of the dump."""


def build_replay_table(batch: TokenBatch) -> pa.Table:
    offsets = pa.array(batch.segments.offsets)
    tokens = {f"{policy}_log_probs": batch.log_probs(policy) for policy in ("rollout", "train", "current")}
    tokens |= {
        "advantages": batch.advantages,
        "ref_log_probs": batch.log_probs("ref") if batch.has_log_probs("ref").all() else None,
    }
    columns = {
        name: pa.LargeListArray.from_arrays(offsets, pa.array(values.astype(np.float64)))
        for name, values in tokens.items()
        if values is not None
    }
    for name in REPLAY_COLUMNS:
        if name in batch.columns:  # None and NaN mean missing
            names = batch.columns[name].tolist()
            columns[name] = pa.array([None if one is None or one != one else str(one) for one in names], pa.string())
    return pa.table(columns)


class LoggedSteps:
    """The values that a framework would log for each run, step and correction."""

    def __init__(self, framework: Framework, corrections: Iterable[Correction], options: ReplayOptions) -> None:
        self.framework, self.options = framework, options
        self._corrections = list(corrections)
        self._open: dict[RunStep, list[pa.Table]] = {}
        self._logged: dict[RunStep, dict[str, dict[str, float]]] = {}
        self.refused: dict[str, str] = {}  # correction -> why the framework cannot apply it
        self.unavailable: dict[str, str] = {}  # logged name -> the missing data that the value needs

    def add(self, parts: StepTables) -> None:
        for step, table in parts:
            self._open.setdefault(step, []).append(table)

    def close(self, may_grow: Callable[[str, LabelValue], bool]) -> None:
        """Compute the framework's metrics for each step that is complete, because `may_grow(run, step)` is False."""
        for step in [step for step in self._open if not may_grow(*step)]:
            tables = self._open.pop(step)
            shared = [name for name in tables[0].column_names if all(name in t.column_names for t in tables)]
            table = pa.concat_tables([part.select(shared) for part in tables])
            usable = (correction for correction in self._corrections if correction.name not in self.refused)
            self._logged[step] = {correction.name: self._replay(table, correction) for correction in usable}

    def finish(self) -> None:
        self.close(lambda run, step: False)

    def _replay(self, table: pa.Table, correction: Correction) -> dict[str, float]:
        options, framework = self.options, self.framework
        try:
            logged = framework.replay(table, correction, options).logged
            unavailable = framework.unavailable_names(correction, table.column_names)
            self.unavailable |= {name: needed for name, needed in unavailable.items() if needed and name in logged}
            return {name: value for name, value in logged.items() if name not in unavailable}
        except ConfigError as error:
            named = (f"{correction.name}: ", f"{framework.name} cannot express this correction: ")
            self.refused[correction.name] = str(error).removeprefix(named[0]).removeprefix(named[1])
        except DataError:  # no valid tokens: the framework logs no value
            pass
        return {}

    def of_run(self, run: str, labels: Sequence[LabelValue]) -> dict[str, dict[str, list[float | None]]]:
        """Return {correction: {logged name: values}}. Missing and non-finite values are `None`."""
        found: dict[str, dict[str, list[float | None]]] = {}
        for name in (item.name for item in self._corrections if item.name not in self.refused):
            steps = [self._logged.get((run, label), {}).get(name, {}) for label in labels]
            keys = dict.fromkeys(key for step in steps for key in step)
            found[name] = {key: replace_nonfinite([float(step.get(key, math.nan)) for step in steps]) for key in keys}
        return found


FLOAT32_TOLERANCE = 2e-6
"""Relative rounding error that a trainer's float32 sum may have, in any order of summation."""
REPLAY_SPREAD = 2.0
"""A logged value may differ from our float64 value by this number times the error of the same value in float32."""
FLOAT64_TOLERANCE = 1e-9
"""Relative rounding error that a float64 sum may have."""
METRIC_TOLERANCE = 1e-8
"""Relative error of a metric in the Result, which is rounded to VALUE_DIGITS digits."""
_FLOAT32_EPSILON = 2.0**-24
_TRACKER_PREFIXES = ("", "train/", "actor/")  # prefixes that trackers and actors add to the names that a framework logs
_ALL_ENVIRONMENTS = "/all/"
"""This part of a name, as in `mismatch_kl/all/mean`, means that the value is the mean over environments."""

LoggedValues = Mapping[str, Sequence[float | None]]
"""Maps the logged name of a metric to its value at each step."""


def align_steps(log: RunLog, runs: Sequence[tuple[Sequence[Any], LoggedValues]], offset: int) -> RunLog:
    """Subtract `offset` from the steps of the log if more of its values then agree with the dump."""
    if not offset:
        return log

    def agreeing(candidate: RunLog) -> int:
        compared = (compare_replay(candidate, labels, values, values) for labels, values in runs)
        return sum(found.agrees for one in compared for found in one.names.values())

    rows = {
        str(int(step) - offset) if step.removeprefix("-").isdecimal() else step: row for step, row in log.rows.items()
    }
    shifted = replace(log, rows=rows)
    return shifted if agreeing(shifted) > agreeing(log) else log


def require_shared_steps(log: RunLog, labels: Sequence[Any]) -> None:
    steps = {step_label(label) for label in labels}
    if steps.isdisjoint(log.rows):
        logged, dumped = (sorted(each, key=lambda step: (len(step), step)) for each in (log.rows, steps))
        ends = (" to ".join(dict.fromkeys((each[0], each[-1]))) for each in (logged, dumped))
        problem = "the log and the dump have no common step: the log has {}, the dump has {}".format(*ends)
        raise DataError(problem, remedy="use the same step numbers in the dump and in the log")


def compare_replay(log: RunLog, labels: Sequence[Any], replayed: LoggedValues, rounded: LoggedValues) -> LogComparison:
    """Compare logged values with the values computed from the dump in float64 (`replayed`) and float32 (`rounded`)."""
    pairs = {
        name: list(_logged_pairs(log, labels, _spellings(name), values, rounded.get(name, values)))
        for name, values in replayed.items()
    }
    # if the float32 and float64 values differ, the logged value shows which precision the framework used
    telling = [one for each in pairs.values() for one in each if not one.is_near(one.rounded)]
    exact = 2 * sum(one.is_near(one.log) for one in telling) > len(telling)
    return LogComparison(
        names={name: _worst_agreement(found, exact) for name, found in pairs.items() if found},
        missing=[name for name, found in pairs.items() if not found],
    )


def match_metrics(log: RunLog, replayed: Collection[str]) -> dict[str, str]:
    """Map logged names to mismatchctl's metrics. Leave out unknown names and names that `replayed` contains."""
    found = {}
    for name in dict.fromkeys(name for row in log.rows.values() for name in row):
        prefix = next((prefix for prefix in _TRACKER_PREFIXES[1:] if name.startswith(prefix)), "")
        plain = name.removeprefix(prefix).replace(_ALL_ENVIRONMENTS, "/")
        if plain not in replayed and (key := find_certain_metric(name) or find_certain_metric(plain)) is not None:
            found[name] = key
    return found


def compare_metrics(
    log: RunLog, labels: Sequence[Any], metrics: Mapping[str, Sequence[float | None]], called: Mapping[str, str]
) -> MetricLogComparison | None:
    """Compare logged values with `metrics`, and accept float32 rounding. `called` maps logged names to metric keys."""
    found = {}
    for name, key in called.items():
        values = metrics.get(key, [None] * len(labels))
        rounded = [None if value is None else value + _FLOAT32_EPSILON * (1 + abs(value)) for value in values]
        if pairs := list(_logged_pairs(log, labels, [name], values, rounded, METRIC_TOLERANCE)):
            found[name] = _worst_agreement(pairs, exact=False)
    return MetricLogComparison(names=found, metrics={name: called[name] for name in found}) if found else None


class _LoggedPair(NamedTuple):
    """A value of one step in the log, and the same quantity computed from the dump."""

    step: str
    dump: float  # from the dump, computed in float64
    rounded: float  # from the dump, with float32 rounding
    log: float
    unit: float  # one unit of the last digit that the log prints, plus the rounding error of a metric

    @property
    def size(self) -> float:
        return max(abs(self.dump), abs(self.log)) or 1.0

    def is_near(self, value: float) -> bool:
        return abs(value - self.dump) <= FLOAT64_TOLERANCE * self.size

    def judge(self, exact: bool) -> Agreement:
        near, rounding = (self.dump, FLOAT64_TOLERANCE) if exact else (self.rounded, FLOAT32_TOLERANCE)
        apart = abs(self.log - self.dump)
        allowed = REPLAY_SPREAD * abs(near - self.dump) + rounding * self.size + self.unit / 2
        return Agreement(
            steps=1, difference=apart / self.size, allowed=min(allowed / self.size, 1.0), step=self.step,
            dump=self.dump, log=self.log, agrees=min(apart, abs(self.log - near)) <= allowed,
        )  # fmt: skip


def _logged_pairs(
    log: RunLog, labels: Sequence[Any], spellings: Sequence[str], values: Sequence[float | None],
    rounded: Sequence[float | None], tolerance: float = 0.0,
) -> Iterator[_LoggedPair]:  # fmt: skip
    for label, value, other in zip(labels, values, rounded, strict=True):
        step = step_label(label)
        row = log.rows.get(step, {})
        called = next((spelling for spelling in spellings if spelling in row), None)
        if value is not None and called is not None:
            unit = log.digits[called].unit(row[called]) + tolerance * abs(value)
            yield _LoggedPair(step, value, value if other is None else other, float(row[called]), unit)


def _worst_agreement(pairs: Sequence[_LoggedPair], exact: bool) -> Agreement:
    judged = [pair.judge(exact) for pair in pairs]
    worst = max(judged, key=lambda each: (not each.agrees, each.difference))
    return worst.model_copy(update={"steps": len(judged)})


def _spellings(name: str) -> list[str]:
    names = [name, name.replace("/", _ALL_ENVIRONMENTS)] if name.count("/") == 1 else [name]
    return [prefix + each for prefix in _TRACKER_PREFIXES for each in names]
