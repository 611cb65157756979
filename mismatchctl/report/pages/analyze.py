"""The page of an analysis, and its sections in the terminal and in Markdown."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING

from mismatchctl.core.formatting import (
    DASH,
    escape_terminal,
    format_count,
    format_estimate,
    format_heavy_tail,
    format_number,
)
from mismatchctl.core.ratios import DENSE_RANGE, MOE_RANGE
from mismatchctl.report.document import (
    EVERYWHERE,
    PAGE_ONLY,
    Answers,
    ColumnHeader,
    DeferredSection,
    Document,
    DocumentPart,
    Figures,
    Headline,
    Note,
    RunCard,
    RunCards,
    Section,
    Table,
    TableCell,
    TableColumns,
    Tile,
    Tiles,
)
from mismatchctl.report.pages.diagnose import finding_card, sides_section
from mismatchctl.report.pages.run_tables import (
    breakdown_tables,
    by_column_tables,
    comparison_of_corrections,
    correction_metric_table,
    gates_table,
    k3_steps_table,
    logged_table,
    loss_table,
    metric_tables,
    objectives_section,
    provenance_section,
    run_log_section,
    selection_table,
    step_tables,
    worst_sequences_table,
    worst_tokens_table,
)
from mismatchctl.report.tables import MetricRegistry, text_cell, value_cell
from mismatchctl.results.growth import Z_LIMIT
from mismatchctl.results.model import NOT_RECORDED, Result, RunResult, Value
from mismatchctl.results.status import STATUSES, run_status
from mismatchctl.results.summary import get_summary, left_out_facts, list_notes

if TYPE_CHECKING:
    from mismatchctl.api.sweep.result import Sweep
    from mismatchctl.report.figures.figure import Figure
    from mismatchctl.report.figures.runs import RunFigures

BRIEF_RUN_COUNT = 9
"""Number of runs from which each run has only its main figures."""
MAX_DETAILED_RUNS = 3
"""Maximum runs with tables of their own on the page, and with a section of their own in the terminal."""
MAX_COLORED_RUNS = 8
"""Maximum runs with a color of their own in one figure."""
MAX_RUN_CARDS = 8
"""Maximum runs whose answer is visible at first."""
TILE_METRICS = (
    "abs_diff_mean", "abs_diff_max", "ratio_mean", "ess_token", "ess_sequence", "drift_k3",
    "total_k3", "rollout_reference_k3", "train_reference_k3", "ref_k3", "routing_differs", "ratio_mean_z",
    "khat_token", "khat_sequence", "chi2_token", "chi2_sequence", "prob_corr", "k3_worst_share", "bitwise_share",
)  # fmt: skip
MAIN_TILE_METRICS = frozenset(TILE_METRICS[:11])
OVERVIEW_METRICS = {
    "tokens": 7, "sequences": None, "abs_diff_mean": 8, "abs_diff_max": 9, "ess_token": None, "ess_sequence": 1,
    "ratio_mean_z": 2, "khat_sequence": None, "bitwise_share": None,
}  # fmt: skip
"""Metrics of the overview with their `ColumnHeader.drop`."""


def document(
    result: Result, objectives: tuple[Sequence[str], Sequence[str]] = ((), ()), sweeps: Sequence[Sweep] = ()
) -> Document:
    """Build the page of a Result.

    `objectives` are the KL estimators and loss aggregations to show. The fronts of `sweeps` are shown with the
    corrections.
    """
    registry, origin = MetricRegistry(result.corrections), result.provenance
    title = f"{len(result.runs)} runs" if len(result.runs) != 1 else escape_terminal(next(iter(result.runs)))
    doc = Document(Headline(title, _size_facts(result), subtitle="analyze"), version=escape_terminal(origin.version))
    doc.add(*(replace(section, terminal=True) for section in _terminal_sections(result, registry)))
    shared: list[Section] = []
    for index, (name, run) in enumerate(result.runs.items()):
        shown, anchor = escape_terminal(name) if len(result.runs) != 1 else "it", f"run-{index}"
        shared += [objectives_section(run, shown, anchor, *objectives)] if any(objectives) else []
        shared.append(run_log_section(run, escape_terminal(name), anchor, origin))
    doc.add(*(replace(section, terminal=True) for section in shared))
    warnings = [Note(escape_terminal(note), "alarm") for note in list_notes(result)]
    doc.add(Section("", "notes", terminal=True).add(*warnings))
    doc.add(DeferredSection(lambda: page_sections(_PageBuilder(result, registry, sweeps), shared, warnings)))
    doc.glossary = lambda: [
        ("The mismatch, and other pairs of policies", registry.entries("m")),
        ("Corrections", registry.entries("c")),
    ]
    doc.page_title = lambda: page_headline(result)
    return doc


def _size_facts(result: Result) -> list[str]:
    """Return the size of the data in a few phrases."""
    runs, provenance = result.runs.values(), result.provenance
    counts = [
        (sum(int(run.overall.metrics.get(f"{key}s", NOT_RECORDED).value or 0) for run in runs), key)
        for key in ("token", "sequence")
    ]
    counts += [(sum(len(run.groups.labels) for run in runs), "step"), (len(provenance.inputs), "file")]
    counts += [(len(result.corrections), "correction")]
    facts = [format_count(*each) for each in counts]
    return [*facts, *left_out_facts(provenance.left_out)]


def page_headline(result: Result) -> str:
    """Return the title of the page: how many runs need attention, or the status of the only run."""
    found = [run_status(run) for run in result.runs.values()]
    if len(found) == 1:
        text = found[0].text
        return f"{escape_terminal(next(iter(result.runs)))}: {escape_terminal(text)}"
    fail, check = (sum(one.status == status for one in found) for status in ("FAIL", "CHECK"))
    if fail:
        return f"{fail} of {len(found)} runs need attention"
    return f"{check} of {len(found)} runs to check" if check else f"All {len(found)} runs are OK"


def page_sections(
    page: _PageBuilder, shared: Sequence[Section], warnings: Sequence[Note]
) -> Iterator[DocumentPart | None]:
    """Yield the sections of the page: the answer, K3, corrections, and folded details."""
    result, registry = page.result, page.registry
    yield page.answer()
    yield from page.corrections()
    yield page.trend()
    yield page.where()
    yield page.causes()
    if warnings:
        note = f"{len(warnings)}: {warnings[0].text}"
        yield Section("Warnings", "warnings", folded=True, note=note, level="CHECK").add(*warnings)
    yield page.details("Kept and rejected sequences", "selection", page.selection)
    yield page.details("By column", "by", lambda index, run: by_column_tables(result.corrections, run, registry, ""))
    yield page.details("Tokens", "tokens", page.worst, note="the sequences and tokens with the largest log ratios")
    for section in shared:
        yield replace(section, folded=True, reach=PAGE_ONLY)
    yield page.numbers()
    origin = result.provenance
    yield provenance_section(origin.version, origin.inputs, origin.left_out, result.corrections)


class _PageBuilder:
    """Builds the sections of the page. With several runs, each section has a folded part per run."""

    def __init__(self, result: Result, registry: MetricRegistry, sweeps: Sequence[Sweep]) -> None:
        from mismatchctl.report.figures.runs import k3_figure, run_figures  # slow import, only needed for HTML

        self.result, self.registry, self.runs, self.sweeps = result, registry, result.runs, sweeps
        self.names = [escape_terminal(name) for name in result.runs]
        self.statuses = [run_status(run) for run in result.runs.values()]
        self.several, self.detailed = len(result.runs) > 1, len(result.runs) <= MAX_DETAILED_RUNS
        self.brief = brief = len(result.runs) >= BRIEF_RUN_COUNT
        self.figures: list[RunFigures] = [
            run_figures(run, f"run{index}", brief=brief) for index, run in enumerate(result.runs.values())
        ]
        worst = min((status.status for status in self.statuses), key=STATUSES.index)
        attention = [status.status == worst != "OK" for status in self.statuses]
        self.k3: Figure | None = k3_figure(result.runs, "k3", attention if any(attention) else ())

    def answer(self) -> Section:
        """Build the first screen."""
        section = Section("", "answer")
        items = list(self.runs.items())
        if not self.several:
            name, run = items[0]
            section.add(_answer_block(run, _next_command(self.result, name, run)))
            return section.add(Figures([self.k3]) if self.k3 is not None else self._overall_tiles(run))
        order = sorted(
            range(len(items)), key=lambda index: (STATUSES.index(self.statuses[index].status), -self._k3(index))
        )
        cards = [self._card(index) for index in order]
        shown = len(cards)
        if shown > MAX_RUN_CARDS:
            shown = min(sum(card.status == cards[0].status != "OK" for card in cards) or MAX_RUN_CARDS, MAX_RUN_CARDS)
        height = 330 if shown <= 3 else 280 if shown <= 5 else 240
        return section.add(RunCards(cards, shown), Figures([self.k3], runs=True, height=height))

    def _k3(self, index: int) -> float:
        run = list(self.runs.values())[index]
        return run.overall.metrics.get("k3", NOT_RECORDED).value or 0.0

    def _card(self, index: int) -> RunCard:
        name, run = list(self.runs.items())[index]
        status = self.statuses[index]
        action = get_summary(run).answer("what to do").text if status.status != "OK" else ""
        command = _next_command(self.result, name, run) if action else ""
        return RunCard(
            index, self.names[index], status.status, escape_terminal(status.text), escape_terminal(action),
            _answer_block(run, command), f"trend-{index}",
        )  # fmt: skip

    def _overall_tiles(self, run: RunResult) -> Tiles:
        return Tiles([tile for tile in build_tiles(run, self.registry) if tile.first or tile.level == "alarm"])

    def details(
        self, title: str, anchor: str, parts: Callable[[int, RunResult], Iterable[DocumentPart | None]], *,
        note: str = "", notes: Sequence[str] = (), series: bool = False,
    ) -> Section:  # fmt: skip
        """Build a folded section, with a folded part per run if there are several."""
        section = Section(title, anchor, folded=True, note=note or _count_notes(notes), reach=PAGE_ONLY)
        for index, run in enumerate(self.runs.values()):
            found = [part for part in parts(index, run) if part is not None]
            if not self.several:
                section.note = note or (notes[index] if notes else "")
                return section.add(*found)
            status = self.statuses[index]
            own = notes[index] if notes else status.text
            sub = Section(
                self.names[index], f"{anchor}-{index}", folded=True, note=escape_terminal(own), level=status.status,
                series=tuple(run.groups.series("k3").value) if series else (), run=index,
            )  # fmt: skip
            section.add(sub.add(*found))
        return section

    def trend(self) -> Section:
        """Build the figures over the steps."""
        notes = [f"K3 {get_summary(run).growth.brief}" for run in self.runs.values()]
        section = self.details("Trend", "trend", self._trend_parts, notes=() if self.several else notes, series=True)
        grown = sum(get_summary(run).growth.changed for run in self.runs.values())
        if self.several:
            section.note = f"K3 changed in {grown} of {len(self.runs)} runs"
            section.parts.insert(0, Table.of(
                "", self.runs.items(), overview_columns(self.result, self.registry), sortable=True, reach=PAGE_ONLY
            ))  # fmt: skip
        return section

    def _trend_parts(self, index: int, run: RunResult) -> Iterator[DocumentPart]:
        found = self.figures[index]
        if not self.brief:
            yield self._overall_tiles(run)
        shown = found.trends[1:] if not self.several else found.trends
        yield Figures(shown)
        if found.drift:
            lead = "From the trainer's recomputation to the policy that is being updated, which PPO's ratio measures."
            yield Section("Policy drift", f"drift-{index}", lead=lead).add(Figures(found.drift))

    def where(self) -> Section:
        """Build the distributions and breakdowns."""
        notes = []
        for found, run in zip(self.figures, self.runs.values(), strict=True):
            titles = [
                figure.title
                for figure in found.distributions
                if figure.title[0].isdigit() or "x the mean" in figure.title
            ]
            zero = run.overall.metrics.get("k3", NOT_RECORDED).value == 0
            notes.append("every log ratio is 0" if zero else "; ".join(titles[:2]) or "evenly spread over the tokens")
        figures = [[Figures(found.distributions)] for found in self.figures]
        return self.details("Where the mismatch is", "where", lambda index, run: figures[index], notes=notes)

    def causes(self) -> Section:
        """Build the findings, and which side has the error."""
        notes = [
            f"{run.findings[0].title} ({run.findings[0].confidence} confidence)" if run.findings else "no finding"
            for run in self.runs.values()
        ]

        def parts(index: int, run: RunResult) -> Iterator[DocumentPart | None]:
            cards = [finding_card(found, full=not self.brief) for found in run.findings]
            yield from (replace(card, details=()) if self.brief else card for card in cards)
            if run.sides is not None:
                yield sides_section("Whose error", f"sides-{index}", run.sides)

        return self.details("Causes", "causes", parts, notes=notes)

    def corrections(self) -> Iterator[Section]:
        """Yield the comparison of the corrections and its details."""
        from mismatchctl.report.figures.bars import corrections_figure

        if not self.result.corrections:
            return
        section = Section("Corrections", "corrections", reach=PAGE_ONLY, folded=True, opened=True)
        count = len(self.result.corrections)
        section.note = f"{format_count(count, 'correction')}: rejected data, remaining mismatch, fresh batch"
        section.add(comparison_of_corrections(self.result, self.registry))
        shown = {name: run.overall.corrections for name, run in list(self.runs.items())[:MAX_COLORED_RUNS]}
        section.add(Figures([corrections_figure(shown, "corrections", _sweep_front(self.sweeps))]))
        yield section
        yield self.details(
            "Corrections in detail", "correction-details", self._correction_parts,
            note="over the steps, loss and gradient, each gate",
        )  # fmt: skip

    def _correction_parts(self, index: int, run: RunResult) -> Iterator[DocumentPart | None]:
        figures = self.figures[index].corrections
        yield Figures(figures[1:])
        if self.detailed:
            yield loss_table(run, self.registry)
            yield gates_table(self.result.corrections, run, self.registry)

    def selection(self, index: int, run: RunResult) -> Iterator[DocumentPart | None]:
        """Yield the means of kept and rejected sequences."""
        yield selection_table(self.result, run, self.registry) if self.detailed else None
        yield Figures(self.figures[index].selection)

    def worst(self, index: int, run: RunResult) -> Iterator[DocumentPart | None]:
        """Yield the sequences and tokens with the largest log ratios."""
        most = None if self.detailed else 1 if self.brief else 3
        yield None if self.brief else worst_sequences_table(run.worst_sequences, most)
        yield worst_tokens_table(run.worst_tokens, most)

    def numbers(self) -> Section:
        """Build the tables of all metrics."""
        section = Section(
            "All numbers", "numbers", folded=True, note="every metric, and values by step", reach=PAGE_ONLY
        )
        tables = metric_tables(self.runs, self.registry, brief=self.brief)
        steps = any(len(run.groups.labels) > 1 for run in self.runs.values())
        if steps and not self.detailed:
            tables += k3_steps_table(self.runs)
        for index, run in enumerate(self.runs.values() if self.detailed else ()):
            own: list[Table] = [correction_metric_table(run, self.registry)] if self.result.corrections else []
            own += [logged_table(run, self.result.provenance.framework or "the framework")] if run.logged else []
            own += breakdown_tables(run, self.registry)
            own += step_tables(run, self.registry) if len(run.groups.labels) > 1 else []
            for table in own:
                table.title = table.title or table.caption.split(":")[0]
                table.title += f", {self.names[index]}" if self.several else ""
            tables += own
        for table in tables:
            table.folded, table.title = True, table.title or table.caption.split(":")[0]
        return section.add(*tables)


def _sweep_front(sweeps: Sequence[Sweep]) -> list[tuple[str, float | None, float | None]]:
    """Return the Pareto fronts of sweeps: name, rejected share of tokens, and K3 of the kept tokens."""
    from mismatchctl.api.sweep.result import format_point

    return [
        (format_point(study, row["point"]), row["rejected_tokens"], row["k3_kept"])
        for sweep in sweeps
        for study in sweep.studies
        for row in sweep.rows(sweep.runs[0], study.name).to_dicts()
        if row["pareto"]
    ]


def _count_notes(notes: Sequence[str]) -> str:
    """Return the most frequent note of the runs."""
    if len(notes) < 2:
        return ""
    note, count = Counter(notes).most_common(1)[0]
    return f"{count} of {len(notes)} runs: {note}" if count > 1 else ""


def _answer_block(run: RunResult, command: str = "") -> Answers:
    over = run.groups.series("k3").value
    return Answers(
        get_summary(run).answers, run.overall.metrics.get("k3", NOT_RECORDED).value, over, escape_terminal(command)
    )


def _next_command(result: Result, name: str, run: RunResult) -> str:
    """Return the command that follows the answer, or an empty string if no action is needed."""
    files = [file.path for file in result.provenance.inputs if file.run == name] or [
        file.path for file in result.provenance.inputs
    ]
    folders = {str(PurePath(file).parent) for file in files}
    path = files[0] if len(files) == 1 else folders.pop() if len(folders) == 1 else ""
    if not path or path.startswith("<"):
        return ""
    verb = {"ask": "advise", "fix": "diagnose", "fix_first": "diagnose"}.get(get_summary(run).answer("what to do").key)
    return f"mismatchctl {verb} {shlex.quote(path)}" if verb else ""


def _terminal_sections(result: Result, registry: MetricRegistry) -> Iterator[Section]:
    """Yield the sections of the terminal and of Markdown."""
    runs, several = result.runs, len(result.runs) != 1
    sections = [list(_detail_sections(result, index, registry)) for index in range(len(runs))]
    if not several:
        yield Section("", "answer").add(_answer_block(next(iter(runs.values()))))
        yield from sections[0]
    else:
        yield overview_section(result, registry)
        yield from map(partial(_run_section, result), range(len(runs)), sections)
    if result.corrections:
        yield Section("", "corrections").add(comparison_of_corrections(result, registry))


def _run_section(result: Result, index: int, sections: Iterable[Section]) -> Section:
    """Build the section of one run of several."""
    name, run = list(result.runs.items())[index]
    k3, few = run.overall.metrics.get("k3", NOT_RECORDED), len(result.runs) <= MAX_DETAILED_RUNS
    note = f"K3 {format_estimate(k3.value, k3.se, 'nats/token')}"
    section = Section(escape_terminal(name), f"run-{index}", note=note, reach=EVERYWHERE if few else PAGE_ONLY)
    return section.add(_answer_block(run), *sections)


def _detail_sections(result: Result, index: int, registry: MetricRegistry) -> Iterator[Section]:
    """Yield the sections of one run."""
    run, anchor = list(result.runs.values())[index], f"run-{index}"
    name = f" on {escape_terminal(list(result.runs)[index])}" if len(result.runs) > 1 else ""
    findings = Section(f"Findings{name}", f"{anchor}-findings")
    yield findings.add(*(finding_card(finding, full=False) for finding in run.findings))
    yield Section("Main figures", f"{anchor}-tiles").add(Tiles(build_tiles(run, registry)))
    if run.sides is not None:
        yield sides_section("Whose error", f"{anchor}-sides", run.sides)
    yield Section("Broken down", f"{anchor}-by").add(*by_column_tables(result.corrections, run, registry, name))


def build_tiles(run: RunResult, registry: MetricRegistry) -> list[Tile]:
    """Return the main numbers of a run, with a judgement if there is a limit."""
    found = []
    for key in (key for key in TILE_METRICS if key in run.overall.metrics):
        value, metric = run.overall.metrics[key], registry.metric(key)
        verdict, beyond = (value.status, False) if value.value is None else judge_value(key, value, run)
        level = "quiet" if value.value is None else "alarm" if beyond else "fair" if value.tail else "good"
        if value.tail:
            verdict = "; ".join(filter(None, (verdict, format_heavy_tail(value.covers))))
        shown, first = format_estimate(value.value, value.se, metric.unit), key in MAIN_TILE_METRICS
        found.append(Tile(metric.title, f"m-{key}", shown, metric.meaning, verdict, level, first))
    return found


def judge_value(key: str, value: Value, run: RunResult) -> tuple[str, bool]:
    """Return a short judgement of a metric with a limit, and True if it exceeds the limit."""
    if value.value is None:
        return "", False
    if key in ("ratio_mean_z", "ratio_mean"):
        z = run.overall.metrics.get("ratio_mean_z", NOT_RECORDED).value
        beyond = z is not None and abs(z) > Z_LIMIT
        if key == "ratio_mean":
            return ("" if z is None else f"z = {round(z, 1) + 0.0:+.1f}"), beyond
        return (f"beyond ±{Z_LIMIT:g}" if beyond else f"within ±{Z_LIMIT:g}"), beyond
    if key.startswith("khat_"):
        limit = run.overall.metrics.get(f"{key}_limit")
        if limit is not None and limit.value is not None:
            beyond = value.value > limit.value
            return f"{'above' if beyond else 'below'} its limit of {format_number(limit.value)}", beyond
    return "", False


def overview_section(result: Result, registry: MetricRegistry) -> Section:
    """Build the table that compares the runs."""
    title, columns = f"{len(result.runs)} runs", overview_columns(result, registry)
    table = Table.of("", result.runs.items(), columns, sortable=True, title=title, reach=EVERYWHERE)
    return Section("Side by side", "overview").add(table)


def overview_columns(result: Result, registry: MetricRegistry) -> TableColumns[tuple[str, RunResult]]:
    """Return the columns of the table that compares the runs."""
    runs = list(result.runs.values())
    chosen = [key for key in OVERVIEW_METRICS if any(key in run.overall.metrics for run in runs)]
    steps = any(len(run.groups.labels) > 1 for run in runs)
    k3 = {name: run.overall.metrics.get("k3", NOT_RECORDED) for name, run in result.runs.items()}
    place = {name: f"trend-{index}" for index, name in enumerate(result.runs)}

    def cell(key: str) -> Callable[[tuple[str, RunResult]], TableCell]:
        def build(item: tuple[str, RunResult]) -> TableCell:
            value = item[1].overall.metrics.get(key, NOT_RECORDED)
            kind = "alarm" if judge_value(key, value, item[1])[1] else "number"
            return replace(value_cell(value, registry.metric(key).unit, errors=False), kind=kind)

        return build

    return (
        ("run", lambda item: TableCell(escape_terminal(item[0]), kind="name", anchor=place[item[0]])),
        *registry.columns({"k3": 0}, lambda item: item[1].overall.metrics),
        (ColumnHeader("K3 from 1e-8 to 1", numeric=False, drop=6, short="K3\nusual for"), lambda item: replace(
            value_cell(k3[item[0]], ""), text=_usual_range(k3[item[0]].value), kind="scale", k3=k3[item[0]].value,
            brief="", reason="")),
        (ColumnHeader("K3 over the steps", numeric=False, drop=4 if steps else None, short="K3 over\nsteps"),
         lambda item: TableCell("", kind="line", series=tuple(item[1].groups.series("k3").value))),
        (ColumnHeader("trend of K3", numeric=False, drop=5 if steps else None, short="change"),
         lambda item: text_cell(get_summary(item[1]).growth.brief)),
        *((registry.head(key, drop=OVERVIEW_METRICS[key]), cell(key)) for key in chosen),
    )  # fmt: skip


def _usual_range(k3: float | None) -> str:
    """Return the usual range that contains a K3."""
    if k3 is None:
        return DASH
    if k3 == 0:
        return "identical"
    if k3 < DENSE_RANGE[0]:
        return "< dense"
    return "dense" if k3 < DENSE_RANGE[1] else "MoE" if k3 < MOE_RANGE[1] else "> MoE"
