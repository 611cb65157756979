"""The page of a Comparison: headline, contributions to the change, and all metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
from mismatchctl.measure.metrics.metric import Metric
from mismatchctl.report.document import (
    EVERYWHERE,
    PAGE_ONLY,
    TERMINAL_AND_PAGE,
    Card,
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
from mismatchctl.results.status import STATUSES

if TYPE_CHECKING:
    from mismatchctl.report.figures.figure import Figure

MAX_DETAILED_CONTRASTS = 3
"""Maximum comparisons with their own tables in a terminal."""
MAX_PARTS, MAX_TOKENS = 50, 30
MAX_SCREEN_METRICS, MAX_SCREEN_RUNS = 7, 12
_LEVELS = {"FAIL": "bad", "CHECK": "fair", "OK": "good"}
TERMINAL_PARTS = 3
"""Contributions per quantity in a terminal."""
_CORRECTION_METRICS = {"rejected_tokens": 0, "ess_token": 0, "ess_sequence": 1}
"""Metrics of corrections in a terminal with their `ColumnHeader.drop`."""


def document(comparison: Comparison) -> Document:
    """Build the page of a comparison."""
    registry, contrasts = MetricRegistry(comparison.corrections), comparison.contrasts
    title = f"{escape_terminal(contrasts[0].other) if len(contrasts) == 1 else f'{len(contrasts)} runs'} against"
    tokens = sum(int(side.metrics["tokens"].value or 0) for side in comparison.sides)
    facts = [f"{len(comparison.sides)} runs", f"{tokens:,} tokens"]
    head = Headline(f"{title} {escape_terminal(comparison.reference.name)}", facts, subtitle="compare")
    doc = Document(head, version=escape_terminal(comparison.version))
    doc.add(*(_contrast_section(comparison, contrast, index, registry) for index, contrast in enumerate(contrasts)))
    doc.add(
        DeferredSection(lambda: [Section("Distributions", "overlaid").add(Figures([*_overlaid_figures(comparison)]))])
    )
    method = describe_method(comparison)
    doc.add(Section("Runs", "sides", lead=method).add(_sides_table(comparison, registry)))
    warnings = (Note(escape_terminal(text), "alarm") for text in comparison.warnings)
    doc.glossary = lambda: [("Compared", [*registry.entries("m"), *registry.entries("c")])]
    return doc.add(Section("", "method").add(Note(method, "quiet", reach=TERMINAL_AND_PAGE), *warnings))


def compare_screen(comparison: Comparison, page: Document | None = None) -> Document:
    """Build the first screen of a comparison, or the whole `page` of it below the answer."""
    judged = [judge_contrast(contrast) for contrast in comparison.contrasts]
    contrast = min(comparison.contrasts, key=_severity)
    status = judge_contrast(contrast).status
    if len(judged) == 1:
        screen = Document(Headline(escape_terminal(contrast_headline(contrast)), status=status))
        parts = _screen_parts(comparison, contrast)
    else:
        bad = sum(one.status != "OK" for one in judged)
        attention = f"{bad} of {len(judged)} runs need{'s' * (bad == 1)} attention"
        screen = Document(Headline(attention if bad else f"none of {len(judged)} runs is worse", status=status))
        parts = iter([_screen_runs(comparison)])
    notes = [Note(escape_terminal(shorten(text, 150)), "alarm") for text in comparison.warnings[:1]]
    if page is None:
        screen.add(Section("", "answer").add(*parts, *notes))
    else:
        screen.sections += page.sections
    side = comparison.side(contrast.other)
    if side.kind == "result":
        following = format_command("report", [side.source], "--html report.html")
    elif status == "OK":
        following = format_command("gate", [side.source], "--save-baseline ok.json --accept")
    else:
        following = format_command("diagnose", [side.source])
    details = [("Details", "-v")] if page is None else []
    screen.commands = [*details, ("Report", "--html report.html"), ("Next", following)]
    return screen


def _screen_parts(comparison: Comparison, contrast: Contrast) -> Iterator[DocumentPart]:
    """Yield the facts and the changed metrics of one run."""
    rows = [("runs", f"{contrast.other} compared with {comparison.reference.name}, {contrast.paired}")]
    rows += [("why", reason) for reason in describe_doubt(contrast)]
    rows += [("where", text) for text in [*describe_carriers(contrast)][:2] if k3_change(contrast).significant]
    rows += [("trend", text) for text in [*describe_growth(contrast.growth)][:1] if contrast.growth.quotient.changed]
    if contrast.tokens is not None:
        rows.append(("tokens", describe_token_pairs(contrast)))
    yield Facts([(name, escape_terminal(shorten(text, 145))) for name, text in rows])
    keys = list_changed_metrics(contrast)
    if keys:
        yield _screen_metrics(contrast, keys[:MAX_SCREEN_METRICS])
    if len(keys) > MAX_SCREEN_METRICS:
        yield Note(f"{format_count(len(keys) - MAX_SCREEN_METRICS, 'more changed metric')}: -v")


def _screen_metrics(contrast: Contrast, keys: Sequence[str]) -> Table:
    registry = MetricRegistry()

    def size(key: str) -> str:
        change = contrast.changes[key]
        if change.relative is None and registry.metric(key).unit == "fraction" and change.difference is not None:
            return f"{100 * change.difference:+.3g} pp"
        return format_signed(change.difference) if change.relative is None else format_signed_percent(change.relative)

    columns: TableColumns[str] = (
        ("metric", lambda key: TableCell(registry.metric(key).title, kind="name")),
        (ColumnHeader("reference", drop=0), lambda key: value_cell(
            contrast.changes[key].reference, registry.metric(key).unit, errors=False)),
        (ColumnHeader("other", drop=0), lambda key: value_cell(
            contrast.changes[key].other, registry.metric(key).unit, errors=False)),
        (ColumnHeader("change", drop=0), size),
        (ColumnHeader("", numeric=False, drop=0), lambda key: change_label(contrast.changes[key])),
    )  # fmt: skip
    return Table.of("", keys, columns, reach=0)


def _screen_runs(comparison: Comparison) -> Table:
    """Return one row per compared run, the worst first."""
    rows = [(contrast, judge_contrast(contrast)) for contrast in sorted(comparison.contrasts, key=_severity)]
    columns: TableColumns[tuple[Contrast, ContrastStatus]] = (
        ("run", lambda row: text_cell(row[0].other, "name")),
        (ColumnHeader("status", numeric=False, drop=0), lambda row: row[1].status),
        (ColumnHeader("K3", drop=0), lambda row: format_number(k3_change(row[0]).other.value)),
        (ColumnHeader("change", numeric=False, drop=1, flexible=True), _short_answer),
    )
    reference = comparison.reference
    title = f"Reference: {escape_terminal(reference.name)}, K3 {value_cell(reference.metrics['k3'], '').brief}"
    if len(rows) > MAX_SCREEN_RUNS:
        title += f". {MAX_SCREEN_RUNS} of {len(rows)} runs, all with -v"
    return Table.of("", rows[:MAX_SCREEN_RUNS], columns, title=title, reach=0)


def _severity(contrast: Contrast) -> tuple[int, float]:
    """Return a key that sorts contrasts by status, then by the rise of K3, the worst first."""
    return STATUSES.index(judge_contrast(contrast).status), -(k3_change(contrast).relative or 0.0)


def _short_answer(row: tuple[Contrast, ContrastStatus]) -> str:
    key = row[1].key
    change = row[0].changes.get(key, UNMEASURED_CHANGE)
    return describe_size(key, change, interval=False) if change.difference else contrast_headline(row[0])


def _overlaid_figures(comparison: Comparison) -> Iterator[Figure | None]:
    # slow import, only needed for HTML
    from mismatchctl.report.figures.distributions import breakdowns_figure, distributions_figure

    sides = comparison.sides
    yield distributions_figure({side.name: side.distribution for side in sides})
    breakdowns = comparison.reference.breakdowns
    for quantity, name in zip(breakdowns, file_stems(breakdowns), strict=True):
        having = {side.name: side.breakdowns[quantity] for side in sides if quantity in side.breakdowns}
        yield breakdowns_figure(having, f"k3_by_{name}")


def _contrast_section(comparison: Comparison, contrast: Contrast, index: int, registry: MetricRegistry) -> Section:
    """Build the section of one run compared with the reference."""
    anchor, alone = f"contrast-{index}", len(comparison.contrasts) == 1
    judged = judge_contrast(contrast)
    name, reference = escape_terminal(contrast.other), escape_terminal(comparison.reference.name)
    reach = TERMINAL_AND_PAGE if len(comparison.contrasts) <= MAX_DETAILED_CONTRASTS else PAGE_ONLY
    keys, headline = list_main_metrics(contrast), escape_terminal(contrast_headline(contrast))
    title = f"Metrics ({max(len(contrast.changes) - len(keys), 0)} more in --json and --html)"
    caption = "Main metrics and other significant changes."
    main = _changes_table(
        caption,
        keys,
        contrast.changes,
        registry,
        title=title,
        reach=EVERYWHERE if reach == TERMINAL_AND_PAGE else PAGE_ONLY,
    )
    return Section("What changed" if alone else f"{name} against {reference}", anchor).add(
        Card(judged.status, _LEVELS[judged.status], f"{headline}.",
             lines=[("", escape_terminal(line), 0) for line in contrast_details(contrast)]),
        main, *_not_significant_notes(contrast, keys, registry, reach), _corrections_table(contrast, reach),
        _main_contributions(contrast, reach),
        DeferredSection(lambda: _detail_sections(comparison, contrast, index, registry)),
    )  # fmt: skip


def _not_significant_notes(
    contrast: Contrast, keys: Sequence[str], registry: MetricRegistry, reach: int
) -> Iterator[Note]:
    """Yield the reason for each change that is not significant although its interval excludes 0."""
    for key in keys:
        if contrast.changes[key].note:
            yield Note(f"* {registry.metric(key).title}: {contrast.changes[key].note}", "quiet", reach=reach)


def _detail_sections(
    comparison: Comparison, contrast: Contrast, index: int, registry: MetricRegistry
) -> Iterator[Section]:
    """Yield the sections of the contributions, the tokens that changed most, and all metrics."""
    from mismatchctl.report.figures.bars import contributions_figure  # slow import, only needed for HTML

    anchor, others = f"contrast-{index}", file_stems([each.other for each in comparison.contrasts])
    prefix = "" if len(others) == 1 else f"{others[index]}-"
    by = zip(file_stems([found.quantity for found in contrast.decompositions]), contrast.decompositions, strict=True)
    drawn = Figures([contributions_figure(found, f"{prefix}change_by_{quantity}") for quantity, found in by])
    lead = (
        "The change of K3 by each quantity: how much comes from a larger or smaller K3 of the same tokens (level), "
        "and how much from more or fewer tokens (mix)."
    )
    parts = [_contributions_table(found) for found in contrast.decompositions] if drawn.figures else []
    yield Section("Contributions to the change", f"{anchor}-parts", lead=lead).add(drawn, *parts)
    if contrast.tokens is not None:
        yield Section("Tokens with the largest change", f"{anchor}-moved").add(_token_table(contrast.tokens))
    every = [("All metrics", contrast.changes, "m")]
    every += [(f"Correction {escape_terminal(name)}", changes, "c") for name, changes in contrast.corrections.items()]
    yield Section("All numbers", f"{anchor}-all").add(
        *(_changes_table(title, list(c), c, registry, scope, folded=True) for title, c, scope in every)
    )


def _sides_table(comparison: Comparison, registry: MetricRegistry) -> Table:
    """Return one row per run, the reference first."""
    several = len(comparison.contrasts) > 1
    keys = {"tokens": 3, "sequences": None, "k3": 0, "abs_diff_mean": None, "abs_diff_max": None, "ess_sequence": None}
    columns: list[Any] = [
        ("run", lambda row: TableCell(escape_terminal(row[0].name), kind="name", anchor=row[1])),
        ("from", lambda row: text_cell(row[0].source, "path")),
        ("what it is", lambda row: text_cell(row[0].kind)),
        *registry.columns(keys, lambda row: row[0].metrics),
    ]
    if several:
        columns += [
            (ColumnHeader("change", drop=0), lambda row: format_signed_percent(row[2].relative) if row[2] else DASH),
            (
                ColumnHeader("interval", drop=1),
                lambda row: _format_interval(row[2].relative_interval, format_signed_percent) if row[2] else DASH,
            ),
            (
                ColumnHeader("verdict", numeric=False, drop=0),
                lambda row: TableCell(change_label(row[2]) if row[2] else "reference"),
            ),
        ]
    links = ["", *(f"contrast-{index}" for index in range(len(comparison.contrasts)))]
    rows = zip(comparison.sides, links, [None, *map(k3_change, comparison.contrasts)], strict=True)
    title = f"{len(comparison.sides)} runs, each against the first"
    caption = "Runs. The first is the reference."
    return Table.of(caption, rows, columns, reach=EVERYWHERE if several else PAGE_ONLY, title=title)


def _format_interval(interval: tuple[float, float] | None, text: Callable[[float], str]) -> str:
    return DASH if interval is None else " to ".join(map(text, interval))


def _changes_table(
    caption: str,
    keys: Sequence[str],
    changes: Mapping[str, Change],
    registry: MetricRegistry,
    scope: str = "m",
    **more: Any,
) -> Table:
    """Return one row per metric, linked to the glossary."""

    def verdict_of(item: tuple[Metric, Change]) -> TableCell:
        word = change_label(item[1])
        return TableCell(word, item[1].note, kind="alarm" if word == "worse" else "number")

    return Table.of(caption, [(registry.metric(key, scope), changes[key]) for key in keys], (
        ("metric", lambda item: TableCell(
            item[0].title, kind="name", anchor=f"{scope}-{item[0].key}")),
        (ColumnHeader("reference", drop=0), lambda item: value_cell(item[1].reference, item[0].unit)),
        (ColumnHeader("other", drop=0), lambda item: value_cell(item[1].other, item[0].unit)),
        (ColumnHeader("difference", drop=2), lambda item: _amount_cell(item[1].difference, format_signed)),
        (ColumnHeader("interval", description="for this metric alone", drop=3), lambda item: TableCell(
            _format_interval(item[1].interval, format_signed), "" if item[1].status == "ok" else item[1].status)),
        (ColumnHeader("relative", drop=1), lambda item: _amount_cell(item[1].relative, format_signed_percent)),
        (ColumnHeader("p", description="two-sided, adjusted for the other metrics"),
         lambda item: _amount_cell(item[1].p, format_number)),
        (ColumnHeader("verdict", drop=0), verdict_of),
    ), sortable=True, **more)  # fmt: skip


def _corrections_table(contrast: Contrast, reach: int) -> Table:
    """Return each correction's metrics in the reference and the other run."""
    columns: list[Any] = [("correction", lambda item: text_cell(item[0], "name"))]
    for key, drop in _CORRECTION_METRICS.items():
        columns.append(
            (ColumnHeader(SHORT_TITLES[key], drop=drop), lambda item, key=key: _format_pair(item[1].get(key)))
        )
    return Table.of(
        "Corrections: reference → other (* significant)", active_corrections(contrast), columns, reach=reach
    )


