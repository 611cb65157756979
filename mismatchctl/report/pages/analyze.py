"""Terminal output and report page of `analyze`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import PurePath
from typing import TYPE_CHECKING

from mismatchctl.api.scan import NO_MICRO_BATCHES
from mismatchctl.core import formatting as form
from mismatchctl.core.formatting import format_count, format_label, format_number, shorten
from mismatchctl.corrections.labels import correction_label
from mismatchctl.corrections.model import Weight
from mismatchctl.corrections.presets import classify_severity
from mismatchctl.report import document as doc
from mismatchctl.report import tables
from mismatchctl.report.figures import runs as charts
from mismatchctl.report.figures.figure import MAX_NAME, Figure
from mismatchctl.report.pages import run_tables
from mismatchctl.report.pages.diagnose import finding_card, rival_text, sides_section
from mismatchctl.results import summary
from mismatchctl.results.model import NOT_RECORDED, Finding, Result, RunResult, Value
from mismatchctl.results.summary import HARMLESS_CAUSES, RunStatus, get_summary, percent

if TYPE_CHECKING:
    from mismatchctl.api.sweep.result import Sweep

BRIEF_RUN_COUNT = 9  # with this number of runs or more, the page shows only the main figures of each run
MAX_DETAILED_RUNS = 3  # with more runs, there are fewer tables, and no sections per run in the terminal
MAX_COLORED_RUNS = MAX_RUN_CARDS = 8
"""Maximum number of runs in a chart of corrections, and of run cards. A click shows the other cards."""
MAX_CORRECTIONS, LOG_LENGTH = 5, 200
MAIN_METRICS = (
    "abs_diff_mean", "abs_diff_max", "ratio_mean", "ratio_mean_z", "ess_token", "ess_sequence", "drift_k3",
    "total_k3", "rollout_reference_k3", "train_reference_k3", "ref_k3", "routing_differs",
)  # fmt: skip
_Row = tuple[str, str]


def analyze_screen(
    result: Result, paths: Sequence[str], *, asked: bool = True, page: doc.Document | None = None, following: str = "",
    report: str = "--html report.html",
) -> doc.Document:  # fmt: skip
    """Build the terminal output. `page` contains the details of -v. `asked`: the user chose the corrections."""
    judged = _judge(result)
    screen = doc.Document(tables.runs_headline(judged, calm_title(judged)))
    if len(judged) > 1:
        notes = [] if page is not None else doc.alarms(_data_notes(result))
        screen.add(_runs_section(result, judged).add(*notes))
    else:
        ((_, run),) = result.runs.items()
        screen.add(doc.Section("", "facts").add(_run_facts(result, run, causes=page is None)))
        if page is None:
            screen.add(doc.Section("", "corrections").add(*_correction_parts(result, run, asked=asked)))
    if page is not None:
        screen.sections += [part for part in page.sections if part.anchor not in ("answer", "runs")]
    more = [("Details", "-v")] if page is None and report.startswith("--") else []
    first = next(iter(judged))
    files = [file.path for file in result.provenance.inputs if file.run == first]
    own = files if len(paths) > 1 and len(files) == 1 and files[0] in paths else paths
    following = following or _next_command(result.runs[first], judged[first], own)
    written = [("Report", report)] if "--html" not in following else []
    screen.commands = [*more, *written, ("Next", following)]
    return screen


def document(result: Result, sweeps: Sequence[Sweep] = ()) -> doc.Document:
    """Build the page of a Result. Its chart of corrections also shows the Pareto fronts of `sweeps`."""
    page, origin = _PageBuilder(result, sweeps), result.provenance
    head = replace(tables.runs_headline(page.judged, calm_title(page.judged), "analyze"), facts=_size_facts(result))
    made = doc.Document(head, version=origin.version)
    warnings = [*doc.alarms(summary.list_notes(result))]
    note = f"{len(warnings)}" if warnings else ""
    made.add(
        replace(_runs_section(result, page.judged), terminal=True) if page.several else None,
        page.answer(), *page.corrections(), page.trend(), page.where(), page.causes(),
        doc.Section("Warnings", "warnings", folded=True, note=note, level="CHECK").add(*warnings),
        page.details("Kept and rejected sequences", "selection", lambda at, _: [page.draw(at, "selection")],
                     note="mean reward, advantage and length of kept and of rejected sequences"),
        page.details("By column", "by", page.by_column, note=f"metrics for each value of {', '.join(origin.by)}"),
        page.details("Tokens", "tokens", page.worst, note="the sequences and tokens with the largest log ratios"),
    )  # fmt: skip
    for index, (name, run) in enumerate(result.runs.items()):
        made.add(run_tables.run_log_section(run, name, f"run-{index}", origin))
    data = run_tables.provenance_section(origin.version, origin.inputs, origin.left_out, result.corrections)
    return made.add(page.numbers(), data)


def calm_title(judged: Mapping[str, RunStatus]) -> str:
    return f"all {len(judged)} runs are healthy; no correction needed"


def _judge(result: Result) -> dict[str, RunStatus]:
    k3 = {name: _k3(run).value for name, run in result.runs.items()}
    order = sorted(k3, key=lambda name: -math.inf if (value := k3[name]) is None else -value)
    judged = {name: summary.run_status(result.runs[name]) for name in order}
    return {name: judged[name] for name in tables.by_severity(judged)}


def _k3(run: RunResult) -> Value:
    return run.overall.metrics.get("k3", NOT_RECORDED)


def _next_command(run: RunResult, judged: RunStatus, paths: Sequence[str]) -> str:
    if judged.status == "OK":
        return form.format_command("gate", paths, "--save-baseline ok.json --accept")
    return form.format_command("diagnose" if summary.find_fixable(run.findings) is not None else "advise", paths)


def _size_facts(result: Result) -> list[str]:
    runs, provenance = result.runs.values(), result.provenance

    def total(key: str) -> int:
        return sum(int(run.overall.metrics.get(key, NOT_RECORDED).value or 0) for run in runs)

    counts = [(total("sequences"), "sequence"), (total("tokens"), "token")]
    counts += [(sum(len(run.groups.labels) for run in runs), "step"), (len(provenance.inputs), "file")]
    return [*(format_count(*each) for each in counts), *summary.left_out_facts(provenance.left_out)]


def _runs_section(result: Result, judged: Mapping[str, RunStatus]) -> doc.Section:
    k3 = doc.Column("K3", lambda name: _k3(result.runs[name]).value, drop=0)
    series = {name: run.groups.series("k3").value for name, run in result.runs.items()}
    drop = 2 if any(len(over) > 1 for over in series.values()) else None
    by_step = doc.Column("K3 by step", lambda name: doc.TableCell(series=series[name]), "line", drop)
    return doc.Section("", "runs").add(*tables.runs_table(judged, "answer", k3, by_step))


def _run_facts(result: Result, run: RunResult, *, causes: bool) -> doc.Facts:
    found = get_summary(run)
    rows: list[_Row] = [("K3", _describe_k3(_k3(run), summary.RANGE_TEXTS[found.standing.range]))]
    rows += [("base", found.against.text)] if found.against is not None else []
    over = run.groups.series("k3").value
    if len(over) > 1:
        known = [label for label, value in zip(run.groups.labels, over, strict=True) if value is not None]
        onset = summary.describe_onset(found.growth, known[-1] if known else None)
        rows.append(("trend", onset or found.growth.text))
    cause = summary.headline_finding(run.findings) or next(iter(run.findings), None)
    rows += _cause_rows(cause, run.findings) if causes and cause is not None else ()
    rows += [("log", form.cut_phrase(text, LOG_LENGTH)) for text in run_tables.describe_log(run, 5) if causes]
    doubt = ["no prompt ids, so intervals may be too narrow"] * bool(summary.prompt_notes([run]))
    rows.append(("data", ", ".join([*_size_facts(result), *doubt])))
    return doc.Facts(rows, series={"trend": over} if len(over) > 1 else {})


def _describe_k3(k3: Value, usual: str) -> str:
    if k3.value is None:
        return f"undefined: {k3.status}"
    if k3.value == 0:
        return f"0   {usual}"
    interval = ""
    if ends := summary.k3_interval(k3):
        low, high = ends
        narrow = ", too narrow because a few prompts dominate" if k3.tail else ""
        interval = f" (95% interval {format_number(low)} to {format_number(high)}{narrow})"
    return f"{format_number(k3.value)} nats/token{interval}   {usual}"


def _cause_rows(cause: Finding, findings: Sequence[Finding]) -> Iterator[_Row]:
    sure = f"{cause.confidence} confidence"
    if cause.cause == "growing_mismatch":  # headline and trend already describe it
        rivals = (summary.lower_first(rival_text(rival)) for rival in cause.rivals[:1])
        yield "cause", "; possibly ".join(("unknown", *rivals))
    elif cause.cause in HARMLESS_CAUSES:
        doubt = "" if cause.confidence == "high" else "possibly "
        yield "cause", f"{doubt}{summary.lower_first(cause.title)} ({sure})"
    else:
        yield "cause", f"{form.cut_phrase(cause.summary, tables.SUMMARY_LENGTH).rstrip('.')} ({sure})"
    if cause.cause not in HARMLESS_CAUSES:
        yield "do", form.cut_phrase(summary.first_sentence(cause.advice), tables.SUMMARY_LENGTH)
    titles = [
        f"{found.title}{'' if found.share_k3 is None else f' ({percent(found.share_k3)} of K3)'}"
        for found in findings
        if found is not cause and found.confidence != "low" and found.cause != "growing_mismatch"
    ]
    if titles:
        yield "also", "; ".join(titles[:3]) + (f"; {len(titles) - 3} more" if len(titles) > 3 else "")


def _correction_parts(result: Result, run: RunResult, *, asked: bool) -> Iterator[doc.DocumentPart]:
    rules = {one.name: one for one in result.corrections if one.weight is not None or one.gates}
    names = [name for name in run.overall.corrections if name in rules]
    if names:
        yield _corrections_table(run, {name: correction_label(rules[name]) for name in names[:MAX_CORRECTIONS]})
    notes = _data_notes(result)
    for name in names:
        if asked and summary.changes_loss_scale(run, name):
            scale = format_number(run.overall.corrections[name]["loss_scale"].value)
            notes.append(f"{name} multiplies the loss by {scale}, which changes the learning rate")
    notes += [f"{len(names) - MAX_CORRECTIONS} more corrections: -v"] if len(names) > MAX_CORRECTIONS else []
    yield from doc.alarms([*notes, *_correction_notes(result, run, names, asked=asked)])


def _corrections_table(run: RunResult, labels: Mapping[str, str]) -> doc.Table:
    def metric(title: str, key: str, text: Callable[[float | None], str]) -> doc.Column:
        return doc.Column(title, lambda name: text(run.overall.corrections[name].get(key, NOT_RECORDED).value), drop=0)

    changed = [name for name in labels if summary.changes_loss_scale(run, name)]
    loss = metric("loss", "loss_scale", format_number)
    columns = [
        doc.Column("correction", kind="name"),
        doc.Column("what it does", lambda name: labels[name], "text", 1, flexible=True),
        *([replace(loss, make=lambda name: "! x" * (name in changed) + loss.cell(name).text)] if changed else []),
        metric("drops", "rejected_tokens", percent), metric("ESS", "ess_token", percent),
        metric("K3 left", "k3_kept", format_number),
    ]  # fmt: skip
    return doc.Table.of("", labels, columns, reach=doc.EVERYWHERE)


def _correction_notes(result: Result, run: RunResult, names: Sequence[str], *, asked: bool) -> Iterator[str]:
    steps, empties = run.groups.labels, []
    for name in names:
        kept = run.groups.corrections.get(name, {}).get("kept_tokens")
        empty = [step for step, left in zip(steps, kept.value if kept else (), strict=False) if left == 0]
        if empty:
            empties.append(f"{name} in {format_count(len(empty), 'step')} (first: {format_label(empty[0])})")
    if empties:
        yield f"all tokens rejected: {', '.join(empties[:3])}"
    for warning in result.warnings:
        if NO_MICRO_BATCHES in warning:
            text = f"{warning.partition(':')[0]}: weights normalized over the whole step (no micro_batch column)"
            yield f"{text}; add --micro-batch-size N" if asked else text


def _data_notes(result: Result) -> list[str]:
    return [note for note in summary.data_notes(result) if NO_MICRO_BATCHES not in note]


class _PageBuilder:
    """Builds the sections of the page. With several runs, each section contains a folded section per run."""

    def __init__(self, result: Result, sweeps: Sequence[Sweep]) -> None:
        self.result, self.runs, self.sweeps = result, result.runs, sweeps
        self.judged = _judge(result)
        self.several, self.detailed = len(result.runs) > 1, len(result.runs) <= MAX_DETAILED_RUNS
        self.brief = len(result.runs) >= BRIEF_RUN_COUNT

    @cached_property
    def figures(self) -> list[dict[str, list[Figure]]]:
        stems = [f"{stem}-" for stem in form.file_stems(self.runs)] if self.several else [""]
        return [charts.run_figures(*each, brief=self.brief) for each in zip(self.runs.values(), stems, strict=True)]

    def draw(self, index: int, *sections: str) -> doc.Figures:
        return doc.Figures([figure for section in sections for figure in self.figures[index][section]])

    def answer(self) -> doc.Section:
        section, shown = doc.Section("", "answer"), 0
        if self.several:
            cards = [*map(self._card, self.judged)]
            alike = sum(card.status == cards[0].status != "OK" for card in cards) or MAX_RUN_CARDS
            shown = len(cards) if len(cards) <= MAX_RUN_CARDS else min(alike, MAX_RUN_CARDS)
            section.add(doc.RunCards(cards, shown))
        else:
            section.add(self._answers(next(iter(self.runs))))
        height = 0 if not self.several else 330 if shown <= 3 else 280 if shown <= 5 else 240
        worst = next(iter(self.judged.values())).status
        attention = [self.judged[name].status == worst for name in self.runs] if worst != "OK" else ()
        k3 = doc.Figures([charts.k3_figure(self.runs, "k3", attention)], runs=self.several, height=height)
        return section.add(k3)

    def _answers(self, name: str) -> doc.Answers:
        run, files = self.runs[name], [file.path for file in self.result.provenance.inputs if file.run == name]
        folders = {str(PurePath(file).parent) for file in files}
        path = files[0] if len(files) == 1 else folders.pop() if len(folders) == 1 else ""
        calm = self.judged[name].status == "OK" or not path or path.startswith("<")
        command = "" if calm else _next_command(run, self.judged[name], [path])
        return doc.Answers(get_summary(run).answers, _k3(run).value, run.groups.series("k3").value, command)

    def _card(self, name: str) -> doc.RunCard:
        status, index = self.judged[name], [*self.runs].index(name)
        action = get_summary(self.runs[name]).answer("what to do").text if status.status != "OK" else ""
        return doc.RunCard(index, name, status.status, status.text, action, self._answers(name), f"trend-{index}")

    def details(
        self, title: str, anchor: str, parts: Callable[[int, RunResult], Iterable[doc.DocumentPart | None]], *,
        note: str = "", notes: Sequence[str] = (), series: bool = False,
    ) -> doc.Section:  # fmt: skip
        section = doc.Section(title, anchor, folded=True, note=note)
        if not self.several:
            section.note = note or (notes[0] if notes else "")
            return section.add(*parts(0, next(iter(self.runs.values()))))
        if len(notes) > 1 and not note:
            text, count = Counter(notes).most_common(1)[0]
            section.note = f"{count} of {len(notes)} runs: {text}" if count > 1 else f"{next(iter(self.runs))}: {text}"
        for index, (name, run) in enumerate(self.runs.items()):
            status = self.judged[name]
            sub = doc.Section(
                name, f"{anchor}-{index}", folded=True, run=index, level=status.status,
                note=notes[index] if notes else status.text, series=run.groups.series("k3").value if series else (),
                reach=doc.EVERYWHERE if self.detailed else doc.PAGE_ONLY,
            )  # fmt: skip
            section.add(sub.add(*parts(index, run)))
        return section

    def trend(self) -> doc.Section:
        growth = [get_summary(run).growth for run in self.runs.values()]
        section = self.details("Trend", "trend", self._trend_parts, notes=[f"K3 {one.brief}" for one in growth],
                               series=True)  # fmt: skip
        if self.several:
            section.note = f"K3 changed in {sum(one.changed for one in growth)} of {len(self.runs)} runs"
        return section

    def _trend_parts(self, index: int, run: RunResult) -> Iterator[doc.DocumentPart]:
        if not self.brief:
            keys = [key for key in MAIN_METRICS if key in run.overall.metrics]
            main = run_tables.metric_table("", "m", keys, {"value": run.overall.metrics})
            yield replace(main, title="Main metrics", reach=doc.TERMINAL_AND_PAGE)
        yield self.draw(index, *["k3"] * self.several, "trends")
        yield doc.Section(
            "Policy drift", f"drift-{index}", lead="Each update moves the policy away from the log-probs that "
            "the trainer recomputed. The ratio in PPO's loss measures this drift.",
        ).add(self.draw(index, "drift"))  # fmt: skip

    def where(self) -> doc.Section:
        notes = []
        for found, run in zip(self.figures, self.runs.values(), strict=True):
            titles = [figure.title for figure in found["distributions"]]
            titles = [title for title in titles if title[0].isdigit() or "x the mean" in title]
            notes.append("every log ratio is 0" if _k3(run).value == 0 else "; ".join(titles[:2]) or "no peak")
        return self.details("Location of the mismatch", "where", lambda at, _: [self.draw(at, "distributions")],
                            notes=notes)  # fmt: skip

    def causes(self) -> doc.Section:
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
        if not self.result.corrections:
            return
        count = len(self.result.corrections)
        section = doc.Section("Corrections", "corrections", folded=True, opened=not self.brief)
        section.note = f"{format_count(count, 'correction')}: what each one rejects, and the K3 and ESS that remain"
        shown = dict(list(self.runs.items())[:MAX_COLORED_RUNS])
        section.lead = self._describe_ess_loss(shown)
        tradeoff = doc.Figures([charts.corrections_figure(shown, "corrections", _sweep_front(self.sweeps))])
        yield section.add(run_tables.comparison_of_corrections(self.result), tradeoff)
        yield self.details(
            "Corrections in detail", "correction-details", self._correction_parts,
            note="figures by step, and a table of all metrics",
        )  # fmt: skip

    def _describe_ess_loss(self, shown: Mapping[str, RunResult]) -> str:
        """Describe the loss of ESS per run, if token weights are truncated at 2."""
        default = (one.name for one in self.result.corrections if one.weight == Weight(truncate=2.0) and not one.gates)
        name, classes = next(default, ""), []
        for run, found in shown.items():
            ess = found.overall.corrections.get(name, {}).get("ess_token", NOT_RECORDED).value
            if ess is not None:
                classes.append(f"{percent(1 - ess)} of the ESS{f' in {run}' * self.several} ({classify_severity(ess)})")
        return f"Token weights truncated at 2 cost {', '.join(classes)}." if classes else ""

    def _correction_parts(self, index: int, run: RunResult) -> Iterator[doc.DocumentPart | None]:
        yield self.draw(index, "corrections")
        keys = dict.fromkeys(key for values in run.overall.corrections.values() for key in values)
        caption = f"All metrics of each correction. {tables.ERRORS}."
        yield run_tables.metric_table(caption, "c", keys, run.overall.corrections) if self.detailed else None

    def by_column(self, index: int, run: RunResult) -> list[doc.Table]:
        name = f" on {[*self.runs][index]}" if self.several else ""
        return run_tables.by_column_tables(self.result.corrections, run, name)

    def worst(self, index: int, run: RunResult) -> Iterator[doc.DocumentPart | None]:
        most = None if self.detailed else 1 if self.brief else 3
        yield None if self.brief else run_tables.worst_sequences_table(run.worst_sequences, most)
        yield run_tables.worst_tokens_table(run.worst_tokens, most)

    def numbers(self) -> doc.Section:
        section = doc.Section("All numbers", "numbers", folded=True, note="all metrics, and their values by step")
        keys = dict.fromkeys(key for run in self.runs.values() for key in run.overall.metrics)
        caption = f"Metrics of the mismatch{f'. {tables.ERRORS}.' if self.several and not self.brief else ''}"
        columns = {name if self.several else "value": run.overall.metrics for name, run in self.runs.items()}
        found = [run_tables.metric_table(caption, "m", keys, columns, errors=not self.brief)]
        for name, run in self.runs.items() if self.detailed else ():
            logged = run_tables.logged_table(run, self.result.provenance.framework or "the framework")
            for table in filter(None, (logged, run_tables.step_table(run))):
                table.title = table.caption.split(":")[0] + (f", {name}" if self.several else "")
                found.append(table)
        return section.add(*(replace(each, folded=True) for each in found))


def _sweep_front(sweeps: Sequence[Sweep]) -> list[tuple[float, float, str]]:
    from mismatchctl.api.sweep.result import format_point  # slow to import

    return [
        (row["rejected_tokens"], row["k3_kept"], shorten(format_point(study, row["point"]), MAX_NAME))
        for sweep in sweeps
        for study in sweep.studies
        for row in sweep.rows(sweep.runs[0], study.name).to_dicts()
        if row["pareto"] and row["rejected_tokens"] is not None and row["k3_kept"]
    ]
