"""Analyze a metrics log without a dump: find its mismatch metrics, and describe their level and trend."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mismatchctl.api.analyze import run_log as logs
from mismatchctl.api.analyze.run_log import PARTS, STEP_NAMES, Health, find_health_names, fit_logged_growth
from mismatchctl.core.formatting import format_number
from mismatchctl.core.schema import COLUMNS_BY_NAME
from mismatchctl.core.validation import FiniteModel
from mismatchctl.data.importers.tables import first_record
from mismatchctl.data.paths import contains_dump
from mismatchctl.errors import DataError
from mismatchctl.frameworks.adapter import LoggedMetric
from mismatchctl.frameworks.glossary import find_certain_metric, find_meanings
from mismatchctl.frameworks.registry import column_aliases
from mismatchctl.io.files import read_first_bytes
from mismatchctl.io.stores import walk_files
from mismatchctl.results.growth import Growth
from mismatchctl.results.model import Lag, Value
from mismatchctl.results.summary import classify_k3
from mismatchctl.results.views import add_version, json_text

Role = Literal["mismatch"] | Health

_OF_LOSS = re.compile(r"loss|advantage", re.IGNORECASE)
"""If the description of a logged quantity matches, it is part of a loss and does not measure the mismatch."""
_KL_LIKE = re.compile(r"k3|mismatch_kl|k3_kl", re.IGNORECASE)
_RUN = " - "
_PREFIXES = frozenset({"train", "training", "actor", "policy", "metrics", "debug", "rl"})
"""Prefixes that trackers add to the names that a framework logs."""
_HEAD = 1 << 20
_SIGNATURE_BYTES = 256


class LoggedSeries(FiniteModel):
    """The values of one metric of a log, one per step."""

    name: str
    role: Role
    metric: str = ""  # key of the metric of `analyze` that has the same formula
    meaning: str = ""  # the quantity, and the frameworks that log it with this name
    growth: Growth
    level: str = ""  # how high the last value is (only for a KL), such as "normal for a dense model"
    not_finite: int = 0  # number of steps with a NaN or infinite value
    lag: Lag | None = None  # by how many steps the leading mismatch metric follows this series
    steps: list[int | float | str]
    values: list[float | None]

    @property
    def first(self) -> float | None:
        return next((value for value in self.values if value is not None), None)

    @property
    def last(self) -> float | None:
        return next((value for value in reversed(self.values) if value is not None), None)


@dataclass(frozen=True)
class LoggedRun:
    """One run of a metrics log. `mismatch` starts with the leading metric, which measures the mismatch best."""

    name: str
    steps: list[int | float | str]
    mismatch: tuple[LoggedSeries, ...]
    health: tuple[LoggedSeries, ...]
    framework: str = ""

    @property
    def lead(self) -> LoggedSeries:
        return self.mismatch[0]

    def lag_text(self, other: LoggedSeries) -> str:
        """Describe when the leading metric changes relative to `other`: "k3 changes 2 logged steps later"."""

        def when(apart: int, unit: str) -> str:
            return f"{abs(apart)} {unit} {'later' if apart > 0 else 'earlier'}" if apart else "in the same step"

        places = {label: place for place, label in enumerate(self.steps)}
        lead, texts = self.lead, []
        if lead.growth.changed and other.growth.changed:
            apart = places[lead.growth.onset or ""] - places[other.growth.onset or ""]
            texts.append(f"{lead.name} changes {when(apart, 'logged steps')}")
        if other.lag is not None and other.lag.steps is not None:
            follows = when(other.lag.steps, "steps")
            changes = f"step-to-step changes of {lead.name} follow {follows}"
            texts.append(f"{changes} (correlation {other.lag.correlation:.2f})")
        elif other.lag is not None and other.lag.status:
            texts.append(f"step to step: {other.lag.status}")
        return "; ".join(texts)

    @property
    def order(self) -> list[LoggedSeries]:
        """Return the leading metric and the health metrics that changed, in the order of their changes."""
        found = [one for one in (*self.mismatch[:1], *self.health) if one.growth.changed]
        places = {label: place for place, label in enumerate(self.steps)}
        return sorted(found, key=lambda one: places.get(one.growth.onset or "", 0))


@dataclass(frozen=True)
class LogAnalysis:
    """The runs of one or more metrics logs, analyzed without a dump."""

    path: str
    runs: tuple[LoggedRun, ...]
    names: int = 0

    def to_json(self) -> str:
        """Return strict JSON, as `mismatchctl analyze --json` prints it for a log."""
        runs = {
            run.name: {
                "steps": len(run.steps),
                "framework": run.framework,
                "mismatch": [one.model_dump(mode="json") for one in run.mismatch],
                "health": [one.model_dump(mode="json") for one in run.health],
            }
            for run in self.runs
        }
        return json_text(add_version({"log": self.path, "runs": runs}))


@dataclass(frozen=True)
class LoggedValues:
    """All values that one run logged, including metrics that mismatchctl does not know."""

    name: str
    steps: list[int | float | str]
    values: Mapping[str, list[float | None]]
    not_finite: Mapping[str, int]


def read_logged_values(path: str | Path) -> list[LoggedValues]:
    log = logs.read_run_log(path)
    names = list(dict.fromkeys([*(name for row in log.rows.values() for name in row), *log.not_finite]))
    found = []
    for run, own in _names_by_run(names, Path(path).stem).items():
        logged = [step for step, row in log.rows.items() if any(name in row for name in own)]
        labels = sorted(((_step(step), step) for step in logged), key=lambda pair: (isinstance(pair[0], str), pair[0]))
        series = log.series([step for _, step in labels])
        steps = [label for label, _ in labels]
        values = {bare: series.get(name, [None] * len(steps)) for name, bare in own.items()}
        lost = {bare: log.not_finite[name] for name, bare in own.items() if name in log.not_finite}
        found.append(LoggedValues(run, steps, values, lost))
    return found


def is_run_log(path: str | Path) -> bool:
    place = Path(path)
    suffix = place.suffix.lower()
    with suppress(OSError, csv.Error):  # the code that reads the log reports the problem
        if place.is_dir():
            return any(map(logs.is_event_file, walk_files(place))) and not contains_dump(str(place))
        if not place.is_file() or logs.is_event_file(place):
            return place.is_file()
        if suffix == ".csv":
            heads = next(csv.reader(read_first_bytes(place, _HEAD).decode("utf-8-sig", "replace").splitlines()), [])
            return any(head.lower() in STEP_NAMES for head in heads) and not _names_log_probs(heads)
        is_result = suffix == ".json" and b'"mismatchctl"' in read_first_bytes(place, _SIGNATURE_BYTES)
        record = None if is_result or suffix not in (".jsonl", ".ndjson", ".json") else first_record(place)
        if record is not None:
            nested = record.get("data")
            values = nested if isinstance(nested, Mapping) else record
            steps = any(name in found for found in (record, values) for name in STEP_NAMES)
            scalars = any(isinstance(value, (int, float)) and name not in STEP_NAMES for name, value in values.items())
            texts = {"input", "output"} <= record.keys() or "prompt" in record
            lists = any(isinstance(value, list) for value in values.values())
            is_row = steps and scalars and not texts and not lists and not _names_log_probs(values)
            return is_row or isinstance(record.get("log_history"), list)
    return False


def _names_log_probs(names: Any) -> bool:
    aliases = column_aliases()
    columns = {aliases.get(name, name) for name in names}
    return any(name in COLUMNS_BY_NAME and COLUMNS_BY_NAME[name].per_token for name in columns)


def analyze_logs(paths: Sequence[str | Path]) -> LogAnalysis:
    """Find mismatch metrics in logs, and their trends. Two runs named `a` become `log1.csv: a` and `log2.csv: a`."""
    found: list[tuple[str | Path, LoggedRun]] = []
    count = 0
    for path in paths:
        logged = read_logged_values(path)
        names = [name for run in logged for name, values in run.values.items() if any(v is not None for v in values)]
        runs = [run for run in map(_analyze_run, logged) if run is not None]
        if not runs:
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            problem = f"this log contains no known mismatch metric; it contains {shown}"
            remedy = "log mismatch metrics: docs/guides/files.md lists the setting of each framework"
            raise DataError(problem, file=str(path), remedy=remedy)
        found += ((path, run) for run in runs)
        count += len(names)
    same = Counter(run.name for _, run in found)
    named = (run if same[run.name] == 1 else replace(run, name=f"{path}: {run.name}") for path, run in found)
    return LogAnalysis(", ".join(map(str, paths)), tuple(named), count)


def _names_by_run(names: Sequence[str], stem: str) -> dict[str, dict[str, str]]:
    """Return {run: {logged name: name without the W&B prefix "RUN - "}}. Without prefixes, the run is `stem`."""
    if not all(_RUN in name for name in names):
        return {stem: {name: name for name in names}}
    found: dict[str, dict[str, str]] = {}
    for name in names:
        run, _, bare = name.partition(_RUN)
        found.setdefault(run, {})[name] = bare
    return found


def _analyze_run(run: LoggedValues) -> LoggedRun | None:
    logged = {name: values for name, values in run.values.items() if any(value is not None for value in values)}
    known = {name: meanings for name in logged if (meanings := _meanings(name))}
    if not known:
        return None
    lead = min(known, key=_rank)
    mismatch = tuple(
        _mismatch(name, run, known[name]) for name in sorted(known, key=lambda name: (name != lead, _rank(name), name))
    )
    health = tuple(
        LoggedSeries(
            name=name, role=role, growth=fit_logged_growth(run.steps, logged[name], role),
            lag=logs.estimate_lag(logs.shift_above_zero(logged[lead]), logged[name]),
            not_finite=run.not_finite.get(name, 0), steps=run.steps, values=logged[name],
        )
        for role, name in find_health_names([name for name in logged if name not in known]).items()
    )  # fmt: skip
    frameworks = {title.partition("@")[0] for found in known.values() for titles in found.values() for title in titles}
    return LoggedRun(run.name, run.steps, mismatch, health, frameworks.pop() if len(frameworks) == 1 else "")


def _step(text: str) -> int | float | str:
    value = logs.parse_decimal(text)
    if not logs.is_number(value):
        return text
    return int(value) if float(value).is_integer() else float(value)


def _meanings(name: str) -> dict[LoggedMetric, list[str]]:
    """Return the mismatch metrics that frameworks log with this name, and the frameworks of each metric."""
    first, _, rest = name.partition("/")
    for candidate in (name, *([rest] if rest and first.lower() in _PREFIXES else [])):
        named = (candidate, candidate.replace("/all/", "/"))  # "/all/" marks the mean over environments
        found = {
            meaning: titles for meaning, titles in find_meanings(candidate).items()
            if meaning.basis in ("train/rollout", "current/rollout")
            # the log may contain a name such as "actor/x_y" without its prefix: "x_y"
            and (meaning.name in named or ("_" in candidate and meaning.name.rpartition("/")[2] == candidate))
            and not _OF_LOSS.search(meaning.quantity)
        }  # fmt: skip
        if found:
            return found
    return {}


def _rank(name: str) -> tuple[int, int]:
    """Return a sort key that puts the leading metric first: K3, then other KL estimates, then log-prob differences."""
    metric = find_certain_metric(name)
    if metric == "k3" or (_KL_LIKE.search(name) and not PARTS.search(name)):
        return 0, len(name)
    if PARTS.search(name):
        return 4, len(name)
    return 1 if "kl" in name.lower() else 2 if "diff" in name.lower() else 3, len(name)


def _mismatch(name: str, run: LoggedValues, found: Mapping[LoggedMetric, list[str]]) -> LoggedSeries:
    metric = find_certain_metric(name) or ""
    titles = dict.fromkeys(title.partition("@")[0] for own in found.values() for title in own)
    series = LoggedSeries(
        name=name, role="mismatch", metric=metric, meaning=f"{next(iter(found)).quantity} ({', '.join(titles)})",
        growth=fit_logged_growth(run.steps, run.values[name], metric or name), not_finite=run.not_finite.get(name, 0),
        steps=run.steps, values=run.values[name],
    )  # fmt: skip
    is_kl = (metric == "k3" or _KL_LIKE.search(name)) and not PARTS.search(name)
    if is_kl and series.last is not None and series.last >= 0:
        series.level = classify_k3(Value(value=series.last)).text
    return series


def change_text(series: LoggedSeries) -> str:
    """Describe the change of a series, for example "rises from step 34"."""
    growth, known = series.growth, [value for value in series.values if value is not None]
    if not growth.changed:
        return "no value" if not known else "goes up and down" if growth.verdict == "uneven" else "no change"
    verb = "rises" if growth.verdict == "grew" else "falls"
    at, positive = "at" if growth.shape == "jump" else "from", min(known) > 0
    factor = f" {format_number(growth.factor)}x" if growth.verdict == "grew" and positive else ""
    return f"{verb}{factor} {at} step {growth.onset}"
