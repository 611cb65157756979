"""Measure a dump in one pass and build its Result."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from mismatchctl.api.analyze import run_log as logs
from mismatchctl.api.analyze.run_log import LoggedSteps, RunLog, StepTables, build_replay_table
from mismatchctl.api.predict import predict_fresh_batch
from mismatchctl.api.scan import DumpReading, ReadOptions, UnitBatches
from mismatchctl.core.batch import Float64s, Segments, TokenBatch
from mismatchctl.core.bins import LAYER_COLUMNS, MAGNITUDE_BINS, magnitude_edges
from mismatchctl.core.schema import PARTIAL_COLUMNS, REQUIRED_COLUMNS, TURN_COLUMN
from mismatchctl.core.validation import (
    cap_sum,
    cap_sums,
    replace_nonfinite,
    replace_nonfinite_in_table,
    round_significant,
)
from mismatchctl.corrections.application import adjacent_segments
from mismatchctl.corrections.model import Correction, parse_loss
from mismatchctl.data.engines import Engine, count_threads
from mismatchctl.data.paths import DumpSource
from mismatchctl.data.problems import Problems
from mismatchctl.data.reader import Dump
from mismatchctl.diagnosis.diagnosis import DIAGNOSIS_COLUMNS, EvidenceCollector, make_collector
from mismatchctl.errors import ConfigError, DataError, option
from mismatchctl.frameworks.adapter import Dtype, Framework, ReplayOptions
from mismatchctl.io import files as io_files
from mismatchctl.io.files import PARQUET_METADATA, atomic_output, natural_key
from mismatchctl.io.process import release_memory
from mismatchctl.io.stores import escape_unprintable
from mismatchctl.measure.columns import MISMATCH_NAME, correction_columns
from mismatchctl.measure.kernels import Device, choose_kernel
from mismatchctl.measure.kernels.kernel import BREAKDOWN_SUMS, BREAKDOWNS, JOINT_CELLS, Kernel
from mismatchctl.measure.metrics.evaluation import (
    OTHER_PAIR_METRICS,
    REPEATED_METRICS,
    Accumulator,
    EstimateRow,
    Estimates,
    NormalizationFactors,
    RunTotals,
)
from mismatchctl.measure.metrics.metric import Estimate
from mismatchctl.measure.reduction import MeasurePlan, Sums, correction_ratios, reduce_batch, split_runs, split_steps
from mismatchctl.measure.sums import (
    ClusterTable,
    ColumnSubject,
    LabelValue,
    PairSums,
    WorstRows,
    cluster_hashes,
    merge_parts,
    step_hash,
)
from mismatchctl.results import model
from mismatchctl.results.model import PresetPoint, Result
from mismatchctl.results.summary import fit_run_growth, summarize_runs

if TYPE_CHECKING:
    from typing_extensions import Unpack


CLUSTER_DIGITS, LAYER_DIGITS = 9, 5
"""Significant digits in cluster tables: 5 for tokens and K3 by rollout probability, 9 for all other columns."""


class ClusterTables:
    """Builds the cluster tables of a run. A row contains the sums of one cluster, such as a prompt."""

    def __init__(self, accumulator: Accumulator, dump: Dump, run: str) -> None:
        files = [file for file in dump.files if file.run == run] or dump.files  # a column names the runs: use all files
        has = {name for file in files for name in (*file.columns, *file.partition)}
        self._plan = accumulator.plan
        self._by = next((name for name in ("prompt", "sequence") if f"{name}_id" in has), "content")
        self._columns = {
            self._title(of, name): place
            for place, (of, name) in enumerate(accumulator.evaluator.columns.names)
            if self._plan.every_cluster or (of == MISMATCH_NAME and name != "clusters")
        }

    def _title(self, of: ColumnSubject, name: str) -> str:
        if isinstance(of, int):
            return f"{self._plan.corrections[of].name}/{name}"
        return name if of == MISMATCH_NAME else f"{of}_{name}"

    def run_table(self, table: ClusterTable, labels: Sequence[LabelValue]) -> model.Clusters:
        """Return the cluster table of the run. Rows name their step, unless the table is folded (rows are merged)."""
        if table.is_folded:
            return self._clusters(table, [])
        index = {int(step_hash(label)): number for number, label in enumerate(labels)}
        return self._clusters(table, [index[scope] for scope in table.scopes.tolist()])

    def value_table(self, tables: Sequence[ClusterTable]) -> model.Clusters | None:
        """Join the cluster tables of all values of a `--by` column. If the result is too large, return `None`."""
        if any(table.is_folded for table in tables) or sum(map(len, tables)) > self._plan.max_clusters:
            return None
        merged = reduce(add, (table.with_scope(np.uint64(number)) for number, table in enumerate(tables)))
        return self._clusters(merged, merged.scopes.tolist())

    def _clusters(self, table: ClusterTable, groups: list[int]) -> model.Clusters:
        bounded = table.is_folded and not self._plan.every_cluster  # LAYER_COLUMNS would fill a third of a Result
        names = [name for name in self._columns if not (bounded and name in LAYER_COLUMNS)]
        return model.Clusters(
            by=self._by,  # type: ignore[arg-type]
            columns=names,
            hashes=[f"{cluster:016x}" for cluster in table.clusters.tolist()],
            groups=groups,
            folded=table.is_folded,
            sums=round_sums(table.sums[:, [self._columns[name] for name in names]], names),
        )


def round_sums(sums: Float64s, names: Sequence[str]) -> list[list[float]]:
    rounded, coarse = np.array(cap_sums(sums)), np.array([name in LAYER_COLUMNS for name in names], np.bool_)
    for chosen, digits in ((coarse, LAYER_DIGITS), (~coarse, CLUSTER_DIGITS)):
        rounded[:, chosen] = round_significant(rounded[:, chosen], digits)
    rows: list[list[float]] = rounded.tolist()
    return rows


def describe_worst_sequences(worst: WorstRows, dump: Dump) -> Iterator[tuple[dict[str, Any], NDArray[Any] | None]]:
    """For each worst sequence, yield a dict of its fields (such as file and row), and its token ids if recorded."""
    ids: dict[tuple[int, int], NDArray[Any]] = {}
    if dump.has("token_ids"):
        for file in np.unique(worst.place[:, 0]).tolist():  # only the blocks that contain these sequences are read
            rows = np.unique(worst.place[worst.place[:, 0] == file, 1]).tolist()
            ids |= {(file, row): own for row, own in dump.token_ids(file, rows).items()}
    for index, (file, row, position) in enumerate(worst.place.tolist()):
        fields = {name: _python_value(values[index]) for name, values in worst.fields.items()}
        yield {"file": dump.paths[file], "row": row, "position": position} | fields, ids.get((file, row))


def describe_worst_tokens(worst: WorstRows, dump: Dump) -> Iterator[dict[str, Any]]:
    """Yield the fields of each worst token, such as its file, row and position."""
    for fields, ids in describe_worst_sequences(worst, dump):
        token = int(fields.pop("token"))
        if ids is not None and token < len(ids):
            fields |= {"token_id": int(ids[token]), "context_ids": ids[max(0, token - CONTEXT_TOKENS) : token].tolist()}
        yield fields


def _python_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        largest = np.finfo(np.float64).max
        return tuple(float(np.clip(number, -largest, largest)) for number in value.tolist())
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and math.isnan(value) else value


VALUE_DIGITS, OTHER_DIGITS, CORRECTION_DIGITS, ERROR_DIGITS = 9, 5, 7, 3
"""Significant digits of the values that a Result contains for each step and each `--by` value.

