"""The page of a Sweep: one self-contained file in the manner of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from mismatchctl.numbers import number
from mismatchctl.render.figures import Figure
from mismatchctl.render.figures.fronts import checks_figure
from mismatchctl.render.figures.scales import percent
from mismatchctl.render.notes import left_out_notes
from mismatchctl.render.pages.provenance import correction_yaml, files_table
from mismatchctl.render.predictions import TITLES, check_sentence, interval
from mismatchctl.render.sweep import WISHES, by_wish, predictions_of, target_interval, threshold
from mismatchctl.render.sweep_explorer import MOST_CONFIGS, MOST_POINTS, as_json, explorer_data
from mismatchctl.render.sweep_section import Row, StudySection, at_place, start_point, study_section
from mismatchctl.render.tables import Cell, Entry, Head, Registry, Table, words
from mismatchctl.render.text import clean
from mismatchctl.render.to.html import render_page
from mismatchctl.sweep.model import GROUP, Sweep, Target


@dataclass
class Predicted:
    """The predictions of one question, the models behind them and how these fared."""

    table: Table
    words: list[str]


@dataclass
class RunSection:
    """One run."""

    anchor: str
    number: int
    name: str
    answer: str
    verdicts: list[str]
    studies: list[StudySection]
    targets: list[Table]
    predictions: list[Predicted]
    checks: list[Figure]


@dataclass
class Page:
    """Everything that the template shows."""

    title: str
    version: str
    facts: list[str]
    notes: list[str]
    explorer_lead: str
    runs: list[RunSection]
    files: Table
    kinds: list[tuple[str, str]]
    corrections: list[tuple[str, str]]
    data: Markup
    glossary: list[Entry] = field(default_factory=list)


def render_sweep_report(sweep: Sweep) -> str:
    """The page as one HTML document; the same Sweep gives the same bytes."""
    return render_page("sweep.html.j2", prepare(sweep), "sweep")


def prepare(sweep: Sweep) -> Page:
    """All data of the page, without any layout."""
    registry = Registry([study.correction for study in sweep.studies])
    registry.corrections |= {key: metric for key, metric in sweep.metrics.items() if key not in registry.corrections}
    rows = {(run, s.name): sweep.rows(run, s.name).to_dicts() for run in sweep.runs for s in sweep.studies}
    starts = {key: start_point(own) for key, own in rows.items()}
    sections = [_run_section(sweep, index, rows, starts, registry) for index in range(len(sweep.runs))]
    names = [section.name for section in sections]
    files, kinds = files_table(sweep.inputs)
    data = explorer_data(sweep, rows, starts, _emptied(sweep), registry)
    return Page(
        title=names[0] if len(names) == 1 else f"{len(names)} runs",
        version=clean(sweep.version),
        facts=_facts(sweep, rows),
        notes=[clean(note) for note in (*sweep.warnings, *left_out_notes(sweep.left_out))],
        explorer_lead=_explorer_lead(sweep, [study["name"] for study in data["studies"]]),
        runs=sections,
        files=files,
        kinds=kinds,
        corrections=[(clean(s.correction.name), correction_yaml(s.correction)) for s in sweep.studies],
        data=as_json(data),
        glossary=registry.entries("c"),
    )


def _facts(sweep: Sweep, rows: Mapping[tuple[str, str], Sequence[Row]]) -> list[str]:
    first = [rows[run, sweep.studies[0].name][0] for run in sweep.runs]
    counts = [(int(sum(row[f"{noun}s"] for row in first)), noun) for noun in ("token", "sequence")]
    counts += [(len(sweep.studies), "correction"), (sum(len(study.points) for study in sweep.studies), "point")]
    return [f"{count:,} {noun}{'s' * (count != 1)}" for count, noun in counts]


def _explorer_lead(sweep: Sweep, explored: Sequence[str]) -> str:
    """What can be explored, and where the same stands otherwise."""
    said = [
        "Move a threshold and read what it costs and gives; the line in the curves moves along. Needs JavaScript; "
        "the tables below say the same."
    ]
    left = [clean(study.name) for study in sweep.studies if clean(study.name) not in explored]
    if left:
        said.append(f"Too large to explore here (more than {MOST_POINTS:,} points): {', '.join(left)}.")
    if any(len(study.points) > MOST_CONFIGS for study in sweep.studies if clean(study.name) in explored):
        said.append(f"Of more than {MOST_CONFIGS} points, those that no other beats are written as configurations.")
    return " ".join(said)


def _emptied(sweep: Sweep) -> dict[tuple[str, str, int], str]:
    """How many steps a point leaves without a kept token, where it leaves any."""
    import polars as pl

    empty = (pl.col("kept_tokens") == 0) & (pl.col("tokens") > 0)
    steps = sweep.groups.filter(pl.col("scope") == GROUP)
    counts = steps.group_by("run", "correction", "point", maintain_order=True).agg(
        empty.sum().alias("empty"), pl.len().alias("steps")
    )  # fmt: skip
    rows = counts.filter(pl.col("empty") > 0).collect().iter_rows()
    return {(run, name, point): f"{empty:,} of {steps:,}" for run, name, point, empty, steps in rows}


def _run_section(
    sweep: Sweep,
    index: int,
    rows: Mapping[tuple[str, str], Sequence[Row]],
    starts: Mapping[tuple[str, str], int],
    registry: Registry,
) -> RunSection:
    run, anchor = sweep.runs[index], f"run-{index}"
    targets = [target for target in sweep.targets if target.run == run]
    predictions = predictions_of(sweep, run)
    checks = [found.check for every in predictions.values() for found in every if found.check is not None]
    figure = checks_figure(checks, f"{anchor}-checks")
    return RunSection(
        anchor=anchor,
        number=index,
        name=clean(run),
        answer=_answer(sweep, [rows[run, s.name] for s in sweep.studies]),
        verdicts=_verdicts(targets),
        studies=[
            study_section(
                sweep, run, study, f"{anchor}-{place}", rows[run, study.name], starts[run, study.name], registry
            )
            for place, study in enumerate(sweep.studies)
        ],
        targets=_targets(targets),
        predictions=_predicted(predictions),
        checks=[] if figure is None else [figure],
    )


def _answer(sweep: Sweep, studies: Sequence[Sequence[Row]]) -> str:
    """The cheapest point of each correction, in one sentence."""
    said = []
    for study, rows in zip(sweep.studies, studies, strict=True):
        known = [row for row in rows if row["pareto"]]
        if known:
            row = min(known, key=lambda row: (row["rejected_tokens"], -row["ess_token"]))
            lost = row["rejected_tokens"]
            cost = f"rejects {number(lost, 'fraction')} of tokens" if lost else "rejects nothing"
            gain = f"ESS {number(row['ess_token'], 'fraction')}"
            if study.correction.weight is not None:
                gain += f", mean weight moved by {number(row['weight_bias'], 'ratio')}"
            said.append(f"{clean(study.name)} at {at_place(study, row['point'])} {cost} ({gain})")
    return f"At its cheapest, {'; '.join(said)}." if said else "No point has every figure."


def _verdicts(targets: Sequence[Target]) -> list[str]:
    """A sentence per wish."""
    said = []
    for (key, wanted), chosen in by_wish(targets).items():
        met = [
            f"{target.rule}: {threshold(target.threshold)} ({target_interval(target)})"
            for target in chosen
            if target.status == "ok"
        ]
        said.append(f"{percent(wanted)} {WISHES[key]} – {'; '.join(met) or 'no threshold meets it'}.")
    return [clean(sentence) for sentence in said]


def _targets(targets: Sequence[Target]) -> list[Table]:
    """One table per wish."""
    tables = []
    for (key, wanted), chosen in by_wish(targets).items():
        heads = [Head("rule", numeric=False), Head("x"), Head("90 % interval"), Head("reached")]
        table = Table(f"Thresholds for {percent(wanted)} {WISHES[key]}", heads)
        for target in chosen:
            mark = "" if target.status == "ok" else table.note(clean(target.status))
            cells = [Cell(threshold(target.threshold)), Cell(target_interval(target))]
            table.rows.append([words(target.rule, "name"), *cells, Cell(number(target.reached, "fraction"), mark)])
        tables.append(table)
    return tables


def _predicted(predictions: Mapping[str, Sequence[Any]]) -> list[Predicted]:
    """A table per question."""
    found = []
    for question in dict.fromkeys(one.question for every in predictions.values() for one in every):
        heads = [Head("point", numeric=False), Head("what", numeric=False), Head("predicted"), Head("90 % interval")]
        table = Table(f"Predicted: {clean(question)}", heads)
        models: dict[str, None] = {}
        for name, every in predictions.items():
            for one in every:
                if one.question == question:
                    mark = "" if one.status == "ok" else table.note(clean(one.status))
                    predicted = Cell(number(one.value, "fraction"), mark)
                    cells = [words(name, "name"), words(TITLES[one.quantity]), predicted, Cell(interval(one))]
                    table.rows.append(cells)
                    models[f"Model: {one.model}."] = None
                    if one.check is not None:
                        models[check_sentence(one.check)] = None
        found.append(Predicted(table, [clean(sentence) for sentence in models]))
    return found
