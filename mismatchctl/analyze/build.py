"""Assembling a Result from accumulated sums."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from mismatchctl.analyze.clusters import Tables
from mismatchctl.analyze.worst import worst_rows, worst_tokens
from mismatchctl.batch import Float64s
from mismatchctl.contract import REQUIRED
from mismatchctl.dumps import Dump, Problems
from mismatchctl.files import natural_key
from mismatchctl.finite import capped, finite, rounded_all
from mismatchctl.measure import MeasurePlan, PairSums
from mismatchctl.measure.accumulate import Accumulator, RunTotals
from mismatchctl.measure.bins import MAGNITUDES, magnitude_edges
from mismatchctl.measure.close import ClosedSums
from mismatchctl.measure.columns import MISMATCH
from mismatchctl.measure.kernels.kernel import BREAKDOWNS, JOINT, SUMMED
from mismatchctl.measure.metrics import Estimate, EstimateRow, Estimates
from mismatchctl.measure.metrics.kept import BY_VALUE, OTHERS
from mismatchctl.measure.tails import Worst
from mismatchctl.result import (
    Breakdown,
    Distribution,
    Groups,
    InputFile,
    Joint,
    LeftOut,
    Overall,
    Provenance,
    Result,
    RunResult,
    Series,
    Value,
    WorstSequence,
    WorstToken,
)

VALUE_DIGITS, OTHER_DIGITS, CORRECTION_DIGITS, ERROR_DIGITS = 9, 5, 7, 3
"""Significant digits of series over groups: metrics of the mismatch, of OTHERS, of corrections, errors. A thousand
steps stay small."""
GROUP_TAILS = frozenset(("k3", "ess_token", "ess_sequence", "chi2_token", "chi2_sequence"))
"""Metrics of the mismatch of which is kept, per group, where their tail is heavy."""
MEASURED = (*REQUIRED, "response_mask", "current_log_probs", "advantages")
"""Columns whose storage types are kept: they decide what can be compared."""
COARSER = 8
"""Fine bins of the log ratio per bin of the distribution in the Result."""
HEXAGONS = 26
"""Hexagons across the joint distribution."""
CONTEXT, EXCERPT = 24, 64
"""Token ids kept before a worst token, and of a worst sequence."""


def build_result(
    dump: Dump,
    plan: MeasurePlan,
    accumulator: Accumulator,
    tokens: Mapping[int, int],
    problems: Problems,
    turns: Accumulator | None = None,
) -> Result:
    """The Result of a finished pass; `turns` has it broken down by what is no column of sequences."""
    runs = {name: _run(name, plan, accumulator, dump) for name in sorted(accumulator.runs, key=natural_key)}
    if turns is not None:
        for name, totals in turns.runs.items():
            runs[name].by |= _by(totals, turns, Tables(plan, dump, name, turns.evaluator.columns))
    provenance = Provenance(
        inputs=input_files(dump, tokens, problems),
        left_out=left_out(problems),
        by=[*plan.by, *(turns.plan.by if turns is not None else ())],
        device=plan.kernel.device,
    )
    corrections, warnings = list(plan.corrections), list(dump.warnings)
    return Result(provenance=provenance, corrections=corrections, warnings=warnings, runs=runs)


def input_files(dump: Dump, tokens: Mapping[int, int], problems: Problems) -> list[InputFile]:
    """The files of a dump, with the valid `tokens` read from each and the sequences left out."""
    return [
        InputFile(
            path=file.path, run=file.run, size=file.size, rows=file.rows, tokens=tokens[file.index],
            layout=file.layout, dtypes={name: dtype for name, dtype in file.dtypes.items() if name in MEASURED},
            skipped=problems.skipped.get(file.path, 0),
        )
        for file in dump.files
    ]  # fmt: skip


def _run(name: str, plan: MeasurePlan, accumulator: Accumulator, dump: Dump) -> RunResult:
    totals = accumulator.runs[name]
    assert totals.overall is not None
    evaluate = accumulator.evaluator.evaluate
    whole = evaluate(ClosedSums.one(totals.overall, by_prompt=plan.by_prompt))
    names = [correction.name for correction in plan.corrections]
    overall = Overall(
        metrics=_values(whole.metrics),
        corrections={name: _values(found) for name, found in zip(names, whole.corrections, strict=True)},
    )
    tables = Tables(plan, dump, name, accumulator.evaluator.columns)
    steps = _groups(totals.steps, EstimateRow.joined(totals.groups), names)
    return RunResult(
        overall=overall,
        groups=steps,
        by=_by(totals, accumulator, tables),
        distribution=_distribution(totals.overall.pairs[MISMATCH]),
        breakdowns={name: _breakdown(name, sums) for name, sums in totals.sums.breakdowns.items()},
        joint=_joint(totals.sums.joint),
        worst_tokens=[WorstToken(**own) for own in worst_tokens(totals.sums.tokens, dump, CONTEXT)],
        worst_sequences=_worst_sequences(totals.sums.sequences, dump),
        clusters=tables.of_steps(totals.overall.table, steps.labels),
    )


def _by(totals: RunTotals, accumulator: Accumulator, tables: Tables) -> dict[str, Groups]:
    """A run by each value of each column."""
    plan, by = accumulator.plan, {}
    for column, cells in totals.by.items():
        closed = (ClosedSums.one(cell, by_prompt=plan.by_prompt) for cell in cells.values())
        rows = EstimateRow.joined([accumulator.evaluator.evaluate(cell, BY_VALUE) for cell in closed])
        by[column] = _groups(list(cells), rows, [correction.name for correction in plan.corrections])
        by[column].clusters = tables.of_values([cells[value].table for value in by[column].labels])
    return by


def _values(estimates: Estimates) -> dict[str, Value]:
    """Estimates of a single cell."""
    values = {}
    for key, found in estimates.items():
        value, error, interval, status = found.at(0)
        covers = found.covers_at(0)
        tail: Literal["heavy_tail"] | None = None if covers is None else "heavy_tail"
        values[key] = Value(value=value, se=error, interval=interval, status=status, tail=tail, covers=covers)
    return values


def _groups(labels: Sequence[Any], rows: EstimateRow, names: Sequence[str]) -> Groups:
    """Estimates of the cells of these labels, in the labels' natural order."""
    order = sorted(range(len(labels)), key=lambda cell: _label_key(labels[cell]))
    others = {key: found for key, found in rows.metrics.items() if key in OTHERS}
    plain = {key: found for key, found in rows.metrics.items() if key not in OTHERS}
    return Groups(
        labels=[labels[cell] for cell in order],
        metrics=_series(plain, order, VALUE_DIGITS) | _series(others, order, OTHER_DIGITS),
        corrections={
            name: _series(estimates, order, CORRECTION_DIGITS, tails=())
            for name, estimates in zip(names, rows.corrections, strict=True)
        },
    )


