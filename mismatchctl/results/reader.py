"""Read a Result from JSON and check that it is consistent."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from mismatchctl.core.batch import Float64s
from mismatchctl.core.bins import K3_CAPS, LAYER_K3, LAYER_TOKENS
from mismatchctl.core.validation import explain_error
from mismatchctl.errors import ConfigError, DataError, describe_os_error, kind_of
from mismatchctl.io.files import is_baseline, read_first_bytes
from mismatchctl.io.stores import is_remote, read_file
from mismatchctl.io.yaml import TextError, decode_utf8, parse_json
from mismatchctl.measure.metrics.metric import RecordingTotals
from mismatchctl.measure.metrics.registry import MISMATCH_METRICS
from mismatchctl.results.model import FORMAT, Clusters, Groups, Result, RunResult, Series, Value
from mismatchctl.results.summary import get_summary

_SAME_TOLERANCE = 1e-6  # sums may differ by this relative amount, because the cluster table stores nine digits
_LAYER_TOLERANCE = 2e-4  # allowed relative error of the LAYER_COLUMNS, because they are stored with five digits
_LARGEST_CHECKED = 1e290  # sums above this value are not checked, because they may have overflowed


class _InconsistencyError(Exception):
    """The first inconsistency in a Result, as `path of the value: problem`."""


def _require(fits: bool | np.bool_, place: str, problem: str) -> None:
    if not fits:
        raise _InconsistencyError(f"{place}: {problem}")


def _check_lengths(place: str, count: int, *columns: Sequence[Any] | None) -> None:
    for column in columns:
        _require(column is None or len(column) == count, place, f"has {len(column or ())} values instead of {count}")


def _check_unique(values: Sequence[Any], place: str) -> None:
    _require(len(set(values)) == len(values), place, "contains duplicates")


def _check_counts(values: Sequence[float | None], place: str) -> None:
    for value in values:
        _require(value is None or (value >= 0 and value == int(value)), place, f"{value} is not a count")


def _check_run(run: RunResult, names: Sequence[str], place: str) -> None:
    _check_values(run.overall.metrics, f"{place}.overall.metrics")
    for name, values in run.overall.corrections.items():
        _check_values(values, f"{place}.overall.corrections.{name}")
        _require(name in names, f"{place}.overall.corrections.{name}", "is not one of the Result's corrections")
    _check_groups(run.groups, f"{place}.groups")
    for column, groups in run.by.items():
        _check_groups(groups, f"{place}.by.{column}")
        if groups.clusters is not None:
            _check_clusters(groups.clusters, len(groups.labels), f"{place}.by.{column}.clusters")
    bins = run.distribution
    _check_lengths(f"{place}.distribution", max(len(bins.edges) - 1, 0), bins.tokens, bins.k3)
    ascend = all(low < high for low, high in zip(bins.edges, bins.edges[1:], strict=False))
    _require(ascend, f"{place}.distribution.edges", "do not ascend")
    for name, found in run.breakdowns.items():
        columns = (found.high, found.tokens, found.k3, found.k3_se, found.abs_diff, found.abs_diff_se)
        shift = (found.logit_shift, found.logit_shift_se)
        _check_lengths(f"{place}.breakdowns.{name}", len(found.low), *columns, *shift)
    _check_lengths(f"{place}.joint", len(run.joint.x), run.joint.y, run.joint.tokens)
    _check_content(run, place)
    sums = _check_clusters(run.clusters, len(run.groups.labels), f"{place}.clusters")
    for correction, logged in run.logged.items():
        for key, series in logged.items():
            _check_lengths(f"{place}.logged.{correction}.{key}", len(run.groups.labels), series)
    _check_sums(run, sums, place)


def _check_content(run: RunResult, place: str) -> None:
    values = {key: found.value for key, found in run.overall.metrics.items()}
    for key in ("tokens", "sequences"):
        _require(values.get(key) is not None, f"{place}.overall.metrics.{key}", "is missing")
    share, every = values.get("bitwise_share"), values.get("bitwise_all")
    agree = share is None or every is None or every == (share == 1)
    _require(agree, f"{place}.overall.metrics.bitwise_all", "contradicts bitwise_share")
    found = run.content
    if found is not None:
        fits = found.repeated <= found.sequences and found.repeated_tokens <= found.tokens
        _require(fits, f"{place}.content.repeated", "is larger than the number of sequences or tokens")
        for key in ("sequences", "tokens"):
            fits = getattr(found, key) >= (values[key] or 0)
            _require(fits, f"{place}.content.{key}", f"is smaller than {key} of the run")


def _check_values(values: Mapping[str, Value], place: str) -> None:
    for key, found in values.items():
        has_reason = found.value is not None or found.status != "ok"
        _require(has_reason, f"{place}.{key}", "has no value, although the status is ok")
        ordered = found.interval is None or found.interval[0] <= found.interval[1]
        _require(ordered, f"{place}.{key}", "has an interval that ends before it begins")
        if key in ("tokens", "sequences"):
            _check_counts([found.value], f"{place}.{key}")


def _check_groups(groups: Groups, place: str) -> None:
    _check_unique([(type(label), label) for label in groups.labels], f"{place}.labels")
    for key, series in groups.metrics.items():
        _check_series(series, len(groups.labels), f"{place}.metrics.{key}")
    for name, metrics in groups.corrections.items():
        for key, series in metrics.items():
            _check_series(series, len(groups.labels), f"{place}.corrections.{name}.{key}")


def _check_series(series: Series, count: int, place: str) -> None:
    _check_lengths(place, count, series.value, series.se, series.interval)
    marked = [] if isinstance(series.status, str) else [index for own in series.status.values() for index in own]
    for name, indices in (("status", marked), ("heavy_tail", series.heavy_tail)):
        known = all(0 <= index < count for index in indices)
        _require(known, f"{place}.{name}", "refers to a group that does not exist")


def _check_clusters(table: Clusters, groups: int, place: str) -> dict[str, Float64s]:
    rows, columns = len(table.hashes), len(table.columns)
    _check_unique(table.columns, f"{place}.columns")
    _check_lengths(f"{place}.sums", rows, table.sums)
    for row, own in enumerate(table.sums):
        _require(len(own) == columns, f"{place}.sums.{row}", f"has {len(own)} numbers for {columns} columns")
    if table.groups:
        _check_lengths(f"{place}.groups", rows, table.groups)
        known = all(0 <= group < max(groups, 1) for group in table.groups)
        _require(known, f"{place}.groups", "refers to a group that does not exist")
    _check_unique([*zip(table.hashes, table.groups or [0] * rows, strict=True)], f"{place}.hashes")
    if not columns:
        return {}
    sums = dict(zip(table.columns, np.array(table.sums, np.float64).reshape(rows, columns).T, strict=True))
    for name in ("tokens", "sequences"):
        _require(name in sums, f"{place}.columns", f"{name} is missing")
        _check_counts(sums[name].tolist(), f"{place}.{name}")
    for name in ("k3", "abs", "square", "identical", "squared_length", "empty_sequences"):
        _require(name not in sums or (sums[name] >= 0).all(), f"{place}.sums", f"{name} is negative")
    tokens, sequences = sums["tokens"], sums["sequences"]
    most = tokens * (1 + _SAME_TOLERANCE)
    fits = (sequences <= most).all() and (sums.get("identical", tokens) <= most).all()
    _require(fits, f"{place}.sums", "a cluster has more sequences or identical tokens than tokens")
    if "squared_length" in sums:
        with np.errstate(over="ignore"):
            least = tokens**2 / np.maximum(sequences, 1) * (1 - _SAME_TOLERANCE)
        fits = (sums["squared_length"] >= least).all()
        _require(fits, f"{place}.sums", "squared_length is too small for the number of tokens")
    if set(LAYER_TOKENS + LAYER_K3 + ("k3",)) <= sums.keys():
        _check_layers(sums, f"{place}.sums")
    return sums


def _check_layers(sums: Mapping[str, Float64s], place: str) -> None:
    tokens = np.stack([sums[name] for name in LAYER_TOKENS])
    capped = np.stack([sums[name] for name in LAYER_K3]).reshape(len(LAYER_TOKENS), len(K3_CAPS), -1)
    apart, slack = np.abs(tokens.sum(axis=0) - sums["tokens"]), 1 + _LAYER_TOLERANCE
    fits = (apart <= _LAYER_TOLERANCE * sums["tokens"]).all() and (tokens >= 0).all()
    _require(fits, place, "the tokens by bin do not add up to the tokens")
    fits = (
        (capped >= 0).all()
        and (capped[:, :-1] <= capped[:, 1:] * slack).all()
        and (capped <= tokens[:, None] * K3_CAPS[:, None] * slack).all()
        and (capped[:, -1].sum(axis=0) <= sums["k3"] * slack).all()
    )
    _require(fits, place, "K3 by bin does not fit the tokens and K3 of its cluster")


def _check_sums(run: RunResult, sums: Mapping[str, Float64s], place: str) -> None:
    """Check that the sums over clusters and over steps agree with the overall values of the run."""
    whole = {key: found.value for key, found in run.overall.metrics.items() if found.value is not None}
    for key in ("tokens", "sequences"):
        parts = run.groups.metrics[key].value if key in run.groups.metrics else []
        fits = not parts or not _differ(sum(part or 0 for part in parts), whole[key])
        _require(fits, f"{place}.groups.metrics.{key}", "the steps do not add up to the run")
    totals = {name: sum(column.tolist()) for name, column in sums.items()}
    for key in ("tokens", "k3"):
        wanted = whole["tokens"] * (1 if key == "tokens" else whole.get(key, math.nan))
        fits = key not in totals or not _differ(totals[key], wanted)
        _require(fits, f"{place}.clusters.sums", f"the sum of {key} over the clusters differs from the run")
    sizes, groups = run.groups.metrics.get("tokens"), run.clusters.groups
    if groups and sizes is not None and "tokens" in sums:
        by_step = np.bincount(groups, sums["tokens"], len(run.groups.labels)).tolist()
        fits = not any(_differ(found, known or 0.0) for found, known in zip(by_step, sizes.value, strict=False))
        problem = "the tokens of the clusters do not add up to the tokens of their steps"
        _require(fits, f"{place}.clusters.groups", problem)
    spans = {name: sum(np.abs(column).tolist()) for name, column in sums.items()}
    for metric in MISMATCH_METRICS:
        if metric.formula is None or metric.key not in whole:
            continue
        asked = RecordingTotals(totals)
        try:
            found = float(np.real(metric.formula(asked)))
        except (ArithmeticError, KeyError):  # no tokens, or a missing column
            continue
        column, *others = sorted(asked.read.keys() - {"tokens", "sequences"}) or [""]
        if others or not column or not max(abs(found), spans[column]) < _LARGEST_CHECKED:
            continue
        moved = float(np.real(metric.formula({**totals, column: totals[column] + _SAME_TOLERANCE * spans[column]})))
        fits = abs(found - whole[metric.key]) <= abs(moved - found) + _SAME_TOLERANCE * abs(found)
        _require(fits, f"{place}.overall.metrics.{metric.key}", f"does not agree with {column} of the clusters")


def _differ(found: float, wanted: float) -> bool:
    largest = max(abs(found), abs(wanted))
    return largest < _LARGEST_CHECKED and abs(found - wanted) > _SAME_TOLERANCE * largest


_REMEDY = "pass a file that analyze -o or gate --save-baseline wrote"

_RESULT_START = 512  # number of bytes at the start of a file that are read to recognize a Result


def is_result(path: str | Path) -> bool:
    """Return True if a file looks like a Result. An empty, unreadable or remote file must have the suffix `.json`."""
    if Path(path).suffix in (".jsonl", ".ndjson"):
        return False
    if is_remote(str(path)):
        return str(path).endswith(".json")
    try:
        start = read_first_bytes(path, _RESULT_START).lstrip()
    except OSError:
        return Path(path).suffix == ".json" and not Path(path).is_dir()
    if b"[" in start and not any(key in start for key in (b'"mismatchctl"', b'"format"', b'"provenance"', b'"runs"')):
        return is_baseline(Path(path))  # both dumps and baselines may start with a list
    return start.startswith(b"{") or (not start and Path(path).suffix == ".json")


def read_result(path: str | Path) -> Result:
    """Read and check a Result."""
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"expected the path of a result, found {kind_of(path)}")
    return parse_result(read_json(path, _REMEDY), str(path))


def read_json(path: str | Path, remedy: str) -> Any:
    try:
        return parse_json(decode_utf8(read_file(path)))
    except OSError as error:
        raise DataError(describe_os_error(error), file=str(path), remedy=remedy) from None
    except TextError as error:
        raise DataError(f"not JSON: {error}", file=str(path), remedy=remedy) from None


def parse_result(data: Any, name: str) -> Result:
    if not isinstance(data, dict) or "format" not in data or "runs" not in data:
        other = isinstance(data, dict) and data.get("tool") == "mismatchctl"
        problem = "this is the output of another command, not a Result" if other else "this is not a mismatchctl result"
        raise DataError(problem, file=name, remedy=_REMEDY)
    if data["format"] != FORMAT:
        newer = type(data["format"]) is int and data["format"] > FORMAT
        problem = f"the file has result format {data['format']!r}, but this version reads format {FORMAT}"
        remedy = "analyze the dump again with this version"
        raise DataError(problem, file=name, remedy=f"install a newer mismatchctl, or {remedy}" if newer else remedy)
    try:
        result = Result.model_validate(data)
        names = [correction.name for correction in result.corrections]
        _check_unique(names, "corrections")
        for key, run in result.runs.items():
            _check_run(run, names, f"runs.{key}")
    except (ValidationError, _InconsistencyError) as error:
        problem = explain_error(error, Result, most=1) if isinstance(error, ValidationError) else str(error)
        raise DataError(f"damaged result: {problem}", file=name, remedy="analyze the dump again") from None
    for run in result.runs.values():
        get_summary(run)  # a Result that was built by hand has no story
    return result
