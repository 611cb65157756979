"""Terminal output and report page of `sweep`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from mismatchctl.api.predict import Prediction
from mismatchctl.api.sweep import result as api
from mismatchctl.api.sweep.study import INTERVAL_FIELDS, Study
from mismatchctl.core import formatting as form
from mismatchctl.core.formatting import DASH, file_stems, format_count, format_number
from mismatchctl.corrections.labels import correction_label, threshold_label
from mismatchctl.corrections.model import Correction
from mismatchctl.corrections.presets import Preset, parse_correction
from mismatchctl.frameworks.adapter import CLAMP_DIFFERENCE
from mismatchctl.frameworks.config_files import format_native, format_preset
from mismatchctl.frameworks.registry import load_adapters
from mismatchctl.report import document as doc
from mismatchctl.report.figures import sweep as charts
from mismatchctl.report.figures.sweep import StudyRun, axis_label
from mismatchctl.report.pages.run_tables import provenance_section
from mismatchctl.report.tables import MAX_ROWS, MAX_RUNS, SHORT_TITLES, find_metric, metric_columns
from mismatchctl.results.model import Value
from mismatchctl.results.summary import percent, skipped_data_notes

MAX_POINTS_SHOWN, POINTS = 12, 5  # maximum points in a table of the page, and on the screen
MAX_STUDIES = 4
FOLD_ROWS = 16


def sweep_screen(sweep: api.Sweep, paths: Sequence[str], page: doc.Document | None = None) -> doc.Document:
    """Build the terminal output of a sweep without targets: a summary, or the sections of `page` if it is given."""
    screen = doc.Document(doc.Headline(_title(sweep)))
    if page is not None:
        screen.sections = [part for part in page.sections if part.anchor != "sweep-answer"]
    elif len(sweep.runs) > 1:
        screen.add(doc.Section("", "runs").add(_runs_table(sweep)))
    else:
        screen.add(doc.Section("", "studies").add(*_study_parts(list(_studied_corrections(sweep, 0)))))
        screen.add(_predictions_section(sweep, 0))
    more = [("Details", "-v")] if page is None else []
    screen.commands = [*more, ("Next", form.format_command("sweep", paths, "--target-rejection 5%"))]
    return screen


def _title(sweep: api.Sweep) -> str:
    name = f"{len(sweep.runs)} runs" if len(sweep.runs) > 1 else sweep.runs[0]
    every = [own for index in range(len(sweep.runs)) for own in _studied_corrections(sweep, index)]
    usual = [own.rows[own.usual] for own in every if own.usual is not None]
    rows = usual or [row for own in every for row in own.rows]
    lost = [row["rejected_tokens"] for row in rows if row["rejected_tokens"] is not None]
    if not lost:
        return f"{name}: no threshold could be evaluated"
    least, most = percent(min(lost)), percent(max(lost))
    what = "the frameworks' usual thresholds drop" if usual else "the thresholds drop"
    return f"{name}: {what} {least if least == most else f'{least} to {most}'} of the tokens"


def _study_parts(every: Sequence[StudyRun]) -> Iterator[doc.DocumentPart]:
    for own in every[:MAX_STUDIES]:
        if len(own.study.axes) == 1 and own.study.axes[0].is_numeric:
            yield _threshold_table(own)
        else:
            best = api.sort_by_cost([row for row in own.rows if row["pareto"]]) or own.rows
            rows = api.thin_rows(best, POINTS)
            items = [(correction_label(own.study.correction_at(row["point"])), row) for row in rows]
            yield _points_screen_table(own.study.name, items)
    if (left := len(every) - MAX_STUDIES) > 0:
        yield doc.Note(f"{left} more corrections: -v")
    if any(own.usual is not None and len(own.study.axes) == 1 for own in every[:MAX_STUDIES]):
        yield doc.Note("* marks the usual default of the frameworks")


def _threshold_table(own: StudyRun) -> doc.Table:
    points = {row["point"] for row in api.thin_rows(own.rows, POINTS)} | {own.usual}
    chosen = [row for row in own.rows if row["point"] in points]
    path = own.study.axes[0].path
    labels = [threshold_label(own.study.correction_at(row["point"]), path) for row in chosen]
    words = zip(*(label.split(" ")[:-1] for label in labels), strict=False)
    shared = "".join(f"{column[0]} " for column in takewhile(lambda column: len({*column}) == 1, words))
    metrics: dict[str, tuple[str, Callable[[Any], str]]] = {"drops": ("rejected_tokens", percent)}
    if all(not row["rejected_tokens"] for row in own.rows):
        metrics = {}
    metrics["ESS"] = "ess_token", percent
    if own.study.correction.gates:
        metrics["K3 left"] = "k3_kept", format_number
    else:
        metrics["mean weight"] = "weight_mean", lambda value: DASH if value is None else f"{value:.3f}"

    def value(row: Mapping[str, Any], title: str) -> str:
        key, text = metrics[title]
        return text(row[key])

    columns = [doc.Column(shared.strip() or own.study.name, "  {}".format, "name")]
    for label, row in zip(labels, chosen, strict=True):
        heading = f"{label[len(shared) :].strip()}{'*' if row['point'] == own.usual else ''}"
        columns.append(doc.Column(heading, partial(value, row), short=heading, drop=0))
    return doc.Table.of("", metrics, columns, compact=True, reach=doc.EVERYWHERE)


def _points_screen_table(heading: str, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> doc.Table:
    def share(title: str, key: str, drop: int, short: str = "") -> doc.Column:
        return doc.Column(title, lambda item: percent(item[1][key]), drop=drop, short=short)

    columns = [
        doc.Column(heading, lambda item: item[0], "name"),
        share("drops tokens", "rejected_tokens", 0, "drops\ntokens"), share("sequences", "rejected_sequences", 1),
        share("ESS", "ess_token", 2), doc.Column("K3 left", lambda item: format_number(item[1]["k3_kept"]), drop=0),
    ]  # fmt: skip
    return doc.Table.of("", rows, columns, reach=doc.EVERYWHERE)


def _runs_table(sweep: api.Sweep) -> doc.Table:
    runs = {run: list(_studied_corrections(sweep, index))[:MAX_STUDIES] for index, run in enumerate(sweep.runs)}

    def rejected(place: int, run: str) -> str:
        own = runs[run][place]
        return percent(own.rows[own.usual or 0]["rejected_tokens"])

    columns = [doc.Column("drops at", kind="name")]
    for place, own in enumerate(runs[sweep.runs[0]]):
        label = correction_label(own.study.correction_at(own.usual or 0))
        columns.append(doc.Column(label, partial(rejected, place), drop=0))
    return doc.Table.of("", sweep.runs[:MAX_RUNS], columns, reach=doc.EVERYWHERE)


def target_screen(sweep: api.Sweep, paths: Sequence[str], prices: Sequence[Mapping[str, Any]]) -> doc.Document:
    """Build the terminal output of a sweep with targets: the best rules, and configuration lines to paste."""
    price = dict(zip(map(id, sweep.targets), prices, strict=True))
    wishes = api.group_by_target(sweep.targets)
    first, alone = next(iter(wishes)), len(sweep.runs) == 1
    screen, ranked = doc.Document(doc.Headline("")), list[Correction]()
    for wish, targets in wishes.items():
        solved = [target for target in targets if target.correction is not None]
        solved.sort(key=lambda target: price[id(target)]["k3_kept"] or float("inf"))
        best = [one for place, one in enumerate(solved) if alone or one.run not in {two.run for two in solved[:place]}]
        corrections = [parse_correction(target.correction or {}, "target") for target in best]
        ranked = ranked or corrections
        marks = ["> ", *["  "] * len(best)] if alone else [f"  {target.run}: " for target in best]
        labels = [f"{mark}{correction_label(own)}" for mark, own in zip(marks, corrections, strict=False)]
        rows = list(zip(labels, (price[id(target)] for target in best), strict=True))
        section = doc.Section("", f"target-{len(screen.sections)}")
        section.add(doc.Note(f"{_describe_wish(*wish)}:") if len(wishes) > 1 else None)
        section.add(_points_screen_table("  rule", rows[:MAX_RUNS]))
        section.add(doc.Note(f"{len(rows) - MAX_RUNS} more runs: -v") if len(rows) > MAX_RUNS else None)
        missed = [target for target in targets if target.correction is None]
        screen.add(section.add(*(doc.Note(f"{target.rule}: {target.status}") for target in missed[:2])))
    is_met = any(target.status.startswith(api.MET_EVERYWHERE) for target in wishes[first])
    answer = "every threshold meets it" if is_met else "no threshold meets it"
    if ranked:
        answer = correction_label(ranked[0]) if alone else "one threshold per run"
    of = sweep.runs[0] if alone else f"each of {len(sweep.runs)} runs"
    screen.headline.title = f"{_describe_wish(*first)} of {of}: {answer}"
    if alone:
        screen.add(doc.Section("", "usual").add(_usual_note(sweep)), doc.Section("", "paste").add(_paste_lines(ranked)))
    screen.commands = [("Details", "-v"), ("Next", form.format_command("advise", paths))]
    return screen


def _describe_wish(key: str, wanted: float) -> str:
    if key == "ess_token":
        return f"To keep an effective sample size of {percent(wanted)}"
    return f"To drop {percent(wanted)} of the {'tokens' if key == 'rejected_tokens' else 'sequences'}"


def _usual_note(sweep: api.Sweep) -> doc.Note | None:
    found = [
        f"{correction_label(own.study.correction)} drops {percent(own.rows[own.usual]['rejected_tokens'])}"
        for own in _studied_corrections(sweep, 0)
        if own.study.correction.gates and own.usual is not None
    ]
    return doc.Note(f"Frameworks' usual thresholds: {', '.join(found)}") if found else None


def _paste_lines(ranked: Sequence[Correction]) -> doc.Code | None:
    """Return the configuration of the best correction that the first framework supports. Round its bounds."""

    def rounded(match: re.Match[str]) -> str:
        value = float(match[0])  # near 1, round the distance from 1
        return f"{1 + float(f'{value - 1:.3g}'):.12g}" if 0.5 < value < 2 else f"{value:.3g}"

    framework = load_adapters()[0].load("")
    for correction in ranked:
        keys, differences = framework.native(correction)
        if keys and all(CLAMP_DIFFERENCE in text for text in differences):
            text = re.sub(r"\d+\.\d{4,}", rounded, format_native(correction, framework, nearest=True))
            lines = [line for line in text.splitlines() if not line.startswith("#")]
            title = f"Paste into {framework.title} ({correction_label(correction)}):"
            return doc.Code(title, "\n".join(lines), reach=doc.EVERYWHERE)
    return None


def document(sweep: api.Sweep) -> doc.Document:
    corrections = [study.correction for study in sweep.studies]
    every, several = [list(_studied_corrections(sweep, index)) for index in range(len(sweep.runs))], len(sweep.runs) > 1
    first = [own[0].rows[0] for own in every]
    counts = [(int(sum(row[f"{noun}s"] for row in first)), noun) for noun in ("token", "sequence")]
    counts += [(len(sweep.studies), "correction"), (sum(len(study.points) for study in sweep.studies), "point")]
    head = doc.Headline(_title(sweep), [format_count(*each) for each in counts], subtitle="thresholds")
    made = doc.Document(head, version=sweep.version)
    answer = doc.Section("Summary", "sweep-answer")
    for run in sweep.runs:
        first_line, *others = api.sweep_sentences(sweep, run)
        answer.add(doc.Note(f"{run}: {first_line}" if several else first_line), *map(doc.Note, others))
    made.add(answer, _explorer_section(sweep, every))
    for index, own in enumerate(every):
        parts = [*(study_section(one) for one in own), *_targets_section(sweep, index)]
        parts += filter(None, [_predictions_section(sweep, index)])
        made.add(*([doc.Section(sweep.runs[index], f"thresholds-{index}").add(*parts)] if several else parts))
    warnings = (*sweep.warnings, *skipped_data_notes(sweep.left_out))
    made.add(doc.Section("Warnings", "sweep-notes").add(*doc.alarms(warnings)))
    return made.add(provenance_section(sweep.version, sweep.inputs, sweep.left_out, corrections))


def _studied_corrections(sweep: api.Sweep, index: int) -> Iterator[StudyRun]:
    run, names = sweep.runs[index], file_stems([study.name for study in sweep.studies])
    for place, study in enumerate(sweep.studies):
        stem = f"{file_stems(sweep.runs)[index]}-{names[place]}" if len(sweep.runs) > 1 else names[place]
        yield StudyRun(sweep, run, study, sweep.rows(run, study.name).to_dicts(), f"thresholds-{index}-{place}", stem)


def study_section(own: StudyRun) -> doc.Section:
    rows, study = own.rows, own.study
    best = api.sort_by_cost([row for row in rows if row["pareto"]])
    chosen = api.thin_rows(best or rows, MAX_POINTS_SHOWN)
    found = "No point has values of all metrics, so there is no Pareto front"
    if best:
        found = f"{len(chosen)} of the {len(best)} points on the Pareto front"
    points = _points_table(own, chosen, f"{found}.", title=found, reach=doc.EVERYWHERE)
    caption = f"{format_count(len(rows), 'point')}."
    every = _points_table(own, rows[:MAX_ROWS], caption, title=f"All points of {study.name}", folded=True)
    curves = list(charts.curve_figures(own))
    return doc.Section(study.name, own.anchor, lead=_lead_sentence(study, own.start)).add(
        doc.Figures([charts.front_figure(own)]),
        doc.Figures([figure for _, figure in curves], [axis for axis, _ in curves]), points, every,
    )  # fmt: skip


def _lead_sentence(study: Study, start: int) -> str:
    about = f"{study.correction.about.rstrip('.')}. " if study.correction.about else ""
    fixed = f"Each curve changes one threshold of {api.format_point(study, start)}." if len(study.axes) > 1 else ""
    sides = any(axis.path.rpartition(".")[2] in INTERVAL_FIELDS for axis in study.axes)
    bound = "A bound x keeps ratios in [1/x, x], and probability differences in [-x, x]. " if sides else ""
    return (about[:1].upper() + about[1:] + bound + fixed).strip() or "One threshold varies."


def _points_table(own: StudyRun, rows: Sequence[api.SweepRow], caption: str, **more: Any) -> doc.Table:
    points, sweep = own.study.points, own.sweep
    keys = {key: api.POINT_METRICS[key][1] for key, _ in api.distinguishing_metrics(own.rows)}

    def threshold(place: int, row: api.SweepRow) -> doc.TableCell:
        value = points[row["point"]][place]
        key = f"{value:.6g}" if isinstance(value, float) else ""
        return doc.TableCell(api.format_threshold(value), sort_key=key)

    def value(row: api.SweepRow, key: str) -> Value:
        reason = sweep.reason(row, key)
        return Value(value=row[key] if reason == "ok" else None, se=row.get(f"{key}_se"), status=reason)

    columns = []
    for place, axis in enumerate(own.study.axes):
        label, kind = axis_label(own.study.correction, axis.path), "number" if place else "name"
        columns.append(doc.Column(label, partial(threshold, place), kind, 0, short=label.removeprefix("bound ")))
    columns += metric_columns(keys, value, "c")
    cut = len(points) > len(rows) == MAX_ROWS
    left_out = f"The first {MAX_ROWS} of {len(points):,} points; -o writes all of them." if cut else ""
    return doc.Table.of(caption, rows, columns, sortable=True, left_out=left_out, **more)


MAX_EXPLORER_POINTS = 2_000  # maximum points of a study, over all runs, in the interactive explorer
OWN_SYNTAX = "mismatchctl"


def _explorer_keys(study: Study) -> list[str]:
    every = (*api.POINT_METRICS, "weight_bounded_high", "weight_bounded_low", "empty_prompts")
    return [key for key in every if study.correction.weight is not None or "weight" not in key]


def _explorer_section(sweep: api.Sweep, every: Sequence[Sequence[StudyRun]]) -> doc.Section:
    lead = "Move a threshold to see its effect and its configuration. A line in the curves shows the threshold."
    places = [at for at, own in enumerate(every[0]) if len(own.rows) * len(every) <= MAX_EXPLORER_POINTS]
    left = [study.name for at, study in enumerate(sweep.studies) if at not in places]
    if left:
        lead += f" Too large to explore on this page (more than {MAX_EXPLORER_POINTS:,} points): {', '.join(left)}."
    keys = {key for at in places for key in _explorer_keys(sweep.studies[at])}
    explorer = doc.Explorer(lambda: explorer_data(sweep, every, places), {f"c-{key}" for key in keys})
    return doc.Section("Explore", "explore", lead=lead).add(explorer)


def explorer_data(sweep: api.Sweep, every: Sequence[Sequence[StudyRun]], places: Sequence[int]) -> dict[str, Any]:
    runs = [
        {"name": run, "studies": [{"start": own[at].start, "values": _point_texts(own[at])} for at in places]}
        for run, own in zip(sweep.runs, every, strict=True)
    ]
    studies: list[dict[str, Any]] = []
    for place in places:
        one, axes = every[0][place], list[dict[str, Any]]()
        for at, axis in enumerate(one.study.axes):
            labels = (threshold_label(one.study.correction_at(point), axis.path) for point in one.points_along(at))
            named = zip(labels, map(api.format_threshold, axis.values), strict=True)
            texts = [f"{label} (x = {value})" for label, value in named]
            values = list(axis.values) if axis.is_numeric else None
            axes.append({"path": axis_label(one.study.correction, axis.path), "texts": texts, "values": values})
        titles = [(find_metric(key, "c").title, f"c-{key}") for key in _explorer_keys(one.study)]
        configs = _config_data(one.study)
        studies.append({"name": one.study.name, "place": place, "axes": axes, "configs": configs, "titles": titles})
    return {"runs": runs, "studies": studies}


def _point_texts(own: StudyRun) -> list[list[str]]:
    def text(row: api.SweepRow, key: str) -> str:
        reason = own.sweep.reason(row, key)
        value = row[key] if reason == "ok" else None
        return form.format_estimate_or_reason(value, row.get(f"{key}_se"), own.sweep.metrics[key].unit, reason)

    return [[text(row, key) for row in own.rows] for key in _explorer_keys(own.study)]


def _config_data(study: Study) -> dict[str, Any]:
    """Return the configuration of each point, in each framework's syntax, as indices into a list of distinct lines."""
    lines: dict[str, int] = {}
    loaded = (adapter.load("") for adapter in load_adapters())
    frameworks = [framework for framework in loaded if framework.native(study.correction_at(0))[0]]
    found = []
    for point in range(len(study.points)):
        correction = study.correction_at(point).model_copy(update={"about": ""})  # `about` describes only the study
        texts = (format_native(correction, framework, nearest=True) for framework in frameworks)
        found.append([
            [lines.setdefault(line, len(lines)) for line in text.splitlines()]
            for text in (format_preset(Preset(correction)), *texts)
        ])  # fmt: skip
    names = [OWN_SYNTAX, *(framework.title for framework in frameworks)]
    return {"names": names, "lines": list(lines), "points": found}


