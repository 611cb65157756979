"""The page of a Comparison: the sentence first, then what carries the change, then the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mismatchctl.compare.model import Change, Comparison, Contrast, Contribution, Decomposition, Matrix, PairedTokens
from mismatchctl.compare.words import (
    MATRIX,
    correction_rows,
    details,
    headline,
    k3_change,
    main_metrics,
    method,
    part_name,
    signed_percent,
    verdict,
    with_sign,
)
from mismatchctl.measure.metrics import Metric
from mismatchctl.numbers import DASH, estimate, number
from mismatchctl.render.document import (
    BRIEF,
    USUAL,
    WHOLE,
    Card,
    Columns,
    Document,
    Figures,
    Head,
    Headline,
    Later,
    Note,
    Section,
    Table,
    TableCell,
)
from mismatchctl.render.figures.theme import SHADES
from mismatchctl.render.pages.run_tables import PLACE, token_columns
from mismatchctl.render.tables import SHORT, Registry, amount, measured, words
from mismatchctl.render.text import clean, stems

if TYPE_CHECKING:
    from mismatchctl.render.figures.figure import Figure

DETAILED = 3
"""Up to so many comparisons, each has its tables in a terminal."""
MOST_PARTS, MOST_TOKENS = 50, 30
PARTS = 3
"""Contributions of each quantity that a terminal shows."""
_MOVED = {"rejected_tokens": 0, "ess_token": 0, "ess_sequence": 1}
"""Metrics of corrections in a terminal, and how early each goes."""


def document(comparison: Comparison) -> Document:
    """All of it."""
    registry, contrasts = Registry(comparison.corrections), comparison.contrasts
    title = f"{clean(contrasts[0].other) if len(contrasts) == 1 else f'{len(contrasts)} runs'} against"
    tokens = sum(int(side.metrics["tokens"].value or 0) for side in comparison.sides)
    facts = [f"{len(comparison.sides)} runs", f"{tokens:,} tokens"]
    head = Headline(f"{title} {clean(comparison.reference.name)}", facts, what="compare")
    made = Document(head, version=clean(comparison.version))
    if comparison.matrix is not None:
        lead = (
            "Rollout engines down, trainers across. A stronger colour is worse, on a logarithmic scale (linear for the "
            "effective sample size). Pairs without a dump are missing."
        )
        made.add(Section("Pairs of engines", "matrix", lead=lead).add(*_matrix(comparison.matrix)))
    made.add(*(_section(comparison, contrast, index, registry) for index, contrast in enumerate(contrasts)))
    made.add(Later(lambda: [Section("Over each other", "overlaid").add(Figures([*_laid_over(comparison)]))]))
    said = method(comparison)
    made.add(Section("The runs", "sides", lead=said).add(_sides(comparison, registry)))
    warnings = (Note(clean(text), "alarm") for text in comparison.warnings)
    made.glossary = lambda: [("Compared", [*registry.entries("m"), *registry.entries("c")])]
    return made.add(Section("", "method").add(Note(said, "quiet", reach=USUAL), *warnings))


def _laid_over(comparison: Comparison) -> Iterator[Figure | None]:
    from mismatchctl.render.figures.breakdowns import breakdowns_figure  # draws: a terminal need not wait for it
    from mismatchctl.render.figures.distributions import distributions_figure

    sides = comparison.sides
    yield distributions_figure({side.name: side.distribution for side in sides}, "distribution")
    breakdowns = comparison.reference.breakdowns
    for quantity, name in zip(breakdowns, stems(breakdowns), strict=True):
        having = {side.name: side.breakdowns[quantity] for side in sides if quantity in side.breakdowns}
        yield breakdowns_figure(having, f"k3_by_{name}")


def _section(comparison: Comparison, contrast: Contrast, index: int, registry: Registry) -> Section:
    """One side against the reference."""
    change, anchor, alone = k3_change(contrast), f"contrast-{index}", len(comparison.contrasts) == 1
    sure = change.significant and change.difference is not None
    level = "fair" if not sure else "bad" if (change.difference or 0) > 0 else "good"
    name, reference = clean(contrast.other), clean(comparison.reference.name)
    reach = USUAL if len(comparison.contrasts) <= DETAILED else WHOLE
    keys = main_metrics(contrast)
    title = f"Metrics ({max(len(contrast.changes) - len(keys), 0)} more in --json and --html)"
    caption = "The main metrics, and what else changed significantly."
    main = _changes(caption, keys, contrast.changes, registry, title=title, reach=BRIEF if reach == USUAL else WHOLE)
    return Section("What changed" if alone else f"{name} against {reference}", anchor).add(
        Card(verdict(change) or "K3", level, f"{clean(headline(contrast, comparison.confidence))}.",
             lines=[("", clean(line), 0) for line in details(contrast)]),
        main, _moved_corrections(contrast, reach), _first_parts(contrast, reach),
        Later(lambda: _of_page(comparison, contrast, index, registry)),
    )  # fmt: skip


def _of_page(comparison: Comparison, contrast: Contrast, index: int, registry: Registry) -> Iterator[Section]:
    """What carries the change, the tokens that moved, every number."""
    from mismatchctl.render.figures.contributions import contributions_figure  # draws: a terminal need not wait for it

    anchor, others = f"contrast-{index}", stems([each.other for each in comparison.contrasts])
    prefix = "" if len(others) == 1 else f"{others[index]}-"
    by = zip(stems([found.quantity for found in contrast.decompositions]), contrast.decompositions, strict=True)
    drawn = Figures([contributions_figure(found, f"{prefix}change_by_{quantity}") for quantity, found in by])
    lead = (
        "The change of K3 in pieces that add up: by each quantity, how much comes from K3 being larger or smaller in a "
        "place (level), and how much from more or fewer tokens being there (mix)."
    )
    parts = [_parts(found) for found in contrast.decompositions] if drawn.figures else []
    yield Section("What carries the change", f"{anchor}-parts", lead=lead).add(drawn, *parts)
    if contrast.tokens is not None:
        yield Section("The tokens that moved", f"{anchor}-moved").add(_moved(contrast.tokens))
    every = [("All metrics", contrast.changes, "m")]
    every += [(f"Correction {clean(name)}", changes, "c") for name, changes in contrast.corrections.items()]
    yield Section("All numbers", f"{anchor}-all").add(
        *(_changes(title, list(c), c, registry, scope, folded=True) for title, c, scope in every)
    )


def _sides(comparison: Comparison, registry: Registry) -> Table:
    """One row per run, the reference first; in a terminal only where there are several to tell apart."""
    several = len(comparison.contrasts) > 1
    keys = {"tokens": 3, "sequences": None, "k3": 0, "abs_diff_mean": None, "abs_diff_max": None, "ess_sequence": None}
    columns: list[Any] = [
        ("run", lambda row: TableCell(clean(row[0].name), kind="name", anchor=row[1])),
        ("from", lambda row: words(row[0].source, "path")),
        ("what it is", lambda row: words(row[0].kind)),
        *registry.columns(keys, lambda row: row[0].metrics),
    ]
    if several:
        columns += [
            (Head("change", drop=0), lambda row: signed_percent(row[2].relative) if row[2] else DASH),
            (Head("interval", drop=1), lambda row: _ends(row[2].relative_interval, signed_percent) if row[2] else DASH),
            (Head("verdict", numeric=False, drop=0), lambda row: TableCell(verdict(row[2]) if row[2] else "reference")),
        ]
    links = ["", *(f"contrast-{index}" for index in range(len(comparison.contrasts)))]
    rows = zip(comparison.sides, links, [None, *map(k3_change, comparison.contrasts)], strict=True)
    title = f"{len(comparison.sides)} runs, each against the first"
    caption = "The runs; the first is the reference."
    return Table.of(caption, rows, columns, reach=BRIEF if several else WHOLE, title=title)


def _ends(interval: tuple[float, float] | None, text: Callable[[float], str]) -> str:
    return DASH if interval is None else " to ".join(map(text, interval))


def _changes(
    caption: str, keys: Sequence[str], changes: Mapping[str, Change], registry: Registry, scope: str = "m", **more: Any
) -> Table:
    """One row per metric, linked to its meaning."""

    def verdict_of(item: tuple[Metric, Change]) -> TableCell:
        word = verdict(item[1])
        return TableCell(word, kind="alarm" if word == "worse" else "number")

    return Table.of(caption, [(registry.metric(key, scope), changes[key]) for key in keys], (
        ("metric", lambda item: TableCell(
            item[0].title, kind="name", anchor=f"{scope}-{item[0].key}", brief=item[0].key)),
        (Head("reference", drop=0), lambda item: measured(item[1].reference, item[0].unit)),
        (Head("other", drop=0), lambda item: measured(item[1].other, item[0].unit)),
        (Head("difference", drop=2), lambda item: _amount(item[1].difference, with_sign)),
        (Head("interval", about="for this metric alone", drop=3), lambda item: TableCell(
            _ends(item[1].interval, with_sign), "" if item[1].status == "ok" else item[1].status)),
        (Head("relative", drop=1), lambda item: _amount(item[1].relative, signed_percent)),
        (Head("p", about="two-sided, adjusted by Holm"), lambda item: _amount(item[1].p, number)),
        (Head("verdict", drop=0), verdict_of),
    ), sortable=True, **more)  # fmt: skip


def _moved_corrections(contrast: Contrast, reach: int) -> Table:
    """What each correction takes, before and after."""
    columns: list[Any] = [("correction", lambda item: words(item[0], "name"))]
    for key, drop in _MOVED.items():
        columns.append((Head(SHORT[key], drop=drop), lambda item, key=key: _pair(item[1].get(key))))
    return Table.of("Corrections: reference → other (* significant)", correction_rows(contrast), columns, reach=reach)


def _pair(change: Change | None) -> str:
    if change is None:
        return DASH
    mark = " *" if change.significant else ""
    return f"{number(change.reference.value, 'fraction')} → {number(change.other.value, 'fraction')}{mark}"


def _first_parts(contrast: Contrast, reach: int) -> Section | None:
    """The largest contributions to the change of K3, by every quantity: of the terminal, the page has all of them."""
    if k3_change(contrast).difference in (None, 0):
        return None
    title = "What the change of K3 is made of: the largest contributions"
    parts = [(found, part) for found in contrast.decompositions for part in found.parts[:PARTS]]
    return Section("", "first-parts", terminal=True).add(Table.of("", parts, _PARTS, title=title, reach=reach))


def _of_change(item: tuple[Decomposition, Contribution]) -> TableCell:
    """The part's share of the whole change."""
    share = item[1].total / item[0].difference if item[0].difference else None
    return _amount(share, lambda share: DASH if share is None else f"{100 * share:.1f} %")


