"""The page of a Comparison: the sentence first, then what carries the change, then the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from mismatchctl.compare.model import Change, Comparison, Contrast, Decomposition, Matrix, MovedToken, PairedTokens
from mismatchctl.compare.words import (
    MATRIX,
    correction_rows,
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
from mismatchctl.numbers import DASH, estimate, number
from mismatchctl.render.document import (
    BRIEF,
    USUAL,
    WHOLE,
    Card,
    Cell,
    Document,
    Figures,
    Head,
    Headline,
    Note,
    Section,
    Table,
)
from mismatchctl.render.figures import Figure
from mismatchctl.render.figures.breakdowns import breakdowns_figure
from mismatchctl.render.figures.contributions import contributions_figure
from mismatchctl.render.figures.distributions import distributions_figure
from mismatchctl.render.figures.theme import SHADES
from mismatchctl.render.pages.run_tables import PLACE, token_columns
from mismatchctl.render.tables import SHORT, Registry, amount, words
from mismatchctl.render.text import clean, stems
from mismatchctl.result import Value

DETAILED = 3
"""Up to so many comparisons, each has its tables in a terminal."""
MOST_PARTS, MOST_TOKENS = 50, 30
PARTS = 3
"""Contributions of each quantity that a terminal shows."""
_MOVED = {"rejected_tokens": 0, "ess_token": 0, "ess_sequence": 1}
"""Metrics of corrections in a terminal, and how early each goes."""


def document(comparison: Comparison, *, whole: bool = True) -> Document:
    """All of it; without `whole` what stands on a page alone is not even prepared."""
    registry = Registry(comparison.corrections)
    names = [clean(contrast.other) for contrast in comparison.contrasts]
    title = f"{names[0] if len(names) == 1 else f'{len(names)} runs'} against {clean(comparison.reference.name)}"
    tokens = sum(int(side.metrics["tokens"].value or 0) for side in comparison.sides)
    facts = [f"{len(comparison.sides)} runs", f"{tokens:,} tokens"]
    made = Document(Headline(title, facts, what="compare"), version=clean(comparison.version))
    made.add(*_sections(comparison, registry, whole))
    if whole:
        made.glossary = [("Metrics", [*registry.entries("m"), *registry.entries("c")])]
    return made


def _sections(comparison: Comparison, registry: Registry, whole: bool) -> Iterator[Section]:
    contrasts = comparison.contrasts
    if comparison.matrix is not None:
        yield Section(
            "Pairs of engines", "matrix",
            lead="Rollout engines down, trainers across. A stronger colour is worse, on a logarithmic scale (linear "
            "for the effective sample size). Pairs without a dump are missing.",
        ).add(*_matrix(comparison.matrix))  # fmt: skip
    for index, contrast in enumerate(contrasts):
        yield _section(comparison, contrast, index, registry, whole)
    if whole:
        yield Section("Over each other", "overlaid").add(Figures(_laid_over(comparison)))
    sides = Section("The runs", "sides", lead=method(comparison))
    yield sides.add(_sides(comparison, registry))
    yield Section("", "method").add(
        Note(method(comparison), "quiet", reach=USUAL), *(Note(clean(text), "alarm") for text in comparison.warnings)
    )


def _laid_over(comparison: Comparison) -> list[Figure]:
    sides = comparison.sides
    found = [distributions_figure({side.name: side.distribution for side in sides}, "distribution")]
    breakdowns = comparison.reference.breakdowns
    for quantity, name in zip(breakdowns, stems(breakdowns), strict=True):
        having = {side.name: side.breakdowns[quantity] for side in sides if quantity in side.breakdowns}
        found.append(breakdowns_figure(having, f"k3_by_{name}"))
    return [figure for figure in found if figure is not None]


def _section(comparison: Comparison, contrast: Contrast, index: int, registry: Registry, whole: bool) -> Section:
    """One side against the reference."""
    change, anchor = k3_change(contrast), f"contrast-{index}"
    sure = change.significant and change.difference is not None
    level = "fair" if not sure else "bad" if (change.difference or 0) > 0 else "good"
    name, reference = clean(contrast.other), clean(comparison.reference.name)
    alone = len(comparison.contrasts) == 1
    section = Section("What changed" if alone else f"{name} against {reference}", anchor)
    section.add(
        Card(verdict(change) or "K3", level, f"{clean(headline(contrast, comparison.confidence))}.",
             lines=[("", clean(line), 0) for line in details(contrast)])
    )  # fmt: skip
    reach = USUAL if len(comparison.contrasts) <= DETAILED else WHOLE
    caption = "The main metrics, and what else changed significantly."
    main = _changes(caption, main_metrics(contrast), contrast.changes, registry)
    main.title = f"Metrics ({max(len(contrast.changes) - len(main.rows), 0)} more in --json and --html)"
    main.reach = BRIEF if reach == USUAL else WHOLE
    section.add(main, _moved_corrections(contrast, reach), _first_parts(contrast, reach))
    if not whole:
        return section
    others = stems([each.other for each in comparison.contrasts])
    by = stems([decomposition.quantity for decomposition in contrast.decompositions])
    figures = [
        contributions_figure(decomposition, f"{'' if alone else f'{others[index]}-'}change_by_{quantity}")
        for quantity, decomposition in zip(by, contrast.decompositions, strict=True)
    ]
    carried = Section(
        "What carries the change", f"{anchor}-parts",
        lead="The change of K3 in pieces that add up: by each quantity, how much comes from K3 being larger or smaller "
        "in a place (level), and how much from more or fewer tokens being there (mix).",
    )  # fmt: skip
    shown = [figure for figure in figures if figure is not None]
    if shown:
        section.add(carried.add(Figures(shown), *(_parts(decomposition) for decomposition in contrast.decompositions)))
    if contrast.tokens is not None:
        section.add(Section("The tokens that moved", f"{anchor}-moved").add(_moved(contrast.tokens)))
    every = _changes("All metrics", list(contrast.changes), contrast.changes, registry)
    each = [
        _changes(f"Correction {clean(name)}", list(changes), changes, registry, "c")
        for name, changes in contrast.corrections.items()
    ]
    for table in (every, *each):
        table.folded = True
    return section.add(Section("All numbers", f"{anchor}-all").add(every, *each))


def _sides(comparison: Comparison, registry: Registry) -> Table:
    """One row per run, the reference first; in a terminal only where there are several to tell apart."""
    several = len(comparison.contrasts) > 1
    keys = ("tokens", "sequences", "k3", "abs_diff_mean", "abs_diff_max", "ess_sequence")
    drops = {"tokens": 3, "k3": 0} if several else {}
    heads = [Head(text, numeric=False) for text in ("run", "from", "what it is")]
    heads += [registry.head(key, drop=drops.get(key)) for key in keys]
    if several:
        heads += [Head("change", drop=0), Head("interval", drop=1), Head("verdict", numeric=False, drop=0)]
    table = Table("The runs; the first is the reference.", heads, reach=BRIEF if several else WHOLE)
    table.title = f"{len(comparison.sides)} runs, each against the first"
    changes = [None, *(k3_change(contrast) for contrast in comparison.contrasts)]
    for index, (side, change) in enumerate(zip(comparison.sides, changes, strict=True)):
        link = "" if index == 0 else f"contrast-{index - 1}"
        values = [side.metrics.get(key, Value(value=None, status="not measured")) for key in keys]
        cells = [table.value(value, registry.metric(key).unit) for key, value in zip(keys, values, strict=True)]
        row = [Cell(clean(side.name), kind="name", anchor=link), words(side.source, "path"), words(side.kind), *cells]
        if several:
            row += [Cell(DASH), Cell(DASH), Cell("reference")] if change is None else _against(change)
        table.rows.append(row)
    return table


def _against(change: Change) -> list[Cell]:
    ends = change.relative_interval
    interval = DASH if ends is None else " to ".join(signed_percent(end) for end in ends)
    return [Cell(signed_percent(change.relative)), Cell(interval), Cell(verdict(change))]


def _changes(
    caption: str, keys: Sequence[str], changes: Mapping[str, Change], registry: Registry, scope: str = "m"
) -> Table:
    """One row per metric, linked to its meaning."""
    heads = [
        Head("metric", numeric=False), Head("reference", drop=0), Head("other", drop=0), Head("difference", drop=2),
        Head("interval", about="for this metric alone", drop=3), Head("relative", drop=1),
        Head("p", about="two-sided, adjusted by Holm"), Head("verdict", drop=0),
    ]  # fmt: skip
    table = Table(caption, heads, sortable=True)
    for key in keys:
        change, metric = changes[key], registry.metric(key, scope)
        ends = DASH if change.interval is None else " to ".join(signed(end) for end in change.interval)
        word = verdict(change)
        table.rows.append([
            Cell(metric.title, kind="name", anchor=f"{scope}-{key}", brief=key),
            *(table.value(value, metric.unit) for value in (change.reference, change.other)),
            _amount(change.difference, signed),
            Cell(ends, "" if change.status == "ok" else table.note(change.status)),
            _amount(change.relative, signed_percent),
            _amount(change.p, number),
            Cell(word, kind="alarm" if word == "worse" else "number"),
        ])  # fmt: skip
    return table


def _moved_corrections(contrast: Contrast, reach: int) -> Table:
    """What each correction takes, before and after."""
    heads = [Head("correction", numeric=False), *(Head(SHORT[key], drop=drop) for key, drop in _MOVED.items())]
    table = Table("Corrections: reference → other (* significant)", heads, reach=reach)
    for name, changes in correction_rows(contrast):
        table.rows.append([words(name, "name"), *(Cell(_pair(changes.get(key))) for key in _MOVED)])
    return table


def _pair(change: Change | None) -> str:
    if change is None:
        return DASH
    mark = " *" if change.significant else ""
    return f"{number(change.reference.value, 'fraction')} → {number(change.other.value, 'fraction')}{mark}"


def _first_parts(contrast: Contrast, reach: int) -> Section | None:
    """The largest contributions to the change of K3, by every quantity: of the terminal, the page has all of them."""
    if k3_change(contrast).difference in (None, 0):
        return None
    table = Table("", _part_heads(), title="What the change of K3 is made of: the largest contributions", reach=reach)
    for decomposition in contrast.decompositions:
        table.rows += _part_rows(decomposition, PARTS)
    return Section("", "first-parts", terminal=True).add(table)


def _part_heads() -> list[Head]:
    return [
        Head("part", numeric=False), Head("contribution", "nats/token", drop=0), Head("of the change", drop=1),
        Head("level", about="K3 there is larger or smaller", drop=4),
        Head("mix", about="more or fewer tokens are there", drop=4), Head("K3 there, reference", drop=2),
        Head("other"), Head("tokens there, reference", drop=5), Head("other"),
    ]  # fmt: skip


def _part_rows(decomposition: Decomposition, most: int) -> Iterator[list[Cell]]:
    for part in decomposition.parts[:most]:
        share = part.total / decomposition.difference if decomposition.difference else None
        yield [
            words(part_name(decomposition, part), "name"),
            Cell(estimate(part.total, part.se), order=_order(part.total)),
            Cell(DASH if share is None else f"{100 * share:.1f} %", order=_order(share)),
            _amount(part.level, signed),
            _amount(part.mix, signed),
            *(Cell(number(k3), order=_order(k3)) for k3 in part.k3),
            *(Cell(number(tokens, "fraction"), order=_order(tokens)) for tokens in part.tokens),
        ]


def _parts(decomposition: Decomposition) -> Table:
    """Contributions by one quantity, the largest first."""
    table = Table(f"The change of K3 by {decomposition.quantity}", _part_heads(), sortable=True, folded=True)
    table.rows += _part_rows(decomposition, MOST_PARTS)
    if len(decomposition.parts) > MOST_PARTS:
        table.left_out = f"The first {MOST_PARTS} of {len(decomposition.parts):,}; the JSON holds all of them."
    return table


def _amount(value: float | None, text: Callable[[float | None], str]) -> Cell:
    return Cell(text(value), order=_order(value))


def _order(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _change_of_k3(row: MovedToken) -> Cell:
    return _amount(row.k3_change, signed)


def _moved(paired: PairedTokens) -> Table | None:
    """The tokens of which K3 changed most."""
    rows = paired.most_moved[:MOST_TOKENS]
    fields = {"rollout": "rollout_log_prob", "train": "train_log_prob", "log ratio": "log_ratio"}
    same = {"rollout": paired.same_rollout, "train": paired.same_train}
    columns: list[Any] = [*PLACE, *token_columns(rows), (Head("change of K3", "nats"), _change_of_k3)]
    for what in (what for what in fields if not same.get(what, False)):
        for place, side in enumerate(("reference", "other")):
            value = partial(lambda field, place, row: amount(getattr(row, field)[place]), fields[what], place)
            columns.append((Head(f"{what}, {side}"), value))
    caption = f"The {len(rows)} tokens of which K3 changed most; places are those in the other dump."
    return Table.of(caption, rows, columns, sortable=True) if rows else None


def _matrix(matrix: Matrix) -> Iterator[Table]:
    """A heat map per figure: rollout engines down, trainers across."""
    for key, unit in MATRIX.items():
        title = SHORT[key] if unit != "nats" else f"{SHORT[key]}, {unit}"
        heads = [Head("rollout, then trainer", numeric=False), *(Head(clean(t), drop=0) for t in matrix.trainers)]
        table = Table(title, heads, title=f"{title}, by rollout engine and trainer", matrix=True, reach=BRIEF)
        values = [[None if cell is None else getattr(cell, key).value for cell in row] for row in matrix.cells]
        known = [value for row in values for value in row if value is not None]
        for rollout, row in zip(matrix.rollouts, values, strict=True):
            table.rows.append([words(rollout, "name"), *(_heat(value, known, unit) for value in row)])
        yield table


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
