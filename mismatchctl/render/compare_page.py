"""The page of a Comparison: one self-contained file in the manner of the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mismatchctl.compare.model import Change, Comparison, Decomposition, Matrix, PairedTokens
from mismatchctl.numbers import DASH, estimate, number
from mismatchctl.render.compare_words import (
    MATRIX,
    details,
    headline,
    k3_change,
    main_metrics,
    method,
    part_name,
    signed,
    signed_percent,
    verdict,
)
from mismatchctl.render.figures import Figure
from mismatchctl.render.figures.breakdowns import breakdowns_figure
from mismatchctl.render.figures.contributions import contributions_figure
from mismatchctl.render.figures.distributions import distributions_figure
from mismatchctl.render.figures.theme import SHADES
from mismatchctl.render.page import render_page
from mismatchctl.render.run_tables import place_cells, place_heads
from mismatchctl.render.tables import Cell, Entry, Head, Registry, Table, amount, words
from mismatchctl.render.text import are_bytes, clean, token_text
from mismatchctl.result import Value

MOST_PARTS, MOST_TOKENS = 50, 30
MAIN_CAPTION = "The main metrics, and what else changed significantly."


@dataclass
class Section:
    """One side against the reference."""

    anchor: str
    name: str
    headline: str
    direction: str
    before: Value
    after: Value
    verdicts: list[str]
    figures: list[Figure]
    changes: Table
    every_change: Table
    corrections: list[Table]
    parts: list[Table]
    moved: Table | None


@dataclass
class Page:
    """Everything that the template shows."""

    version: str
    reference: str
    title: str
    facts: list[str]
    notes: list[str]
    method: str
    matrix: list[Table]
    sides: Table
    figures: list[Figure]
    sections: list[Section] = field(default_factory=list)
    glossary: list[Entry] = field(default_factory=list)


def render_comparison_page(comparison: Comparison) -> str:
    """The page as one HTML document; the same Comparison gives the same bytes."""
    return render_page("compare.html.j2", prepare(comparison))


def prepare(comparison: Comparison) -> Page:
    """All data of the page, without any layout."""
    registry = Registry(comparison.corrections)
    names = [clean(contrast.other) for contrast in comparison.contrasts]
    page = Page(
        version=clean(comparison.version),
        reference=clean(comparison.reference.name),
        title=names[0] if len(names) == 1 else f"{len(names)} runs",
        facts=_facts(comparison),
        notes=[clean(warning) for warning in comparison.warnings],
        method=method(comparison),
        matrix=[] if comparison.matrix is None else _matrix(comparison.matrix),
        sides=_sides(comparison, registry),
        figures=_laid_over(comparison),
        sections=[_section(comparison, index, registry) for index in range(len(comparison.contrasts))],
    )
    page.glossary = [*registry.entries("m"), *registry.entries("c")]
    return page


def _facts(comparison: Comparison) -> list[str]:
    """How much was compared, in a few phrases."""
    tokens = sum(int(side.metrics["tokens"].value or 0) for side in comparison.sides)
    return [f"{len(comparison.sides)} runs", f"{tokens:,} tokens"]


def _laid_over(comparison: Comparison) -> list[Figure]:
    sides = comparison.sides
    found = [distributions_figure({side.name: side.distribution for side in sides}, "x")]
    for index, quantity in enumerate(comparison.reference.breakdowns):
        having = {side.name: side.breakdowns[quantity] for side in sides if quantity in side.breakdowns}
        found.append(breakdowns_figure(having, f"b{index}"))
    return [figure for figure in found if figure is not None]


def _section(comparison: Comparison, index: int, registry: Registry) -> Section:
    contrast = comparison.contrasts[index]
    change = k3_change(contrast)
    figures = [contributions_figure(d, f"c{index}-{place}") for place, d in enumerate(contrast.decompositions)]
    sure = change.significant and change.difference is not None
    return Section(
        anchor=f"contrast-{index}",
        name=clean(contrast.other),
        headline=clean(headline(contrast, comparison.confidence)),
        direction="flat" if not sure else "up" if (change.difference or 0) > 0 else "down",
        before=change.reference,
        after=change.other,
        verdicts=[clean(line) for line in details(contrast)],
        figures=[figure for figure in figures if figure is not None],
        changes=_changes(MAIN_CAPTION, main_metrics(contrast), contrast.changes, registry),
        every_change=_changes("All metrics", list(contrast.changes), contrast.changes, registry),
        corrections=[
            _changes(f"Correction {clean(name)}", list(changes), changes, registry, "c")
            for name, changes in contrast.corrections.items()
        ],
        parts=[_parts(decomposition) for decomposition in contrast.decompositions],
        moved=None if contrast.tokens is None else _moved(contrast.tokens),
    )


def _sides(comparison: Comparison, registry: Registry) -> Table:
    """One row per run, the reference first."""
    heads = [Head(text, numeric=False) for text in ("run", "from", "what it is")]
    keys = ("tokens", "sequences", "k3", "abs_diff_mean", "abs_diff_max", "ess_sequence")
    table = Table("The runs; the first is the reference.", [*heads, *(registry.head(key) for key in keys)])
    for index, side in enumerate(comparison.sides):
        name = words(side.name, "name") if index == 0 else Cell(clean(side.name), kind="name", anchor=_anchor(index))
        values = [side.metrics.get(key, Value(value=None, status="not measured")) for key in keys]
        cells = [table.value(value, registry.metric(key).unit) for key, value in zip(keys, values, strict=True)]
        table.rows.append([name, words(side.source, "path"), words(side.kind), *cells])
    return table


def _anchor(index: int) -> str:
    return f"contrast-{index - 1}"


def _changes(
    caption: str, keys: Sequence[str], changes: Mapping[str, Change], registry: Registry, scope: str = "m"
) -> Table:
    """One row per metric, linked to its meaning."""
    heads = [
        Head("metric", numeric=False), Head("reference"), Head("other"), Head("difference"),
        Head("interval", about="for this metric alone"), Head("relative"),
        Head("p", about="two-sided, adjusted by Holm"), Head("verdict"),
    ]  # fmt: skip
    table = Table(caption, heads, sortable=True)
    for key in keys:
        change, metric = changes[key], registry.metric(key, scope)
        ends = DASH if change.interval is None else " to ".join(signed(end) for end in change.interval)
        mark = "" if change.status == "ok" else table.note(change.status)
        word = verdict(change)
        table.rows.append(
            [
                Cell(metric.title, kind="name", anchor=f"{scope}-{key}"),
                table.value(change.reference, metric.unit),
                table.value(change.other, metric.unit),
                _amount(change.difference, signed),
                Cell(ends, mark),
                _amount(change.relative, signed_percent),
                Cell(DASH if change.p is None else number(change.p), order=_order(change.p)),
                Cell(word, kind="alarm" if word == "worse" else "number"),
            ]
        )
    return table


def _amount(value: float | None, text: Callable[[float | None], str]) -> Cell:
    return Cell(text(value), order=_order(value))


def _order(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _parts(decomposition: Decomposition) -> Table:
    """Contributions by one quantity, the largest first."""
    heads = [
        Head("part", numeric=False), Head("contribution", "nats/token"), Head("of the change"),
        Head("level", about="K3 there is larger or smaller"), Head("mix", about="more or fewer tokens are there"),
        Head("K3 there, reference"), Head("other"), Head("tokens there, reference"), Head("other"),
    ]  # fmt: skip
    table = Table(f"The change of K3 by {decomposition.quantity}", heads, sortable=True)
    for part in decomposition.parts[:MOST_PARTS]:
        share = part.total / decomposition.difference if decomposition.difference else None
        table.rows.append(
            [
                words(part_name(decomposition, part), "name"),
                Cell(estimate(part.total, part.se), order=_order(part.total)),
                Cell(DASH if share is None else f"{100 * share:.1f} %", order=_order(share)),
                _amount(part.level, signed),
                _amount(part.mix, signed),
                *(Cell(number(k3), order=_order(k3)) for k3 in part.k3),
                *(Cell(number(tokens, "fraction"), order=_order(tokens)) for tokens in part.tokens),
            ]
        )
    if len(decomposition.parts) > MOST_PARTS:
        table.left_out = f"The first {MOST_PARTS} of {len(decomposition.parts):,}; the JSON holds all of them."
    return table


def _moved(paired: PairedTokens) -> Table | None:
    """The tokens of which K3 changed most."""
    rows = paired.most_moved[:MOST_TOKENS]
    if not rows:
        return None
    as_bytes = are_bytes([row.context_ids for row in rows])
    ids = any(row.token_id is not None for row in rows)
    heads = [*place_heads(), Head("position", about="counted from the sequence's first valid token")]
    heads += [Head("what came before", numeric=False), Head("token", numeric=False)] if ids else []
    heads.append(Head("change of K3", "nats"))
    differing = [
        (what, field)
        for what, field, same in (
            ("rollout", "rollout_log_prob", paired.same_rollout),
            ("train", "train_log_prob", paired.same_train),
            ("log ratio", "log_ratio", False),
        )
        if not same
    ]
    heads += [Head(f"{what}, {side}") for what, _ in differing for side in ("reference", "other")]
    caption = f"The {len(rows)} tokens of which K3 changed most; places are those in the other dump."
    table = Table(caption, heads, sortable=True)
    for row in rows:
        cells = [*place_cells(row), amount(row.position, "tokens")]
        if ids:
            cells.append(words(token_text(row.context_ids, as_bytes), "before"))
            cells.append(words(token_text([] if row.token_id is None else [row.token_id], as_bytes), "code"))
        cells.append(_amount(row.k3_change, signed))
        table.rows.append([*cells, *(amount(value) for _, field in differing for value in getattr(row, field))])
    return table


def _matrix(matrix: Matrix) -> list[Table]:
    """A heat map per figure: rollout engines down, trainers across."""
    tables = []
    for title, key, unit in MATRIX:
        table = Table(title, [Head("rollout, then trainer", numeric=False), *(Head(clean(t)) for t in matrix.trainers)])
        values = [[None if cell is None else getattr(cell, key).value for cell in row] for row in matrix.cells]
        known = [value for row in values for value in row if value is not None]
        for rollout, row in zip(matrix.rollouts, values, strict=True):
            table.rows.append([words(rollout, "name"), *(_heat(value, known, unit) for value in row)])
        tables.append(table)
    return tables


def _heat(value: float | None, known: Sequence[float], unit: str) -> Cell:
    """A cell coloured by how bad it is among those known; no colour where all are alike."""
    if value is None:
        return Cell("missing", kind="missing")
    low, high = (_scale(end, unit) for end in (min(known), max(known)))
    share = (_scale(value, unit) - low) / (high - low) if high > low else 0.0
    bad = 1 - share if unit == "fraction" else share
    return Cell(number(value, unit), kind=f"heat{SHADES[round(bad * (len(SHADES) - 1))]}")


def _scale(value: float, unit: str) -> float:
    return value if unit == "fraction" else math.log10(max(value, 1e-12))
