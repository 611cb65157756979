"""Terminal output and report page of `diagnose`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mismatchctl.core import formatting as form
from mismatchctl.diagnosis.causes.registry import CAUSES
from mismatchctl.diagnosis.diagnosis import Diagnosis
from mismatchctl.diagnosis.layer_reports import LayerReport, LogitNoise, Tensor, compare_with_noise
from mismatchctl.report import document as doc
from mismatchctl.report import tables
from mismatchctl.report.figures.distributions import layers_figure
from mismatchctl.report.figures.figure import Axis, Figure, rows_figure
from mismatchctl.results import summary
from mismatchctl.results.model import Example, Fact, Finding, RivalCause, Sides, SideShare
from mismatchctl.results.summary import RunStatus

_MAX_GROUPS = 12
_Row = tuple[str, str]


def diagnose_screen(
    found: Diagnosis, paths: Sequence[str], page: doc.Document | None = None, notes: Sequence[str] = ()
) -> doc.Document:
    """Build the terminal output, with the details of `page` if given."""
    judged = {name: summary.findings_status(findings) for name, findings in found.runs.items()}
    screen = doc.Document(_headline(judged))
    if page is None:
        screen.add(_answer_section(found, judged))
    else:
        screen.sections += [section for section in page.sections if section.anchor != "answer"]
    screen.add(doc.Section("", "notes").add(*doc.alarms(notes)))
    healthy = screen.headline.status == "OK"
    options = "--save-baseline ok.json --accept" if healthy else ""
    if len(paths) == len(judged) > 1:
        worst = tables.by_severity(judged)[0]
        own = [path for path in paths if worst in (Path(path).name, Path(path).stem)]
        paths = own if len(own) == 1 else paths
    following = form.format_command("gate" if healthy else "analyze", paths, options)
    more = [("Details", "-v")] if page is None else []
    screen.commands = [*more, ("Report", "--html report.html"), ("Next", following)]
    return screen


def document(found: Diagnosis, reports: Sequence[LayerReport] = (), *, full: bool = False) -> doc.Document:
    """Build the page of a diagnosis. Without `full`, show findings of low confidence in one line each."""
    judged = {name: summary.findings_status(findings) for name, findings in found.runs.items()}
    answer = _answer_section(found, judged) if len(judged) > 1 else doc.Section("", "answer")
    made = doc.Document(_headline(judged)).add(answer.add(doc.Figures([causes_figure(found.runs, "causes")])))
    for index, (name, findings) in enumerate(found.runs.items()):
        made.add(_findings_section(name, f"run-{index}-findings", findings, full=full))
    for index, (name, sides) in enumerate(found.sides.items()):
        heading = f"Wrong side of {name}" if len(found.sides) > 1 else "Wrong side"
        made.add(sides_section(heading, f"sides-{index}", sides))
    for name, steps in list(found.next.items())[: 0 if reports else 1]:
        of = f" of {name}" if len(found.runs) > 1 else ""
        facts = doc.Facts([(step.name, step.text) for step in steps], reach=doc.EVERYWHERE)
        made.add(doc.Section(f"Location in the network{of}", "next").add(facts))
    return made.add(*(_layers_section(report, f"layers-{n}", found.logit_noise) for n, report in enumerate(reports)))


def _headline(judged: Mapping[str, RunStatus]) -> doc.Headline:
    return tables.runs_headline(judged, f"no fault found in any of the {len(judged)} runs", "causes of the mismatch")


def _answer_section(found: Diagnosis, judged: Mapping[str, RunStatus]) -> doc.Section:
    section = doc.Section("", "answer")
    if len(judged) == 1:
        ((name, findings),) = found.runs.items()
        section.add(doc.Facts(list(_finding_rows(found, name, findings)), reach=doc.EVERYWHERE))
    else:
        section.add(*tables.runs_table(judged, "cause"))
    return section


def _finding_rows(found: Diagnosis, name: str, findings: Sequence[Finding]) -> Iterator[_Row]:
    first = summary.headline_finding(findings) or (findings[0] if findings else None)
    if first is None:
        return
    long = ("found", "do") if len(findings) < 4 else ("found",)
    for heading, text in _finding_lines(first, brief=True):
        yield heading, form.cut_phrase(text, tables.SUMMARY_LENGTH * (1 + (heading in long)))
    if name in found.sides:
        yield "side", form.cut_phrase(found.sides[name].summary, tables.NOTE_LENGTH)
    others = [one for one in findings if one is not first]
    for one in others[:4]:
        share = "" if one.share_k3 is None else f", {summary.percent(one.share_k3)} of K3"
        yield "also", f"{one.title} ({one.confidence} confidence{share})"
    if len(others) > 4:
        yield "", f"{len(others) - 4} more findings: -v"


def rival_text(rival: RivalCause) -> str:
    titles = {cause.id: cause.title for cause in CAUSES}
    return f"{titles.get(rival.cause) or rival.cause.replace('_', ' ').capitalize()}: {rival.tell}"


def _findings_section(name: str, anchor: str, findings: Sequence[Finding], *, full: bool) -> doc.Section:
    count = f"{form.format_count(len(findings), 'finding')}{', strongest first' * (len(findings) > 1)}"
    count = count if findings else "no cause found"
    unexplained = sum(found.share_k3 or 0.0 for found in findings if found.cause == "unexplained")
    explained = f"; {summary.percent(1 - unexplained)} of the K3 explained" if findings else ""
    cards: list[doc.DocumentPart] = [
        finding_card(found, full=full or found.confidence != "low" or len(findings) == 1, place=place)
        for place, found in enumerate(findings, start=1)
    ]
    return doc.Section(name, anchor, note=f"{count}{explained}").add(*(cards or [doc.Note("no cause found", "quiet")]))


def finding_card(finding: Finding, *, full: bool = True, place: int = 0) -> doc.Card:
    share = f", {summary.percent(finding.share_k3)} of the K3" if finding.share_k3 is not None else ""
    return doc.Card(
        finding.confidence, "calm" if finding.cause in summary.HARMLESS_CAUSES else finding.confidence,
        f"{place}. {finding.title}" if place else finding.title,
        "" if full else finding.summary, f"{finding.cause}{share}" if full or place else "",
        list(_finding_lines(finding, brief=True)) if full else [], list(_finding_lines(finding)),
    )  # fmt: skip


def _describe_fact(fact: Fact) -> str:
    """Format a fact and its meaning. Show the expected value (the part of the meaning after a colon) in parentheses."""
    meaning, _, expected = fact.meaning.partition(": ")
    return f"{fact.name} {format_fact(fact)}: {meaning}{f' ({expected})' if expected else ''}"


def _finding_lines(finding: Finding, *, brief: bool = False) -> Iterator[_Row]:
    """Yield the lines of a finding. With `brief`, omit the evidence, and show only one example and one other cause."""
    yield "found", finding.summary
    for heading, supports in (("for", True), ("against", False)):
        facts = (fact for fact in finding.evidence if fact.supports == supports and not brief)
        yield from doc.add_heading(heading, map(_describe_fact, facts))
    if finding.where and not brief:
        yield "where", "; ".join(f"{key}: {value}" for key, value in finding.where.items())
    most = 1 if brief else None
    yield from doc.add_heading("see", map(format_example, finding.examples[:most]))
    yield "do", finding.advice
    yield from doc.add_heading("or", map(rival_text, finding.rivals[:most]))
    if finding.pointless:
        yield "note", finding.pointless


def format_fact(fact: Fact) -> str:
    def text(value: float | str | None) -> str:
        if isinstance(value, str):
            return value
        return form.format_number(value, "rows" if value is not None and float(value).is_integer() else "")

    if fact.interval is None:
        return text(fact.value)
    return f"{text(fact.value)} ({text(fact.interval[0])} to {text(fact.interval[1])})"


def format_example(example: Example) -> str:
    names = ("position", "sequence_id", "step")
    parts = [f"{name.removesuffix('_id')} {value}" for name in names if (value := getattr(example, name)) is not None]
    return f"{'/'.join(example.file.split('/')[-2:])}: {', '.join([f'row {example.row}', *parts])}"


def sides_section(title: str, anchor: str, sides: Sides) -> doc.Section:
    shares = f"caused by the rollout: {_format_share(sides.rollout_share)} of the squared log ratio"
    rows = [("found", sides.summary), ("split", f"{shares}, {_format_share(sides.rollout_share_k3)} of K3")]
    ratio = sides.reference_over_rollout
    if ratio.value is not None:
        meaning = "(1 if the engine sampled with the recorded probabilities)"
        rows.append(
            ("sampled", f"E[reference/rollout] = {form.format_estimate(ratio.value, ratio.se, 'ratio')} {meaning}")
        )
    charts = []
    for name, groups in sides.groups.items():
        errors = [f"{own.label}: rollout {own.rollout_rms:.2g}, trainer {own.train_rms:.2g}" for own in groups]
        rows.append((f"by {name}", "; ".join([*errors[:_MAX_GROUPS], *["..."] * (len(errors) > _MAX_GROUPS)])))
        if 1 < len(groups) <= 2 * _MAX_GROUPS and all(own.rollout_rms and own.train_rms for own in groups):
            series = {side: {own.label: (getattr(own, f"{side}_rms"), None, None) for own in groups}
                      for side in ("rollout", "train")}  # fmt: skip
            about = f"Error of each side by {name}", "The point further to the right is the side with the larger error."
            charts.append(rows_figure(f"{anchor}-{name}", *about, Axis("root mean square error (nats)", "log"), series))
    facts = doc.Facts([*rows, *(("note", note) for note in sides.notes)], reach=doc.EVERYWHERE)
    section = doc.Section(title, anchor, note=f"{sides.side}, {sides.confidence} confidence")
    return section.add(facts, doc.Figures(charts))


def _format_share(share: SideShare) -> str:
    if share.value is None or share.status != "ok":
        return f"undefined ({share.status})" if share.value is None else share.status
    interval = "" if share.interval is None else f" [{share.interval[0]:.0%}, {share.interval[1]:.0%}]"
    return f"{share.value:.0%}{interval}"


def _layers_section(report: LayerReport, anchor: str, noise: Mapping[str, LogitNoise]) -> doc.Section:
    rows, apart, bad = [("first bad", _describe_first_difference(report))], report.first_apart, report.first_bad
    if apart is not None and (bad is None or (apart.layer, apart.step) != (bad.layer, bad.step)):
        rows.append(("also", f"{_format_tensor(apart)} {apart.why}, but is within the tool's tolerance"))
    facts = doc.Facts(rows, reach=doc.EVERYWHERE)
    if len(report.growth) > 1:
        rows.append(("growth", f"layer {report.growth[0][0]} to {report.growth[-1][0]}"))
        facts.series = {"growth": [value or None for _, value in report.growth]}
    rows += [("measure", report.measure), *(("note", note) for note in report.notes)]
    rows += [("next", report.next)] if report.next else []
    rows += [("dump", f"{name}: {compare_with_noise(report, found)}") for name, found in noise.items()]
    rank = f", rank {report.rank}" if report.rank is not None else ""

    figure = doc.Figures([layers_figure(report, f"{anchor}-growth")])
    return doc.Section(report.file, anchor, note=f"{report.tool}{rank}").add(facts, figure)


def _describe_first_difference(report: LayerReport) -> str:
    if report.first_bad is None:
        return f"0 of {report.tensors:,} tensors are outside the tool's tolerance"
    words = [f"{_format_tensor(report.first_bad)}: {report.first_bad.why}"]
    if report.before is not None:
        level = "equal" if report.before == 0 else f"different by at most {report.before:.2g}"
        words.append(f"all earlier tensors are {level}")
    if report.last_good is not None:
        words.append(f"the last good layer is {report.last_good}")
    return "; ".join(words)


def _format_tensor(tensor: Tensor) -> str:
    """Format a tensor, for example `layer 3, mlp_output, 0.39 (step 1)`."""
    place = "outside the layers" if tensor.layer is None else f"layer {tensor.layer}"
    value = "" if tensor.value is None else f", {tensor.value:.2g}"
    step = "" if tensor.step is None else f" (step {tensor.step})"
    return f"{place}, {tensor.name}{value}{step}"


def causes_figure(runs: Mapping[str, Sequence[Finding]], name: str) -> Figure | None:
    series = {
        form.shorten(run, 24) if len(runs) > 1 else "share of K3":
            {found.title: (found.share_k3, None, None) for found in findings if found.share_k3}
        for run, findings in runs.items()
    }  # fmt: skip
    if sum(map(len, series.values())) < 2:
        return None
    x = Axis("share of K3", limits=(0.0, 1.02), percent=True)
    caption = "If causes overlap, their shares add up to more than 100%."
    return rows_figure(name, "What the mismatch consists of", caption, x, series, size="wide")
