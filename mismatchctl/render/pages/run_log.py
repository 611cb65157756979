"""What a run has beside its mismatch: what the trainer would minimize, and the run's own log beside the dump."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mismatchctl.measure.metrics.aggregation import AGGREGATIONS, SUFFIXES
from mismatchctl.measure.metrics.facets import kl_key
from mismatchctl.numbers import number
from mismatchctl.render.document import USUAL, Head, Note, Part, Section, Table
from mismatchctl.render.tables import measured, words
from mismatchctl.result import AgainstLog, AgainstMetrics, Provenance, RunResult, Value


def objectives(run: RunResult, name: str, anchor: str, kinds: Sequence[str], aggregations: Sequence[str]) -> Section:
    """One row per KL to the reference policy and per correction's loss, one column per aggregation, as asked for."""
    chosen = aggregations or AGGREGATIONS
    metrics, rows = run.overall.metrics, dict[str, list[Value]]()
    for kind in kinds:
        for unbiased in (False, True):
            values = [metrics[kl_key(kind, each, unbiased=unbiased)] for each in chosen]
            rows[f"KL to ref, {kind}{', unbiased' if unbiased else ''}"] = values
    for correction, found in run.overall.corrections.items():
        if aggregations and "loss" in found:
            rows[f"loss, {correction}"] = [found[f"loss{SUFFIXES[each]}"] for each in chosen]
    columns: list[Any] = [("objective", lambda item: words(item[0], "name"))]
    for place, each in enumerate(chosen):
        columns.append((Head(each, drop=0, short=each), lambda item, place=place: measured(item[1][place], "")))
    table = Table.of(f"What {name} would minimize", rows.items(), columns, reach=USUAL)
    return Section("What it would minimize", f"{anchor}-objectives").add(table)


def against(run: RunResult, name: str, anchor: str, provenance: Provenance) -> Section:
    """For each correction, where the run's log and the dump agree and where not; and how K3 lags it."""
    section, log = Section("The run's log", f"{anchor}-log"), provenance.log
    for correction, found in run.against.items():
        section.add(*_compared(f"{log} against {provenance.framework} on {name}, correction {correction}", found))
    told = run.against_metrics or AgainstMetrics()
    if told.names:
        called = {f"{logged} ({told.metrics[logged]})": found for logged, found in told.names.items()}
        section.add(*_compared(f"{log} against the metrics of {name}", AgainstLog(names=called)))
    compared = {name for found in run.against.values() for name in found.names} | {*told.names}
    others = [
        name for name in run.log
        if name not in compared and name.removeprefix("train/").removeprefix("actor/") not in compared
    ]  # fmt: skip
    section.add(Note(f"kept from the log, not compared: {', '.join(others)}", reach=USUAL) if others else None)
    lags = (f"{logged}: K3 {lag.text}" for logged, lag in run.lags.items() if lag.steps is not None)
    return section.add(*(Note(sentence, reach=USUAL) for sentence in lags))


def _compared(title: str, found: AgainstLog) -> Iterator[Part]:
    title = f"{title}: {sum(name.agrees for name in found.names.values())} of {len(found.names)} names agree"
    if found.names:
        yield Table.of(title, found.names.items(), (
            ("name", lambda item: words(item[0], "name")),
            (Head("", numeric=False, drop=0), lambda item: "agrees" if item[1].agrees else "DIFFERS"),
            (Head("largest difference", drop=0), lambda item: f"{item[1].difference:.1e}"),
            (Head("allowed", drop=4), lambda item: f"{item[1].allowed:.1e}"),
            (Head("at step", drop=3), lambda item: item[1].step),
            (Head("dump", drop=1), lambda item: number(item[1].dump)),
            (Head("log", drop=1), lambda item: number(item[1].log)),
            (Head("steps", drop=2), lambda item: str(item[1].steps)),
        ), reach=USUAL)  # fmt: skip
    else:
        yield Note(title, reach=USUAL)
    if found.missing:
        yield Note(f"not in the log: {', '.join(found.missing)}", reach=USUAL)