_PARTS: Columns[tuple[Decomposition, Contribution]] = (
    ("part", lambda item: words(part_name(*item), "name")),
    (Head("contribution", "nats/token", drop=0), lambda item: TableCell(
        estimate(item[1].total, item[1].se), order=f"{item[1].total:.6g}")),
    (Head("of the change", drop=1), _of_change),
    (Head("level", about="K3 there is larger or smaller", drop=4), lambda item: _amount(item[1].level, with_sign)),
    (Head("mix", about="more or fewer tokens are there", drop=4), lambda item: _amount(item[1].mix, with_sign)),
    (Head("K3 there, reference", drop=2), lambda item: _amount(item[1].k3[0], number)),
    (Head("other"), lambda item: _amount(item[1].k3[1], number)),
    (Head("tokens there, reference", drop=5), lambda item: amount(item[1].tokens[0], "fraction")),
    (Head("other"), lambda item: amount(item[1].tokens[1], "fraction")),
)  # fmt: skip


def _parts(decomposition: Decomposition) -> Table:
    """Contributions by one quantity, the largest first."""
    parts, caption = decomposition.parts, f"The change of K3 by {decomposition.quantity}"
    left_out = f"The first {MOST_PARTS} of {len(parts):,}; the JSON holds all of them." * (len(parts) > MOST_PARTS)
    items = ((decomposition, part) for part in parts[:MOST_PARTS])
    return Table.of(caption, items, _PARTS, sortable=True, folded=True, left_out=left_out)


