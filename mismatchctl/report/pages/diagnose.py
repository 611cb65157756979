"""Page and tables of the findings about a mismatch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile

from mismatchctl.core.formatting import DASH, format_count, format_number
from mismatchctl.diagnosis.diagnosis import Diagnosis
from mismatchctl.diagnosis.layer_reports.model import LayerReport, LogitNoise, Tensor, compare_with_noise
from mismatchctl.report.document import (
    EVERYWHERE,
    Card,
    ColumnHeader,
    DeferredSection,
    Document,
    DocumentPart,
    Facts,
    Figures,
    Headline,
    Note,
    Section,
    Table,
    TableCell,
    add_heading,
)
from mismatchctl.results.model import Example, Fact, Finding, Sides, SidesGroup, SideShare, Value
from mismatchctl.results.summary import HARMLESS_CAUSES, format_share


def finding_card(finding: Finding, folder: str = "", *, full: bool = True, place: int = 0) -> Card:
    """Return the card of a finding. `folder` is removed from file names, `place` is its number."""
    share = f", {format_share(finding.share_k3)} of the K3" if finding.share_k3 is not None else ""
    return Card(
        finding.confidence, "calm" if finding.cause in HARMLESS_CAUSES else finding.confidence,
        f"{place}. {finding.title}" if place else finding.title,
        "" if full else finding.summary, f"{finding.cause}{share}" if full or place else "",
        list(_brief_lines(finding, folder)) if full else [], list(_detail_lines(finding, folder)),
        note=f"{finding.confidence} confidence{share}", max_lines=int(not full and finding.confidence == "low"),
    )  # fmt: skip


def _brief_lines(finding: Finding, folder: str) -> Iterable[tuple[str, str, int]]:
    """Yield a summary that fits seven lines of a terminal."""
    yield "found", finding.summary, 3
    if finding.examples:
        yield "see", "; ".join(format_example(example, folder) for example in finding.examples[:2]), 1
    yield "do", finding.advice, 2
    if finding.rivals:
        yield "or is it", f"{', '.join(rival.cause for rival in finding.rivals)}? {finding.rivals[0].tell}", 1


def _detail_lines(finding: Finding, folder: str) -> Iterable[tuple[str, str]]:
    """Yield everything about a finding."""
    yield "found", finding.summary
    for heading, supports in (("for", True), ("against", False)):
        facts = (fact for fact in finding.evidence if fact.supports == supports)
        yield from add_heading(heading, (f"{fact.meaning}: {fact.name} {format_fact(fact)}" for fact in facts))
    if finding.where:
        yield "where", "; ".join(f"{key}: {value}" for key, value in finding.where.items())
    yield from add_heading("see", (format_example(example, folder) for example in finding.examples))
    yield "do", finding.advice
    if finding.pointless:
        yield "pointless", f"until then, {finding.pointless}"
    for rival in finding.rivals:
        yield "or is it", f"{rival.cause}? To tell: {rival.tell}"


def format_fact(fact: Fact) -> str:
    """Format the value of a fact with its interval."""
    shown = fact.value if isinstance(fact.value, str) else _format_number(fact.value)
    if fact.interval is None:
        return shown
    return f"{shown} ({_format_number(fact.interval[0])} to {_format_number(fact.interval[1])})"


def _format_number(value: float | None) -> str:
    """Format steps, shifts and counts as whole numbers."""
    return format_number(value, "rows") if value is not None and float(value).is_integer() else format_number(value)


def format_example(example: Example, folder: str = "") -> str:
    """Format the location of an example, without `folder`."""
    parts = [f"row {example.row}"]
    parts += [f"position {example.position}"] if example.position is not None else []
    parts += [f"sequence {example.sequence_id}"] if example.sequence_id is not None else []
    parts += [f"step {example.step}"] if example.step is not None else []
    return f"{example.file.removeprefix(folder)}: {', '.join(parts)}"


_MIN_FOLDER_LENGTH = 8


def common_folder(findings: Iterable[Sequence[Finding]]) -> str:
    """Return the folder that contains all examples, if removing it makes their paths shorter."""
    folders = [example.file.split("/")[:-1] for every in findings for found in every for example in found.examples]
    shared = takewhile(lambda names: len({*names}) == 1, zip(*folders, strict=False))
    common = "/".join(names[0] for names in shared)
    return f"{common}/" if len(common) > _MIN_FOLDER_LENGTH else ""


_MAX_GROUPS, _MAX_DRAWN_GROUPS = 12, 24


def sides_section(title: str, anchor: str, sides: Sides) -> Section:
    """Build the section about which side has the error."""
    shares = f"the rollout's share of the squared gap is {_format_share(sides.rollout_share)}"
    rows = [("found", sides.summary), ("split", f"{shares}, of K3 {_format_share(sides.rollout_share_k3)}")]
    ratio = sides.reference_over_rollout
    if ratio.value is not None:
        error = "" if ratio.se is None else f" ± {ratio.se:.1g}"
        meaning = "1 where the rollout's column is what sampled"
        rows.append(("sampled", f"E[reference/rollout] = {ratio.value:.5g}{error}, {meaning}"))
    rows += [(f"by {name}", _format_groups(groups)) for name, groups in sides.groups.items()]
    note = f"{sides.side}, {sides.confidence} confidence"
    facts = Facts([*rows, *(("note", note) for note in sides.notes)], reach=EVERYWHERE)
    return Section(title, anchor, note=note).add(facts, DeferredSection(lambda: _error_figures(sides, anchor)))


def _error_figures(sides: Sides, anchor: str) -> Iterator[Figures]:
    """Yield figures of the errors of rollout and trainer."""
    from mismatchctl.report.figures.bars import dots_figure, sides_plot  # slow import, only needed for HTML

    for name, groups in sides.groups.items():
        if 1 < len(groups) <= _MAX_DRAWN_GROUPS:
            errors = {
                own.label: {"rollout": Value(value=own.rollout_rms), "train": Value(value=own.train_rms)}
                for own in groups
            }
            yield Figures([dots_figure(sides_plot(name), errors, f"{anchor}-{name}")])


def _format_share(share: SideShare) -> str:
    if share.value is None:
        return f"undefined ({share.status})"
    if share.status != "ok":
        return share.status
    interval = "" if share.interval is None else f" [{share.interval[0]:.0%}, {share.interval[1]:.0%}]"
    return f"{share.value:.0%}{interval}"


def _format_groups(groups: list[SidesGroup]) -> str:
    errors = (
        f"{own.label}: rollout {own.rollout_rms:.2g}, trainer {own.train_rms:.2g}" for own in groups[:_MAX_GROUPS]
    )
    return "; ".join(errors) + ("; ..." if len(groups) > _MAX_GROUPS else "")


def document(found: Diagnosis, reports: Sequence[LayerReport] = (), *, full: bool = False) -> Document:
    """Build the page of a diagnosis. `full` shows findings of low confidence in full."""
    doc = Document(Headline("", subtitle="causes of the mismatch"))
    folder = common_folder(found.runs.values())
    if len(found.runs) > 1:
        doc.add(Section("", "overview").add(_overview_table(found.runs)))
    if folder:
        doc.add(Section("", "files").add(Note(f"Files are in {folder}", "quiet")))
    for index, (name, findings) in enumerate(found.runs.items()):
        doc.add(findings_section(name, f"run-{index}-findings", findings, folder, full=full))
    for index, (name, sides) in enumerate(found.sides.items()):
        heading = f"Whose error on {name}" if len(found.sides) > 1 else "Whose error"
        doc.add(sides_section(heading, f"sides-{index}", sides))
    if not reports:
        doc.add(*_next_steps(found))
    return doc.add(*(_layers_section(report, f"layers-{n}", found.logit_noise) for n, report in enumerate(reports)))


def _next_steps(found: Diagnosis) -> list[Section]:
    """Return the section with the next dumps and comparisons to make."""
    for name, steps in found.next.items():
        of = f" of {name}" if len(found.runs) > 1 else ""
        facts = Facts([(step.name, step.text) for step in steps], reach=EVERYWHERE)
        return [Section(f"Where in the network{of}", "next").add(facts)]
    return []


def findings_section(
    name: str, anchor: str, findings: Sequence[Finding], folder: str, *, full: bool = False
) -> Section:
    """Build the findings of one run. Findings of low confidence take one line, unless `full`."""
    count = f"{format_count(len(findings), 'finding')}, strongest first" if findings else "nothing found"
    explained = f"; {format_share(1 - _unexplained_share(findings))} of the K3 explained" if findings else ""
    fully = [full or found.confidence != "low" or len(findings) == 1 for found in findings]
    cards: list[DocumentPart] = [
        finding_card(found, folder, full=each, place=place)
        for place, (found, each) in enumerate(zip(findings, fully, strict=True), start=1)
    ]
    return Section(name, anchor, note=f"{count}{explained}").add(*(cards or [Note("no cause shows", "quiet")]))


def _overview_table(runs: Mapping[str, Sequence[Finding]]) -> Table:
    """Return one row per run with its first finding."""

    def first(item: tuple[str, Sequence[Finding]], text: Callable[[Finding], str], none: str = DASH) -> str:
        return text(item[1][0]) if item[1] else none

    return Table.of("First findings, run by run", runs.items(), (
        ("run", lambda item: TableCell(item[0], kind="name")),
        (ColumnHeader("first finding", numeric=False, drop=0, short="first finding"),
         lambda item: first(item, lambda one: one.title, "none")),
        (ColumnHeader("confidence", drop=0), lambda item: first(item, lambda one: one.confidence)),
        (ColumnHeader("of the K3", drop=0), lambda item: first(item, lambda one: format_share(one.share_k3))),
        (ColumnHeader("unexplained", drop=1),
         lambda item: format_share(_unexplained_share(item[1])) if item[1] else DASH),
    ), reach=EVERYWHERE)  # fmt: skip


def _unexplained_share(findings: Sequence[Finding]) -> float:
    """Return the share of K3 without a cause."""
    return sum(found.share_k3 or 0.0 for found in findings if found.cause == "unexplained")


def _layers_section(report: LayerReport, anchor: str, noise: Mapping[str, LogitNoise]) -> Section:
    """Build the section of a layer report, with the dump's own noise for comparison."""
    rows, apart, bad = [("first bad", describe_first_difference(report))], report.first_apart, report.first_bad
    if apart is not None and (bad is None or (apart.layer, apart.step) != (bad.layer, bad.step)):
        rows.append(("yet", f"{format_tensor(apart)} {apart.why}, within the tool's tolerance"))
    facts = Facts(rows, reach=EVERYWHERE)
    if len(report.growth) > 1:
        rows.append(("growth", f"layer {report.growth[0][0]} to {report.growth[-1][0]}"))
        facts.series = {"growth": [value or None for _, value in report.growth]}
    rows += [("measure", report.measure), *(("note", note) for note in report.notes)]
    rows += [("next", report.next)] if report.next else []
    rows += [("dump", f"{name}: {compare_with_noise(report, found)}") for name, found in noise.items()]
    rank = f", rank {report.rank}" if report.rank is not None else ""
    return Section(report.file, anchor, note=f"{report.tool}{rank}").add(
        facts, DeferredSection(lambda: [_layers_figure(report, anchor)])
    )


def _layers_figure(report: LayerReport, anchor: str) -> Figures:
    """Draw the difference after each layer."""
    from mismatchctl.report.figures.distributions import layers_figure  # slow import, only needed for HTML

    return Figures([layers_figure(report, f"{anchor}-growth")])


def describe_first_difference(report: LayerReport) -> str:
    """Describe the first tensor outside the tolerance."""
    if report.first_bad is None:
        return f"none of {report.tensors:,} tensors is outside the tool's tolerance"
    words = [f"{format_tensor(report.first_bad)}: {report.first_bad.why}"]
    if report.before is not None:
        words.append("before it all equal" if report.before == 0 else f"before it all within {report.before:.2g}")
    if report.last_good is not None:
        words.append(f"last good layer {report.last_good}")
    return "; ".join(words)


def format_tensor(tensor: Tensor) -> str:
    """Format a tensor, for example `layer 3, mlp_output, 0.39 (step 1)`."""
    place = "beside the layers" if tensor.layer is None else f"layer {tensor.layer}"
    value = "" if tensor.value is None else f", {tensor.value:.2g}"
    step = "" if tensor.step is None else f" (step {tensor.step})"
    return f"{place}, {tensor.name}{value}{step}"
