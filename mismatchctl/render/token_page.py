"""The page of tokens: each sequence as text whose colour is its log ratio, and a bound that can be moved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from mismatchctl import __version__
from mismatchctl.browse import Browsed, SequenceRow, Threshold
from mismatchctl.browse.thresholds import TOTALS
from mismatchctl.numbers import counted, label, number
from mismatchctl.render.text import clean, short
from mismatchctl.render.to.html import as_json, render_page

MOST_TOKENS = 40_000
"""On one page, so that it stays below 5 MB; later sequences are cut, and say so."""
SHADES = (0.02, 0.1, 0.5, 2.0)
"""|log ratio| from which each shade begins."""
_FACTS = {"step": "step", "sequence_id": "sequence", "prompt_id": "prompt", "worker": "worker", "reward": "reward",
          "rollout_version": "rollout's version", "train_version": "trainer's version"}  # fmt: skip


def render_tokens(browsed: Browsed) -> str:
    """The page as one HTML document; the same sequences give the same bytes."""
    spans, left = [], MOST_TOKENS
    for row in browsed.rows:
        last = min(row.last, row.first + left)
        spans.append((row.first, last))
        left -= last - row.first
    page = {
        "version": clean(__version__),
        "title": f"{counted(len(spans), 'sequence')}, token by token",
        "vocabulary": clean(browsed.vocabulary.name),
        "shades": [(f"n{place}", f"below −{SHADES[place - 1]:g}") for place in range(len(SHADES), 0, -1)]
        + [(f"p{place}", f"above {bound:g}") for place, bound in enumerate(SHADES, start=1)],
        "sequences": [*map(_shown, browsed.rows, spans, count())],
        "data": as_json(_data(browsed, spans)),
    }
    return render_page("tokens.html.j2", page, "tokens")


def _shown(row: SequenceRow, span: tuple[int, int], index: int) -> dict[str, Any]:
    """One sequence as the template has it."""
    log_ratio, tokens, (first, last) = row.log_ratio, row.batch.tokens, span
    facts = [f"{text} {short(label(row.facts[name]), 40)}" for name, text in _FACTS.items() if name in row.facts]
    facts += [f"{tokens:,} valid tokens", f"log ratio {number(float(log_ratio.sum()))} in sum"]
    note = f"Tokens {first:,} to {last - 1:,} of {tokens:,} are shown." if tokens > last - first else ""
    title = f"{short(row.file, 160)}, row {row.row:,}"
    return {
        "anchor": f"sequence-{index}", "title": title, "facts": facts, "note": note,
        "tokens": Markup("").join(_tokens(row, log_ratio, span)),
    }  # fmt: skip


def _tokens(row: SequenceRow, log_ratio: np.ndarray[Any, Any], span: tuple[int, int]) -> Iterator[Markup]:
    """Valid tokens one by one; a stretch of masked ones as one piece."""
    first, last = span
    valid = np.flatnonzero(row.mask)
    if last <= first:
        return
    start, stop = int(valid[first]) if first else 0, int(valid[last - 1]) + 1 if last < len(valid) else len(row.mask)
    number_of = np.cumsum(row.mask) - 1
    place = start
    while place < stop:
        if row.mask[place]:
            index = int(number_of[place])
            shade = _shade(float(log_ratio[index]))
            text = _text(row, place)
            yield Markup(f"<i{f' class={shade}' if shade else ''}>") + escape(text) + Markup("</i>")
            place += 1
            continue
        end = place
        while end < stop and not row.mask[end]:
            end += 1
        text = short("".join(_text(row, at) for at in range(place, min(end, place + 200))), 120)
        told = f"{end - place:,} masked"
        yield Markup('<s title="') + told + Markup('">') + escape(text or told) + Markup("</s>")
        place = end


def _text(row: SequenceRow, place: int) -> str:
    """A token as text; a line break is shown, and breaks the line."""
    if not row.texts:
        return "▯"
    return clean(row.texts[place]) + ("\n" if "\n" in row.texts[place] else "")


def _shade(log_ratio: float) -> str:
    level = sum(abs(log_ratio) >= bound for bound in SHADES)
    return f"{'n' if log_ratio < 0 else 'p'}{level}" if level else ""


def _data(browsed: Browsed, spans: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """What the script needs: numbers of each token, and for each bound what becomes of it at each value."""
    return {
        "sequences": [_numbers(row, span) for row, span in zip(browsed.rows, spans, strict=True)],
        "bounds": [_bound(threshold, browsed.rows, spans) for threshold in browsed.thresholds],
    }


def _numbers(row: SequenceRow, span: tuple[int, int]) -> dict[str, Any]:
    part = slice(*span)
    found: dict[str, Any] = {
        "run": clean(row.run),
        "total": row.batch.tokens,
        "position": row.position[part].tolist(),
        "rollout": [_digits(value) for value in row.batch.rollout[part].tolist()],
        "train": [_digits(value) for value in row.batch.train[part].tolist()],
    }
    if row.experts is not None:
        found["experts"] = row.experts[part].tolist()
    if row.ids is not None:
        found["ids"] = row.ids[row.mask][part].tolist()
    return found


def _digits(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _bound(threshold: Threshold, rows: Sequence[SequenceRow], spans: Sequence[tuple[int, int]]) -> dict[str, Any]:
    patterns: dict[str, int] = {}
    sentences: dict[str, int] = {}
    sequences = []
    for index, span in enumerate(spans):
        part = slice(*span)
        states = threshold.states[index]
        held = ["".join(map(str, column)) for column in states[:, part].T.tolist()]
        sequences.append(
            {
                "states": [patterns.setdefault(pattern, len(patterns)) for pattern in held],
                "kept": (states != 1).sum(axis=1).tolist(),
                "weights": [_digits(float(value)) for value in threshold.weights[index][part]],
                "why": [sentences.setdefault(clean(text), len(sentences)) for text in threshold.reasons[index][part]],
            }
        )
    return {
        "name": clean(f"{threshold.correction.name}: {threshold.path}"),
        "values": [number(value) if abs(value - 1) > 0.1 else f"{value:.6g}" for value in threshold.values],
        "start": threshold.start,
        "patterns": list(patterns),
        "sentences": list(sentences),
        "sequences": sequences,
        "totals": {
            clean(run): [[number(line[name], "fraction") for name in TOTALS] for line in lines]
            for run, lines in threshold.totals.items()
        },
    }  # fmt: skip
