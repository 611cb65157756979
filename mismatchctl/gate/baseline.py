"""Baselines: accepted Results without what only reports need, in a form that git shows well; and histories of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mismatchctl.analyze.clusters import rounded_sums
from mismatchctl.batch import Float64s
from mismatchctl.errors import DataError, wording
from mismatchctl.files import natural_key, write_atomically
from mismatchctl.gate.rules import Rule
from mismatchctl.gate.verdict import Verdict
from mismatchctl.measure import OVERALL_CAP
from mismatchctl.measure.table import Hashes
from mismatchctl.resample import sample_of_run
from mismatchctl.result import (
    Acceptance,
    Clusters,
    Distribution,
    Groups,
    InputFile,
    Joint,
    Provenance,
    Result,
    RunResult,
    read_result,
)


def as_baseline(result: Result, verdict: Verdict, rules: Sequence[Rule], *, by_hand: bool) -> Result:
    """What later gates need of a Result: values, cluster tables, what was read; no places, paths, or raw data."""
    accepted = Acceptance(verdict=verdict.outcome, by_hand=by_hand, rules=[rule.text for rule in rules])
    provenance = Provenance(
        version=result.provenance.version,
        inputs=_inputs(result.provenance.inputs),
        by=result.provenance.by,
        framework=result.provenance.framework,
        replay=result.provenance.replay,
        accepted=accepted,
    )
    runs = {name: _run(run) for name, run in result.runs.items()}
    return Result(provenance=provenance, corrections=result.corrections, warnings=[], runs=runs)


def _inputs(files: Iterable[InputFile]) -> list[InputFile]:
    """One entry per run and kind of file, wherever they lay."""
    found: dict[tuple[str, str, str], InputFile] = {}
    for file in files:
        key = file.run, file.layout, json.dumps(file.dtypes, sort_keys=True)
        before = found.get(key)
        facts = {
            name: getattr(file, name) + (getattr(before, name) if before else 0)
            for name in ("size", "rows", "tokens", "skipped")
        }
        found[key] = file.model_copy(update=facts | {"path": file.run})
    return [found[key] for key in sorted(found)]


def _run(run: RunResult) -> RunResult:
    return RunResult(
        overall=run.overall,
        groups=Groups(labels=run.groups.labels, metrics={}, corrections={}),
        by={column: _values(groups) for column, groups in run.by.items()},
        distribution=Distribution(edges=[], tokens=[], k3=[]),
        breakdowns={},
        joint=Joint(width=1.0, x=[], y=[], tokens=[]),
        worst_tokens=[],
        worst_sequences=[],
        clusters=_clusters(run),
        logged=run.logged,
    )


def _clusters(run: RunResult) -> Clusters:
    """The table as it is resampled: a row per cluster, whatever its steps."""
    sample = sample_of_run(run)
    return _small(run.clusters, sample.keys, sample.sums)


def _values(groups: Groups) -> Groups:
    """The groups of a `--by` column, with their table."""
    table = groups.clusters
    if table is None:
        return groups
    keys, values = np.array([int(text, 16) for text in table.hashes], np.uint64), np.array(table.groups, np.uint64)
    small = _small(table, keys, np.array(table.sums), values)
    return groups.model_copy(update={"clusters": small})


def _small(table: Clusters, keys: Hashes, sums: Float64s, values: Hashes | None = None) -> Clusters:
    """A table of as many rows as a Result holds; where there are more, those of each value are folded by their hash."""
    by_value, folded = values is not None, len(keys) > OVERALL_CAP
    values = np.zeros_like(keys) if values is None else values
    if folded:
        room = np.uint64(max(OVERALL_CAP // len(np.unique(values)), 1))
        names, where = np.unique(np.stack([keys % room, values]), axis=1, return_inverse=True)
        gathered = np.zeros((names.shape[1], sums.shape[1]))
        np.add.at(gathered, where.ravel(), sums)
        (keys, values), sums = names, gathered
    return Clusters(
        by=table.by,
        columns=table.columns,
        hashes=[f"{key:016x}" for key in keys.tolist()],
        groups=values.tolist() if by_value else [],
        folded=table.folded or folded,
        sums=rounded_sums(sums, table.columns),
    )


def write_baseline(baseline: Result, place: Path) -> Path:
    """Write a baseline: sorted keys, a row of numbers per line; a folder gets the next number as its name.

    Returns:
        The file written.
    """
    if place.is_dir():
        place = place / f"{_last_number(place) + 1:04d}.json"
    write_atomically(place, ("".join(_lines(baseline.to_data())) + "\n").encode())
    return place


def _last_number(folder: Path) -> int:
    numbers = [int(found.group()) for path in folder.glob("*.json") if (found := re.match(r"\d+", path.name))]
    return max(numbers, default=0)


def _lines(data: Any, indent: str = "") -> Iterator[str]:
    """Strict JSON: mappings and lists of lists over several lines, everything else on one."""
    inner = indent + " "
    if isinstance(data, dict) and data:
        for number, key in enumerate(sorted(data)):
            yield f"{',' if number else '{'}\n{inner}{_compact(key)}: "
            yield from _lines(data[key], inner)
        yield f"\n{indent}}}"
    elif isinstance(data, list) and data and isinstance(data[0], (list, dict)):
        yield "[\n" + ",\n".join(inner + _compact(item) for item in data) + f"\n{indent}]"
    else:
        yield _compact(data)


def _compact(data: Any) -> str:
    return json.dumps(data, allow_nan=False, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def read_history(folder: Path, last: int) -> dict[str, Result]:
    """The last accepted Results of a folder by name, in the natural order of their names.

    Raises:
        DataError: it cannot be read, or a file in it is no accepted Result.
    """
    if not folder.is_dir():
        raise DataError("is no folder", file=str(folder), remedy="create it, and save accepted results into it")
    paths = sorted(folder.glob("*.json"), key=lambda path: natural_key(path.name))[-last:]
    found = [read_result(path) for path in paths]
    for path, result in zip(paths, found, strict=True):
        if result.provenance.accepted is None:
            flag = wording(python="`mismatchctl gate --save-baseline`", command="--save-baseline")
            raise DataError("was never accepted", file=str(path), remedy=f"save results there with {flag}")
    return {path.name: result for path, result in zip(paths, found, strict=True)}