In this order: mismatch metrics, other metrics, corrections, standard errors. Few digits keep a Result small.
"""
GROUP_TAILS = frozenset(("k3", "ess_token", "ess_sequence", "chi2_token", "chi2_sequence"))
"""Only for these metrics, `Series.heavy_tail` lists the steps or `--by` values that have a heavy tail."""
TYPED_COLUMNS = (*REQUIRED_COLUMNS, "response_mask", "current_log_probs", "advantages")
"""Columns whose data types a Result contains, because runs with different data types may not be comparable."""
BINS_PER_BIN = 8
"""Number of fine bins of the log-ratio histogram that become one bin of the histogram in a Result."""
HEXAGONS = 26
"""Number of hexagons from rollout probability 0 to 1, in the joint distribution of rollout and train probability."""
CONTEXT_TOKENS, EXCERPT_TOKENS = 24, 64
"""Number of token ids in a Result: before each of the worst tokens, and at the start of each of the worst sequences."""


def build_result(reading: DumpReading, accumulator: Accumulator, turns: Accumulator | None = None) -> model.Result:
    """Build the Result. `turns` contains sums over single turns, or `None` if sequences are not split into turns."""
    dump, plan = reading.dump, accumulator.plan
    runs = {name: _build_run(name, accumulator, dump) for name in sorted(accumulator.runs, key=natural_key)}
    if turns is not None:
        for name, totals in turns.runs.items():
            runs[name].by |= _build_breakdowns(totals, turns, ClusterTables(turns, dump, name))
    provenance = model.Provenance(
        inputs=describe_input_files(reading),
        left_out=summarize_left_out(reading.problems),
        by=[*plan.by, *(turns.plan.by if turns is not None else ())],
        device=plan.kernel.device,
        unread=list(dump.unread),
    )
    corrections, warnings = list(plan.corrections), list(dump.warnings)
    return model.Result(provenance=provenance, corrections=corrections, warnings=warnings, runs=runs)


def describe_input_files(reading: DumpReading) -> list[model.InputFile]:
    tokens, problems = reading.tokens, reading.problems
    return [
        model.InputFile(
            path=file.path, run=file.run, size=file.size, rows=file.rows, tokens=tokens[file.index],
            layout=file.layout,
            dtypes={name: escape_unprintable(str(file.types[name])) for name in TYPED_COLUMNS if name in file.types},
            skipped=problems.skipped.get(file.path, 0), skipped_tokens=problems.tokens.get(file.path, 0),
        )
        for file in reading.dump.files
    ]  # fmt: skip


def _build_run(name: str, accumulator: Accumulator, dump: Dump) -> model.RunResult:
    totals = accumulator.runs[name]
    whole = accumulator.evaluator.evaluate([totals.overall])
    names = [correction.name for correction in accumulator.plan.corrections]
    metrics, *corrections = (
        {key: _overall_value(found) for key, found in each.items()} for each in (whole.metrics, *whole.corrections)
    )
    overall = model.OverallMetrics(metrics=metrics, corrections=dict(zip(names, corrections, strict=True)))
    tables = ClusterTables(accumulator, dump, name)
    steps = _build_groups(totals.steps, EstimateRow.concatenate(totals.groups), names)
    return model.RunResult(
        overall=overall,
        fresh_batches=_predict_fresh_batches(totals, steps, accumulator),
        groups=steps,
        by=_build_breakdowns(totals, accumulator, tables),
        distribution=_build_distribution(totals.overall.pairs[MISMATCH_NAME]),
        breakdowns={name: _build_breakdown(name, sums) for name, sums in totals.sums.breakdowns.items()},
        joint=_build_joint(totals.sums.joint),
        worst_tokens=[model.WorstToken(**own) for own in describe_worst_tokens(totals.sums.tokens, dump)],
        worst_sequences=_build_worst_sequences(totals.sums.sequences, dump),
        clusters=tables.run_table(totals.overall.table, steps.labels),
    )


def _predict_fresh_batches(
    totals: RunTotals, steps: model.Groups, accumulator: Accumulator
) -> dict[str, model.FreshBatch]:
    """For each correction, predict the share of tokens that it rejects in a new batch as large as one step."""
    table, axis = totals.overall.table, accumulator.evaluator.columns
    tokens = table.sums[:, axis.position(MISMATCH_NAME, "tokens")]
    sequences = int(table.sums[:, axis.position(MISMATCH_NAME, "sequences")].sum())
    rows, found = np.flatnonzero(tokens > 0), {}
    where = np.unique(table.scopes[rows], return_inverse=True)[1]
    for place, correction in enumerate(accumulator.plan.corrections):
        rejected = tokens[rows] - table.sums[rows, axis.position(place, "kept")]
        found[correction.name] = predict_fresh_batch(
            np.stack([rejected, tokens[rows]], axis=1), table.clusters[rows], where, sequences, steps.labels,
            steps.series("rejected_tokens", correction.name).value, is_folded=table.is_folded,
        )  # fmt: skip
    return found


def _build_breakdowns(totals: RunTotals, accumulator: Accumulator, tables: ClusterTables) -> dict[str, model.Groups]:
    plan, by = accumulator.plan, {}
    for column in plan.by:
        cells = {value: cell for (name, value), cell in totals.closed.items() if name == column}
        rows = accumulator.evaluator.evaluate(list(cells.values()), REPEATED_METRICS)
        by[column] = _build_groups(list(cells), rows, [correction.name for correction in plan.corrections])
        by[column].clusters = tables.value_table([cells[value].table for value in by[column].labels])
    return by


def _overall_value(found: Estimate) -> model.Value:
    value, error, interval, status = found.at(0)
    covers = found.covers_at(0)
    tail: Literal["heavy_tail"] | None = None if covers is None else "heavy_tail"
    return model.Value(value=value, se=error, interval=interval, status=status, tail=tail, covers=covers)


def _build_groups(labels: Sequence[Any], rows: EstimateRow, names: Sequence[str]) -> model.Groups:
    order = sorted(range(len(labels)), key=lambda cell: _label_sort_key(labels[cell]))
    others = {key: found for key, found in rows.metrics.items() if key in OTHER_PAIR_METRICS}
    plain = {key: found for key, found in rows.metrics.items() if key not in OTHER_PAIR_METRICS}
    return model.Groups(
        labels=[labels[cell] for cell in order],
        metrics=_build_series(plain, order, VALUE_DIGITS) | _build_series(others, order, OTHER_DIGITS),
        corrections={
            name: _build_series(estimates, order, CORRECTION_DIGITS, tails=())
            for name, estimates in zip(names, rows.corrections, strict=True)
        },
    )


def _label_sort_key(label: Any) -> tuple[Any, ...]:
    if isinstance(label, (int, float)) and not isinstance(label, bool):
        return (0, label)
    return (2,) if label is None else (1, *natural_key(str(label)))


def _build_series(
    estimates: Estimates, order: Sequence[int], digits: int, tails: Collection[str] = GROUP_TAILS
) -> dict[str, model.Series]:
    if not estimates:
        return {}
    value = np.stack([found.value[order] for found in estimates.values()])
    error = np.stack([found.se[order] for found in estimates.values()])
    errors = _round_rows(np.where(np.isfinite(value), error, np.nan), ERROR_DIGITS)
    return {
        key: model.Series(
            value=values,
            se=se if any(one is not None for one in se) else None,
            interval=_series_intervals(found, order),
            status=_series_statuses(found, order),
            heavy_tail=[place for place, cell in enumerate(order) if key in tails and found.covers_at(cell)],
        )
        for (key, found), values, se in zip(estimates.items(), _round_rows(value, digits), errors, strict=True)
    }


def _series_intervals(estimate: Estimate, order: Sequence[int]) -> list[tuple[float, float] | None] | None:
    """Return the confidence interval of each group in `order`, or `None` if the estimate has standard errors."""
    if np.isfinite(estimate.se).any():
        return None
    known = np.isfinite(estimate.value[order])
    low, high = _round_rows(np.where(known, estimate.interval[order].T, np.nan), ERROR_DIGITS)
    between = [None if one is None or two is None else (one, two) for one, two in zip(low, high, strict=True)]
    return between if any(between) else None


def _series_statuses(estimate: Estimate, order: Sequence[int]) -> str | dict[str, list[int]]:
    if np.isfinite(estimate.value).all():
        return "ok"
    statuses = [estimate.status(cell) for cell in order]
    if all(status == statuses[0] for status in statuses):
        return statuses[0]
    reasons = dict.fromkeys(status for status in statuses if status != "ok")
    return {reason: [index for index, status in enumerate(statuses) if status == reason] for reason in reasons}


def _round_rows(values: Float64s, digits: int) -> list[list[float | None]]:
    """Round values to significant digits. Integers stay exact, and non-finite values become `None`."""
    finite = np.isfinite(values)
    held = np.where(finite, values, 0.0) + 0.0
    whole = (held == np.rint(held)) & (np.abs(held) < 2**53)
    kept = np.where(whole, held, round_significant(held, digits)).astype(object)
    kept[~finite] = None
    rows: list[list[float | None]] = kept.tolist()
    return rows


def _build_distribution(pair: PairSums) -> model.Distribution:
    # first fine bin of each coarse bin. `starts` adds bin 0 (the smallest |log ratio|), which is not merged
    inner = np.arange(0, MAGNITUDE_BINS - 1, BINS_PER_BIN)
    starts = np.concatenate([[0], 1 + inner[:-1] if len(inner) > 1 else inner])
    edges = magnitude_edges()[starts]
    negative = MAGNITUDE_BINS - np.append(starts[1:], MAGNITUDE_BINS)[::-1]
    cuts = np.concatenate([negative, MAGNITUDE_BINS + starts])
    counts, k3 = (np.add.reduceat(values, cuts) for values in pair.histogram.by_bin())
    bounds = np.concatenate([-np.append(edges[1:], 2.0**15)[::-1], edges, [2.0**15]])
    filled = np.flatnonzero(counts)
    first, last = (filled[0], filled[-1] + 1) if len(filled) else (0, 0)
    return model.Distribution(
        edges=bounds[first : last + 1].tolist(),
        tokens=counts[first:last].tolist(),
        k3=[cap_sum(value) for value in k3[first:last]],
    )


def _build_breakdown(name: str, sums: Float64s) -> model.Breakdown:
    """Compute the mean of K3 and other values per bin, with standard errors from sums per group of clusters."""
    edges = BREAKDOWNS[name].edges()
    filled = np.flatnonzero(sums[:, :, 0].sum(axis=0))
    tokens = sums[:, filled, 0].T
    occupied = (tokens > 0).sum(axis=1)
    columns: dict[str, list[float | None]] = {}
    for key, column, over in (("abs_diff", 1, 0), ("k3", 2, 0), ("logit_shift", BREAKDOWN_SUMS, BREAKDOWN_SUMS + 1)):
        if over >= sums.shape[2]:
            continue
        values, weights = sums[:, filled, column].T, sums[:, filled, over].T
        total = weights.sum(axis=1)
        with np.errstate(all="ignore"):
            mean = values.sum(axis=1) / total
            scatter = ((values - mean[:, None] * weights) ** 2).sum(axis=1)
            error = np.sqrt(scatter * occupied / (occupied - 1)) / np.abs(total)  # the sum of 1 - p may be below 0
        columns[key], columns[f"{key}_se"] = replace_nonfinite(mean.tolist()), replace_nonfinite(error.tolist())
    highs = edges[filled + 1]
    return model.Breakdown(
        quantity=name,
        low=edges[filled].tolist(),
        high=replace_nonfinite(highs.tolist()),
        tokens=tokens.sum(axis=1).astype(np.int64).tolist(),
        **columns,
    )


def _build_joint(grid: np.ndarray[Any, Any]) -> model.JointDistribution:
    """Merge the cells of a two-dimensional histogram into hexagons."""
    across, up = np.nonzero(grid)
    if not len(across):
        return model.JointDistribution(width=1 / HEXAGONS, x=[], y=[], tokens=[])
    width, height = 1 / HEXAGONS, math.sqrt(3) / HEXAGONS
    x, y = (across + 0.5) / JOINT_CELLS, (up + 0.5) / JOINT_CELLS
    even = np.round(x / width) * width, np.round(y / height) * height
    odd = (np.floor(x / width) + 0.5) * width, (np.floor(y / height) + 0.5) * height
    nearer = (x - even[0]) ** 2 + (y - even[1]) ** 2 <= (x - odd[0]) ** 2 + (y - odd[1]) ** 2
    centres = np.empty(len(x), np.complex128)  # np.unique sorts by real, then by imaginary part
    centres.real, centres.imag = (np.where(nearer, a, b).round(6) for a, b in zip(even, odd, strict=True))
    hexagons, where = np.unique(centres, return_inverse=True)
    tokens = np.bincount(where, weights=grid[across, up])
    x, y = hexagons.real, hexagons.imag
    return model.JointDistribution(width=width, x=x.tolist(), y=y.tolist(), tokens=tokens.astype(np.int64).tolist())


def _build_worst_sequences(worst: WorstRows, dump: Dump) -> list[model.WorstSequence]:
    found = []
    for fields, ids in describe_worst_sequences(worst, dump):
        del fields["position"]
        fields |= {"k3": cap_sum(fields["k3"]), "token_ids": None if ids is None else ids[:EXCERPT_TOKENS].tolist()}
        found.append(model.WorstSequence(**fields))
    return found


def summarize_left_out(problems: Problems) -> list[model.SkippedData]:
    found = []
    for (file, reason), count in sorted(problems.counts.items()):
        one = problems.examples[file, reason]
        found.append(model.SkippedData(file=file, reason=reason, count=count, example=f"row {one.row}: {one.problem}"))
    for file, why in problems.files.items():
        size = 0
        with suppress(OSError, ValueError):
            size = os.stat(file).st_size
        found.append(model.SkippedData(file=file, reason="file", count=1, example=why, size=size))
    for (file, column), count in sorted(problems.masked.items()):
        found.append(model.SkippedData(file=file, reason=model.MASKED_TOKENS, count=count, example=column))
    return found


_ROW_COLUMNS = ("run", "file", "row", "step", "sequence_id", "prompt_id", "reward")
_JOIN_KEYS = ("_run", "_step", "_scope")


class SequenceFile:
    """Writes a Parquet file with one row per sequence. Without a path, no file is written."""

    def __init__(self, path: str | Path | None, plan: MeasurePlan) -> None:
        self._path, self._plan, self._parts = path, plan, list[Path]()

    def __enter__(self) -> SequenceFile:
        self._folder = None if self._path is None else io_files.make_temporary_folder()
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            io_files.remove_folder(self._folder)

    def write(self, batches: Sequence[bytes]) -> None:
        for batch in batches:
            assert self._folder is not None
            place = self._folder / f"{len(self._parts):08d}.arrow"
            with io_files.explain_write_errors(place):
                place.write_bytes(batch)
            self._parts.append(place)

    def finish(self, factors: NormalizationFactors) -> None:
        if self._path is None:
            return
        import polars as pl

        release_memory()  # free the memory of the pass over the tokens
        frame = pl.concat(map(pl.scan_ipc, self._parts), how="diagonal_relaxed")
        named = {
            f"_factor{index}": f"{correction.name}.weight"
            for index, correction in enumerate(self._plan.corrections)
            if correction.weight is not None and correction.weight.normalize != "none"
        }
        if named:
            columns: dict[str, Any] = {key: [row[place] for row in factors] for place, key in enumerate(_JOIN_KEYS)}
            columns |= {name: [row[3][int(name.removeprefix("_factor"))] for row in factors] for name in named}
            table = pl.LazyFrame(columns, schema_overrides={"_scope": pl.UInt64})
            joined = frame.join(table, on=list(_JOIN_KEYS), how="left", maintain_order="left")
            scaled = [pl.col(weight) / pl.col(factor) for factor, weight in named.items()]
            frame = joined.with_columns(scaled).drop(list(named))
        frame = replace_nonfinite_in_table(frame.drop(_JOIN_KEYS))
        with atomic_output(self._path) as temporary:
            frame.sink_parquet(temporary, metadata=PARQUET_METADATA)


def encode_rows(tables: Iterable[dict[str, NDArray[Any]]], path: str, plan: MeasurePlan) -> bytes:
    """Convert tables with one row per sequence to compressed bytes (Arrow IPC) for `SequenceFile.write`."""
    import polars as pl

    frames = [
        pl.DataFrame({name: _column_values(values) for name, values in _row_columns(table, path, plan).items()})
        for table in tables
    ]
    encoded, rows = io.BytesIO(), pl.concat(frames, how="diagonal_relaxed")
    rows = rows if rows["row"].is_sorted() else rows.sort("row", maintain_order=True)
    rows.write_ipc(encoded, compression="lz4")
    return encoded.getvalue()


def _row_columns(columns: dict[str, NDArray[Any]], path: str, plan: MeasurePlan) -> dict[str, NDArray[Any]]:
    number = len(columns["row"])

    def of(name: str, owner: str | int = MISMATCH_NAME) -> NDArray[Any]:
        return columns["_sums"][:, plan.row_columns.position(owner, name)]

    named = columns | {"file": np.full(number, path, object)}
    rows = {name: named[name] for name in (*_ROW_COLUMNS, *plan.by) if name in named}
    tokens = np.maximum(of("tokens"), 1)
    rows |= {
        "tokens": of("tokens").astype(np.int64),
        "log_ratio_sum": of("log_ratio"),
        "k1": -of("log_ratio") / tokens,
        "k2": of("square") / tokens / 2,
        "k3": of("k3") / tokens,
        "abs_diff_mean": of("abs") / tokens,
        "abs_diff_max": np.maximum(columns["_sums"][:, -1], 0),
        "sequence_ratio": np.where(of("tokens") > 0, of("product"), 1.0),
        "train_log_ppl": of("policy_log_ppl"),
        "rollout_log_ppl": of("reference_log_ppl"),
    }
    for index, correction in enumerate(plan.corrections):
        rows[f"{correction.name}.kept_tokens"] = of("kept", index).astype(np.int64)
        rows[f"{correction.name}.weight"] = 1.0 + of("mean_excess", index)
    step = columns.get("_step", np.full(number, "None", object))
    return rows | {"_run": columns["run"], "_step": step, "_scope": columns["_scope"]}


def _column_values(values: NDArray[Any]) -> Any:
    if values.dtype != object:
        return values
    found = values.tolist()
    kinds = {type(value) for value in found} - {type(None)}
    return found if len(kinds) < 2 else [None if value is None else str(value) for value in found]


def has_turn_parts(dump: Dump) -> bool:
    """Return True if one sequence may contain several turns."""
    for file in dump.files:
        if TURN_COLUMN in file.ignored:
            problem = f"{option('by', TURN_COLUMN)}: the column turn {file.ignored[TURN_COLUMN]} in {file.path}"
            raise ConfigError(
                f"{problem}; store turns as numbers, or give the column another name and use it with --by"
            )
    return all(
        TURN_COLUMN not in file.partition and (TURN_COLUMN not in file.columns or file.is_per_token(TURN_COLUMN))
        for file in dump.files
    )


def split_by_turn(batch: TokenBatch) -> TokenBatch:
    """Return a batch with one sequence per turn. Turns stay in the cluster of their original sequence.

    If the batch lacks a `turn` column, masked tokens separate the turns, and the turns are numbered from 1.
    """
    turn_numbers, offsets = batch.extra_columns.get(TURN_COLUMN), batch.segments.offsets
    if turn_numbers is None:
        turns = adjacent_segments(batch).offsets
    else:
        before, after = turn_numbers[:-1], turn_numbers[1:]  # adjacent NaNs are one turn
        changes = (before != after) & ~(np.isnan(before) & np.isnan(after))
        turns = np.union1d(np.flatnonzero(changes) + 1, offsets)
    starts = turns[:-1]
    sequence = np.searchsorted(offsets, starts, side="right") - 1
    in_order = np.arange(len(starts)) - np.searchsorted(sequence, sequence) + 1
    columns = {name: values[sequence] for name, values in batch.columns.items() if name != "sequence_id"}
    columns[TURN_COLUMN] = in_order if turn_numbers is None else turn_numbers[starts]
    columns["prompt_id"] = cluster_hashes(batch)[sequence]
    impossible, near = batch.impossible, batch.impossible_near
    if impossible is not None and near is not None:  # count the impossible tokens of each turn
        before = np.append(np.where(in_order > 1, near[starts, 2], 0), 0)
        own = np.where(np.append(in_order[1:], 1) > 1, before[1:], impossible[sequence]) - before[:-1]
        impossible = near[starts, 1] if turn_numbers is None else own
    return replace(
        batch, segments=Segments(turns), columns=columns, file=batch.file[sequence], rows=batch.rows[sequence],
        trims={gate: values[sequence] for gate, values in batch.trims.items()}, impossible=impossible,
    )  # fmt: skip


GateSums = dict[str, Float64s]
"""Run -> array [P, 2] with a row per preset: the number of tokens that the preset keeps, and the sum of their K3."""


def _measure_gates(batch: TokenBatch, run: str, presets: MeasurePlan) -> GateSums:
    found: GateSums = {}
    for name, part in split_runs(batch, run):
        found[name] = np.zeros((len(presets.corrections), 2))
        for _, block in part.blocks():
            ratios = correction_ratios(block, presets)
            k3 = ratios["train/rollout"].k3_sum
            for sums, preset in zip(found[name], presets.corrections, strict=True):
                columns, _ = correction_columns(
                    preset, ratios, k3, block, all_tokens=presets.kernel.evaluates_all_tokens
                )
                sums += columns["kept"].sum(), columns["kept_k3"].sum()
    return found


@dataclass(frozen=True)
class _AnalysisPart:
    causes: EvidenceCollector
    sums: Sums
    turns: Sums
    parts: StepTables
    rows: list[bytes]  # results of `encode_rows`
    gates: GateSums

    def __add__(self, other: _AnalysisPart) -> _AnalysisPart:
        sums, turns = self.sums + other.sums, self.turns + other.turns
        parts, rows = self.parts + other.parts, self.rows + other.rows
        gates = merge_parts(self.gates, other.gates)
        return _AnalysisPart(self.causes + other.causes, sums, turns, parts, rows, gates)


@dataclass(frozen=True)
class _AnalysisPass:
    plan: MeasurePlan
    turns: MeasurePlan | None
    causes: EvidenceCollector
    watches: bool
    replays: bool
    presets: MeasurePlan

    def __call__(self, batches: UnitBatches, run: str) -> _AnalysisPart:
        causes, sums, turns, parts = self.causes.empty(), Sums(), Sums(), StepTables()
        rows: list[bytes] = []
        gates: GateSums = {}
        for batch in batches.read(causes.watch) if self.watches else batches:
            reduced = reduce_batch(batch, run, self.plan)
            if self.plan.sequences:
                rows.append(encode_rows(reduced.sequences, batches.path, self.plan))
            sums = sums + replace(reduced, sequences=())
            if self.turns is not None:
                turns = turns + reduce_batch(split_by_turn(batch), run, self.turns)
            if self.presets.corrections:
                gates = merge_parts(gates, _measure_gates(batch, run, self.presets))
            if self.replays:
                parts += [((name, step), build_replay_table(part)) for name, (step, _), part in split_steps(batch, run)]
        return _AnalysisPart(causes, sums, turns, parts, rows, gates)


def _combine_with_losses(corrections: Sequence[Correction], losses: Sequence[str]) -> Sequence[Correction]:
    try:
        for loss in losses:
            parse_loss(loss)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    several = len(losses) > 1
    return [
        one.model_copy(update={"name": f"{one.name} [{loss}]" if several else one.name, "loss": loss})
        for one in corrections
        for loss in losses
    ] or corrections


def _choose_kernel(tokens: int, device: Device, corrections: int, engine: Engine) -> Kernel:
    if (threads := count_threads(engine)) is not None:
        return choose_kernel(tokens, device, corrections / threads)
    if device == "cuda":
        raise ConfigError(
            f"{option('device', 'cuda')} does not work with {option('engine', 'ray')}; leave one of them out"
        )
    return choose_kernel(tokens, "cpu")


def analyze(
    paths: Sequence[DumpSource],
    corrections: Sequence[Correction] = (),  # corrections with unique names
    *,
    # columns to break metrics down by. For `turn`, each turn counts as a sequence, and corrections are not measured.
    by: Sequence[str] = (),
    sequences: str | Path | None = None,  # write one row per sequence to this Parquet file
    framework: Framework | None = None,  # also compute the metrics that it logs. This keeps a step in memory.
    log: RunLog | None = None,
    every_cluster: bool = False,  # store cluster tables with all columns and more clusters, for gate and compare
    findings: bool = True,
    device: Device = "auto",
    baseline: tuple[str, Result] | None = None,  # name of an accepted Result, and the Result
    # measure each correction with each of these losses instead of its own loss. If there are several losses, the
    # corrections are called `NAME [LOSS]`. A replayed framework always uses its own loss.
    losses: Sequence[str] = (),
    # corrections for a figure: only the rejected share and the K3 of kept tokens are measured. Presets are left out if
    # they need a column that the dump lacks, or all tokens of a step at once.
    presets: Sequence[Correction] = (),
    **options: Unpack[ReadOptions],
) -> Result:
    """Measure the mismatch of a dump and the effect of each correction, in one pass. See `mm.analyze`."""
    replayed, corrections = corrections, _combine_with_losses(corrections, losses)
    extra = () if framework is None else logs.REPLAY_COLUMNS
    columns = tuple(column for column in by if column != TURN_COLUMN)
    extra = (*extra, TURN_COLUMN) if TURN_COLUMN in by else extra
    watched = (
        *(column for column in PARTIAL_COLUMNS if column != TURN_COLUMN),
        *(DIAGNOSIS_COLUMNS if findings else ()),
    )
    reading = DumpReading.open(paths, corrections, columns, extra=extra, watched=watched, **options)
    dump = reading.dump
    within = TURN_COLUMN in by and has_turn_parts(dump)
    for column in ("current_log_probs", "advantages") if losses else ():
        if not dump.has(column):
            problem = f"the loss {losses[0]} needs this column, which is missing"
            raise DataError(
                problem, file=dump.files[0].path, column=column, remedy="record this column, or leave the loss out"
            )
    plan = MeasurePlan(
        tuple(corrections),
        columns if within else tuple(by),
        reading.has,
        sequences is not None,
        _choose_kernel(reading.expected_tokens, device, len(corrections), reading.engine),
        every_cluster,
        dump.has("prompt_id"),
    )
    turns = replace(plan, corrections=(), by=(TURN_COLUMN,), sequences=False) if within else None
    accumulator, by_turn = Accumulator(plan), None if turns is None else Accumulator(turns)
    # a second replay in float32 shows how much rounding can change the logged values
    dtypes: list[Dtype] = ["float64"] if log is None else ["float64", "float32"]
    replays = [
        LoggedSteps(framework, replayed, ReplayOptions(options.get("micro_batch_size"), dtype))
        for dtype in dtypes if framework is not None
    ]  # fmt: skip
    kept: list[tuple[Any, str]] = [(accumulator, "sums"), *((logged, "parts") for logged in replays)]
    kept += [] if by_turn is None else [(by_turn, "turns")]
    causes = make_collector(dump, plan.by)
    drawn = [
        preset for preset in presets if all(gate.over != "batch" for gate in preset.gates)
        and all(column in (*file.columns, *file.partition) for column in preset.needed_columns for file in dump.files)
    ]  # fmt: skip
    rules = {preset.gates: Correction(name=preset.name, gates=preset.gates) for preset in drawn}
    gates: GateSums = {}
    work = _AnalysisPass(
        plan, turns, causes.empty(), findings, framework is not None, replace(plan, corrections=(*rules.values(),))
    )
    with SequenceFile(sequences, plan) as rows:
        for done, may_grow in reading.parts(work):
            for groups, what in kept:
                groups.add(getattr(done, what))
                groups.close(may_grow)
            rows.write(done.rows)
            gates = merge_parts(gates, done.gates)
            causes.add(done.causes)
        reading.require_tokens()
        for groups, _ in kept:
            groups.finish()
        result = build_result(reading, accumulator, by_turn)
        for name, run in result.runs.items():
            growth = partial(fit_run_growth, run)
            files = dump.paths
            run.findings, run.sides = causes.findings(name, files, growth)
            run.content = causes.content(name, files, run.findings)
            points = dict(zip(rules, gates.get(name, ()), strict=False))
            tokens = run.overall.metrics["tokens"].value or 0
            run.presets = {
                preset.name: PresetPoint.from_sums(tokens, *points[preset.gates].tolist()) for preset in drawn if tokens
            }
        summarize_runs(result, baseline)
        result.warnings += reading.warnings
        if framework is not None:
            _add_replays(result, framework, replays)
        if log is not None:
            _add_run_log(result, log, replays)
        rows.finish(accumulator.factors)
    return result


def _add_replays(result: Result, framework: Framework, replays: Sequence[LoggedSteps]) -> None:
    logged = replays[0]
    result.provenance.framework = framework.title
    result.provenance.replay = logged.options.given
    result.warnings += framework.warnings
    result.warnings += [
        f"{name}: {framework.title} cannot apply this correction ({framework.as_it(why)})"
        for name, why in logged.refused.items()
    ]
    result.warnings += [
        f"{framework.title} logs {name}, which is not computed: it needs {needed}"
        for name, needed in logged.unavailable.items()
    ]
    for name, run in result.runs.items():
        run.logged = logged.of_run(name, run.groups.labels)


def _add_run_log(result: Result, log: RunLog, replays: Sequence[LoggedSteps]) -> None:
    result.provenance.log = log.path
    if replays and (offset := replays[0].framework.log_step_offset):
        runs = [(run.groups.labels, values) for run in result.runs.values() for values in run.logged.values()]
        aligned = logs.align_steps(log, runs, offset)
        if aligned is not log:
            result.warnings.append(
                f"{result.provenance.framework} logs a batch {offset} step after its generation, so the steps of "
                f"{log.path} are moved {offset} step back"
            )
        log = aligned
    logs.require_shared_steps(log, [label for run in result.runs.values() for label in run.groups.labels])
    for name, run in result.runs.items():
        labels, k3 = run.groups.labels, run.groups.metrics.get("k3")
        run.log = log.series([logs.step_label(label) for label in labels])
        run.order = logs.describe_order(labels, fit_run_growth(run), run.log)
        run.lags = {} if k3 is None else {key: logs.estimate_lag(k3.value, values) for key, values in run.log.items()}
        rounded = replays[-1].of_run(name, labels) if replays else {}
        run.against = {
            correction: logs.compare_replay(log, labels, values, rounded.get(correction, {}))
            for correction, values in run.logged.items()
        }
        called = logs.match_metrics(log, {each for values in run.logged.values() for each in values})
        series = {key: run.groups.metrics[key].value for key in called.values() if key in run.groups.metrics}
        run.against_metrics = logs.compare_metrics(log, labels, series, called)
