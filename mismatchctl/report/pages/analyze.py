"""First screen and page of an analysis."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import PurePath
from typing import TYPE_CHECKING

from mismatchctl.api.scan import NO_MICRO_BATCHES
from mismatchctl.core.formatting import (
    escape_terminal,
    format_command,
    format_count,
    format_estimate,
    format_heavy_tail,
    format_label,
    format_number,
)
from mismatchctl.corrections.labels import correction_label
from mismatchctl.report import document as doc
from mismatchctl.report.pages import run_tables as tables
from mismatchctl.report.pages.diagnose import finding_card, rival_text, sides_section
from mismatchctl.report.tables import (
    ADVICE_LENGTH,
    MAX_RUNS,
    NOTE_LENGTH,
    SUMMARY_LENGTH,
    MetricRegistry,
    cut,
    cut_notes,
)
from mismatchctl.results.growth import Z_LIMIT
from mismatchctl.results.model import NOT_RECORDED, Finding, Result, RunResult, Value
from mismatchctl.results.summary import (
    HARMLESS_CAUSES,
    STATUSES,
    RunStatus,
    changes_loss_scale,
    data_notes,
    describe_range,
    find_fixable,
    first_sentence,
    get_summary,
    headline_finding,
    k3_interval,
    left_out_facts,
    list_notes,
    lower_first,
    names_not_compared,
    percent,
    prompt_notes,
    run_status,
)

if TYPE_CHECKING:
    from mismatchctl.api.sweep.result import Sweep
    from mismatchctl.report.figures.runs import RunFigures

BRIEF_RUN_COUNT = 9
"""Number of runs from which each run has only its main figures."""
MAX_DETAILED_RUNS = 3
"""Maximum runs with tables of their own on the page, and with a section of their own in the terminal."""
MAX_COLORED_RUNS = 8
"""Maximum runs with a color of their own in one figure."""
MAX_RUN_CARDS = 8
"""Maximum runs whose answer is visible at first."""
MAX_CORRECTIONS = 5
"""Maximum corrections on the screen."""
MAIN_METRICS = (
    "abs_diff_mean", "abs_diff_max", "ratio_mean", "ess_token", "ess_sequence", "drift_k3",
    "total_k3", "rollout_reference_k3", "train_reference_k3", "ref_k3", "routing_differs", "ratio_mean_z",
    "khat_token", "khat_sequence", "chi2_token", "chi2_sequence", "prob_corr", "k3_worst_share", "bitwise_share",
)  # fmt: skip
ALWAYS_SHOWN = frozenset(MAIN_METRICS[:11])
"""Main metrics that are shown even if they are within their limits."""
_Row = tuple[str, str]


def analyze_screen(
    result: Result,
    paths: Sequence[str],
    *,
    asked: bool = True,
    page: doc.Document | None = None,
    following: str = "",
    report: str = "--html report.html",
) -> doc.Document:
    """Build the first screen of a Result, or the whole `page` of it below the answer.

    `asked` is false if the corrections are the default ones. `following` is the next command, by default one that
    reads the dump in `paths`. `report` is the file of the report, or the option that writes one.
    """
    judged = {name: run_status(run) for name, run in result.runs.items()}
    screen = doc.Document(_headline(judged))
    if len(judged) > 1:
        notes = [] if page is not None else cut_notes(_data_notes(result))
        screen.add(_runs_section(result, judged).add(*notes))
    else:
        ((_, run),) = result.runs.items()
        screen.add(doc.Section("", "facts").add(_run_facts(result, run, causes=page is None)))
        if page is None:
            screen.add(doc.Section("", "corrections").add(*_correction_parts(result, run, asked=asked)))
    if page is not None:
        screen.sections += [part for part in page.sections if getattr(part, "anchor", "") not in ("answer", "runs")]
    more = [("Details", "-v")] if page is None and report.startswith("--") else []
    first = _by_severity(result, judged)[0]
    following = following or _next_command(result.runs[first], judged[first], _run_paths(result, first, paths))
    written = [("Report", report)] if "--html" not in following else []
    screen.commands = [*more, *written, ("Next", following)]
    return screen


def document(result: Result, sweeps: Sequence[Sweep] = ()) -> doc.Document:
    """Build the page of a Result. The fronts of `sweeps` are shown with the corrections."""
    page, origin = _PageBuilder(result, sweeps), result.provenance
    head = replace(_headline(page.judged), facts=_size_facts(result), subtitle="analyze")
    made = doc.Document(head, version=escape_terminal(origin.version))
    warnings = [doc.Note(escape_terminal(note), "alarm") for note in list_notes(result)]
    made.add(
        replace(_runs_section(result, page.judged), terminal=True) if page.several else None,
        page.answer(), *page.corrections(), page.trend(), page.where(), page.causes(),
        doc.Section("Warnings", "warnings", folded=True, note=str(len(warnings)), level="CHECK").add(*warnings),
        page.details("Kept and rejected sequences", "selection", lambda at, _: [page.draw(at, "selection")]),
        page.details("By column", "by", page.by_column),
        page.details("Tokens", "tokens", page.worst, note="the sequences and tokens with the largest log ratios"),
    )  # fmt: skip
    for index, (name, run) in enumerate(result.runs.items()):
        shown, anchor = escape_terminal(name), f"run-{index}"
        made.add(tables.run_log_section(run, shown, anchor, origin))
    made.glossary = lambda: [
        ("The mismatch, and other pairs of policies", page.registry.entries("m")),
        ("Corrections", page.registry.entries("c")),
    ]
    data = tables.provenance_section(origin.version, origin.inputs, origin.left_out, result.corrections)
    return made.add(doc.DeferredSection(lambda: [page.numbers()]), data)


def _headline(judged: Mapping[str, RunStatus]) -> doc.Headline:
    worst = min(judged.values(), key=lambda one: STATUSES.index(one.status))
    if len(judged) == 1:
        ((name, one),) = judged.items()
        return doc.Headline(f"{escape_terminal(name)}: {escape_terminal(one.text)}", status=worst.status)
    return doc.Headline(count_statuses(judged), status=worst.status)


def count_statuses(judged: Mapping[str, RunStatus]) -> str:
    """Count the runs that are not OK."""
    bad = sum(one.status != "OK" for one in judged.values())
    if not bad:
        return f"all {len(judged)} runs are healthy; no correction needed"
    return f"{bad} of {len(judged)} runs need{'s' * (bad == 1)} attention"


def _by_severity(result: Result, judged: Mapping[str, RunStatus]) -> list[str]:
    return sorted(judged, key=lambda name: (STATUSES.index(judged[name].status), -or_infinite(_k3(result, name).value)))


def or_infinite(value: float | None) -> float:
    """Return a value, or infinity if it is undefined."""
    return math.inf if value is None else value


def _k3(result: Result, name: str) -> Value:
    return result.runs[name].overall.metrics.get("k3", NOT_RECORDED)


def _next_command(run: RunResult, judged: RunStatus, paths: Sequence[str]) -> str:
    if judged.status == "OK":
        return format_command("gate", paths, "--save-baseline ok.json --accept")
    return format_command("diagnose" if find_fixable(run.findings) is not None else "advise", paths)


def _run_paths(result: Result, name: str, paths: Sequence[str]) -> Sequence[str]:
    """Return the file of a run, if it is one of several paths."""
    files = [file.path for file in result.provenance.inputs if file.run == name]
    return files if len(paths) > 1 and len(files) == 1 and files[0] in paths else paths


def _size_facts(result: Result) -> list[str]:
    runs, provenance = result.runs.values(), result.provenance
    counts = [
        (sum(int(run.overall.metrics.get(f"{key}s", NOT_RECORDED).value or 0) for run in runs), key)
        for key in ("token", "sequence")
    ]
    counts += [(sum(len(run.groups.labels) for run in runs), "step"), (len(provenance.inputs), "file")]
    counts += [(len(result.corrections), "correction")]
    return [*(format_count(*each) for each in counts), *left_out_facts(provenance.left_out)]


def _runs_section(result: Result, judged: Mapping[str, RunStatus]) -> doc.Section:
    order = _by_severity(result, judged)
    shown = order[: MAX_RUNS + (len(order) == MAX_RUNS + 1)]
    steps = any(len(run.groups.labels) > 1 for run in result.runs.values())
    columns: doc.TableColumns[str] = (
        ("run", lambda name: doc.TableCell(escape_terminal(name), kind="name")),
        (doc.ColumnHeader("status", numeric=False, drop=0), lambda name: judged[name].status),
        (doc.ColumnHeader("K3", drop=0), lambda name: format_number(_k3(result, name).value)),
        (doc.ColumnHeader("K3 by step", numeric=False, drop=2 if steps else None),
         lambda name: doc.TableCell("", kind="line", series=tuple(result.runs[name].groups.series("k3").value))),
        (doc.ColumnHeader("answer", numeric=False, drop=1, flexible=True), lambda name: judged[name].text),
    )  # fmt: skip
    section = doc.Section("", "runs").add(doc.Table.of("", shown, columns, reach=doc.EVERYWHERE))
    if rest := order[len(shown) :]:
        counts = Counter(judged[name].status for name in rest)
        left = ", ".join(f"{counts[one]} {one}" for one in STATUSES if counts[one])
        section.add(doc.Note(f"{format_count(len(rest), 'more run')}: {left}"))
    return section


def _run_facts(result: Result, run: RunResult, *, causes: bool) -> doc.Facts:
    summary, k3 = get_summary(run), run.overall.metrics.get("k3", NOT_RECORDED)
    rows: list[_Row] = [("K3", _describe_k3(k3, describe_range(summary.standing)))]
    if summary.against is not None:
        rows.append(("base", summary.against.text))
    over = list(run.groups.series("k3").value)
    if len(over) > 1:
        rows.append(("trend", _describe_trend(run)))
    cause = headline_finding(run.findings) or (run.findings[0] if run.findings else None)
    rows += _cause_rows(cause, run.findings) if causes and cause is not None else ()
    rows += [("log", text) for text in _describe_log(run)]
    rows.append(("data", ", ".join(_describe_data(result, run))))
    return doc.Facts(rows, series={"trend": over} if len(over) > 1 else {})


def _describe_log(run: RunResult) -> Iterator[str]:
    """Yield how the run's log compares with the dump, and which series changed first."""
    compared = [*run.against.values(), *([run.against_metrics] if run.against_metrics else [])]
    for found in compared:
        wrong = [name for name, agreement in found.names.items() if not agreement.agrees]
        verb = "agrees" if len(found.names) == 1 else "agree"
        text = f"{len(found.names) - len(wrong)} of {format_count(len(found.names), 'name')} {verb} with the run's log"
        text += f"; different: {', '.join(wrong[:3])}" if wrong else ""
        yield f"{text}; not in the log: {', '.join(found.missing[:2])}" if found.missing else text
    if others := names_not_compared(run):
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        yield f"kept, not compared: {', '.join(map(escape_terminal, others[:5]))}{more}"
    if run.order:
        yield cut(run.order, NOTE_LENGTH)


