"""What the trainer would minimize: the KL to the reference policy and each correction's loss, as asked for."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from mismatchctl.errors import ConfigError
from mismatchctl.measure.metrics.aggregation import AGGREGATIONS, SUFFIXES
from mismatchctl.measure.metrics.facets import kl_key
from mismatchctl.numbers import estimate_or_reason
from mismatchctl.render.grid import Column, print_grid
from mismatchctl.result import Result, RunResult, Value


def require_objectives(result: Result, kinds: Sequence[str], aggregations: Sequence[str]) -> None:
    """Refuse what the dump has no columns for.

    Raises:
        ConfigError: so it is.
    """
    for run in result.runs.values():
        if kinds and kl_key(kinds[0]) not in run.overall.metrics:
            raise ConfigError("--kl needs the column ref_log_probs, which no file has")
        if aggregations and not any("loss" in values for values in run.overall.corrections.values()) and not kinds:
            raise ConfigError("--loss-agg needs the column current_log_probs (or --kl), which no file has")


def render_objectives(result: Result, kinds: Sequence[str], aggregations: Sequence[str], console: Console) -> None:
    """One row per KL and per correction's loss, one column per aggregation."""
    chosen = aggregations or AGGREGATIONS
    for name, run in result.runs.items():
        rows = _kl_rows(run, kinds, chosen) | (_loss_rows(run, chosen) if aggregations else {})
        title = f"What {name} would minimize" if len(result.runs) > 1 else "What it would minimize"
        columns = [
            Column(aggregation, [_shown(values[place]) for values in rows.values()])
            for place, aggregation in enumerate(chosen)
        ]
        print_grid(console, title, Column("objective", list(rows)), columns)


def _kl_rows(run: RunResult, kinds: Sequence[str], chosen: Sequence[str]) -> dict[str, list[Value]]:
    return {
        f"KL to ref, {kind}{', unbiased' if unbiased else ''}": [
            run.overall.metrics[kl_key(kind, each, unbiased=unbiased)] for each in chosen
        ]
        for kind in kinds
        for unbiased in (False, True)
    }


def _loss_rows(run: RunResult, chosen: Sequence[str]) -> dict[str, list[Value]]:
    return {
        f"loss, {name}": [values[f"loss{SUFFIXES[each]}"] for each in chosen]
        for name, values in run.overall.corrections.items()
        if "loss" in values
    }


def _shown(value: Value) -> str:
    return estimate_or_reason(value.value, value.se, "", value.status)
