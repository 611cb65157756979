"""The page of a Sweep: the answer, an explorer, then correction by correction, targets and predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mismatchctl.numbers import number
from mismatchctl.predict.prediction import Prediction
from mismatchctl.render.document import BRIEF, Cell, Document, Explorer, Figures, Head, Headline, Note, Section, Table
from mismatchctl.render.figures.fronts import checks_figure
from mismatchctl.render.figures.scales import percent
from mismatchctl.render.pages.provenance import provenance
from mismatchctl.render.pages.sweep_explorer import MOST_CONFIGS, MOST_POINTS, explorer_data
from mismatchctl.render.pages.sweep_study import start_point, study_section
from mismatchctl.render.tables import SHORT, Registry, words
from mismatchctl.render.text import clean, stems
from mismatchctl.result.notes import left_out_notes
from mismatchctl.sweep.model import GROUP, Sweep, Target
from mismatchctl.sweep.words import (
    WISHES,
    Row,
    at_place,
    by_wish,
    check_sentence,
    interval,
    predictions_of,
    target_interval,
    threshold,
)

LONG = 16
"""Rows from which a table of predictions is folded."""


def document(sweep: Sweep, *, whole: bool = True, front: bool = False) -> Document:
    """All of it; without `whole` what stands on a page alone is not even prepared; `front`: the whole front of each."""
    registry = Registry([study.correction for study in sweep.studies])
    registry.corrections |= {key: metric for key, metric in sweep.metrics.items() if key not in registry.corrections}
    rows = {(run, s.name): sweep.rows(run, s.name).to_dicts() for run in sweep.runs for s in sweep.studies}
    names = [clean(run) for run in sweep.runs]
    title = names[0] if len(names) == 1 else f"{len(names)} runs"
    made = Document(Headline(title, _facts(sweep, rows), what="thresholds"), version=clean(sweep.version))
    made.add(*_sections(sweep, rows, registry, whole=whole, front=front))
    if whole:
        corrections = [study.correction for study in sweep.studies]
        made.add(provenance(sweep.version, sweep.inputs, sweep.left_out, corrections))
        made.glossary = [("Metrics", registry.entries("c"))]
    return made


def _sections(
    sweep: Sweep, rows: Mapping[tuple[str, str], Sequence[Row]], registry: Registry, *, whole: bool, front: bool
) -> Iterator[Section]:
    starts, several = {key: start_point(own) for key, own in rows.items()}, len(sweep.runs) > 1
    answer = Section("Thresholds, in a sentence", "sweep-answer")
    for run in sweep.runs:
        targets = [target for target in sweep.targets if target.run == run]
        named = f"{clean(run)}: " if several else ""
        answer.add(Note(named + _answer(sweep, [rows[run, s.name] for s in sweep.studies])))
        answer.add(*map(Note, _verdicts(targets)))
    yield answer
    called = [Note(clean(note), "alarm") for note in (*sweep.warnings, *left_out_notes(sweep.left_out))]
    if whole:
        yield Section("Look at this, too", "sweep-notes").add(*called)
        data = explorer_data(sweep, rows, starts, _emptied(sweep), registry)
        lead = _explorer_lead(sweep, [study["name"] for study in data["studies"]])
        yield Section("Explore", "explore", lead=lead).add(Explorer(data))
    for index, run in enumerate(sweep.runs):
        parts = list(_run(sweep, index, rows, starts, registry, whole=whole, front=front))
        if several:
            yield Section(clean(run), f"thresholds-{index}").add(*parts)
        else:
            yield from parts
    if not whole:
        yield Section("", "sweep-notes").add(*called)


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


def _run(
    sweep: Sweep,
    index: int,
    rows: Mapping[tuple[str, str], Sequence[Row]],
    starts: Mapping[tuple[str, str], int],
    registry: Registry,
    *,
    whole: bool,
    front: bool,
) -> Iterator[Section]:
    """Correction by correction, then targets, then predictions."""
    run, anchor = sweep.runs[index], f"thresholds-{index}"
    prefix = f"{stems(sweep.runs)[index]}-" if len(sweep.runs) > 1 else ""
    names = stems([study.name for study in sweep.studies])
    for place, study in enumerate(sweep.studies):
        key = run, study.name
        yield study_section(
            sweep, run, study, f"{anchor}-{place}", f"{prefix}{names[place]}", rows[key], starts[key], registry,
            whole=whole, front=front,
        )  # fmt: skip
    targets = Section("Targets", f"{anchor}-targets")
    yield targets.add(*_targets([target for target in sweep.targets if target.run == run]))
    predictions = predictions_of(sweep, run)
    section = Section(
        "Predictions", f"{anchor}-predictions",
        lead="What some of the points would do where the dump does not reach, each with its 90 % interval.",
    ).add(*_predicted(predictions))  # fmt: skip
    checks = [found.check for every in predictions.values() for found in every if found.check is not None]
    figure = checks_figure(checks, f"{prefix}checks") if whole else None
    yield section.add(Figures([] if figure is None else [figure]))


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
        heads = [
            Head("rule", numeric=False), Head("x", drop=0), Head("90 % interval", numeric=False, drop=1),
            Head("reached", numeric=False, drop=0),
        ]  # fmt: skip
        caption = f"Thresholds for {percent(wanted)} {WISHES[key]}"
        table = Table(caption, heads, title=caption, reach=BRIEF)
        for target in chosen:
            mark = "" if target.status == "ok" else table.note(clean(target.status))
            cells = [Cell(threshold(target.threshold)), Cell(target_interval(target))]
            table.rows.append([words(target.rule, "name"), *cells, _reached(target, mark)])
        tables.append(table)
    return tables


def _reached(target: Target, mark: str) -> Cell:
    return Cell(number(target.reached, "fraction") if target.status == "ok" else clean(target.status), mark)


def _predicted(predictions: Mapping[str, Sequence[Prediction]]) -> Iterator[Table | Note]:
    """A table per question."""
    for question in dict.fromkeys(one.question for every in predictions.values() for one in every):
        heads = [
            Head("point", numeric=False), Head("what", numeric=False, drop=0), Head("predicted", drop=0),
            Head("90 % interval", numeric=False, drop=0), Head("status", numeric=False, drop=2),
        ]  # fmt: skip
        caption = f"Predicted: {clean(question)}"
        table = Table(caption, heads, title=caption, reach=BRIEF)
        models: dict[str, None] = {}
        for name, every in predictions.items():
            for one in every:
                if one.question == question:
                    mark = "" if one.status == "ok" else table.note(clean(one.status))
                    predicted = Cell(number(one.value, "fraction"), mark)
                    cells = [
                        words(name, "name"),
                        words(SHORT[one.quantity]),
                        predicted,
                        Cell(interval(one)),
                        Cell(_brief(one.status)),
                    ]
                    table.rows.append(cells)
                    if one.status not in ("ok", _brief(one.status)):
                        models[one.status] = None
                    models[f"Model: {one.model}."] = None
                    if one.check is not None:
                        models[check_sentence(one.check)] = None
        table.folded = len(table.rows) > LONG
        yield table
        yield from (Note(clean(sentence), "quiet") for sentence in models)


def _brief(status: str) -> str:
    """The part of a status before its colon; nothing where all is well."""
    return "" if status == "ok" else clean(status.partition(":")[0])