def _describe_k3(k3: Value, usual: str) -> str:
    if k3.value is None:
        return f"undefined: {k3.status}"
    if k3.value == 0:
        return f"0   {usual}"
    interval = ""
    if ends := k3_interval(k3):
        low, high = ends
        interval = f" (95% interval {format_number(low)} to {format_number(high)}{', too narrow' if k3.tail else ''})"
    return f"{format_number(k3.value)} nats/token{interval}   {usual}"


def _describe_trend(run: RunResult) -> str:
    growth = get_summary(run).growth
    if growth.factor is None or growth.onset is None:
        return growth.text
    at = format_label(growth.onset)
    if growth.onset_interval and growth.onset_interval[0] != growth.onset_interval[1]:
        at += f" ({format_label(growth.onset_interval[0])}–{format_label(growth.onset_interval[1])})"
    last = format_label(run.groups.labels[-1])
    return f"{format_number(growth.before)} → {format_number(growth.value)}, onset at step {at}, last step {last}"


def _cause_rows(cause: Finding, findings: Sequence[Finding]) -> Iterator[_Row]:
    sure = f"{cause.confidence} confidence"
    if cause.cause == "growing_mismatch":  # the headline and the trend describe the growth
        yield "cause", "unknown" + "".join(f"; possibly {rival_text(rival)}" for rival in cause.rivals[:1])
    elif cause.cause in HARMLESS_CAUSES:
        yield "cause", f"{lower_first(cause.title)} ({sure})"
    else:
        yield "cause", f"{cut(cause.summary.rstrip('.'), SUMMARY_LENGTH)} ({sure})"
    if cause.cause not in HARMLESS_CAUSES:
        yield "do", cut(first_sentence(cause.advice), ADVICE_LENGTH)
    titles = [
        f"{found.title}{'' if found.share_k3 is None else f' ({percent(found.share_k3)} of K3)'}"
        for found in findings
        if found is not cause and found.confidence != "low" and found.cause != "growing_mismatch"
    ]
    if titles:
        yield "also", "; ".join(titles[:3]) + (f"; {len(titles) - 3} more" if len(titles) > 3 else "")