def _amount(value: float | None, text: Callable[[float | None], str]) -> TableCell:
    return TableCell(text(value), order="" if value is None else f"{value:.6g}")


def _moved(paired: PairedTokens) -> Table | None:
    """The tokens of which K3 changed most."""
    rows = paired.most_moved[:MOST_TOKENS]
    fields = {"rollout": "rollout_log_prob", "train": "train_log_prob", "log ratio": "log_ratio"}
    same = {"rollout": paired.same_rollout, "train": paired.same_train}
    columns: list[Any] = [
        *PLACE,
        *token_columns(rows),
        (Head("change of K3", "nats"), lambda row: _amount(row.k3_change, with_sign)),
    ]
    for what, name in fields.items():
        for place, side in enumerate(("reference", "other") if not same.get(what, False) else ()):
            value = lambda row, name=name, place=place: amount(getattr(row, name)[place])  # noqa: E731
            columns.append((Head(f"{what}, {side}"), value))
    caption = f"The {len(rows)} tokens of which K3 changed most; places are those in the other dump."
    return Table.of(caption, rows, columns, sortable=True) if rows else None


def _matrix(matrix: Matrix) -> Iterator[Table]:
    """A heat map per figure: rollout engines down, trainers across."""
    for key, unit in MATRIX.items():
        title = SHORT[key] if unit != "nats" else f"{SHORT[key]}, {unit}"
        values = [[None if cell is None else getattr(cell, key).value for cell in row] for row in matrix.cells]
        known = [value for row in values for value in row if value is not None]
        columns: list[Any] = [("rollout, then trainer", lambda item: words(item[0], "name"))]
        for place, trainer in enumerate(matrix.trainers):
            heat = lambda item, place=place, known=known, unit=unit: _heat(item[1][place], known, unit)  # noqa: E731
            columns.append((Head(clean(trainer), drop=0), heat))
        rows = zip(matrix.rollouts, values, strict=True)
        about = f"{title}, by rollout engine and trainer"
        yield Table.of(title, rows, columns, title=about, matrix=True, reach=BRIEF)


def _heat(value: float | None, known: Sequence[float], unit: str) -> TableCell:
    """A cell coloured by how bad it is among those known; no colour where all are alike."""
    if value is None:
        return TableCell("missing", kind="missing")
    low, high = (_scale(end, unit) for end in (min(known), max(known)))
    share = (_scale(value, unit) - low) / (high - low) if high > low else 0.0
    bad = 1 - share if unit == "fraction" else share
    return TableCell(number(value, unit), kind=f"heat{SHADES[round(bad * (len(SHADES) - 1))]}")


def _scale(value: float, unit: str) -> float:
    return value if unit == "fraction" else math.log10(max(value, 1e-12))
