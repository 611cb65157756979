"""The HTML report: one self-contained file, a rendering of a Result and of nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mismatchctl.correction import Correction
from mismatchctl.numbers import bytes_size
from mismatchctl.render.figures import Figure, overview_figure
from mismatchctl.render.notes import notes
from mismatchctl.render.page import gauge_place, render_page
from mismatchctl.render.run_section import RunSection, judgement, run_section
from mismatchctl.render.tables import Cell, Entry, Head, Registry, Table, amount, words
from mismatchctl.render.text import clean
from mismatchctl.result import InputFile, Result, RunResult, Value
from mismatchctl.texts.yaml_written import dump_yaml

BRIEF_FROM = 9
"""With so many runs, each shows its main figures only."""
OPEN_RUNS = 3
"""Up to so many runs are unfolded when the page opens."""
MOST_FILES = 500
SIDE_BY_SIDE = (
    "tokens",
    "sequences",
    "abs_diff_mean",
    "abs_diff_max",
    "ess_token",
    "ess_sequence",
    "ratio_mean_z",
    "khat_sequence",
    "bitwise_share",
)


def render_report(result: Result) -> str:
    """The report as one HTML document; the same Result gives the same bytes."""
    return render_page("report.html.j2", prepare(result))


@dataclass
class Page:
    """Everything that the template shows."""

    title: str
    version: str
    facts: list[str]
    notes: list[str]
    runs: list[RunSection]
    brief: bool
    unfolded: bool
    overview: Table | None
    overview_figure: Figure | None
    files: Table
    kinds: list[tuple[str, str]]
    left_out: Table | None
    corrections: list[tuple[str, str]]
    glossary: list[tuple[str, list[Entry]]] = field(default_factory=list)


def prepare(result: Result) -> Page:
    """All data of the page, without any layout."""
    registry = Registry(result.corrections)
    brief = len(result.runs) >= BRIEF_FROM
    sections = [run_section(result, index, registry, brief=brief) for index in range(len(result.runs))]
    several = len(sections) > 1
    files, kinds = files_table(result.provenance.inputs)
    page = Page(
        title=sections[0].name if len(sections) == 1 else f"{len(sections)} runs",
        version=clean(result.provenance.version),
        facts=_facts(result),
        notes=[clean(note) for note in notes(result)],
        runs=sections,
        brief=brief,
        unfolded=len(sections) <= OPEN_RUNS,
        overview=_overview(result, sections, registry) if several else None,
        overview_figure=overview_figure(result.runs) if several else None,
        files=files,
        kinds=kinds,
        left_out=_left_out(result),
        corrections=[(clean(c.name), correction_yaml(c)) for c in result.corrections],
    )
    page.glossary = [
        ("The mismatch, and the second drift", registry.entries("m")),
        ("Corrections", registry.entries("c")),
    ]
    return page


def _facts(result: Result) -> list[str]:
    """The size of what was read, in a few phrases."""
    runs, provenance = result.runs.values(), result.provenance
    counts = [(sum(int(_overall(run, key).value or 0) for run in runs), key) for key in ("token", "sequence")]
    counts += [(sum(len(run.groups.labels) for run in runs), "step"), (len(provenance.inputs), "file")]
    counts += [(len(result.corrections), "correction")]
    facts = [f"{count:,} {name}{'s' * (count != 1)}" for count, name in counts]
    left_out = sum(row.count for row in provenance.left_out)
    return [*facts, f"{left_out:,} left out"] if left_out else facts


def _overall(run: RunResult, noun: str) -> Value:
    return run.overall.metrics.get(f"{noun}s", Value(value=None))


def _overview(result: Result, sections: list[RunSection], registry: Registry) -> Table:
    """Runs side by side: K3 and its trend first, then what is read next."""
    run_results = list(result.runs.values())
    keys = [key for key in SIDE_BY_SIDE if any(key in run.overall.metrics for run in run_results)]
    heads = [
        Head("run", numeric=False),
        registry.head("k3"),
        Head("K3 from 1e-8 to 1", numeric=False),
        Head("trend of K3", numeric=False),
    ]
    table = Table("", [*heads, *(registry.head(key) for key in keys)], sortable=True)
    for section, run in zip(sections, run_results, strict=True):
        k3 = table.value(section.k3, "nats/token")
        gauge = Cell(
            "" if section.k3.value is None else str(gauge_place(section.k3.value)), kind="scale", order=k3.order
        )
        row = [Cell(section.name, kind="name", anchor=section.anchor), k3, gauge, words(section.trend.brief)]
        for key in keys:
            value = run.overall.metrics.get(key, Value(value=None, status="not recorded"))
            alarm = "alarm" if judgement(key, value, run)[1] else "number"
            cell = table.value(value, registry.metric(key).unit, errors=False)
            row.append(Cell(cell.text, cell.mark, cell.order, alarm))
        table.rows.append(row)
    return table


def files_table(inputs: Sequence[InputFile]) -> tuple[Table, list[tuple[str, str]]]:
    """Input files, with their column types once per kind of file."""
    kinds: dict[str, str] = {}
    table = Table(
        "Files that were read. Kinds of columns are listed below.",
        [
            Head("file", numeric=False), Head("run", numeric=False), Head("size"), Head("rows"), Head("valid tokens"),
            Head("layout", numeric=False), Head("columns", numeric=False),
        ],
    )  # fmt: skip
    for file in inputs[:MOST_FILES]:
        types = ", ".join(f"{name}: {dtype}" for name, dtype in file.dtypes.items())
        kind = kinds.setdefault(types, f"kind {len(kinds) + 1}")
        sizes = [Cell(bytes_size(file.size)), amount(file.rows, "rows"), amount(file.tokens, "tokens")]
        table.rows.append([words(file.path, "path"), words(file.run), *sizes, words(file.layout), words(kind)])
    if len(inputs) > MOST_FILES:
        table.left_out = f"The first {MOST_FILES} of {len(inputs):,} files; the JSON result holds all of them."
    return table, [(kind, clean(types)) for types, kind in kinds.items()]


def _left_out(result: Result) -> Table | None:
    """What bad data was left out."""
    rows = result.provenance.left_out
    if not rows:
        return None
    total = Counter[str]()
    for row in rows:
        total["files" if row.reason == "file" else "rows"] += row.count
    caption = "Left out as bad data: " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(total.items())) + "."
    heads = [
        Head("file", numeric=False),
        Head("reason", numeric=False),
        Head("count"),
        Head("first example", numeric=False),
    ]
    table = Table(caption, heads)
    for row in rows[:MOST_FILES]:
        table.rows.append(
            [words(row.file, "path"), words(row.reason), amount(row.count, "rows"), words(row.example, "prose")]
        )
    return table


def correction_yaml(correction: Correction) -> str:
    """A correction as one writes it, its name first."""
    ordered = {"name": correction.name} | correction.to_mapping()
    text = dump_yaml(ordered, inner=True)
    return "\n".join(clean(line) for line in text.splitlines())