def _describe_data(result: Result, run: RunResult) -> Iterator[str]:
    for key in ("sequence", "token"):
        yield format_count(int(run.overall.metrics.get(f"{key}s", NOT_RECORDED).value or 0), key)
    yield format_count(len(run.groups.labels), "step")
    yield format_count(len(result.provenance.inputs), "file")
    yield from left_out_facts(result.provenance.left_out) if len(result.runs) == 1 else ()
    if prompt_notes([run]):
        yield "no prompt ids (intervals may be too narrow)"


def _correction_parts(result: Result, run: RunResult, *, asked: bool) -> Iterator[doc.DocumentPart]:
    rules = {one.name: one for one in result.corrections if one.weight is not None or one.gates}
    names = [name for name in run.overall.corrections if name in rules]
    if names:
        yield _corrections_table(run, {name: correction_label(rules[name]) for name in names[:MAX_CORRECTIONS]})
    notes = _data_notes(result)
    for name in filter(lambda name: asked and changes_loss_scale(run, name), names):
        scale = format_number(run.overall.corrections[name]["loss_scale"].value)
        notes.append(f"{escape_terminal(name)} multiplies the loss by {scale}, which changes the learning rate")
    notes += [f"{len(names) - MAX_CORRECTIONS} more corrections: -v"] if len(names) > MAX_CORRECTIONS else []
    yield from cut_notes([*notes, *_correction_notes(result, run, names, asked=asked)])