def _targets_section(sweep: api.Sweep, index: int) -> Iterator[doc.Section]:
    def reached(target: api.SolvedThreshold) -> doc.TableCell:
        if target.status == "ok":
            return doc.TableCell(format_number(target.reached, "fraction"), kind="number")
        return doc.TableCell(target.status, target.status)

    columns = [
        doc.Column("rule", "rule", "name"),
        doc.Column("x", lambda target: api.format_threshold(target.threshold), drop=0),
        doc.Column("95% interval", api.format_target_interval, "text", 1),
        doc.Column("reached", reached, "text", 0),
    ]
    section = doc.Section("Targets", f"thresholds-{index}-targets")
    wishes = api.group_by_target([target for target in sweep.targets if target.run == sweep.runs[index]])
    for wish, targets in wishes.items():
        caption = f"Thresholds for {api.format_target(*wish)}"
        section.add(doc.Table.of(caption, targets, columns, title=caption, reach=doc.EVERYWHERE))
    yield section


def _predictions_section(sweep: api.Sweep, index: int) -> doc.Section | None:
    predictions = api.run_predictions(sweep, sweep.runs[index])
    if not predictions:
        return None
    section = doc.Section(
        "Predictions", f"thresholds-{index}-predictions",
        lead="The tables predict how some thresholds act on a new batch, on longer responses or at later steps.",
    )  # fmt: skip
    questions: dict[str, list[tuple[str, Prediction]]] = {}
    for name, every in predictions.items():
        for one in every:
            questions.setdefault(one.question, []).append((name, one))
    columns = [
        doc.Column("point", lambda item: item[0], "name"),
        doc.Column("what", lambda item: SHORT_TITLES[item[1].quantity], "text", 0),
        doc.Column("predicted", lambda item: doc.TableCell(
            format_number(item[1].value, "fraction"), "" if item[1].status == "ok" else item[1].status), drop=0),
        doc.Column("95% interval", lambda item: api.format_interval(item[1]), "text", 0),
        doc.Column("status", lambda item: re.split("[:,(]| on the ", item[1].status.removeprefix("ok"))[0], "text", 2),
    ]  # fmt: skip
    for question, found in questions.items():
        caption, folded = f"Predicted: {question}", len(found) > FOLD_ROWS
        section.add(doc.Table.of(caption, found, columns, title=caption, reach=doc.EVERYWHERE, folded=folded))
        sentences: list[str] = []
        for _, one in found:
            status, check = [one.status] * (one.status != "ok"), [api.describe_check(one.check)] if one.check else []
            sentences += [*status, f"Model: {one.model}.", *check]
        section.add(*(doc.Note(text, "quiet") for text in dict.fromkeys(sentences)))
    return section
