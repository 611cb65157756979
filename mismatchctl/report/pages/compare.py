"""Terminal output and report page of `compare`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from mismatchctl.api.compare import comparison as api
from mismatchctl.core import formatting as form
from mismatchctl.core.formatting import DASH, format_number, shorten
from mismatchctl.report import document as doc
from mismatchctl.report import tables
from mismatchctl.report.figures.distributions import breakdowns_figure, distributions_figure
from mismatchctl.report.figures.figure import MAX_NAME, Axis, Figure, Interval, change_axis, interval_of, rows_figure
from mismatchctl.report.tables import SHORT_TITLES, find_metric, metric_columns, value_cell
from mismatchctl.results.model import NOT_RECORDED
from mismatchctl.results.summary import STATUSES, RunStatus

MAX_DETAILED_CONTRASTS = 3  # with more comparisons, the terminal does not show their tables
MAX_METRICS, MAX_PARTS, TERMINAL_PARTS, MAX_DRAWN = 24, 50, 9, 12
MAX_SCREEN_METRICS, MAX_SCREEN_RUNS = 7, 11


def compare_screen(comparison: api.Comparison, page: doc.Document | None = None) -> doc.Document:
    """Build the terminal output: a summary, or all sections of `page` if it is given."""
    worst = min(comparison.contrasts, key=_severity)
    screen = doc.Document(_headline(comparison), page.sections if page is not None else [])
    if page is None:
        facts = doc.Facts([(name, form.cut_phrase(text, 220)) for name, text in _answer_rows(comparison)])
        parts = _runs_table(comparison) if len(comparison.contrasts) > 1 else (facts, *_screen_metrics(comparison))
        screen.add(doc.Section("", "answer").add(*parts, *doc.alarms(comparison.warnings)))
    more = [("Details", "-v")] if page is None else []
    screen.commands = [*more, ("Report", "--html report.html"), ("Next", _next_command(comparison, worst))]
    return screen


def document(comparison: api.Comparison) -> doc.Document:
    contrasts = comparison.contrasts
    tokens = sum(int(side.metrics["tokens"].value or 0) for side in comparison.sides)
    head = _headline(comparison)
    head.facts, head.subtitle = [f"{len(comparison.sides)} runs", f"{tokens:,} tokens"], "compare"
    made = doc.Document(head, version=comparison.version)
    following = doc.Code("next", _next_command(comparison, min(contrasts, key=_severity)))
    made.add(doc.Section("", "answer").add(
        *(_runs_table(comparison) if len(contrasts) > 1 else ()), doc.Facts(_answer_rows(comparison)), following,
        doc.Figures([changes_figure(comparison, "changes")]),
    ))  # fmt: skip
    made.add(*(_contrast_section(comparison, contrast, index) for index, contrast in enumerate(contrasts)))
    overlaid = doc.Section("Distributions", "overlaid", folded=True, note="log ratios and K3 of all runs")
    made.add(overlaid.add(doc.Figures(_distribution_figures(comparison))))
    method = doc.Note(api.describe_method(comparison), "quiet", reach=doc.TERMINAL_AND_PAGE)
    sides = doc.Section("Runs", "sides", folded=True, note="source, size and mismatch of each run")
    sides.add(_sides_table(comparison))
    return made.add(sides, doc.Section("", "method").add(method, *doc.alarms(comparison.warnings)))


def _severity(contrast: api.Contrast) -> tuple[int, float]:
    return STATUSES.index(api.judge_contrast(contrast).status), -(api.k3_change(contrast).relative or 0.0)


def _headline(comparison: api.Comparison) -> doc.Headline:
    if len(comparison.contrasts) == 1:
        (own,) = comparison.contrasts
        return doc.Headline(api.contrast_headline(own), status=api.judge_contrast(own).status)
    judged = _judge(comparison)
    return tables.runs_headline(judged, f"0 of {len(judged)} runs are worse")


def _next_command(comparison: api.Comparison, worst: api.Contrast) -> str:
    side = comparison.side(worst.other)
    if side.kind == "result":
        return form.format_command("report", [side.source], "--html report.html")
    found = api.judge_contrast(worst)
    if found.status == "OK" and found.word != "better":  # if K3 fell without a known cause, the dump may be wrong
        return form.format_command("gate", [side.source], "--save-baseline ok.json --accept")
    return form.format_command("diagnose", [side.source])


def _answer_rows(comparison: api.Comparison) -> list[tuple[str, str]]:
    if len(comparison.contrasts) > 1:
        return []
    (contrast,) = comparison.contrasts
    rows = [("runs", f"{contrast.other} compared with {comparison.reference.name}, {contrast.paired}")]
    rows += [("why", reason) for reason in api.describe_doubt(contrast)]
    rows += [("where", text) for text in [*api.describe_carriers(contrast)][:2] if api.k3_change(contrast).significant]
    rows += [("trend", f"{side.name}: K3 {side.growth.text}") for side in comparison.sides if side.growth.changed]
    return rows


def _screen_metrics(comparison: api.Comparison) -> Iterator[doc.DocumentPart]:
    (contrast,) = comparison.contrasts
    keys = sorted(api.list_changed_metrics(contrast), key=lambda key: contrast.changes[key].better is not False)
    if keys:
        yield _changes_table("", keys[:MAX_SCREEN_METRICS], contrast.changes, brief=True)
    if len(keys) > MAX_SCREEN_METRICS:
        yield doc.Note(f"{form.format_count(len(keys) - MAX_SCREEN_METRICS, 'more changed metric')}: -v")


def _judge(comparison: api.Comparison) -> dict[str, RunStatus]:
    answers = {}
    for contrast in sorted(comparison.contrasts, key=_severity):
        judged = api.judge_contrast(contrast)
        change = contrast.changes.get(judged.key, api.UNMEASURED_CHANGE)
        size = api.describe_size(judged.key, change, interval=False) if change.difference else None
        answers[contrast.other] = RunStatus(judged.status, size or api.contrast_headline(contrast))
    return answers


def _runs_table(comparison: api.Comparison) -> Iterator[doc.Table | doc.Note]:
    found = {contrast.other: contrast for contrast in comparison.contrasts}
    k3 = doc.Column("K3", lambda name: format_number(api.k3_change(found[name]).other.value), drop=0)
    title = f"Reference: {comparison.reference.name}, K3 {value_cell(comparison.reference.metrics['k3'], '').brief}"
    return tables.runs_table(_judge(comparison), "change", k3, title=title, most=MAX_SCREEN_RUNS)


def _distribution_figures(comparison: api.Comparison) -> Iterator[Figure | None]:
    sides, breakdowns = comparison.sides, comparison.reference.breakdowns
    yield distributions_figure({side.name: side.distribution for side in sides})
    for quantity, name in zip(breakdowns, form.file_stems(breakdowns), strict=True):
        having = {side.name: side.breakdowns[quantity] for side in sides if quantity in side.breakdowns}
        yield breakdowns_figure(having, f"k3_by_{name}")


def _contrast_section(comparison: api.Comparison, contrast: api.Contrast, index: int) -> doc.Section:
    anchor, alone = f"contrast-{index}", len(comparison.contrasts) == 1
    keys = api.list_main_metrics(contrast)[:MAX_METRICS]
    left = len(contrast.changes) - len(keys)
    section = doc.Section("What changed", anchor, level=api.judge_contrast(contrast).status)
    if not alone:
        section.title = f"{contrast.other} against {comparison.reference.name}"
        section.note = api.contrast_headline(contrast)
    if len(comparison.contrasts) > MAX_DETAILED_CONTRASTS:
        section.reach = doc.PAGE_ONLY
    told = {text for _, text in _answer_rows(comparison)} | ({contrast.paired} if alone else set())
    section.add(*(doc.Note(line, "quiet") for line in api.contrast_details(contrast) if line not in told))
    section.add(_changes_table(
        "The main metrics, and all other metrics that changed significantly.", keys, contrast.changes,
        title=f"Metrics ({left} more in --json and --html)",
        left_out=f"{left} more metrics are in the section All numbers." if left else "",
    ))  # fmt: skip
    for key in keys:
        if note := contrast.changes[key].note:
            section.add(doc.Note(f"* {find_metric(key).title}: {note}", "quiet"))
    lead = (
        "The runs are divided into parts, such as steps or positions, and each part contributes to the change of K3. "
        "A part contributes in two ways: K3 of its tokens changes (level), or its share of the tokens changes (mix). "
        f"The table shows at most {MAX_PARTS} steps, positions and so on. The JSON result contains all parts."
    )
    prefix = "" if alone else f"{form.file_stems([each.other for each in comparison.contrasts])[index]}-"
    stems = form.file_stems([found.quantity for found in contrast.decompositions])
    named = zip(stems, contrast.decompositions, strict=True)
    figures = doc.Figures([contributions_figure(found, f"{prefix}change_by_{stem}") for stem, found in named])
    parts = doc.Section("Contributions to the change", f"{anchor}-parts", lead=lead, folded=True)
    parts.note = figures.figures[0].title if figures.figures else ""
    changed = api.k3_change(contrast).difference not in (None, 0)
    section.add(_corrections_table(contrast), parts.add(figures, _contributions_table(contrast) if changed else None))
    every = [("All metrics", contrast.changes, "m")]
    every += [(f"Correction {name}", changes, "c") for name, changes in contrast.corrections.items()]
    note = f"{len(contrast.changes)} metrics, and the metrics of each correction"
    numbers = doc.Section("All numbers", f"{anchor}-all", folded=True, note=note)
    shown = (_changes_table(title, list(c), c, scope, folded=True, reach=doc.PAGE_ONLY) for title, c, scope in every)
    return section.add(numbers.add(*shown))


def _changes_table(
    caption: str, keys: Sequence[str], changes: Mapping[str, api.Change], scope: str = "m",
    *, brief: bool = False, reach: int = doc.EVERYWHERE, **more: Any,
) -> doc.Table:  # fmt: skip

    def form(key: str) -> Callable[[float | None], str]:
        if changes[key].relative is not None:
            return api.format_signed_percent
        points = find_metric(key, scope).unit == "fraction"
        return lambda value: f"{100 * value:+.3g} pp" if points and value is not None else api.format_signed(value)

    def size(key: str) -> doc.TableCell:
        change = changes[key]
        return doc.number_cell(change.difference if change.relative is None else change.relative, form=form(key))

    def interval(key: str) -> doc.TableCell:
        change = changes[key]
        ends = change.interval if change.relative is None else change.relative_interval
        text = DASH if ends is None else " to ".join(map(form(key), ends))
        return doc.TableCell(text, "" if change.status == "ok" else change.status)

    def verdict(key: str) -> doc.TableCell:
        word = api.change_label(changes[key])
        reason = "" if brief else changes[key].note
        return doc.TableCell(word, reason, kind="alarm" if word == "worse" and not brief else "")

    def side(name: str, key: str) -> doc.TableCell:
        return value_cell(getattr(changes[key], name), find_metric(key, scope).unit, errors=not brief)

    details = [
        doc.Column("interval", interval, drop=1, description="95% interval, not adjusted for the number of metrics"),
        doc.Column("p", lambda key: changes[key].p,
                   description="two-sided p-value, adjusted for the number of metrics"),
    ]  # fmt: skip
    columns = [
        doc.Column("metric", lambda key: doc.TableCell(
            find_metric(key, scope).title, anchor="" if brief else f"{scope}-{key}"), "name"),
        *(doc.Column(name, partial(side, name), drop=0) for name in ("reference", "other")),
        doc.Column("change", size, drop=0), *([] if brief else details),
        doc.Column("" if brief else "verdict", verdict, "text", 0),
    ]  # fmt: skip
    return doc.Table.of(caption, keys, columns, sortable=not brief, reach=reach, **more)


def _sides_table(comparison: api.Comparison) -> doc.Table:
    keys = ("tokens", "sequences", "k3", "abs_diff_mean", "abs_diff_max", "ess_sequence")
    columns = [
        doc.Column("run", "name", "name"), doc.Column("file or folder", "source", "path"),
        doc.Column("type", "kind", "text"),
        *metric_columns(keys, lambda side, key: side.metrics.get(key, NOT_RECORDED)),
        doc.Column("K3 over the steps", lambda side: side.growth.brief, "text"),
    ]  # fmt: skip
    return doc.Table.of("All runs. The first run is the reference.", comparison.sides, columns)


def _corrections_table(contrast: api.Contrast) -> doc.Table:
    def pair(key: str, item: tuple[str, Mapping[str, api.Change]]) -> str:
        change = item[1].get(key, api.UNMEASURED_CHANGE)
        text = _format_change((change.reference.value, change.other.value), "fraction")
        return text + (" *" if change.significant else "") if key in item[1] else DASH

    drops = {"rejected_tokens": 0, "ess_token": 0, "ess_sequence": 1}
    columns = [doc.Column(SHORT_TITLES[key], partial(pair, key), drop=drop) for key, drop in drops.items()]
    names = doc.Column("correction", lambda item: item[0], "name")
    caption = "Corrections: reference → compared run (* marks a significant change)"
    return doc.Table.of(caption, api.active_corrections(contrast), [names, *columns], reach=doc.TERMINAL_AND_PAGE)


def _format_change(ends: Iterable[float | None], unit: str = "") -> str:
    return " → ".join(format_number(end, unit) for end in ends)


def _contributions_table(contrast: api.Contrast) -> doc.Table:
    def share(item: tuple[api.Decomposition, api.Contribution]) -> doc.TableCell:
        value = item[1].total / item[0].difference if item[0].difference else None
        return doc.number_cell(value, form=lambda value: DASH if value is None else f"{100 * value:.1f}%")

    columns = [
        doc.Column("part", lambda item: api.format_part(*item), "name"),
        doc.Column("contribution", lambda item: doc.number_cell(
            item[1].total, form=lambda total: form.format_estimate(total, item[1].se)), unit="nats/token", drop=0,
            short="contribution ± half 95% interval"),
        doc.Column("share of the change", share, drop=1),
        doc.Column("K3 of the part", lambda item: _format_change(item[1].k3), drop=2),
        doc.Column("its share of the tokens", lambda item: _format_change(item[1].tokens, "fraction"), drop=4),
    ]  # fmt: skip
    items = [(found, part) for found in contrast.decompositions for part in found.parts[:MAX_PARTS]]
    return doc.Table.of(
        "Largest contributions to the change of K3", items, columns, sortable=True, max_rows=TERMINAL_PARTS,
        reach=doc.TERMINAL_AND_PAGE,
    )  # fmt: skip


def changes_figure(comparison: api.Comparison, name: str) -> Figure | None:
    keys, several = api.list_main_metrics(comparison.contrasts[0]), len(comparison.contrasts) > 1
    titles = {key: find_metric(key).title for key in keys if key != "tokens"}
    series: dict[str, dict[str, Interval]] = {
        shorten(own.other, 24) if several else "change": {
            title: (own.changes[key].relative, *(own.changes[key].relative_interval or (None, None)))
            for key, title in titles.items()
            if key in own.changes and own.changes[key].relative is not None
        }
        for own in comparison.contrasts
    }
    return rows_figure(
        name, "Change of the main metrics",
        "If the interval of a metric includes 0%, the metric did not change significantly.",
        change_axis("relative change", series), series, rule=(0.0, ""), size="wide",
    )  # fmt: skip


def contributions_figure(decomposition: api.Decomposition, name: str) -> Figure | None:
    """Draw how each part of the data changed K3: in total, by its own K3 and by its share of the tokens."""
    parts = {api.format_part(decomposition, part): part for part in decomposition.parts[:MAX_DRAWN]}
    if not any(part.total for part in parts.values()):
        return None
    series: dict[str, dict[str, Interval]] = {
        "whole contribution": {row: interval_of(part.total, part.se) for row, part in parts.items()},
        "level: change of the part's K3": {row: (part.level, None, None) for row, part in parts.items()},
        "mix: change of the part's share of tokens": {row: (part.mix, None, None) for row, part in parts.items()},
    }
    noun, largest = shorten(decomposition.quantity, 40), max(parts, key=lambda row: abs(parts[row].total))
    moved = " of ".join(api.format_signed(change) for change in (parts[largest].total, decomposition.difference))
    return rows_figure(
        name, f"{shorten(largest, 2 * MAX_NAME)} contributes most to the change of K3: {moved} nats/token",
        f"Each row is one part of the data. The figure shows at most {MAX_DRAWN} parts, those with the largest "
        "contributions. The contributions of all parts add up to the change of K3.",
        Axis("contribution (nats/token)"), series, noun=noun.replace("surprisal", "probability"), rule=(0.0, ""),
    )  # fmt: skip
