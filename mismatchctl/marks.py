"""What mismatchctl wrote is known again: by its first bytes, Parquet and PDF by what they hold at their ends.

Such a file may be written anew; any other is the user's, and so is a baseline.
"""

from __future__ import annotations

import re
from pathlib import Path

from mismatchctl import __version__

TOOL = f"mismatchctl {__version__}"
"""What signs a picture or a page of text."""
PARQUET = {"mismatchctl": __version__}
"""What signs the footer of Parquet."""
CAPTIONS = "captions.md"
"""The file beside figures that names them, and the CSV behind them, which cannot be signed itself."""
_MOST = 4096
_KINDS = (
    rb'\{[^\0]*"tool":\s*"mismatchctl"',
    rb'(?i)<!doctype html>[^\0]*<meta name="generator" content="mismatchctl ',
    rb"<!-- mismatchctl ",
    rb"#+ mismatchctl ",
    rb'<\?xml [^>]*\?>\s*<testsuites name="mismatchctl ',
    rb"\x89PNG\r\n\x1a\n[\s\S]*Software\0mismatchctl ",
    rb"run,correction,point,",
)
"""JSON, HTML, SVG and Markdown, JUnit, PNG, a sweep's CSV."""
_ACCEPTED = re.compile(rb'"accepted":\s*\{')
"""In a baseline: somebody accepted it, and only `--save-baseline` writes it anew."""


def is_ours(path: Path) -> bool:
    """Whether mismatchctl wrote this file, or nothing is in it."""
    try:
        with path.open("rb") as file:
            first = file.read(_MOST)
            file.seek(max(0, path.stat().st_size - _MOST))
            last = file.read()
    except OSError:
        return False
    if first.startswith(b"PAR1"):
        return _signed_parquet(path)
    if first.startswith(b"%PDF"):
        return b"(mismatchctl " in last
    if _ACCEPTED.search(first):
        return False
    return not first or any(re.match(kind, first) for kind in _KINDS) or _is_named(path)


def is_baseline(path: Path) -> bool:
    """Whether this file is a Result that was accepted."""
    try:
        with path.open("rb") as file:
            return _ACCEPTED.search(file.read(_MOST)) is not None
    except OSError:
        return False


def signed(schema_metadata: dict[bytes, bytes] | None) -> dict[bytes, bytes]:
    """The metadata of an Arrow schema, with what signs Parquet."""
    return (schema_metadata or {}) | {name.encode(): version.encode() for name, version in PARQUET.items()}


def _signed_parquet(path: Path) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from mismatchctl.footer import check_footer

    try:
        with pa.OSFile(str(path)) as file:
            check_footer(file)
            held = pq.read_metadata(file).metadata or {}
    except (OSError, pa.ArrowException):
        return False
    return all(name.encode() in held for name in PARQUET)


def _is_named(path: Path) -> bool:
    """Whether this is the CSV behind a figure, by the captions beside it."""
    beside = path.with_name(CAPTIONS)
    if path.suffix != ".csv" or not beside.is_file() or not is_ours(beside):
        return False
    return f"({path.name})" in beside.read_text("utf-8", "replace")
