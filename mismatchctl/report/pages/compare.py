"""First screen and page of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mismatchctl.api.compare.comparison import (
    UNMEASURED_CHANGE,
    Change,
    Comparison,
    Contrast,
    ContrastStatus,
    Contribution,
    Decomposition,
    PairedTokens,
    active_corrections,
    change_label,
    contrast_details,
    contrast_headline,
    describe_carriers,
    describe_doubt,
    describe_growth,
    describe_method,
    describe_size,
    describe_token_pairs,
    format_part,
    format_signed,
    format_signed_percent,
    judge_contrast,
    k3_change,
    list_changed_metrics,
    list_main_metrics,
)
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
from mismatchctl.report.document import (
    EVERYWHERE,
    PAGE_ONLY,
    TERMINAL_AND_PAGE,
    ColumnHeader,
    DeferredSection,
    Document,
    DocumentPart,
    Facts,
    Figures,
    Headline,
    Note,
    Section,
    Table,
    TableCell,
    TableColumns,
)
from mismatchctl.report.pages.run_tables import PLACE_COLUMNS, token_columns
from mismatchctl.report.tables import SHORT_TITLES, MetricRegistry, number_cell, text_cell, value_cell
from mismatchctl.results.summary import STATUSES

MAX_DETAILED_CONTRASTS = 3
"""Maximum comparisons with their own tables in a terminal."""
MAX_PARTS, MAX_TOKENS, TERMINAL_PARTS = 50, 30, 9
MAX_SCREEN_METRICS, MAX_SCREEN_RUNS = 7, 12


def compare_screen(comparison: Comparison, page: Document | None = None) -> Document:
    """Build the first screen of a comparison, or the whole `page` of it below the answer."""
    worst = min(comparison.contrasts, key=_severity)
    screen = Document(_headline(comparison))
    if page is None:
        notes = (Note(escape_terminal(shorten(text, 150)), "alarm") for text in comparison.warnings[:1])
        screen.add(Section("", "answer").add(*_answer_parts(comparison), *_screen_metrics(comparison), *notes))
    else:
        screen.sections += page.sections[1:]
    more = [("Details", "-v")] if page is None else []
    screen.commands = [*more, ("Report", "--html report.html"), ("Next", _next_command(comparison, worst))]
    return screen


def document(comparison: Comparison) -> Document:
    """Build the page of a comparison."""
    registry, contrasts = MetricRegistry(comparison.corrections), comparison.contrasts
    tokens = sum(int(side.metrics["tokens"].value or 0) for side in comparison.sides)
    head = _headline(comparison)
    head.facts, head.subtitle = [f"{len(comparison.sides)} runs", f"{tokens:,} tokens"], "compare"
    doc = Document(head, version=escape_terminal(comparison.version))
    answer = Section("", "answer").add(
        *_answer_parts(comparison),
        Facts([("next", _next_command(comparison, min(contrasts, key=_severity)))]),
        DeferredSection(lambda: _answer_figure(comparison)),
    )
    doc.add(answer)
    doc.add(*(_contrast_section(comparison, contrast, index, registry) for index, contrast in enumerate(contrasts)))
    doc.add(DeferredSection(lambda: [_distributions_section(comparison)]))
    method = describe_method(comparison)
    sides = Section("Runs", "sides", lead=method, folded=True).add(_sides_table(comparison, registry))
    warnings = (Note(escape_terminal(text), "alarm") for text in comparison.warnings)
    doc.glossary = lambda: [("Compared", [*registry.entries("m"), *registry.entries("c")])]
    return doc.add(sides, Section("", "method").add(Note(method, "quiet", reach=TERMINAL_AND_PAGE), *warnings))


def _severity(contrast: Contrast) -> tuple[int, float]:
    """Return a key that sorts contrasts by status, then by the rise of K3, the worst first."""
    return STATUSES.index(judge_contrast(contrast).status), -(k3_change(contrast).relative or 0.0)


def _headline(comparison: Comparison) -> Headline:
    judged = [judge_contrast(contrast) for contrast in comparison.contrasts]
    worst = min(comparison.contrasts, key=_severity)
    bad = sum(one.status != "OK" for one in judged)
    title = f"{bad} of {len(judged)} runs need{'s' * (bad == 1)} attention"
    if len(judged) == 1:
        title = escape_terminal(contrast_headline(worst))
    elif not bad:
        title = f"0 of {len(judged)} runs are worse"
    return Headline(title, status=judge_contrast(worst).status)


def _next_command(comparison: Comparison, worst: Contrast) -> str:
    side = comparison.side(worst.other)
    if side.kind == "result":
        return format_command("report", [side.source], "--html report.html")
    if judge_contrast(worst).status == "OK":
        return format_command("gate", [side.source], "--save-baseline ok.json --accept")
    return format_command("diagnose", [side.source])


def _answer_parts(comparison: Comparison) -> Iterator[DocumentPart]:
    """Yield the facts of the only run, or a table of the runs."""
    if len(comparison.contrasts) > 1:
        yield _runs_table(comparison)
        return
    (contrast,) = comparison.contrasts
    rows = [("runs", f"{contrast.other} compared with {comparison.reference.name}, {contrast.paired}")]
    rows += [("why", reason) for reason in describe_doubt(contrast)]
    rows += [("where", text) for text in [*describe_carriers(contrast)][:2] if k3_change(contrast).significant]
    rows += [("trend", text) for text in [*describe_growth(contrast.growth)][:1] if contrast.growth.quotient.changed]
    if contrast.tokens is not None:
        rows.append(("tokens", describe_token_pairs(contrast)))
    yield Facts([(name, escape_terminal(shorten(text, 145))) for name, text in rows])


def _screen_metrics(comparison: Comparison) -> Iterator[DocumentPart]:
    """Yield the changed metrics of the only run."""
    if len(comparison.contrasts) > 1:
        return
    (contrast,) = comparison.contrasts
    keys = list_changed_metrics(contrast)
    if keys:
        yield _changes_table("", keys[:MAX_SCREEN_METRICS], contrast.changes, MetricRegistry(), brief=True)
    if len(keys) > MAX_SCREEN_METRICS:
        yield Note(f"{format_count(len(keys) - MAX_SCREEN_METRICS, 'more changed metric')}: -v")


def _runs_table(comparison: Comparison) -> Table:
    """Return one row per compared run, the worst first."""

    def change(row: tuple[Contrast, ContrastStatus]) -> str:
        found = row[0].changes.get(row[1].key, UNMEASURED_CHANGE)
        return describe_size(row[1].key, found, interval=False) if found.difference else contrast_headline(row[0])

    rows = [(contrast, judge_contrast(contrast)) for contrast in sorted(comparison.contrasts, key=_severity)]
    columns: TableColumns[tuple[Contrast, ContrastStatus]] = (
        ("run", lambda row: text_cell(row[0].other, "name")),
        (ColumnHeader("status", numeric=False, drop=0), lambda row: row[1].status),
        (ColumnHeader("K3", drop=0), lambda row: format_number(k3_change(row[0]).other.value)),
        (ColumnHeader("change", numeric=False, drop=1, flexible=True), change),
    )
    reference = comparison.reference
    title = f"Reference: {escape_terminal(reference.name)}, K3 {value_cell(reference.metrics['k3'], '').brief}"
    if len(rows) > MAX_SCREEN_RUNS:
        title += f". {MAX_SCREEN_RUNS} of {len(rows)} runs, all with -v"
    return Table.of("", rows[:MAX_SCREEN_RUNS], columns, title=title, reach=EVERYWHERE)


def _answer_figure(comparison: Comparison) -> Iterator[Figures]:
    from mismatchctl.report.figures.bars import changes_figure  # slow import, only needed for HTML

    keys = [key for key in list_main_metrics(comparison.contrasts[0]) if key != "tokens"]
    titles = {key: MetricRegistry().metric(key).title for key in keys}
    changes = {contrast.other: contrast.changes for contrast in comparison.contrasts}
    yield Figures([changes_figure(changes, titles, "changes")])


def _distributions_section(comparison: Comparison) -> Section:
    # slow import, only needed for HTML
    from mismatchctl.report.figures.distributions import breakdowns_figure, distributions_figure

    sides = comparison.sides
    found = [distributions_figure({side.name: side.distribution for side in sides})]
    breakdowns = comparison.reference.breakdowns
    for quantity, name in zip(breakdowns, file_stems(breakdowns), strict=True):
        having = {side.name: side.breakdowns[quantity] for side in sides if quantity in side.breakdowns}
        found.append(breakdowns_figure(having, f"k3_by_{name}"))
    return Section("Distributions", "overlaid", folded=True).add(Figures(found))


def _contrast_section(comparison: Comparison, contrast: Contrast, index: int, registry: MetricRegistry) -> Section:
    """Build the section of one run compared with the reference."""
    anchor, alone = f"contrast-{index}", len(comparison.contrasts) == 1
    judged, keys = judge_contrast(contrast), list_main_metrics(contrast)
    name, reference = escape_terminal(contrast.other), escape_terminal(comparison.reference.name)
    brief = len(comparison.contrasts) > MAX_DETAILED_CONTRASTS
    heading = f"Metrics ({max(len(contrast.changes) - len(keys), 0)} more in --json and --html)"
    main = _changes_table(
        "Main metrics and other significant changes.", keys, contrast.changes, registry, title=heading
    )
    corrections = _corrections_table(contrast)
    title, note = ("What changed", "") if alone else (f"{name} against {reference}", contrast_headline(contrast))
    section = Section(title, anchor, level=judged.status, note=escape_terminal(note))
    section.add(*(Note(escape_terminal(line), "quiet") for line in contrast_details(contrast)))
    notes = [
        Note(f"* {registry.metric(key).title}: {contrast.changes[key].note}", "quiet")
        for key in keys
        if contrast.changes[key].note
    ]
    parts = _contributions_table(contrast)
    for part in (main, corrections, parts, *notes):
        part.reach = PAGE_ONLY if brief else part.reach
    stems = file_stems([each.other for each in comparison.contrasts])
    prefix = "" if alone else f"{stems[index]}-"
    lead = (
        "The change of K3 by each quantity: how much comes from a larger or smaller K3 of the same tokens (level), "
        "and how much from more or fewer tokens (mix)."
    )
    section.add(main, *notes, corrections)
    changed = k3_change(contrast).difference not in (None, 0)
    section.add(
        Section("Contributions to the change", f"{anchor}-parts", lead=lead, folded=True).add(
            DeferredSection(lambda: [_contribution_figures(contrast, prefix)]), parts if changed else None
        )
    )
    if contrast.tokens is not None:
        tokens = Section("Tokens with the largest change", f"{anchor}-moved", folded=True)
        section.add(tokens.add(_token_table(contrast.tokens)))
    every = [("All metrics", contrast.changes, "m")]
    every += [(f"Correction {escape_terminal(name)}", changes, "c") for name, changes in contrast.corrections.items()]
    numbers = Section("All numbers", f"{anchor}-all", folded=True)
    return section.add(
        numbers.add(
            *(_changes_table(title, list(c), c, registry, scope, folded=True, reach=2) for title, c, scope in every)
        )
    )


def _contribution_figures(contrast: Contrast, prefix: str) -> Figures:
    from mismatchctl.report.figures.bars import contributions_figure  # slow import, only needed for HTML

    stems = file_stems([found.quantity for found in contrast.decompositions])
    by = zip(stems, contrast.decompositions, strict=True)
    return Figures([contributions_figure(found, f"{prefix}change_by_{quantity}") for quantity, found in by])


def _changes_table(
    caption: str, keys: Sequence[str], changes: Mapping[str, Change], registry: MetricRegistry, scope: str = "m",
    *, brief: bool = False, reach: int = EVERYWHERE, **more: Any,
) -> Table:  # fmt: skip
    """Return one row per metric. `brief` leaves out errors and tests."""

    def form(key: str) -> Callable[[float | None], str]:
        if changes[key].relative is not None:
            return format_signed_percent
        points = registry.metric(key, scope).unit == "fraction"
        return lambda value: f"{100 * value:+.3g} pp" if points and value is not None else format_signed(value)

    def size(key: str) -> TableCell:
        change = changes[key]
        return _amount_cell(change.difference if change.relative is None else change.relative, form(key))

    def interval(key: str) -> TableCell:
        change = changes[key]
        ends = change.interval if change.relative is None else change.relative_interval
        text = DASH if ends is None else " to ".join(map(form(key), ends))
        return TableCell(text, "" if change.status == "ok" else change.status)

    def verdict(key: str) -> TableCell:
        word = change_label(changes[key])
        reason = "" if brief else changes[key].note
        return TableCell(word, reason, kind="alarm" if word == "worse" and not brief else "text")

    def side(name: str) -> Callable[[str], TableCell]:
        return lambda key: value_cell(getattr(changes[key], name), registry.metric(key, scope).unit, errors=not brief)

    details: TableColumns[str] = (
        (ColumnHeader("interval", description="95%, for this metric alone", drop=1), interval),
        (ColumnHeader("p", description="two-sided, adjusted for the other metrics"),
         lambda key: _amount_cell(changes[key].p, format_number)),
    )  # fmt: skip
    columns: list[Any] = [
        ("metric", lambda key: TableCell(
            registry.metric(key, scope).title, kind="name", anchor="" if brief else f"{scope}-{key}")),
        (ColumnHeader("reference", drop=0), side("reference")),
        (ColumnHeader("other", drop=0), side("other")),
        (ColumnHeader("change", drop=0), size),
        *(() if brief else details),
        (ColumnHeader("", numeric=False, drop=0) if brief else ColumnHeader("verdict", numeric=False, drop=0), verdict),
    ]  # fmt: skip
    return Table.of(caption, keys, columns, sortable=not brief, reach=reach, **more)


def _sides_table(comparison: Comparison, registry: MetricRegistry) -> Table:
    """Return one row per run, the reference first."""
    keys = ("tokens", "sequences", "k3", "abs_diff_mean", "abs_diff_max", "ess_sequence")
    columns: list[Any] = [
        ("run", lambda side: TableCell(escape_terminal(side.name), kind="name")),
        ("from", lambda side: text_cell(side.source, "path")),
        ("what it is", lambda side: text_cell(side.kind)),
        *registry.columns(keys, lambda side: side.metrics),
    ]
    return Table.of("Runs. The first is the reference.", comparison.sides, columns)


def _corrections_table(contrast: Contrast) -> Table:
    """Return each correction's metrics in the reference and the other run."""

    def pair(key: str) -> Callable[[tuple[str, Mapping[str, Change]]], str]:
        def text(item: tuple[str, Mapping[str, Change]]) -> str:
            change = item[1].get(key, UNMEASURED_CHANGE)
            ends = (format_number(side.value, "fraction") for side in (change.reference, change.other))
            return " → ".join(ends) + (" *" if change.significant else "") if key in item[1] else DASH

        return text

    columns: list[Any] = [("correction", lambda item: text_cell(item[0], "name"))]
    for key, drop in {"rejected_tokens": 0, "ess_token": 0, "ess_sequence": 1}.items():
        columns.append((ColumnHeader(SHORT_TITLES[key], drop=drop), pair(key)))
    caption = "Corrections: reference → other (* significant)"
    return Table.of(caption, active_corrections(contrast), columns, reach=TERMINAL_AND_PAGE)


