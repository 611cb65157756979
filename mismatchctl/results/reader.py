"""Read a Result from JSON and check that it is consistent."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from mismatchctl.core.batch import Float64s
from mismatchctl.core.bins import K3_CAPS, LAYER_K3, LAYER_TOKENS
from mismatchctl.core.validation import explain_error
from mismatchctl.errors import ConfigError, DataError, kind_of
from mismatchctl.io.files import read_first_bytes
from mismatchctl.io.stores import is_remote, read_file
from mismatchctl.io.yaml import TextError, decode_utf8, parse_json
from mismatchctl.measure.metrics.mismatch import MISMATCH_METRICS
from mismatchctl.results.model import (
    FORMAT,
    Breakdown,
    Clusters,
    Distribution,
    Groups,
    Result,
    RunResult,
    Series,
    Value,
)
from mismatchctl.results.summary import summarize_run

_HASH_PATTERN = re.compile("[0-9a-f]{16}")
_SAME_TOLERANCE = 1e-6
"""Relative tolerance of sums, because the cluster table stores nine digits."""
_LAYER_TOLERANCE = 2e-4
"""Relative tolerance of the LAYER_COLUMNS, which are stored with five digits."""
_LARGEST_CHECKED = 1e290
"""Larger sums may have overflowed and are not checked."""


def find_problems(result: Result) -> Iterator[str]:
    """Yield the inconsistencies of a Result, each with its path."""
    names = [correction.name for correction in result.corrections]
    yield from _check_unique(names, "corrections")
    for number, file in enumerate(result.provenance.inputs):
        yield from _check_counts([file.size, file.rows, file.tokens], f"provenance.inputs.{number}")
    yield from _check_counts([item.count for item in result.provenance.left_out], "provenance.left_out")
    for name, run in result.runs.items():
        for problem in _check_run(run, names):
            yield f"runs.{name}.{problem}"


def _check_run(run: RunResult, names: Sequence[str]) -> Iterator[str]:
    yield from _check_values(run.overall.metrics, "overall.metrics")
    for name, values in run.overall.corrections.items():
        yield from _check_values(values, f"overall.corrections.{name}")
        if name not in names:
            yield f"overall.corrections.{name}: no such correction"
    yield from _check_groups(run.groups, "groups")
    for column, groups in run.by.items():
        yield from _check_groups(groups, f"by.{column}")
        if groups.clusters is not None:
            yield from _check_clusters(groups.clusters, len(groups.labels), f"by.{column}.clusters")
    yield from _check_distribution(run.distribution)
    for name, breakdown in run.breakdowns.items():
        yield from _check_breakdown(breakdown, f"breakdowns.{name}")
    yield from _check_lengths("joint", len(run.joint.x), run.joint.y, run.joint.tokens)
    yield from _check_counts(run.joint.tokens, "joint.tokens")
    labels = len(run.groups.labels)
    yield from _check_content(run)
    yield from _check_clusters(run.clusters, labels, "clusters")
    for correction, logged in run.logged.items():
        for key, series in logged.items():
            yield from _check_lengths(f"logged.{correction}.{key}", labels, series)
    yield from _check_sums(run)


def _check_content(run: RunResult) -> Iterator[str]:
    """Check the counts and shares of the content."""
    found, metrics = run.content, run.overall.metrics
    for key in ("tokens", "sequences"):
        if key not in metrics or metrics[key].value is None:
            yield f"overall.metrics.{key}: is missing"
    values = {
        key: metrics[key].value for key in ("tokens", "sequences", "bitwise_all", "bitwise_share") if key in metrics
    }
    share, every = values.get("bitwise_share"), values.get("bitwise_all")
    if share is not None and every is not None and every != (share == 1):
        yield "overall.metrics.bitwise_all: contradicts bitwise_share"
    if found is None:
        return
    counts = (found.sequences, found.tokens, found.repeated, found.repeated_tokens, *found.vocabulary)
    yield from _check_counts(counts, "content")
    if found.repeated > found.sequences or found.repeated_tokens > found.tokens:
        yield "content.repeated: is larger than the number of sequences or tokens"
    for name in ("sequences", "tokens"):
        if getattr(found, name) < (values.get(name) or 0):
            yield f"content.{name}: is smaller than the run's"
    for name in ("hidden", "hidden_abs_diff", "shown_abs_diff", "loud", "holes", "clipped"):
        if not 0 <= getattr(found, name) <= 1:
            yield f"content.{name}: is not between 0 and 1"


def _check_values(values: dict[str, Value], place: str) -> Iterator[str]:
    for key, found in values.items():
        if found.value is None and found.status == "ok":
            yield f"{place}.{key}: no value, although the status is ok"
        if found.se is not None and found.se < 0:
            yield f"{place}.{key}: a standard error below 0"
        if found.interval is not None and found.interval[0] > found.interval[1]:
            yield f"{place}.{key}: an interval that ends before it begins"
    for key in ("tokens", "sequences"):
        count = values[key].value if key in values else None
        if count is not None and (count < 0 or count != int(count)):
            yield f"{place}.{key}: {count} is not a count"


def _check_groups(groups: Groups, place: str) -> Iterator[str]:
    count = len(groups.labels)
    yield from _check_unique([(type(label), label) for label in groups.labels], f"{place}.labels")
    for key, series in groups.metrics.items():
        yield from _check_series(series, count, f"{place}.metrics.{key}")
    for name, metrics in groups.corrections.items():
        for key, series in metrics.items():
            yield from _check_series(series, count, f"{place}.corrections.{name}.{key}")


def _check_series(series: Series, count: int, place: str) -> Iterator[str]:
    columns = (series.value, series.se, series.interval)
    yield from _check_lengths(place, count, *(column for column in columns if column is not None))
    marked = [] if isinstance(series.status, str) else [index for own in series.status.values() for index in own]
    for name, indices in (("status", marked), ("heavy_tail", series.heavy_tail)):
        if any(not 0 <= index < count for index in indices):
            yield f"{place}.{name}: refers to a group that does not exist"


def _check_distribution(found: Distribution) -> Iterator[str]:
    yield from _check_lengths("distribution", max(len(found.edges) - 1, 0), found.tokens, found.k3)
    yield from _check_counts(found.tokens, "distribution.tokens")
    if any(low >= high for low, high in zip(found.edges, found.edges[1:], strict=False)):
        yield "distribution.edges: do not ascend"


def _check_breakdown(found: Breakdown, place: str) -> Iterator[str]:
    columns = (found.low, found.high, found.tokens, found.k3, found.k3_se, found.abs_diff, found.abs_diff_se)
    shift = (each for each in (found.logit_shift, found.logit_shift_se) if each is not None)
    yield from _check_lengths(place, len(found.low), *columns, *shift)
    yield from _check_counts(found.tokens, f"{place}.tokens")


def _check_clusters(table: Clusters, groups: int, place: str) -> Iterator[str]:
    rows, columns = len(table.hashes), len(table.columns)
    yield from _check_unique(table.columns, f"{place}.columns")
    yield from _check_lengths(f"{place}.sums", rows, table.sums)
    wrong = next((row for row, sums in enumerate(table.sums) if len(sums) != columns), None)
    if wrong is not None:
        yield f"{place}.sums.{wrong}: {len(table.sums[wrong])} numbers under {columns} columns"
    odd = next((text for text in table.hashes if not _HASH_PATTERN.fullmatch(text)), None)
    if odd is not None:
        yield f"{place}.hashes: {odd[:20]!r} is not a hash of 16 digits"
    if table.groups:
        yield from _check_lengths(f"{place}.groups", rows, table.groups)
        if any(not 0 <= group < max(groups, 1) for group in table.groups):
            yield f"{place}.groups: refers to a group that does not exist"
    yield from _check_unique([*zip(table.hashes, table.groups or [0] * rows, strict=False)], f"{place}.hashes")
    missing = next((name for name in ("tokens", "sequences") if name not in table.columns), None)
    if missing is not None and table.columns:
        yield f"{place}.columns: {missing} is missing"
    elif wrong is None and rows and len(table.sums) == rows:
        sums = dict(zip(table.columns, np.array(table.sums, np.float64).reshape(rows, columns).T, strict=True))
        for name in ("tokens", "sequences"):
            yield from _check_counts(sums[name].tolist(), f"{place}.{name}")
        yield from _check_bounds(sums, place)
        yield from _check_layers(sums, place)


def _check_bounds(sums: Mapping[str, Float64s], place: str) -> Iterator[str]:
    for name in ("k3", "abs", "square", "identical", "squared_length", "empty_sequences"):
        if name in sums and (sums[name] < 0).any():
            yield f"{place}.sums: {name} is negative"
    tokens, sequences = sums["tokens"], sums["sequences"]
    most = tokens * (1 + _SAME_TOLERANCE)
    if (sequences > most).any() or (sums.get("identical", tokens) > most).any():
        yield f"{place}.sums: a cluster has more sequences or identical tokens than tokens"
    if "squared_length" in sums:
        with np.errstate(over="ignore"):
            least = tokens**2 / np.maximum(sequences, 1)
        if (sums["squared_length"] < least * (1 - _SAME_TOLERANCE)).any():
            yield f"{place}.sums: squared_length is too small for the number of tokens"


def _check_layers(sums: Mapping[str, Float64s], place: str) -> Iterator[str]:
    if not set(LAYER_TOKENS + LAYER_K3 + ("k3",)) <= sums.keys():
        return
    tokens = np.stack([sums[name] for name in LAYER_TOKENS])
    capped = np.stack([sums[name] for name in LAYER_K3]).reshape(len(LAYER_TOKENS), len(K3_CAPS), -1)
    if (np.abs(tokens.sum(axis=0) - sums["tokens"]) > _LAYER_TOLERANCE * sums["tokens"]).any() or (tokens < 0).any():
        yield f"{place}.sums: the tokens by bin do not add up to the tokens"
    slack = 1 + _LAYER_TOLERANCE
    if (
        (capped < 0).any()
        or (capped[:, :-1] > capped[:, 1:] * slack).any()
        or (capped > tokens[:, None] * K3_CAPS[:, None] * slack).any()
        or (capped[:, -1].sum(axis=0) > sums["k3"] * slack).any()
    ):
        yield f"{place}.sums: K3 by bin does not fit the tokens and K3 of its cluster"


def _check_sums(run: RunResult) -> Iterator[str]:
    whole = {key: found.value for key, found in run.overall.metrics.items() if found.value is not None}
    for key in sorted(whole.keys() & {"tokens", "sequences"} & run.groups.metrics.keys()):
        parts = run.groups.metrics[key].value
        if parts and _differ(sum(part or 0 for part in parts), whole[key]):
            yield f"groups.metrics.{key}: the steps do not add up to the run"
    table, tokens = run.clusters, whole.get("tokens", 0.0)
    for key in sorted(whole.keys() & {"tokens", "k3"} & set(table.columns)):
        place = table.columns.index(key)
        found = sum(sums[place] for sums in table.sums if len(sums) == len(table.columns))
        if _differ(found, tokens if key == "tokens" else whole[key] * tokens):
            yield f"clusters.sums: {key} of the clusters does not add up to the run's"
    sizes = run.groups.metrics.get("tokens")
    if table.groups and sizes is not None and "tokens" in table.columns:
        place, by_step = table.columns.index("tokens"), np.zeros(len(run.groups.labels))
        for group, sums in zip(table.groups, table.sums, strict=False):
            if 0 <= group < len(by_step) and len(sums) == len(table.columns):
                by_step[group] += sums[place]
        if any(_differ(found, known or 0.0) for found, known in zip(by_step.tolist(), sizes.value, strict=False)):
            yield "clusters.groups: the tokens of the clusters do not add up to the tokens of their steps"
    yield from _check_means(table, whole)


def _check_means(table: Clusters, whole: Mapping[str, float]) -> Iterator[str]:
    """Check each mean over tokens or sequences against the sums of the clusters."""
    rows = [sums for sums in table.sums if len(sums) == len(table.columns)]
    totals = {name: sum(row[place] for row in rows) for place, name in enumerate(table.columns)}
    sizes = {name: sum(abs(row[place]) for row in rows) for place, name in enumerate(table.columns)}
    for metric in MISMATCH_METRICS:
        if metric.formula is None or metric.key not in whole:
            continue
        asked = _RecordingTotals(totals)
        try:
            found = float(np.real(metric.formula(asked)))
        except (ArithmeticError, KeyError):  # no tokens, or a missing column
            continue
        column, *others = sorted(asked.names - {"tokens", "sequences"}) or [""]
        if others or not column or not max(abs(found), sizes[column]) < _LARGEST_CHECKED:
            continue
        moved = float(np.real(metric.formula({**totals, column: totals[column] + _SAME_TOLERANCE * sizes[column]})))
        if abs(found - whole[metric.key]) > abs(moved - found) + _SAME_TOLERANCE * abs(found):
            yield f"overall.metrics.{metric.key}: does not agree with {column} of the clusters"


class _RecordingTotals(dict[str, float]):
    """A mapping of totals by name that records the names that a formula reads."""

    def __init__(self, totals: Mapping[str, float]) -> None:
        super().__init__(totals)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> float:
        self.names.add(name)
        return super().__getitem__(name)


def _differ(found: float, wanted: float) -> bool:
    return max(abs(found), abs(wanted)) < _LARGEST_CHECKED and abs(found - wanted) > _SAME_TOLERANCE * max(
        abs(found), abs(wanted)
    )


def _check_counts(values: Sequence[float], place: str) -> Iterator[str]:
    wrong = next((value for value in values if value < 0 or value != int(value)), None)
    if wrong is not None:
        yield f"{place}: {wrong} is not a count"


def _check_lengths(place: str, count: int, *columns: Sequence[Any]) -> Iterator[str]:
    wrong = next((len(column) for column in columns if len(column) != count), None)
    if wrong is not None:
        yield f"{place}: {wrong} values instead of {count}"


def _check_unique(values: Sequence[Any], place: str) -> Iterator[str]:
    if len(set(values)) < len(values):
        yield f"{place}: contains duplicates"


_REMEDY = "name a file written by analyze -o"


_RESULT_START = 512
"""Number of bytes at the start of a file that name the tool."""


def is_result(path: str | Path) -> bool:
    """Return True if the path is a file of a Result, not a dump.

    Empty, unreadable and remote files are judged by their suffix.
    """
    if Path(path).suffix in (".jsonl", ".ndjson"):
        return False
    if is_remote(str(path)):
        return str(path).endswith(".json")
    try:
        start = read_first_bytes(path, _RESULT_START).lstrip()
    except OSError:
        return Path(path).suffix == ".json" and not Path(path).is_dir()
    if b"[" in start and not any(key in start for key in (b'"mismatchctl"', b'"format"', b'"provenance"', b'"runs"')):
        return False  # lists begin early in a dump
    return start.startswith(b"{") or (not start and Path(path).suffix == ".json")


def read_result(path: str | Path) -> Result:
    """Read and check a Result."""
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"expected the path of a result, found {kind_of(path)}")
    return parse_result(read_json(path, _REMEDY), str(path))


def read_json(path: str | Path, remedy: str) -> Any:
    """Read a local or remote JSON file."""
    try:
        return parse_json(decode_utf8(read_file(path)))
    except OSError as error:
        raise DataError(error.strerror or str(error), file=str(path), remedy=remedy) from None
    except TextError as error:
        raise DataError(f"not JSON: {error}", file=str(path), remedy=remedy) from None


_KEYS_OF_FORMAT_1 = ("interval", "tail", "covers", "heavy_tail", "story")
"""Keys about 90% intervals. The gate and compare recompute the intervals of means from the cluster table."""


def _drop_keys(data: Any, keys: Sequence[str]) -> Any:
    if isinstance(data, dict):
        return {key: _drop_keys(value, keys) for key, value in data.items() if key not in keys}
    if isinstance(data, list) and data and isinstance(data[0], dict):
        return [_drop_keys(item, keys) for item in data]
    return data


def parse_result(data: Any, name: str) -> Result:
    """Convert the data of a file to a Result."""
    if not isinstance(data, dict) or "format" not in data or "runs" not in data:
        raise DataError("not a mismatchctl result", file=name, remedy=_REMEDY)
    if data["format"] == 1:
        data = _drop_keys(data, _KEYS_OF_FORMAT_1) | {"format": FORMAT}
    if data["format"] != FORMAT:
        newer = type(data["format"]) is int and data["format"] > FORMAT
        problem = f"result format {data['format']!r}, this version reads {FORMAT}"
        remedy = "analyze the dump again with this version"
        raise DataError(problem, file=name, remedy=f"install a newer mismatchctl, or {remedy}" if newer else remedy)
    try:
        result = Result.model_validate(data)
    except ValidationError as error:
        problem = f"damaged result: {explain_error(error, Result, most=1)}"
        raise DataError(problem, file=name, remedy="analyze the dump again") from None
    wrong = next(find_problems(result), None)
    if wrong is not None:
        raise DataError(f"damaged result: {wrong}", file=name, remedy="analyze the dump again")
    for run in result.runs.values():
        run.story = run.story or summarize_run(run)  # earlier versions did not store this value
    return result
