"""The page of an analysis, and the page that combines several results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from mismatchctl.api.advise.advice import RunAdvice
from mismatchctl.api.compare.comparison import FORMAT, Comparison
from mismatchctl.api.gate.verdict import Verdict
from mismatchctl.api.sweep.result import Sweep
from mismatchctl.api.sweep.serialization import sweep_from_json
from mismatchctl.core.formatting import (
    DASH,
    escape_terminal,
    format_count,
    format_estimate,
    format_heavy_tail,
    format_number,
)
from mismatchctl.core.ratios import DENSE_RANGE, MOE_RANGE
from mismatchctl.corrections.model import Correction
from mismatchctl.errors import DataError
from mismatchctl.report.document import (
    EVERYWHERE,
    PAGE_ONLY,
    TERMINAL_AND_PAGE,
    Answers,
    Card,
    ColumnHeader,
    DeferredSection,
    Document,
    Figures,
    Headline,
    Note,
    Section,
    Table,
    TableCell,
    TableColumns,
    Tile,
    Tiles,
)
from mismatchctl.report.pages import advise, compare, gate
from mismatchctl.report.pages.diagnose import finding_card, sides_section
from mismatchctl.report.pages.run_tables import (
    breakdown_tables,
    by_column_tables,
    correction_metric_table,
    corrections_table,
    effects_table,
    gates_table,
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
from mismatchctl.report.pages.sweep import document as sweep_document
from mismatchctl.report.tables import MetricRegistry, text_cell, value_cell
from mismatchctl.results.growth import Z_LIMIT
from mismatchctl.results.model import MASKED_TOKENS, NOT_RECORDED, Finding, Result, RunResult, Value
from mismatchctl.results.reader import parse_result, read_json
from mismatchctl.results.summary import get_summary, list_notes

if TYPE_CHECKING:
    from mismatchctl.report.figures.runs import RunFigures

BRIEF_RUN_COUNT = 9
"""Number of runs from which each run only shows its main figures."""
MAX_DETAILED_RUNS = 3
"""Maximum runs that are open on the page and have their own section in the terminal."""
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


def document(result: Result, objectives: tuple[Sequence[str], Sequence[str]] = ((), ())) -> Document:
    """Build the page of a Result. `objectives` are the KL estimators and loss aggregations to show."""
    registry, runs, origin = MetricRegistry(result.corrections), result.runs, result.provenance
    several = len(runs) != 1
    title = f"{len(runs)} runs" if several else escape_terminal(next(iter(runs)))
    doc = Document(Headline(title, _size_facts(result), subtitle="analyze"), version=escape_terminal(origin.version))
    if not several:
        doc.add(Section("", "answer").add(_answer_block(runs[next(iter(runs))])))
    warnings = [Note(escape_terminal(note), "alarm") for note in list_notes(result)]
    doc.add(Section("Look at this first", "notes", reach=PAGE_ONLY).add(*warnings))
    sections = (_detail_sections(result, index, registry) for index in range(len(runs)))
    if several:
        doc.add(overview_section(result, registry), *map(partial(_run_section, result), range(len(runs)), sections))
        doc.add(_runs_section(result) if len(runs) > MAX_DETAILED_RUNS else None)
    else:
        doc.add(*next(sections))
    for index, (name, run) in enumerate(runs.items()):
        shown, id = escape_terminal(name) if several else "it", f"run-{index}"
        doc.add(objectives_section(run, shown, id, *objectives) if any(objectives) else None)
        doc.add(run_log_section(run, escape_terminal(name), id, origin))
    doc.add(Section("", "notes", terminal=True).add(*warnings))
    doc.add(provenance_section(origin.version, origin.inputs, origin.left_out, result.corrections))
    doc.glossary = lambda: [
        ("The mismatch, and other pairs of policies", registry.entries("m")),
        ("Corrections", registry.entries("c")),
    ]
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
    left_out = sum(row.count for row in provenance.left_out if row.reason != MASKED_TOKENS)
    masked = sum(row.count for row in provenance.left_out if row.reason == MASKED_TOKENS)
    facts += [f"{left_out:,} left out"] if left_out else []
    return [*facts, f"{masked:,} tokens masked"] if masked else facts


def _answer_block(run: RunResult) -> Answers:
    over = run.groups.series("k3").value
    return Answers(get_summary(run).answers, run.overall.metrics.get("k3", NOT_RECORDED).value, over)


def _run_section(result: Result, index: int, sections: Iterable[Section | DeferredSection]) -> Section:
    """Build the section of one run on a page with several runs."""
    name, run = list(result.runs.items())[index]
    k3, few = run.overall.metrics.get("k3", NOT_RECORDED), len(result.runs) <= MAX_DETAILED_RUNS
    section = Section(
        escape_terminal(name), f"run-{index}", note=f"K3 {format_estimate(k3.value, k3.se, 'nats/token')}", folded=True,
        opened=few, reach=EVERYWHERE if few else PAGE_ONLY,
    )  # fmt: skip
    judged = [Note(escape_terminal(found.sentence), "alarm", reach=PAGE_ONLY) for found in get_summary(run).judgements]
    return section.add(_answer_block(run), *judged, *sections)


def _runs_section(result: Result) -> Section:
    """Build the terminal tables that replace the sections of many runs."""
    first = {name: run.findings[0] if run.findings else None for name, run in result.runs.items()}
    columns: TableColumns[tuple[str, Finding | None]] = (
        ("Strongest finding of", lambda item: text_cell(item[0], "name")),
        (ColumnHeader("how sure", numeric=False, drop=1), lambda item: item[1].confidence if item[1] else DASH),
        (ColumnHeader("what", numeric=False, drop=0), lambda item: item[1].title if item[1] else "none"),
    )
    table = Table.of("Strongest finding of each run", first.items() if any(first.values()) else (), columns)
    table.reach = TERMINAL_AND_PAGE
    return Section("", "each", terminal=True).add(table, effects_table(result) if result.corrections else None)


def _detail_sections(result: Result, index: int, registry: MetricRegistry) -> Iterator[Section | DeferredSection]:
    """Yield the sections of one run."""
    run, id, brief = list(result.runs.values())[index], f"run-{index}", len(result.runs) >= BRIEF_RUN_COUNT
    name = f" on {escape_terminal(list(result.runs)[index])}" if len(result.runs) > 1 else ""

    @cache
    def figures() -> RunFigures:
        from mismatchctl.report.figures.runs import run_figures  # slow import, only needed for HTML

        return run_figures(run, f"f{index}", brief=brief)

    findings = Section(f"Findings{name}", f"{id}-findings", terminal=True)
    yield findings.add(*(finding_card(finding, full=False) for finding in run.findings))
    lead = "What causes the mismatch, as far as the dump shows it; strongest first."
    yield Section("Findings", f"{id}-findings", lead=lead, reach=PAGE_ONLY).add(*map(finding_card, run.findings))
    yield Section("Main figures", f"{id}-tiles").add(Tiles(build_tiles(run, registry)))
    if run.sides is not None:
        yield sides_section("Whose error", f"{id}-sides", run.sides)
    yield DeferredSection(lambda: (
        Section("Over the steps", f"{id}-steps").add(Figures(figures().trends)),
        Section(
            "Where the mismatch sits", f"{id}-where",
            lead="Nowhere: every log ratio is 0." if run.overall.metrics["k3"].value == 0 else "",
        ).add(Figures(figures().distributions + figures().breakdowns)),
        Section(
            "The second drift", f"{id}-drift",
            lead="From the trainer's recomputation to the policy that is being updated: what PPO's ratio sees, apart "
            "from the mismatch.",
        ).add(Figures(figures().drift)),
    ))  # fmt: skip
    if run.overall.corrections:
        yield Section("Corrections", f"{id}-corrections").add(
            corrections_table(run, registry, name),
            DeferredSection(lambda: (
                Figures(figures().corrections), loss_table(run, registry),
                gates_table(result.corrections, run, registry),
            )),
        )  # fmt: skip
        lead = "A rejection that prefers some sequences changes what is learned. Compare within a row; ± is one "
        yield Section("Rejected against kept", f"{id}-selection", lead=f"{lead}standard error.", reach=PAGE_ONLY).add(
            DeferredSection(lambda: (selection_table(result, run, registry), Figures(figures().selection)))
        )
    yield Section("Broken down", f"{id}-by").add(*by_column_tables(result.corrections, run, registry, name))
    yield DeferredSection(lambda: (
        Section("The worst", f"{id}-worst").add(
            worst_sequences_table(run.worst_sequences), worst_tokens_table(run.worst_tokens)
        ),
        Section("All numbers", f"{id}-numbers").add(*_number_tables(result, run, registry, brief)),
    ))  # fmt: skip


def _number_tables(result: Result, run: RunResult, registry: MetricRegistry, brief: bool) -> list[Table]:
    """Return tables of all metrics, folded on the page."""
    found = metric_tables(run, registry)
    if result.corrections:
        found.append(correction_metric_table(run, registry))
    if run.logged:
        found.append(logged_table(run, result.provenance.framework or "the framework"))
    if not brief:
        found += breakdown_tables(run, registry)
    if len(run.groups.labels) > 1:
        found += step_tables(run, registry)
    for table in found:
        table.folded, table.title = True, table.title or table.caption.split(":")[0]
    return found


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
    runs = list(result.runs.values())
    chosen = [key for key in OVERVIEW_METRICS if any(key in run.overall.metrics for run in runs)]
    steps = any(len(run.groups.labels) > 1 for run in runs)
    k3 = {name: run.overall.metrics.get("k3", NOT_RECORDED) for name, run in result.runs.items()}
    place = {name: f"run-{index}" for index, name in enumerate(result.runs)}

    def cell(key: str) -> Callable[[tuple[str, RunResult]], TableCell]:
        def build(item: tuple[str, RunResult]) -> TableCell:
            value = item[1].overall.metrics.get(key, NOT_RECORDED)
            kind = "alarm" if judge_value(key, value, item[1])[1] else "number"
            return replace(value_cell(value, registry.metric(key).unit, errors=False), kind=kind)

        return build

    columns: TableColumns[tuple[str, RunResult]] = (
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
    table = Table.of("", result.runs.items(), columns, sortable=True, title=f"{len(runs)} runs", reach=EVERYWHERE)
    section = Section(
        "Side by side", "overview",
        lead="Each run on its own; nothing is blended. The scale marks K3 between 1e-8 and 1: the first band is what "
        "dense models usually show (1e-5 to 1e-3), the second what mixtures of experts do (1e-3 to 0.1). Marked "
        "numbers are beyond their limit.",
    )  # fmt: skip
    return section.add(table, DeferredSection(lambda: [_overview_figure(result)]))


def _overview_figure(result: Result) -> Figures:
    from mismatchctl.report.figures.runs import overview_figure  # slow import, only needed for HTML

    return Figures([overview_figure(result.runs)])


def _usual_range(k3: float | None) -> str:
    """Return the usual range that contains a K3."""
    if k3 is None:
        return DASH
    if k3 == 0:
        return "identical"
    if k3 < DENSE_RANGE[0]:
        return "< dense"
    return "dense" if k3 < DENSE_RANGE[1] else "MoE" if k3 < MOE_RANGE[1] else "> MoE"


SavedResult = Result | Comparison | Verdict | Sweep | dict[str, RunAdvice]
_REMEDY = "name files that analyze, sweep, compare, advise or gate wrote as JSON"


def read_saved(paths: Sequence[Path]) -> list[tuple[str, SavedResult]]:
    """Read results that commands wrote as JSON, each with the name of its file.

    A Result is followed by its sections from other commands.

    Raises:
        DataError: a file is damaged or was not written by a command.
    """
    found: list[tuple[str, SavedResult]] = []
    for path in paths:
        data = read_json(path, _REMEDY)
        embedded = _parse_saved(data, path)
        kept = parse_result(data, str(path)) if embedded is None else embedded
        found.append((path.stem, kept))
        for section in kept.sections if isinstance(kept, Result) else ():
            embedded = _parse_saved(section, path)
            if embedded is None:
                raise DataError("damaged: sections: one is of no verb", file=str(path), remedy=_REMEDY)
            found.append((path.stem, embedded))
    return found


def combine_results(paths: Sequence[Path]) -> Result:
    """Merge results into one Result. Results of other commands become its sections.

    Raises:
        DataError: no file is a Result, or a file is damaged.
    """
    results, others = [], []
    for path in paths:
        data = read_json(path, _REMEDY)
        if _parse_saved(data, path) is None:
            results.append((path.stem, parse_result(data, str(path))))
        else:
            others.append(data)
    if not results:
        raise DataError("no Result, to hold the others", file=str(paths[0]), remedy="name what analyze -o wrote")
    merged = _merge_results(results)
    merged.sections = [*(section for _, result in results for section in result.sections), *others]
    return merged


def _parse_saved(data: Any, path: Path) -> SavedResult | None:
    """Parse the result of a command other than analyze, recognized by its keys."""
    try:
        return _parse_sections(data) if isinstance(data, dict) and "provenance" not in data else None
    except (ValidationError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"damaged: {str(error).splitlines()[0]}", file=str(path), remedy=_REMEDY) from None


def _parse_sections(data: Mapping[str, Any]) -> SavedResult | None:
    plain = {key: value for key, value in data.items() if key not in ("tool", "version", "format")}
    if "contrasts" in data:
        if data.get("format") != FORMAT:
            raise ValueError(f"comparison format {data.get('format')!r}, this version reads {FORMAT}")
        return Comparison.model_validate(data)
    if "checks" in data:
        return Verdict.model_validate(plain)
    if "studies" in data:
        return sweep_from_json(data)
    if "basis" in data:
        return {"": RunAdvice.model_validate(plain)}
    runs = data.get("runs")
    if isinstance(runs, dict) and runs and all(isinstance(run, dict) and "basis" in run for run in runs.values()):
        return {run: RunAdvice.model_validate(found) for run, found in runs.items()}
    return None


def combined_document(paths: Sequence[Path]) -> Document:
    """Build one page of several results. A single result gets the page of its command."""
    found = read_saved(paths)
    if len(found) == 1:
        return _SECTION_KINDS[type(found[0][1])][1](found[0][1])
    results = [(name, kept) for name, kept in found if isinstance(kept, Result)]
    doc = Document(Headline(f"{len(found)} results", subtitle="report"))
    if results:
        doc = document(_merge_results(results))
    opening, closing, seen = doc.sections[:-1], doc.sections[-1:], set[type]()
    terms = [doc.glossary]
    for number, kept in enumerate(kept for _, kept in found if not isinstance(kept, Result)):
        title, page = _SECTION_KINDS[type(kept)]
        own_page, anchor = page(kept), f"part-{number}"
        if isinstance(kept, Verdict):  # a verdict comes first
            card = Card(kept.outcome, kept.outcome, own_page.headline.title.replace(kept.outcome, "The gate", 1))
            opening.insert(bool(results), Section("", f"verdict-{number}").add(card))
        section = Section(title, anchor, note=own_page.headline.title)
        section.anchor_prefix = f"{anchor}-" if type(kept) in seen else ""
        seen.add(type(kept))
        opening.append(
            section.add(*(part for part in own_page.sections if getattr(part, "anchor", "") != "provenance"))
        )
        terms.append(own_page.glossary)
    doc.sections, doc.glossary = [*opening, *closing], lambda: [entries for each in terms for entries in each()]
    return doc


_SECTION_KINDS: dict[type, tuple[str, Callable[[Any], Document]]] = {
    Result: ("Runs", document), Comparison: ("Compared", compare.document),
    Sweep: ("Thresholds", sweep_document), Verdict: ("The gate", gate.document),
    dict: ("Which correction", advise.document),
}  # fmt: skip
"""Title and page of each type of result."""


def _merge_results(results: Sequence[tuple[str, Result]]) -> Result:
    """Merge Results. Runs with the same name get the file name as a suffix."""
    if len(results) == 1:
        return results[0][1]
    names, every = [name for _, result in results for name in result.runs], [result for _, result in results]
    merged, corrections = every[0].model_copy(deep=True), dict[str, Correction]()
    merged.runs = {
        name if names.count(name) == 1 else f"{name} ({file})": run
        for file, result in results
        for name, run in result.runs.items()
    }
    for correction in (correction for result in every for correction in result.corrections):
        corrections.setdefault(correction.name, correction)
    merged.corrections = list(corrections.values())
    merged.provenance.inputs = [file for result in every for file in result.provenance.inputs]
    merged.provenance.left_out = [row for result in every for row in result.provenance.left_out]
    merged.warnings = list(dict.fromkeys(warning for result in every for warning in result.warnings))
    return merged