def _contributions_table(contrast: Contrast) -> Table:
    """Return the contributions to the change of K3 by each quantity, largest first."""

    def share(item: tuple[Decomposition, Contribution]) -> TableCell:
        value = item[1].total / item[0].difference if item[0].difference else None
        return _amount_cell(value, lambda value: DASH if value is None else f"{100 * value:.1f}%")

    columns: TableColumns[tuple[Decomposition, Contribution]] = (
        ("part", lambda item: text_cell(format_part(*item), "name")),
        (ColumnHeader("contribution", "nats/token", drop=0), lambda item: TableCell(
            format_estimate(item[1].total, item[1].se), sort_key=f"{item[1].total:.6g}")),
        (ColumnHeader("of the change", drop=1), share),
        (ColumnHeader("level", description="K3 there is larger or smaller", drop=4),
         lambda item: _amount_cell(item[1].level, format_signed)),
        (ColumnHeader("mix", description="more or fewer tokens are there", drop=4),
         lambda item: _amount_cell(item[1].mix, format_signed)),
        (ColumnHeader("K3 there, reference", drop=2), lambda item: _amount_cell(item[1].k3[0], format_number)),
        (ColumnHeader("other"), lambda item: _amount_cell(item[1].k3[1], format_number)),
        (ColumnHeader("tokens there, reference", drop=5), lambda item: number_cell(item[1].tokens[0], "fraction")),
        (ColumnHeader("other"), lambda item: number_cell(item[1].tokens[1], "fraction")),
    )  # fmt: skip
    items = [(found, part) for found in contrast.decompositions for part in found.parts[:MAX_PARTS]]
    left = sum(max(len(found.parts) - MAX_PARTS, 0) for found in contrast.decompositions)
    return Table.of(
        "Largest contributions to the change of K3", items, columns, sortable=True, max_rows=TERMINAL_PARTS,
        left_out=f"The first {MAX_PARTS} of each quantity. The JSON contains all." if left else "",
        reach=TERMINAL_AND_PAGE,
    )  # fmt: skip


def _amount_cell(value: float | None, text: Callable[[float | None], str]) -> TableCell:
    return TableCell(text(value), sort_key="" if value is None else f"{value:.6g}")


def _token_table(paired: PairedTokens) -> Table | None:
    """Return the tokens with the largest change of K3."""
    rows = paired.most_moved[:MAX_TOKENS]
    fields = {"rollout": "rollout_log_prob", "train": "train_log_prob", "log ratio": "log_ratio"}
    same = {"rollout": paired.same_rollout, "train": paired.same_train}
    columns: list[Any] = [
        *PLACE_COLUMNS,
        *token_columns(rows),
        (ColumnHeader("change of K3", "nats"), lambda row: _amount_cell(row.k3_change, format_signed)),
    ]
    for what, name in fields.items():
        for place, side in enumerate(("reference", "other") if not same.get(what, False) else ()):
            value = lambda row, name=name, place=place: number_cell(getattr(row, name)[place])  # noqa: E731
            columns.append((ColumnHeader(f"{what}, {side}"), value))
    caption = f"The {len(rows)} tokens with the largest change of K3. Rows and positions are in the other dump."
    return Table.of(caption, rows, columns, sortable=True) if rows else None
