"""The page of `diagnose`: findings strongest first, whose error it is, and where layers part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mismatchctl.diagnose import Diagnosis
from mismatchctl.frameworks.layers import LayerReport, Tensor
from mismatchctl.frameworks.layers.noise import LogitNoise, held_against
from mismatchctl.numbers import DASH, counted
from mismatchctl.render.document import (
    BRIEF,
    Document,
    Facts,
    Figures,
    Head,
    Headline,
    Later,
    Note,
    Part,
    Section,
    Table,
    TableCell,
)
from mismatchctl.render.pages.findings import card, folder_of, sides_section
from mismatchctl.result import Finding
from mismatchctl.result.story import percent


def document(found: Diagnosis, reports: Sequence[LayerReport] = (), *, told: bool = False) -> Document:
    """All of it; `told` tells findings of low confidence as the others."""
    made = Document(Headline("", what="causes of the mismatch"))
    folder = folder_of(found.runs.values())
    if len(found.runs) > 1:
        made.add(Section("", "overview").add(_overview(found.runs)))
    if folder:
        made.add(Section("", "files").add(Note(f"Files are in {folder}", "quiet")))
    for index, (name, findings) in enumerate(found.runs.items()):
        made.add(findings_section(name, f"run-{index}-findings", findings, folder, told=told))
    for index, (name, sides) in enumerate(found.sides.items()):
        heading = f"Whose error on {name}" if len(found.sides) > 1 else "Whose error"
        made.add(sides_section(heading, f"sides-{index}", sides))
    if not reports:
        made.add(*_next(found))
    return made.add(*(_layers(report, f"layers-{n}", found.logit_noise) for n, report in enumerate(reports)))


def _next(found: Diagnosis) -> list[Section]:
    """What to dump and compare next, where the fault may be in a layer."""
    for name, steps in found.next.items():
        of = f" of {name}" if len(found.runs) > 1 else ""
        facts = Facts([(step.name, step.text) for step in steps], reach=BRIEF)
        return [Section(f"Where in the network{of}", "next").add(facts)]
    return []


def findings_section(
    name: str, anchor: str, findings: Sequence[Finding], folder: str, *, told: bool = False
) -> Section:
    """The findings of one run: a finding takes a few lines, one of low confidence a single one beside others."""
    count = f"{counted(len(findings), 'finding')}, strongest first" if findings else "nothing found"
    explained = f"; {percent(1 - _unexplained(findings))} of the K3 explained" if findings else ""
    fully = [told or found.confidence != "low" or len(findings) == 1 for found in findings]
    cards: list[Part] = [
        card(found, folder, told=each, place=place)
        for place, (found, each) in enumerate(zip(findings, fully, strict=True), start=1)
    ]
    return Section(name, anchor, note=f"{count}{explained}").add(*(cards or [Note("no cause shows", "quiet")]))


def _overview(runs: Mapping[str, Sequence[Finding]]) -> Table:
    """A line for each run: the first finding, how sure, and how much of the K3 is explained."""

    def first(item: tuple[str, Sequence[Finding]], text: Callable[[Finding], str], none: str = DASH) -> str:
        return text(item[1][0]) if item[1] else none

    return Table.of("First findings, run by run", runs.items(), (
        ("run", lambda item: TableCell(item[0], kind="name")),
        (Head("first finding", numeric=False, drop=0, short="first finding"),
         lambda item: first(item, lambda one: one.title, "none")),
        (Head("confidence", drop=0), lambda item: first(item, lambda one: one.confidence)),
        (Head("of the K3", drop=0), lambda item: first(item, lambda one: percent(one.share_k3))),
        (Head("unexplained", drop=1), lambda item: percent(_unexplained(item[1])) if item[1] else DASH),
    ), reach=BRIEF)  # fmt: skip


def _unexplained(findings: Sequence[Finding]) -> float:
    """The share of K3 that no cause explains."""
    return sum(found.share_k3 or 0.0 for found in findings if found.cause == "unexplained")


def _layers(report: LayerReport, anchor: str, noise: Mapping[str, LogitNoise]) -> Section:
    """Where the runs part by a comparator's report, and the dump's own noise beside it."""
    rows, apart, bad = [("first bad", first_bad(report))], report.first_apart, report.first_bad
    if apart is not None and (bad is None or (apart.layer, apart.step) != (bad.layer, bad.step)):
        rows.append(("yet", f"{tensor_text(apart)} {apart.why}, within the tool's tolerance"))
    facts = Facts(rows, reach=BRIEF)
    if len(report.growth) > 1:
        rows.append(("growth", f"layer {report.growth[0][0]} to {report.growth[-1][0]}"))
        facts.series = {"growth": [value or None for _, value in report.growth]}
    rows += [("measure", report.measure), *(("note", note) for note in report.notes)]
    rows += [("next", report.next)] if report.next else []
    rows += [("dump", f"{name}: {held_against(report, found)}") for name, found in noise.items()]
    rank = f", rank {report.rank}" if report.rank is not None else ""
    return Section(report.file, anchor, note=f"{report.tool}{rank}").add(
        facts, Later(lambda: [_picture(report, anchor)])
    )


def _picture(report: LayerReport, anchor: str) -> Figures:
    """The growth over the layers."""
    from mismatchctl.render.figures.layers import layers_figure  # draws: a terminal need not wait for it

    return Figures([layers_figure(report, f"{anchor}-growth")])


def first_bad(report: LayerReport) -> str:
    """The first bad tensor in a sentence: where, how far, and how good it was before."""
    if report.first_bad is None:
        return f"none of {report.tensors:,} tensors is outside the tool's tolerance"
    words = [f"{tensor_text(report.first_bad)}: {report.first_bad.why}"]
    if report.before is not None:
        words.append("before it all equal" if report.before == 0 else f"before it all within {report.before:.2g}")
    if report.last_good is not None:
        words.append(f"last good layer {report.last_good}")
    return "; ".join(words)


def tensor_text(tensor: Tensor) -> str:
    """`layer 3, mlp_output, 0.39 (step 1)`."""
    place = "beside the layers" if tensor.layer is None else f"layer {tensor.layer}"
    value = "" if tensor.value is None else f", {tensor.value:.2g}"
    step = "" if tensor.step is None else f" (step {tensor.step})"
    return f"{place}, {tensor.name}{value}{step}"
