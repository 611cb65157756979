"""The HTML page of `analyze --tokens`: sequences as text, colored by log ratio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, groupby
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from mismatchctl.api.browse import STATE_REJECTED, AppliedCorrection, SequenceRow, TokenView
from mismatchctl.core.formatting import escape_terminal, format_count, format_label, format_number, shorten
from mismatchctl.corrections.labels import correction_label
from mismatchctl.io import __version__
from mismatchctl.report.figures.figure import round_number
from mismatchctl.report.html import render_page, script_json

MAX_TOKENS = 40_000  # maximum tokens on a page, so that it has at most 5 MB. The rest is cut.
SHADE_BOUNDS = (0.02, 0.1, 0.5, 2.0)  # smallest |log ratio| of each shade
_FACT_TITLES = {
    "step": "step", "sequence_id": "sequence", "prompt_id": "prompt", "worker": "worker", "reward": "reward",
    "rollout_version": "rollout's version", "train_version": "trainer's version",
}  # fmt: skip


def render_tokens(browsed: TokenView) -> str:
    """Return the page as HTML. The same sequences give the same bytes."""
    spans, left = [], MAX_TOKENS
    for row in browsed.rows:
        last = min(row.last, row.first + left)
        spans.append((row.first, last))
        left -= last - row.first
    data = {
        "sequences": [*map(_token_numbers, browsed.rows, spans)],
        "corrections": [_correction_data(applied, spans) for applied in browsed.corrections],
    }
    page = {
        "version": escape_terminal(__version__),
        "title": f"{format_count(len(spans), 'sequence')}, token by token",
        "vocabulary": escape_terminal(browsed.vocabulary.name),
        "shades": [(f"n{place}", f"below −{SHADE_BOUNDS[place - 1]:g}") for place in range(len(SHADE_BOUNDS), 0, -1)]
        + [(f"p{place}", f"above {bound:g}") for place, bound in enumerate(SHADE_BOUNDS, start=1)],
        "sequences": [*map(_sequence_data, browsed.rows, spans, count())],
        "data": script_json(data),
    }
    return render_page("tokens.html.j2", page, ("tokens",))


def _sequence_data(row: SequenceRow, span: tuple[int, int], index: int) -> dict[str, Any]:
    log_ratio, tokens, (first, last) = row.log_ratio, row.batch.tokens, span
    named = ((text, row.facts[name]) for name, text in _FACT_TITLES.items() if name in row.facts)
    facts = [f"{text} {shorten(format_label(fact), 40)}" for text, fact in named]
    facts += [f"{tokens:,} valid tokens", f"sum of the log ratios {format_number(float(log_ratio.sum()))}"]
    note = f"Tokens {first:,} to {last - 1:,} of {tokens:,} are shown." if tokens > last - first else ""
    title = f"{shorten(row.file, 160)}, row {row.row:,}"
    return {
        "anchor": f"sequence-{index}", "title": title, "facts": facts, "note": note,
        "tokens": Markup("").join(_token_markup(row, log_ratio, span)),
    }  # fmt: skip


def _token_markup(row: SequenceRow, log_ratio: np.ndarray[Any, Any], span: tuple[int, int]) -> Iterator[Markup]:
    first, last = span
    valid = np.flatnonzero(row.mask)
    if last <= first:
        return
    start, stop = int(valid[first]) if first else 0, int(valid[last - 1]) + 1 if last < len(valid) else len(row.mask)
    number_of = np.cumsum(row.mask) - 1
    for is_valid, places in groupby(range(start, stop), lambda place: bool(row.mask[place])):
        if is_valid:
            for place in places:
                ratio = float(log_ratio[number_of[place]])
                level = sum(abs(ratio) >= bound for bound in SHADE_BOUNDS)
                shade = f" class={'n' if ratio < 0 else 'p'}{level}" if level else ""
                yield Markup(f"<i{shade}>") + escape(_token_text(row, place)) + Markup("</i>")
        else:
            masked = [*places]
            text = shorten("".join(_token_text(row, place) for place in masked[:200]), 120)
            label = f"{len(masked):,} masked"
            yield Markup('<s title="') + label + Markup('">') + escape(text or label) + Markup("</s>")


def _token_text(row: SequenceRow, place: int) -> str:
    if not row.texts:
        return "▯"
    return escape_terminal(row.texts[place]) + ("\n" if "\n" in row.texts[place] else "")


def _token_numbers(row: SequenceRow, span: tuple[int, int]) -> dict[str, Any]:
    part = slice(*span)
    found: dict[str, Any] = {
        "run": escape_terminal(row.run),
        "total": row.batch.tokens,
        "position": row.position[part].tolist(),
        "rollout": _round_numbers(row.batch.rollout[part]),
        "train": _round_numbers(row.batch.train[part]),
    }
    if row.experts is not None:
        found["experts"] = row.experts[part].tolist()
    if row.ids is not None:
        found["ids"] = row.ids[row.mask][part].tolist()
    return found


def _round_numbers(values: np.ndarray[Any, Any]) -> list[Any]:
    return [round_number(value, 5) for value in values.tolist()]


def _correction_data(applied: AppliedCorrection, spans: Sequence[tuple[int, int]]) -> dict[str, Any]:
    sentences: dict[str, int] = {}
    sequences = [
        {
            "states": states[slice(*span)].tolist(),
            "kept": int((states != STATE_REJECTED).sum()),
            "weights": _round_numbers(weights[slice(*span)]),
            "why": [sentences.setdefault(escape_terminal(text), len(sentences)) for text in reasons[slice(*span)]],
        }
        for states, weights, reasons, span in zip(applied.states, applied.weights, applied.reasons, spans, strict=True)
    ]
    label = f"{applied.correction.name}: {correction_label(applied.correction)}"
    return {"name": escape_terminal(label), "sentences": list(sentences), "sequences": sequences}