def _format_pair(change: Change | None) -> str:
    if change is None:
        return DASH
    mark = " *" if change.significant else ""
    return (
        f"{format_number(change.reference.value, 'fraction')} → {format_number(change.other.value, 'fraction')}{mark}"
    )


def _main_contributions(contrast: Contrast, reach: int) -> Section | None:
    """Build the terminal table of the largest contributions to the change of K3."""
    if k3_change(contrast).difference in (None, 0):
        return None
    title = "Largest contributions to the change of K3"
    parts = [(found, part) for found in contrast.decompositions for part in found.parts[:TERMINAL_PARTS]]
    return Section("", "first-parts", terminal=True).add(
        Table.of("", parts, _CONTRIBUTION_COLUMNS, title=title, reach=reach)
    )


def _share_cell(item: tuple[Decomposition, Contribution]) -> TableCell:
    """Return the share of a part in the whole change."""
    share = item[1].total / item[0].difference if item[0].difference else None
    return _amount_cell(share, lambda share: DASH if share is None else f"{100 * share:.1f} %")


_CONTRIBUTION_COLUMNS: TableColumns[tuple[Decomposition, Contribution]] = (
    ("part", lambda item: text_cell(format_part(*item), "name")),
    (ColumnHeader("contribution", "nats/token", drop=0), lambda item: TableCell(
        format_estimate(item[1].total, item[1].se), sort_key=f"{item[1].total:.6g}")),
    (ColumnHeader("of the change", drop=1), _share_cell),
    (ColumnHeader("level", description="K3 there is larger or smaller", drop=4),
     lambda item: _amount_cell(item[1].level, format_signed)),
    (ColumnHeader("mix", description="more or fewer tokens are there", drop=4),
     lambda item: _amount_cell(item[1].mix, format_signed)),
    (ColumnHeader("K3 there, reference", drop=2), lambda item: _amount_cell(item[1].k3[0], format_number)),
    (ColumnHeader("other"), lambda item: _amount_cell(item[1].k3[1], format_number)),
    (ColumnHeader("tokens there, reference", drop=5), lambda item: number_cell(item[1].tokens[0], "fraction")),
    (ColumnHeader("other"), lambda item: number_cell(item[1].tokens[1], "fraction")),
)  # fmt: skip


def _contributions_table(decomposition: Decomposition) -> Table:
    """Return the contributions by one quantity, largest first."""
    parts, caption = decomposition.parts, f"The change of K3 by {decomposition.quantity}"
    left_out = f"The first {MAX_PARTS} of {len(parts):,}. The JSON contains all." * (len(parts) > MAX_PARTS)
    items = ((decomposition, part) for part in parts[:MAX_PARTS])
    return Table.of(caption, items, _CONTRIBUTION_COLUMNS, sortable=True, folded=True, left_out=left_out)


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