def _label_key(label: Any) -> tuple[Any, ...]:
    if isinstance(label, (int, float)) and not isinstance(label, bool):
        return (0, label)
    return (2,) if label is None else (1, *natural_key(str(label)))


def _series(
    estimates: Estimates, order: Sequence[int], digits: int, tails: Collection[str] = GROUP_TAILS
) -> dict[str, Series]:
    """The series of each estimate, all rounded at once; those of `tails` say where theirs is heavy."""
    if not estimates:
        return {}
    value = np.stack([found.value[order] for found in estimates.values()])
    unknown = np.full(len(order), np.nan)
    error = np.stack([unknown if found.se is None else found.se[order] for found in estimates.values()])
    errors = _rounded(np.where(np.isfinite(value), error, np.nan), ERROR_DIGITS)
    return {
        key: Series(
            value=values,
            se=se if any(one is not None for one in se) else None,
            interval=_intervals(found, order),
            status=_statuses(found, order),
            heavy_tail=[place for place, cell in enumerate(order) if key in tails and found.covers_at(cell)],
        )
        for (key, found), values, se in zip(estimates.items(), _rounded(value, digits), errors, strict=True)
    }


def _intervals(estimate: Estimate, order: Sequence[int]) -> list[tuple[float, float] | None] | None:
    """Those of an estimate that has no standard error."""
    if estimate.interval is None or estimate.se is not None:
        return None
    known = np.isfinite(estimate.value[order])
    low, high = _rounded(np.where(known, estimate.interval[order].T, np.nan), ERROR_DIGITS)
    between = [None if one is None or two is None else (one, two) for one, two in zip(low, high, strict=True)]
    return between if any(between) else None


def _statuses(estimate: Estimate, order: Sequence[int]) -> str | dict[str, list[int]]:
    if np.isfinite(estimate.value).all():
        return "ok"
    statuses = [estimate.status(cell) for cell in order]
    if all(status == statuses[0] for status in statuses):
        return statuses[0]
    reasons = dict.fromkeys(status for status in statuses if status != "ok")
    return {reason: [index for index, status in enumerate(statuses) if status == reason] for reason in reasons}


def _rounded(values: Float64s, digits: int) -> list[list[float | None]]:
    """Rows of values with so many significant digits, what is not finite as None; a whole number stays exact."""
    finite = np.isfinite(values)
    held = np.where(finite, values, 0.0) + 0.0
    whole = (held == np.rint(held)) & (np.abs(held) < 2**53)
    kept = np.where(whole, held, rounded_all(held, digits)).astype(object)
    kept[~finite] = None
    rows: list[list[float | None]] = kept.tolist()
    return rows