def _corrections_table(run: RunResult, labels: Mapping[str, str]) -> doc.Table:
    def metric(key: str, form: Callable[[float | None], str]) -> Callable[[str], str]:
        return lambda name: form(run.overall.corrections[name].get(key, NOT_RECORDED).value)

    def loss_scale(name: str) -> str:
        return f"{'! x' * changes_loss_scale(run, name)}{metric('loss_scale', format_number)(name)}"

    changed = any(changes_loss_scale(run, name) for name in labels)
    columns: doc.TableColumns[str] = (
        ("correction", lambda name: doc.TableCell(escape_terminal(name), kind="name")),
        (doc.ColumnHeader("what it does", numeric=False, drop=1, flexible=True), lambda name: labels[name]),
        *([(doc.ColumnHeader("loss", drop=0), loss_scale)] if changed else []),
        (doc.ColumnHeader("drops", drop=0), metric("rejected_tokens", percent)),
        (doc.ColumnHeader("ESS", drop=0), metric("ess_token", percent)),
        (doc.ColumnHeader("K3 left", drop=0), metric("k3_kept", format_number)),
    )
    return doc.Table.of("", labels, columns, reach=doc.EVERYWHERE)


def _correction_notes(result: Result, run: RunResult, names: Sequence[str], *, asked: bool) -> Iterator[str]:
    steps, empties = run.groups.labels, []
    for name in names:
        kept = run.groups.corrections.get(name, {}).get("kept_tokens")
        empty = [step for step, left in zip(steps, kept.value if kept else (), strict=False) if left == 0]
        if empty:
            empties.append(f"{escape_terminal(name)} {len(empty)} (first: {format_label(empty[0])})")
    if empties:
        yield f"steps without a kept token, of {len(steps)}: {', '.join(empties[:3])}"
    for warning in result.warnings:
        if NO_MICRO_BATCHES in warning:
            text = f"{warning.partition(':')[0]}: normalized over the whole step, no micro_batch column"
            yield f"{text}; add --micro-batch-size N" if asked else text


