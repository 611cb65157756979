"""Where what a page shows comes from: files, what was left out of them, corrections as one writes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mismatchctl.correction import Correction
from mismatchctl.numbers import bytes_size
from mismatchctl.render.document import WHOLE, Code, Facts, Head, Note, Section, Table
from mismatchctl.render.tables import amount, words
from mismatchctl.render.text import clean
from mismatchctl.result import InputFile, LeftOut
from mismatchctl.texts.yaml_written import dump_yaml

MOST_FILES = 500


def provenance(
    version: str, inputs: Sequence[InputFile], left_out: Sequence[LeftOut], corrections: Sequence[Correction]
) -> Section:
    """The section that closes a page."""
    section = Section(
        "Provenance", "provenance", reach=WHOLE,
        lead=f"Written by mismatchctl {clean(version)} from the files below; the same files give the same report.",
    )  # fmt: skip
    gone = left_out_table(left_out)
    section.add(gone or Note("No row and no file was left out.", reach=WHOLE))
    files, kinds = files_table(inputs)
    section.add(
        Section("Files", "files", note=f"{len(files.rows)} shown", folded=True).add(files, Facts(kinds, reach=WHOLE))
    )
    codes = [Code(clean(c.name), correction_yaml(c)) for c in corrections]
    note = f"{len(codes)} in YAML"
    return section.add(Section("Corrections, as one writes them", "as-written", note=note, folded=True).add(*codes))


def files_table(inputs: Sequence[InputFile]) -> tuple[Table, list[tuple[str, str]]]:
    """Input files, with their column types once per kind of file."""
    kinds: dict[str, str] = {}

    def kind(file: InputFile) -> str:
        types = ", ".join(f"{name}: {dtype}" for name, dtype in file.dtypes.items())
        return kinds.setdefault(types, f"kind {len(kinds) + 1}")

    table = Table.of("Files that were read. Kinds of columns are listed below.", inputs[:MOST_FILES], (
        ("file", lambda file: words(file.path, "path")),
        ("run", lambda file: file.run),
        (Head("size"), lambda file: bytes_size(file.size)),
        (Head("rows"), lambda file: amount(file.rows, "rows")),
        (Head("valid tokens"), lambda file: amount(file.tokens, "tokens")),
        ("layout", lambda file: file.layout),
        ("columns", kind),
    ))  # fmt: skip
    if len(inputs) > MOST_FILES:
        table.left_out = f"The first {MOST_FILES} of {len(inputs):,} files; the JSON result holds all of them."
    return table, [(kind, clean(types)) for types, kind in kinds.items()]


def left_out_table(rows: Sequence[LeftOut]) -> Table | None:
    """What bad data was left out."""
    if not rows:
        return None
    total = Counter[str]()
    for row in rows:
        total["files" if row.reason == "file" else "rows"] += row.count
    caption = "Left out as bad data: " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(total.items())) + "."
    return Table.of(caption, rows[:MOST_FILES], (
        ("file", lambda row: words(row.file, "path")),
        ("reason", lambda row: row.reason),
        (Head("count"), lambda row: amount(row.count, "rows")),
        ("first example", lambda row: words(row.example, "prose")),
    ))  # fmt: skip


def correction_yaml(correction: Correction) -> str:
    """A correction as one writes it, its name first."""
    ordered = {"name": correction.name} | correction.to_mapping()
    text = dump_yaml(ordered, inner=True)
    return "\n".join(clean(line) for line in text.splitlines())
