"""HTML writer: renders a document as one file that needs no other file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from mismatchctl.core.formatting import escape_terminal
from mismatchctl.core.ratios import DENSE_RANGE, MOE_RANGE, k3_scale_position
from mismatchctl.io.files import find_packaged_folder
from mismatchctl.report.document import Card, Document, Explorer, Figures, RunCards, Table, scale_sparkline
from mismatchctl.report.figures.figure import page_data
from mismatchctl.report.tables import find_metric

TEMPLATES_FOLDER = "reports_templates"
_SPARK_WIDTH = 60


def render_html(page: Document) -> str:
    """Return the page as HTML. The same document gives the same bytes."""
    found = [figure for part in page.parts(Figures) for figure in part.figures]
    data = script_json(page_data(found)) if found else ""
    libraries = ("vendor/d3.min", "vendor/plot.umd.min") if found else ()
    own = ("sweep",) if any(page.parts(Explorer)) else ()
    tables = list(page.parts(Table))
    anchors = {cell.anchor for table in tables for row in (table.heads, *table.rows) for cell in row}
    anchors |= {anchor for part in page.parts(Explorer) for anchor in part.anchors}
    glossary = {anchor: find_metric(anchor[2:], anchor[0]) for anchor in sorted(anchors - {""})}
    places = map(str, count())  # numbers: the template takes the next one for each figure
    return render_page("document.html.j2", page, own, libraries, figures=data, glossary=glossary, places=places)


def render_page(template: str, page: Any, own: Sequence[str] = (), libraries: Sequence[str] = (), **more: Any) -> str:
    """Render a template with the shared scripts and styles, with `libraries`, and with the files named in `own`."""
    scripts = ["\n" + (find_templates() / f"{name}.js").read_text("utf-8") for name in (*libraries, "report", *own)]
    styles = [(find_templates() / f"{name}.css").read_text("utf-8") for name in ("report", *own)]
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    frame = {"css": Markup("\n".join(styles)), "scripts": list(map(Markup, scripts)), "policy": policy}
    return _jinja_environment().get_template(template).render(page=page, frame=frame, **more)


@cache
def _jinja_environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(find_templates()), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=_escape_value,
    )  # fmt: skip
    environment.filters |= {
        "breakable": insert_breaks, "whole": keep_numbers_whole, "rest": _remaining_details, "json": script_json,
        "lines": lambda text: Markup("\n").join(map(escape_terminal, text.split("\n"))),
    }  # fmt: skip
    environment.globals.update(ranges=(DENSE_RANGE, MOE_RANGE), spark=_sparkline, run_cards_type=RunCards)
    environment.globals["gauge"] = lambda k3: round(100 * k3_scale_position(k3), 2)  # position of K3, in percent
    return environment


def script_json(data: Any) -> Markup:
    def escaped(value: Any) -> Any:
        if isinstance(value, dict):
            return {escaped(key): escaped(one) for key, one in value.items()}
        return [*map(escaped, value)] if isinstance(value, (list, tuple)) else _escape_value(value)

    text = json.dumps(escaped(data), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return Markup(re.sub("[<>&'\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text))


def _remaining_details(card: Card) -> list[tuple[str, str]]:
    shown = {text for _, text in card.lines} | {card.text}
    return [(heading, text) for heading, text in card.details if text not in shown]


def _sparkline(values: Sequence[float | None]) -> Markup:
    shares = scale_sparkline(values, _SPARK_WIDTH)
    known = [(x, share) for x, share in enumerate(shares) if share is not None]
    if len(known) < 2:
        return Markup("")
    points = " ".join(f"{_SPARK_WIDTH * x / (len(shares) - 1):.4g},{15 - 12 * share:.3g}" for x, share in known)
    return Markup(f'<svg class="spark" viewBox="-1 0 62 18" aria-hidden="true"><polyline points="{points}"/></svg>')


@cache
def find_templates() -> Path:
    return find_packaged_folder(TEMPLATES_FOLDER)


def insert_breaks(text: str) -> Markup:
    """Allow line breaks after the separators of a name, except inside its numbers."""
    shown = str(escape(escape_terminal(text)))
    return keep_numbers_whole(Markup(re.sub(r"(?<=[_/\-])(?<!\de-)(?=\w)|(?<=\.)(?=[^\W\d])", "<wbr>", shown)))


def keep_numbers_whole(text: str) -> Markup:
    return Markup(re.sub(r"(?<=[\d.)])e-\d+", r'<span class="whole">\g<0></span>', str(escape(_escape_value(text)))))


def _escape_value(value: Any) -> Any:
    return escape_terminal(value) if isinstance(value, str) and not isinstance(value, Markup) else value