def _data_notes(result: Result) -> list[str]:
    return [note for note in data_notes(result) if NO_MICRO_BATCHES not in note]


class _PageBuilder:
    """Builds the sections of the page. With several runs, each section has a folded part per run."""

    def __init__(self, result: Result, sweeps: Sequence[Sweep]) -> None:
        self.result, self.runs, self.sweeps = result, result.runs, sweeps
        self.registry = MetricRegistry(result.corrections)
        self.judged = {name: run_status(run) for name, run in result.runs.items()}
        self.several, self.detailed = len(result.runs) > 1, len(result.runs) <= MAX_DETAILED_RUNS
        self.brief = len(result.runs) >= BRIEF_RUN_COUNT

    @cached_property
    def figures(self) -> list[RunFigures]:
        """The figures of each run, only made for HTML."""
        from mismatchctl.report.figures.runs import run_figures

        return [run_figures(run, f"run{at}", brief=self.brief) for at, run in enumerate(self.runs.values())]

    def draw(self, index: int, section: str, *, after: int = 0) -> doc.DeferredSection:
        """Return the figures of one run and section, except the first `after` figures."""
        return doc.DeferredSection(lambda: [doc.Figures(getattr(self.figures[index], section)[after:])])

    def answer(self) -> doc.Section:
        """Build the first screen of the page."""
        section, shown = doc.Section("", "answer"), 0
        if self.several:
            order = _by_severity(self.result, self.judged)
            cards = [self._card(name) for name in order]
            alike = sum(card.status == cards[0].status != "OK" for card in cards) or MAX_RUN_CARDS
            shown = len(cards) if len(cards) <= MAX_RUN_CARDS else min(alike, MAX_RUN_CARDS)
            section.add(doc.RunCards(cards, shown))
        else:
            ((name, run),) = self.runs.items()
            section.add(_answers(run, self._command(name)))
        height = 0 if not self.several else 330 if shown <= 3 else 280 if shown <= 5 else 240
        return section.add(doc.DeferredSection(lambda: [self._main_figure(height)]))

    def _main_figure(self, height: int) -> doc.Figures:
        """Return K3 over the steps, or the distribution of a single step."""
        from mismatchctl.report.figures.runs import k3_figure

        worst = min((one.status for one in self.judged.values()), key=STATUSES.index)
        attention = [one.status == worst != "OK" for one in self.judged.values()]
        k3 = k3_figure(self.runs, "k3", attention if any(attention) else ())
        return doc.Figures([k3], runs=self.several, height=height)

    def _command(self, name: str) -> str:
        files = [file.path for file in self.result.provenance.inputs if file.run == name]
        folders = {str(PurePath(file).parent) for file in files}
        path = files[0] if len(files) == 1 else folders.pop() if len(folders) == 1 else ""
        calm = self.judged[name].status == "OK" or not path or path.startswith("<")
        return "" if calm else _next_command(self.runs[name], self.judged[name], [path])

    def _card(self, name: str) -> doc.RunCard:
        run, status, index = self.runs[name], self.judged[name], [*self.runs].index(name)
        action = get_summary(run).answer("what to do").text if status.status != "OK" else ""
        return doc.RunCard(
            index, escape_terminal(name), status.status, escape_terminal(status.text), escape_terminal(action),
            _answers(run, self._command(name) if action else ""), f"trend-{index}",
        )  # fmt: skip

    def details(
        self, title: str, anchor: str, parts: Callable[[int, RunResult], Iterable[doc.DocumentPart | None]], *,
        note: str = "", notes: Sequence[str] = (), series: bool = False,
    ) -> doc.Section:  # fmt: skip
        """Build a folded section, with a folded part per run if there are several."""
        section = doc.Section(title, anchor, folded=True, note=note)
        if not self.several:
            section.note = note or (notes[0] if notes else "")
            return section.add(*parts(0, next(iter(self.runs.values()))))
        if len(notes) > 1 and not note:
            text, count = Counter(notes).most_common(1)[0]
            section.note = f"{count} of {len(notes)} runs: {text}" if count > 1 else ""
        for index, (name, run) in enumerate(self.runs.items()):
            status = self.judged[name]
            sub = doc.Section(
                escape_terminal(name), f"{anchor}-{index}", folded=True, run=index, level=status.status,
                note=escape_terminal(notes[index] if notes else status.text),
                series=tuple(run.groups.series("k3").value) if series else (),
                reach=doc.EVERYWHERE if self.detailed else doc.PAGE_ONLY,
            )  # fmt: skip
            section.add(sub.add(*parts(index, run)))
        return section

    def trend(self) -> doc.Section:
        """Build the main numbers and the figures over the steps."""
        growth = [get_summary(run).growth for run in self.runs.values()]
        section = self.details("Trend", "trend", self._trend_parts, notes=[f"K3 {one.brief}" for one in growth],
                               series=True)  # fmt: skip
        if self.several:
            section.note = f"K3 changed in {sum(one.changed for one in growth)} of {len(self.runs)} runs"
        return section

    def _trend_parts(self, index: int, run: RunResult) -> Iterator[doc.DocumentPart]:
        if not self.brief:
            yield main_facts(run, self.registry)
        yield self.draw(index, "trends", after=not self.several)
        lead = "From the trainer's recomputation to the policy that is being updated, which PPO's ratio measures."
        yield doc.Section("Policy drift", f"drift-{index}", lead=lead).add(self.draw(index, "drift"))

    def where(self) -> doc.DeferredSection:
        """Build the distributions and breakdowns."""

        def make() -> Iterator[doc.Section]:
            notes = []
            for found, run in zip(self.figures, self.runs.values(), strict=True):
                titles = [figure.title for figure in found.distributions]
                titles = [title for title in titles if title[0].isdigit() or "x the mean" in title]
                zero = run.overall.metrics.get("k3", NOT_RECORDED).value == 0
                notes.append("every log ratio is 0" if zero else "; ".join(titles[:2]) or "evenly spread")
            yield self.details(
                "Location of the mismatch", "where", lambda index, _: [self.draw(index, "distributions")], notes=notes
            )

        return doc.DeferredSection(make)

    def causes(self) -> doc.Section:
        """Build the findings, and which side has the error."""
        notes = [
            f"{run.findings[0].title} ({run.findings[0].confidence} confidence)" if run.findings else "no finding"
            for run in self.runs.values()
        ]

        def parts(index: int, run: RunResult) -> Iterator[doc.DocumentPart | None]:
            cards = [finding_card(found, full=not self.brief) for found in run.findings]
            yield from (replace(card, details=()) if self.brief else card for card in cards)
            if run.sides is not None:
                yield sides_section("Wrong side", f"sides-{index}", run.sides)

        return self.details("Causes", "causes", parts, notes=notes)

    def corrections(self) -> Iterator[doc.Section]:
        """Yield the comparison of the corrections and its details."""
        if not self.result.corrections:
            return
        count = len(self.result.corrections)
        section = doc.Section("Corrections", "corrections", folded=True, opened=True)
        section.note = f"{format_count(count, 'correction')}: rejected data, remaining mismatch, fresh batch"
        section.add(tables.comparison_of_corrections(self.result, self.registry), doc.DeferredSection(self._tradeoff))
        yield section
        yield self.details(
            "Corrections in detail", "correction-details", self._correction_parts,
            note="over the steps, loss and gradient, each gate",
        )  # fmt: skip

    def _tradeoff(self) -> Iterator[doc.Figures]:
        from mismatchctl.report.figures.bars import corrections_figure

        shown = {name: run.overall.corrections for name, run in list(self.runs.items())[:MAX_COLORED_RUNS]}
        yield doc.Figures([corrections_figure(shown, "corrections", _sweep_front(self.sweeps))])

    def _correction_parts(self, index: int, run: RunResult) -> Iterator[doc.DocumentPart | None]:
        yield self.draw(index, "corrections", after=1)
        yield tables.correction_metric_table(run, self.registry) if self.detailed else None

    def by_column(self, index: int, run: RunResult) -> list[doc.Table]:
        """Return the tables of the `--by` columns."""
        name = f" on {escape_terminal([*self.runs][index])}" if self.several else ""
        return tables.by_column_tables(self.result.corrections, run, self.registry, name)

    def worst(self, index: int, run: RunResult) -> Iterator[doc.DocumentPart | None]:
        """Yield the sequences and tokens with the largest log ratios."""
        most = None if self.detailed else 1 if self.brief else 3
        yield None if self.brief else tables.worst_sequences_table(run.worst_sequences, most)
        yield tables.worst_tokens_table(run.worst_tokens, most)

    def numbers(self) -> doc.Section:
        """Build the tables of all metrics."""
        section = doc.Section("All numbers", "numbers", folded=True, note="every metric, and values by step")
        found = [tables.metric_table(self.runs, self.registry, brief=self.brief)]
        for name, run in self.runs.items() if self.detailed else ():
            own = [tables.logged_table(run, self.result.provenance.framework or "the framework")] if run.logged else []
            own += [tables.step_table(run, self.registry)] if len(run.groups.labels) > 1 else []
            for table in own:
                table.title = table.caption.split(":")[0] + (f", {escape_terminal(name)}" if self.several else "")
            found += own
        return section.add(*(replace(each, folded=True) for each in found))


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