def _distribution(pair: PairSums) -> Distribution:
    """The signed histogram in bins `COARSER` times as wide, over the range that holds tokens."""
    inner = np.arange(0, MAGNITUDES - 1, COARSER)  # magnitude bins that start a coarse bin, after the zero bin
    starts = np.concatenate([[0], 1 + inner[:-1] if len(inner) > 1 else inner])
    edges = magnitude_edges()[starts]
    negative = MAGNITUDES - np.append(starts[1:], MAGNITUDES)[::-1]
    cuts = np.concatenate([negative, MAGNITUDES + starts])
    counts, k3 = (np.add.reduceat(values, cuts) for values in pair.histogram.by_bin())
    bounds = np.concatenate([-np.append(edges[1:], 2.0**15)[::-1], edges, [2.0**15]])
    filled = np.flatnonzero(counts)
    first, last = (filled[0], filled[-1] + 1) if len(filled) else (0, 0)
    return Distribution(
        edges=bounds[first : last + 1].tolist(),
        tokens=counts[first:last].tolist(),
        k3=[capped(value) for value in k3[first:last]],
    )


def _breakdown(name: str, sums: Float64s) -> Breakdown:
    """Means by bin with standard errors over buckets of clusters; bins without tokens are left out."""
    edges = BREAKDOWNS[name].edges()
    filled = np.flatnonzero(sums[:, :, 0].sum(axis=0))
    tokens = sums[:, filled, 0].T
    occupied = (tokens > 0).sum(axis=1)
    columns: dict[str, list[float | None]] = {}
    for key, column, over in (("abs_diff", 1, 0), ("k3", 2, 0), ("logit_shift", SUMMED, SUMMED + 1)):
        if over >= sums.shape[2]:
            continue
        values, weights = sums[:, filled, column].T, sums[:, filled, over].T
        total = weights.sum(axis=1)
        with np.errstate(all="ignore"):
            mean = values.sum(axis=1) / total
            scatter = ((values - mean[:, None] * weights) ** 2).sum(axis=1)
            error = np.sqrt(scatter * occupied / (occupied - 1)) / total
        columns[key], columns[f"{key}_se"] = finite(mean.tolist()), finite(error.tolist())
    highs = edges[filled + 1]
    return Breakdown(
        quantity=name,
        low=edges[filled].tolist(),
        high=finite(highs.tolist()),
        tokens=tokens.sum(axis=1).astype(np.int64).tolist(),
        **columns,
    )


def _joint(grid: np.ndarray[Any, Any]) -> Joint:
    """The square grid gathered into hexagons: each cell goes to the nearer of two staggered lattices."""
    across, up = np.nonzero(grid)
    if not len(across):
        return Joint(width=1 / HEXAGONS, x=[], y=[], tokens=[])
    width, height = 1 / HEXAGONS, math.sqrt(3) / HEXAGONS
    x, y = (across + 0.5) / JOINT, (up + 0.5) / JOINT
    even = np.round(x / width) * width, np.round(y / height) * height
    odd = (np.floor(x / width) + 0.5) * width, (np.floor(y / height) + 0.5) * height
    nearer = (x - even[0]) ** 2 + (y - even[1]) ** 2 <= (x - odd[0]) ** 2 + (y - odd[1]) ** 2
    centres = np.empty(len(x), np.complex128)  # which sort by their real parts, then by the others
    centres.real, centres.imag = (np.where(nearer, a, b).round(6) for a, b in zip(even, odd, strict=True))
    hexagons, where = np.unique(centres, return_inverse=True)
    tokens = np.bincount(where, weights=grid[across, up])
    return Joint(
        width=width,
        x=hexagons.real.tolist(),
        y=hexagons.imag.tolist(),
        tokens=tokens.astype(np.int64).tolist(),
    )


def _worst_sequences(worst: Worst, dump: Dump) -> list[WorstSequence]:
    found = []
    for fields, ids in worst_rows(worst, dump):
        del fields["position"]
        fields |= {"k3": capped(fields["k3"]), "token_ids": None if ids is None else ids[:EXCERPT].tolist()}
        found.append(WorstSequence(**fields))
    return found


def left_out(problems: Problems) -> list[LeftOut]:
    """What was left out, by file and reason."""
    rows = [
        LeftOut(
            file=file,
            reason=reason,
            count=count,
            example=f"row {problems.examples[file, reason].row}: {problems.examples[file, reason].problem}",
        )
        for (file, reason), count in sorted(problems.counts.items())
    ]
    return [
        *rows,
        *(LeftOut(file=file, reason="file", count=1, example=why) for file, why in problems.files.items()),
    ]
