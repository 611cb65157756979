"""The page of a Sweep: the answer, an explorer, then correction by correction, targets and predictions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from mismatchctl.numbers import counted, number
from mismatchctl.predict.prediction import Prediction
from mismatchctl.render.document import (
    BRIEF,
    WHOLE,
    Columns,
    Document,
    Explorer,
    Figures,
    Head,
    Headline,
    Later,
    Note,
    Part,
    Section,
    Table,
    TableCell,
)
from mismatchctl.render.pages.provenance import provenance
from mismatchctl.render.pages.sweep_explorer import MOST_CONFIGS, MOST_POINTS, explorer_data
from mismatchctl.render.pages.sweep_study import Studied, study_section
from mismatchctl.render.tables import SHORT, Registry, words
from mismatchctl.render.text import clean, stems
from mismatchctl.result.notes import left_out_notes
from mismatchctl.sweep.model import SolvedThreshold, Sweep
from mismatchctl.sweep.words import (
    by_wish,
    check_sentence,
    interval,
    predictions_of,
    says,
    target_interval,
    threshold,
    wish_text,
)

LONG = 16
"""Rows from which a table of predictions is folded."""


def document(sweep: Sweep, *, front: bool = False) -> Document:
    """All of it; `front`: the whole front of each correction."""
    corrections = [study.correction for study in sweep.studies]
    registry = Registry(corrections)
    registry.corrections |= {key: metric for key, metric in sweep.metrics.items() if key not in registry.corrections}
    every, several = [list(_studied(sweep, index)) for index in range(len(sweep.runs))], len(sweep.runs) > 1
    title = f"{len(sweep.runs)} runs" if several else clean(sweep.runs[0])
    made = Document(Headline(title, _facts(sweep, every), what="thresholds"), version=clean(sweep.version))
    answer = Section("Thresholds, in a sentence", "sweep-answer")
    for run in sweep.runs:
        first, *others = map(clean, says(sweep, run))
        answer.add(Note(f"{clean(run)}: {first}" if several else first), *map(Note, others))
    called = [Note(clean(note), "alarm") for note in (*sweep.warnings, *left_out_notes(sweep.left_out))]
    made.add(answer, Section("Look at this, too", "sweep-notes", reach=WHOLE).add(*called))
    made.add(Later(lambda: [_explorer(sweep, every, registry)]))
    for index, own in enumerate(every):
        parts = [*(study_section(one, registry, front=front) for one in own), *_ahead(sweep, index)]
        made.add(*([Section(clean(sweep.runs[index]), f"thresholds-{index}").add(*parts)] if several else parts))
    made.add(Section("", "sweep-notes", terminal=True).add(*called))
    made.glossary = lambda: [("Thresholds", registry.entries("c"))]
    return made.add(provenance(sweep.version, sweep.inputs, sweep.left_out, corrections))


def _studied(sweep: Sweep, index: int) -> Iterator[Studied]:
    """Each correction on one run."""
    run, names = sweep.runs[index], stems([study.name for study in sweep.studies])
    for place, study in enumerate(sweep.studies):
        rows = sweep.rows(run, study.name).to_dicts()
        yield Studied(sweep, run, study, rows, f"thresholds-{index}-{place}", f"{_prefix(sweep, index)}{names[place]}")


def _prefix(sweep: Sweep, index: int) -> str:
    """What names of the figures of one run begin with."""
    return f"{stems(sweep.runs)[index]}-" if len(sweep.runs) > 1 else ""


def _facts(sweep: Sweep, every: Sequence[Sequence[Studied]]) -> list[str]:
    first = [own[0].rows[0] for own in every]
    counts = [(int(sum(row[f"{noun}s"] for row in first)), noun) for noun in ("token", "sequence")]
    counts += [(len(sweep.studies), "correction"), (sum(len(study.points) for study in sweep.studies), "point")]
    return [counted(*each) for each in counts]


def _explorer(sweep: Sweep, every: Sequence[Sequence[Studied]], registry: Registry) -> Section:
    """What can be explored, and where the same stands otherwise."""
    said = [
        "Move a threshold and read what it costs and gives; the line in the curves moves along. Needs JavaScript; "
        "the tables below say the same."
    ]
    data = explorer_data(sweep, every, registry)
    explored = [study["name"] for study in data["studies"]]
    left = [clean(study.name) for study in sweep.studies if clean(study.name) not in explored]
    if left:
        said.append(f"Too large to explore here (more than {MOST_POINTS:,} points): {', '.join(left)}.")
    if any(len(study.points) > MOST_CONFIGS for study in sweep.studies if clean(study.name) in explored):
        said.append(f"Of more than {MOST_CONFIGS} points, those that no other beats are written as configurations.")
    return Section("Explore", "explore", lead=" ".join(said)).add(Explorer(data))


def _ahead(sweep: Sweep, index: int) -> Iterator[Section]:
    """Targets, then predictions, of one run."""
    run, anchor = sweep.runs[index], f"thresholds-{index}"
    targets = by_wish([target for target in sweep.targets if target.run == run])
    yield Section("Targets", f"{anchor}-targets").add(*(_targets(wish_text(*wish), t) for wish, t in targets.items()))
    predictions = predictions_of(sweep, run)

    def checks() -> Iterator[Figures]:
        from mismatchctl.render.figures.fronts import checks_figure  # draws: a terminal need not wait for it

        found = [one.check for every in predictions.values() for one in every if one.check is not None]
        yield Figures([checks_figure(found, f"{_prefix(sweep, index)}checks")])

    yield Section(
        "Predictions", f"{anchor}-predictions",
        lead="What some of the points would do where the dump does not reach, each with its 90 % interval.",
    ).add(*_predicted(predictions), Later(checks) if predictions else None)  # fmt: skip


def _targets(wish: str, targets: Iterable[SolvedThreshold]) -> Table:
    """The thresholds that meet one wish."""

    def reached(target: SolvedThreshold) -> TableCell:
        status = clean(target.status)
        return TableCell(number(target.reached, "fraction")) if status == "ok" else TableCell(status, status)

    columns: Columns[SolvedThreshold] = (
        ("rule", lambda target: words(target.rule, "name")),
        (Head("x", drop=0), lambda target: threshold(target.threshold)),
        (Head("90 % interval", numeric=False, drop=1), target_interval),
        (Head("reached", numeric=False, drop=0), reached),
    )
    caption = f"Thresholds for {wish}"
    return Table.of(caption, targets, columns, title=caption, reach=BRIEF)


def _predicted(predictions: Mapping[str, Sequence[Prediction]]) -> Iterator[Part]:
    """A table per question, with the models behind it."""
    asked: dict[str, list[tuple[str, Prediction]]] = {}
    for name, every in predictions.items():
        for one in every:
            asked.setdefault(one.question, []).append((name, one))
    columns: Columns[tuple[str, Prediction]] = (
        ("point", lambda item: words(item[0], "name")),
        (Head("what", numeric=False, drop=0), lambda item: SHORT[item[1].quantity]),
        (Head("predicted", drop=0), lambda item: TableCell(
            number(item[1].value, "fraction"), "" if item[1].status == "ok" else clean(item[1].status))),
        (Head("90 % interval", numeric=False, drop=0), lambda item: interval(item[1])),
        (Head("status", numeric=False, drop=2), lambda item: _brief(item[1].status)),
    )  # fmt: skip
    for question, found in asked.items():
        caption = f"Predicted: {clean(question)}"
        yield Table.of(caption, found, columns, title=caption, reach=BRIEF, folded=len(found) > LONG)
        models = dict.fromkeys(sentence for _, one in found for sentence in _models(one))
        yield from (Note(clean(sentence), "quiet") for sentence in models)


def _models(one: Prediction) -> Iterator[str]:
    if one.status not in ("ok", _brief(one.status)):
        yield one.status
    yield f"Model: {one.model}."
    if one.check is not None:
        yield check_sentence(one.check)


def _brief(status: str) -> str:
    """The part of a status before its colon; nothing where all is well."""
    return "" if status == "ok" else clean(status.partition(":")[0])
