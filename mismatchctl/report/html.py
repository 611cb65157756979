"""HTML writer: renders a document as one self-contained file."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import marshal
import math
import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import jinja2
from jinja2.bccache import Bucket
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup, escape

from mismatchctl.core.formatting import escape_terminal
from mismatchctl.core.ratios import DENSE_RANGE, MOE_RANGE, k3_scale_position
from mismatchctl.errors import ConfigError
from mismatchctl.io import __version__
from mismatchctl.io.files import find_packaged_folder, write_atomically
from mismatchctl.report.document import MIN_SPARKLINE_SPREAD, Card, Document, Explorer, Figures, RunCards
from mismatchctl.report.figures.figure import page_json

TEMPLATES_FOLDER = "reports_templates"
_SPARK_WIDTH = 60


def render_html(document: Document) -> str:
    """Return the page as HTML. The same document gives the same bytes."""
    page = document.page()
    figures = list(dict.fromkeys(figure.name for part in page.parts(Figures) for figure in part.figures))
    found = {figure.name: figure for part in page.parts(Figures) for figure in part.figures}
    libraries = ("vendor/d3.min", "vendor/plot.umd.min") if found else ()
    own = ("sweep",) if any(page.parts(Explorer)) else ()
    data = _escape_script(page_json(list(found.values()))) if found else ""
    places = {name: place for place, name in enumerate(figures)}
    return render_page("document.html.j2", page, own, libraries, figures=data, places=places)


def render_page(template: str, page: Any, own: Sequence[str] = (), libraries: Sequence[str] = (), **more: Any) -> str:
    """Render a template. `own` names scripts that are added to the shared one, after the libraries."""
    at = find_templates()
    scripts = ["\n" + (at / f"{name}.js").read_text("utf-8") for name in (*libraries, "report", *own)]
    styles = [
        (at / f"{name}.css").read_text("utf-8")
        for name in ("report", *(name for name in own if (at / f"{name}.css").is_file()))
    ]
    frame = {
        "css": Markup("\n".join(styles)), "scripts": [Markup(script) for script in scripts],
        "policy": _content_policy(scripts),
    }  # fmt: skip
    return _jinja_environment().get_template(template).render(page=page, frame=frame, **more)


class _BytecodeCache(jinja2.BytecodeCache):
    """Cache of compiled templates in `__pycache__`, next to the templates."""

    def load_bytecode(self, bucket: Bucket) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
            made_of, _, code = Path(bucket.key).read_bytes().partition(b"\n")
            bucket.code = marshal.loads(code) if made_of == bucket.checksum.encode() else None

    def dump_bytecode(self, bucket: Bucket) -> None:
        if sys.dont_write_bytecode:
            return
        with contextlib.suppress(OSError, ConfigError):
            Path(bucket.key).parent.mkdir(exist_ok=True)
            write_atomically(bucket.key, bucket.checksum.encode() + b"\n" + marshal.dumps(bucket.code), at_once=True)

    def get_source_checksum(self, source: str) -> str:
        """Include the versions that affect compiled code."""
        return f"{super().get_source_checksum(source)} {__version__} {jinja2.__version__}"

    def get_cache_key(self, name: str, filename: str | None = None) -> str:
        return cache_from_source(filename or name)


@cache
def _jinja_environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(find_templates()),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_escape_value,
        bytecode_cache=_BytecodeCache(),
    )
    environment.filters |= {
        "breakable": insert_breaks,
        "whole": keep_numbers_whole,
        "rest": _remaining_details,
        "json": script_json,
    }
    environment.globals.update(ranges=(DENSE_RANGE, MOE_RANGE), spark=_sparkline, run_cards_type=RunCards)
    environment.globals["gauge"] = lambda k3: round(100 * k3_scale_position(k3), 2)  # percent of the scale
    return environment


def script_json(data: Any) -> Markup:
    """Return JSON that is safe inside a script element."""
    return htmlsafe_json_dumps(data, separators=(",", ":"), allow_nan=False)


def _escape_script(text: str) -> Markup:
    """Return JSON that is safe inside a script element."""
    for character in "<>&'\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _remaining_details(card: Card) -> list[tuple[str, str]]:
    """Return the details of a card that its lines do not already show."""
    shown = {text for _, text, _ in card.lines} | {card.text}
    return [(heading, text) for heading, text in card.details if text not in shown]


def _sparkline(values: Sequence[float | None]) -> Markup:
    """Draw a positive series on a log scale, with a point per pixel at most."""
    size = max(math.ceil(len(values) / _SPARK_WIDTH), 1)
    parts = [[math.log(value) for value in values[at : at + size] if value] for at in range(0, len(values), size)]
    known = [(x, sum(part) / len(part)) for x, part in enumerate(parts) if part]
    if len(known) < 2:
        return Markup("")
    low, high = min(y for _, y in known), max(y for _, y in known)
    spread = max(high - low, MIN_SPARKLINE_SPREAD)
    points = " ".join(
        f"{_SPARK_WIDTH * x / (len(parts) - 1):.4g},{15 - 12 * (y - (low + high - spread) / 2) / spread:.3g}"
        for x, y in known
    )
    return Markup(f'<svg class="spark" viewBox="-1 0 62 18" aria-hidden="true"><polyline points="{points}"/></svg>')


@cache
def find_templates() -> Path:
    """Return the template folder of the installed package or the checkout."""
    return find_packaged_folder(TEMPLATES_FOLDER)


def insert_breaks(text: str) -> Markup:
    """Allow line breaks after the separators of a name, but not inside its numbers."""
    return keep_numbers_whole(
        Markup(re.sub(r"(?<=[_/\-])(?<!\de-)(?=\w)|(?<=\.)(?=[^\W\d])", "<wbr>", str(escape(escape_terminal(text)))))
    )


def keep_numbers_whole(text: str) -> Markup:
    """Prevent line breaks inside numbers with an exponent."""
    return Markup(re.sub(r"(?<=[\d.)])e-\d+", r'<span class="whole">\g<0></span>', str(escape(_escape_value(text)))))


def _content_policy(scripts: Sequence[str]) -> str:
    """Return a policy that blocks all loading and allows the scripts by their hashes."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def _escape_value(value: Any) -> Any:
    """Escape invisible characters except line breaks, in every value that a template prints."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return "\n".join(map(escape_terminal, value.split("\n")))
    return value
