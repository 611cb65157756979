"""First screen and page of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mismatchctl.api.compare import comparison as api
from mismatchctl.core.formatting import (
    DASH,
    escape_terminal,
    file_stems,
    format_command,
    format_count,
    format_estimate,
    format_number,
    shorten,
)
from mismatchctl.report import document as doc
from mismatchctl.report.pages.run_tables import PLACE_COLUMNS, token_columns
from mismatchctl.report.tables import SHORT_TITLES, MetricRegistry, number_cell, text_cell, value_cell
from mismatchctl.results.summary import STATUSES

MAX_DETAILED_CONTRASTS = 3
"""Maximum comparisons with their own tables in a terminal."""
MAX_PARTS, MAX_TOKENS, TERMINAL_PARTS = 50, 30, 9
MAX_SCREEN_METRICS, MAX_SCREEN_RUNS = 7, 12


def compare_screen(comparison: api.Comparison, page: doc.Document | None = None) -> doc.Document:
    """Build the first screen of a comparison, or the whole `page` of it below the answer."""
    worst = min(comparison.contrasts, key=_severity)
    screen = doc.Document(_headline(comparison))
    if page is None:
        notes = (doc.Note(escape_terminal(shorten(text, 150)), "alarm") for text in comparison.warnings[:1])
        screen.add(doc.Section("", "answer").add(*_answer_parts(comparison), *_screen_metrics(comparison), *notes))
    else:
        screen.sections += page.sections[1:]
    more = [("Details", "-v")] if page is None else []
    screen.commands = [*more, ("Report", "--html report.html"), ("Next", _next_command(comparison, worst))]
    return screen


def document(comparison: api.Comparison) -> doc.Document:
    """Build the page of a comparison."""
    registry, contrasts = MetricRegistry(comparison.corrections), comparison.contrasts
    tokens = sum(int(side.metrics["tokens"].value or 0) for side in comparison.sides)
    head = _headline(comparison)
    head.facts, head.subtitle = [f"{len(comparison.sides)} runs", f"{tokens:,} tokens"], "compare"
    made = doc.Document(head, version=escape_terminal(comparison.version))
    answer = doc.Section("", "answer").add(
        *_answer_parts(comparison),
        doc.Facts([("next", _next_command(comparison, min(contrasts, key=_severity)))]),
        doc.DeferredSection(lambda: _answer_figure(comparison)),
    )
    made.add(answer)
    made.add(*(_contrast_section(comparison, contrast, index, registry) for index, contrast in enumerate(contrasts)))
    made.add(doc.DeferredSection(lambda: [_distributions_section(comparison)]))
    method = api.describe_method(comparison)
    sides = doc.Section("Runs", "sides", lead=method, folded=True).add(_sides_table(comparison, registry))
    warnings = (doc.Note(escape_terminal(text), "alarm") for text in comparison.warnings)
    made.glossary = lambda: [("Compared", [*registry.entries("m"), *registry.entries("c")])]
    return made.add(
        sides, doc.Section("", "method").add(doc.Note(method, "quiet", reach=doc.TERMINAL_AND_PAGE), *warnings)
    )


def _severity(contrast: api.Contrast) -> tuple[int, float]:
    return STATUSES.index(api.judge_contrast(contrast).status), -(api.k3_change(contrast).relative or 0.0)


def _headline(comparison: api.Comparison) -> doc.Headline:
    judged = [api.judge_contrast(contrast) for contrast in comparison.contrasts]
    worst = min(comparison.contrasts, key=_severity)
    bad = sum(one.status != "OK" for one in judged)
    title = f"{bad} of {len(judged)} runs need{'s' * (bad == 1)} attention"
    if len(judged) == 1:
        title = escape_terminal(api.contrast_headline(worst))
    elif not bad:
        title = f"0 of {len(judged)} runs are worse"
    return doc.Headline(title, status=api.judge_contrast(worst).status)


def _next_command(comparison: api.Comparison, worst: api.Contrast) -> str:
    side = comparison.side(worst.other)
    if side.kind == "result":
        return format_command("report", [side.source], "--html report.html")
    if api.judge_contrast(worst).status == "OK":
        return format_command("gate", [side.source], "--save-baseline ok.json --accept")
    return format_command("diagnose", [side.source])


def _answer_parts(comparison: api.Comparison) -> Iterator[doc.DocumentPart]:
    if len(comparison.contrasts) > 1:
        yield _runs_table(comparison)
        return
    (contrast,) = comparison.contrasts
    rows = [("runs", f"{contrast.other} compared with {comparison.reference.name}, {contrast.paired}")]
    rows += [("why", reason) for reason in api.describe_doubt(contrast)]
    rows += [("where", text) for text in [*api.describe_carriers(contrast)][:2] if api.k3_change(contrast).significant]
    rows += [
        ("trend", text) for text in [*api.describe_growth(contrast.growth)][:1] if contrast.growth.quotient.changed
    ]
    if contrast.tokens is not None:
        rows.append(("tokens", api.describe_token_pairs(contrast)))
    yield doc.Facts([(name, escape_terminal(shorten(text, 145))) for name, text in rows])


def _screen_metrics(comparison: api.Comparison) -> Iterator[doc.DocumentPart]:
    if len(comparison.contrasts) > 1:
        return
    (contrast,) = comparison.contrasts
    keys = api.list_changed_metrics(contrast)
    if keys:
        yield _changes_table("", keys[:MAX_SCREEN_METRICS], contrast.changes, MetricRegistry(), brief=True)
    if len(keys) > MAX_SCREEN_METRICS:
        yield doc.Note(f"{format_count(len(keys) - MAX_SCREEN_METRICS, 'more changed metric')}: -v")


def _runs_table(comparison: api.Comparison) -> doc.Table:
    def change(row: tuple[api.Contrast, api.ContrastStatus]) -> str:
        found = row[0].changes.get(row[1].key, api.UNMEASURED_CHANGE)
        return (
            api.describe_size(row[1].key, found, interval=False) if found.difference else api.contrast_headline(row[0])
        )

    rows = [(contrast, api.judge_contrast(contrast)) for contrast in sorted(comparison.contrasts, key=_severity)]
    columns: doc.TableColumns[tuple[api.Contrast, api.ContrastStatus]] = (
        ("run", lambda row: text_cell(row[0].other, "name")),
        (doc.ColumnHeader("status", numeric=False, drop=0), lambda row: row[1].status),
        (doc.ColumnHeader("K3", drop=0), lambda row: format_number(api.k3_change(row[0]).other.value)),
        (doc.ColumnHeader("change", numeric=False, drop=1, flexible=True), change),
    )
    reference = comparison.reference
    title = f"Reference: {escape_terminal(reference.name)}, K3 {value_cell(reference.metrics['k3'], '').brief}"
    if len(rows) > MAX_SCREEN_RUNS:
        title += f". {MAX_SCREEN_RUNS} of {len(rows)} runs, all with -v"
    return doc.Table.of("", rows[:MAX_SCREEN_RUNS], columns, title=title, reach=doc.EVERYWHERE)


def _answer_figure(comparison: api.Comparison) -> Iterator[doc.Figures]:
    from mismatchctl.report.figures.bars import changes_figure  # slow import, only needed for HTML

    keys = [key for key in api.list_main_metrics(comparison.contrasts[0]) if key != "tokens"]
    titles = {key: MetricRegistry().metric(key).title for key in keys}
    changes = {contrast.other: contrast.changes for contrast in comparison.contrasts}
    yield doc.Figures([changes_figure(changes, titles, "changes")])


def _distributions_section(comparison: api.Comparison) -> doc.Section:
    # slow import, only needed for HTML
    from mismatchctl.report.figures.distributions import breakdowns_figure, distributions_figure

    sides = comparison.sides
    found = [distributions_figure({side.name: side.distribution for side in sides})]
    breakdowns = comparison.reference.breakdowns
    for quantity, name in zip(breakdowns, file_stems(breakdowns), strict=True):
        having = {side.name: side.breakdowns[quantity] for side in sides if quantity in side.breakdowns}
        found.append(breakdowns_figure(having, f"k3_by_{name}"))
    return doc.Section("Distributions", "overlaid", folded=True).add(doc.Figures(found))


def _contrast_section(
    comparison: api.Comparison, contrast: api.Contrast, index: int, registry: MetricRegistry
) -> doc.Section:
    anchor, alone = f"contrast-{index}", len(comparison.contrasts) == 1
    judged, keys = api.judge_contrast(contrast), api.list_main_metrics(contrast)
    name, reference = escape_terminal(contrast.other), escape_terminal(comparison.reference.name)
    brief = len(comparison.contrasts) > MAX_DETAILED_CONTRASTS
    heading = f"Metrics ({max(len(contrast.changes) - len(keys), 0)} more in --json and --html)"
    main = _changes_table(
        "Main metrics and other significant changes.", keys, contrast.changes, registry, title=heading
    )
    corrections = _corrections_table(contrast)
    title, note = ("What changed", "") if alone else (f"{name} against {reference}", api.contrast_headline(contrast))
    section = doc.Section(title, anchor, level=judged.status, note=escape_terminal(note))
    section.add(*(doc.Note(escape_terminal(line), "quiet") for line in api.contrast_details(contrast)))
    notes = [
        doc.Note(f"* {registry.metric(key).title}: {contrast.changes[key].note}", "quiet")
        for key in keys
        if contrast.changes[key].note
    ]
    parts = _contributions_table(contrast)
    for part in (main, corrections, parts, *notes):
        part.reach = doc.PAGE_ONLY if brief else part.reach
    stems = file_stems([each.other for each in comparison.contrasts])
    prefix = "" if alone else f"{stems[index]}-"
    lead = (
        "The change of K3 by each quantity: how much comes from a larger or smaller K3 of the same tokens (level), "
        "and how much from more or fewer tokens (mix)."
    )
    section.add(main, *notes, corrections)
    changed = api.k3_change(contrast).difference not in (None, 0)
    section.add(
        doc.Section("Contributions to the change", f"{anchor}-parts", lead=lead, folded=True).add(
            doc.DeferredSection(lambda: [_contribution_figures(contrast, prefix)]), parts if changed else None
        )
    )
    if contrast.tokens is not None:
        tokens = doc.Section("Tokens with the largest change", f"{anchor}-moved", folded=True)
        section.add(tokens.add(_token_table(contrast.tokens)))
    every = [("All metrics", contrast.changes, "m")]
    every += [(f"Correction {escape_terminal(name)}", changes, "c") for name, changes in contrast.corrections.items()]
    numbers = doc.Section("All numbers", f"{anchor}-all", folded=True)
    return section.add(
        numbers.add(
            *(_changes_table(title, list(c), c, registry, scope, folded=True, reach=2) for title, c, scope in every)
        )
    )


def _contribution_figures(contrast: api.Contrast, prefix: str) -> doc.Figures:
    from mismatchctl.report.figures.bars import contributions_figure  # slow import, only needed for HTML

    stems = file_stems([found.quantity for found in contrast.decompositions])
    by = zip(stems, contrast.decompositions, strict=True)
    return doc.Figures([contributions_figure(found, f"{prefix}change_by_{quantity}") for quantity, found in by])


def _changes_table(
    caption: str, keys: Sequence[str], changes: Mapping[str, api.Change], registry: MetricRegistry, scope: str = "m",
    *, brief: bool = False, reach: int = doc.EVERYWHERE, **more: Any,
) -> doc.Table:  # fmt: skip
    """Return one row per metric. `brief` leaves out errors and tests."""

    def form(key: str) -> Callable[[float | None], str]:
        if changes[key].relative is not None:
            return api.format_signed_percent
        points = registry.metric(key, scope).unit == "fraction"
        return lambda value: f"{100 * value:+.3g} pp" if points and value is not None else api.format_signed(value)

    def size(key: str) -> doc.TableCell:
        change = changes[key]
        return _amount_cell(change.difference if change.relative is None else change.relative, form(key))

    def interval(key: str) -> doc.TableCell:
        change = changes[key]
        ends = change.interval if change.relative is None else change.relative_interval
        text = DASH if ends is None else " to ".join(map(form(key), ends))
        return doc.TableCell(text, "" if change.status == "ok" else change.status)

    def verdict(key: str) -> doc.TableCell:
        word = api.change_label(changes[key])
        reason = "" if brief else changes[key].note
        return doc.TableCell(word, reason, kind="alarm" if word == "worse" and not brief else "text")

    def side(name: str) -> Callable[[str], doc.TableCell]:
        return lambda key: value_cell(getattr(changes[key], name), registry.metric(key, scope).unit, errors=not brief)

    details: doc.TableColumns[str] = (
        (doc.ColumnHeader("interval", description="95%, for this metric alone", drop=1), interval),
        (doc.ColumnHeader("p", description="two-sided, adjusted for the other metrics"),
         lambda key: _amount_cell(changes[key].p, format_number)),
    )  # fmt: skip
    columns: list[Any] = [
        ("metric", lambda key: doc.TableCell(
            registry.metric(key, scope).title, kind="name", anchor="" if brief else f"{scope}-{key}")),
        (doc.ColumnHeader("reference", drop=0), side("reference")),
        (doc.ColumnHeader("other", drop=0), side("other")),
        (doc.ColumnHeader("change", drop=0), size),
        *(() if brief else details),
        (doc.ColumnHeader("" if brief else "verdict", numeric=False, drop=0), verdict),
    ]  # fmt: skip
    return doc.Table.of(caption, keys, columns, sortable=not brief, reach=reach, **more)


def _sides_table(comparison: api.Comparison, registry: MetricRegistry) -> doc.Table:
    keys = ("tokens", "sequences", "k3", "abs_diff_mean", "abs_diff_max", "ess_sequence")
    columns: list[Any] = [
        ("run", lambda side: doc.TableCell(escape_terminal(side.name), kind="name")),
        ("from", lambda side: text_cell(side.source, "path")),
        ("what it is", lambda side: text_cell(side.kind)),
        *registry.columns(keys, lambda side: side.metrics),
    ]
    return doc.Table.of("Runs. The first is the reference.", comparison.sides, columns)


def _corrections_table(contrast: api.Contrast) -> doc.Table:
    def pair(key: str) -> Callable[[tuple[str, Mapping[str, api.Change]]], str]:
        def text(item: tuple[str, Mapping[str, api.Change]]) -> str:
            change = item[1].get(key, api.UNMEASURED_CHANGE)
            ends = (format_number(side.value, "fraction") for side in (change.reference, change.other))
            return " → ".join(ends) + (" *" if change.significant else "") if key in item[1] else DASH

        return text

    columns: list[Any] = [("correction", lambda item: text_cell(item[0], "name"))]
    for key, drop in {"rejected_tokens": 0, "ess_token": 0, "ess_sequence": 1}.items():
        columns.append((doc.ColumnHeader(SHORT_TITLES[key], drop=drop), pair(key)))
    caption = "Corrections: reference → other (* significant)"
    return doc.Table.of(caption, api.active_corrections(contrast), columns, reach=doc.TERMINAL_AND_PAGE)


def _contributions_table(contrast: api.Contrast) -> doc.Table:
    def share(item: tuple[api.Decomposition, api.Contribution]) -> doc.TableCell:
        value = item[1].total / item[0].difference if item[0].difference else None
        return _amount_cell(value, lambda value: DASH if value is None else f"{100 * value:.1f}%")

    columns: doc.TableColumns[tuple[api.Decomposition, api.Contribution]] = (
        ("part", lambda item: text_cell(api.format_part(*item), "name")),
        (doc.ColumnHeader("contribution", "nats/token", drop=0), lambda item: doc.TableCell(
            format_estimate(item[1].total, item[1].se), sort_key=f"{item[1].total:.6g}")),
        (doc.ColumnHeader("of the change", drop=1), share),
        (doc.ColumnHeader("level", description="change from a larger or smaller K3 of these tokens", drop=4),
         lambda item: _amount_cell(item[1].level, api.format_signed)),
        (doc.ColumnHeader("mix", description="change from more or fewer of these tokens", drop=4),
         lambda item: _amount_cell(item[1].mix, api.format_signed)),
        (doc.ColumnHeader("K3 there, reference", drop=2), lambda item: _amount_cell(item[1].k3[0], format_number)),
        (doc.ColumnHeader("other"), lambda item: _amount_cell(item[1].k3[1], format_number)),
        (doc.ColumnHeader("tokens there, reference", drop=5), lambda item: number_cell(item[1].tokens[0], "fraction")),
        (doc.ColumnHeader("other"), lambda item: number_cell(item[1].tokens[1], "fraction")),
    )  # fmt: skip
    items = [(found, part) for found in contrast.decompositions for part in found.parts[:MAX_PARTS]]
    left = sum(max(len(found.parts) - MAX_PARTS, 0) for found in contrast.decompositions)
    return doc.Table.of(
        "Largest contributions to the change of K3", items, columns, sortable=True, max_rows=TERMINAL_PARTS,
        left_out=f"The first {MAX_PARTS} of each quantity. The JSON contains all." if left else "",
        reach=doc.TERMINAL_AND_PAGE,
    )  # fmt: skip


def _amount_cell(value: float | None, text: Callable[[float | None], str]) -> doc.TableCell:
    return doc.TableCell(text(value), sort_key="" if value is None else f"{value:.6g}")


def _token_table(paired: api.PairedTokens) -> doc.Table | None:
    rows = paired.most_moved[:MAX_TOKENS]
    fields = {"rollout": "rollout_log_prob", "train": "train_log_prob", "log ratio": "log_ratio"}
    same = {"rollout": paired.same_rollout, "train": paired.same_train}
    columns: list[Any] = [
        *PLACE_COLUMNS,
        *token_columns(rows),
        (doc.ColumnHeader("change of K3", "nats"), lambda row: _amount_cell(row.k3_change, api.format_signed)),
    ]
    for what, name in fields.items():
        for place, side in enumerate(("reference", "other") if not same.get(what, False) else ()):
            value = lambda row, name=name, place=place: number_cell(getattr(row, name)[place])  # noqa: E731
            columns.append((doc.ColumnHeader(f"{what}, {side}"), value))
    caption = f"The {len(rows)} tokens with the largest change of K3, with the rows and positions of the compared dump."
    return doc.Table.of(caption, rows, columns, sortable=True) if rows else None