def _answers(run: RunResult, command: str) -> doc.Answers:
    k3, over = run.overall.metrics.get("k3", NOT_RECORDED).value, run.groups.series("k3").value
    return doc.Answers(get_summary(run).answers, k3, over, escape_terminal(command))


def main_facts(run: RunResult, registry: MetricRegistry) -> doc.Facts:
    """Return the main numbers of a run, with a judgement if there is a limit."""
    rows, wrong = list[_Row](), list[int]()
    for key in (key for key in MAIN_METRICS if key in run.overall.metrics):
        value, metric = run.overall.metrics[key], registry.metric(key)
        verdict, beyond = (value.status, False) if value.value is None else judge_value(key, value, run)
        if value.tail:
            verdict = "; ".join(filter(None, (verdict, format_heavy_tail(value.covers))))
        if key in ALWAYS_SHOWN or beyond:
            wrong += [len(rows)] if beyond else []
            rows.append((metric.title, f"{format_estimate(value.value, value.se, metric.unit)}  {verdict}".rstrip()))
    return doc.Facts(rows, wrong=wrong)


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
    limit = run.overall.metrics.get(f"{key}_limit") if key.startswith("khat_") else None
    if limit is not None and limit.value is not None:
        beyond = value.value > limit.value
        return f"{'above' if beyond else 'below'} its limit of {format_number(limit.value)}", beyond
    return "", False
