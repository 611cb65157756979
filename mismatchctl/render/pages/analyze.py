"""The page of a Result: the answer first, then its evidence in the order of a reader's questions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from mismatchctl.numbers import DASH, counted, estimate, heavy_tail, number
from mismatchctl.ratios import DENSE_RANGE, MOE_RANGE
from mismatchctl.render.document import (
    BRIEF,
    USUAL,
    WHOLE,
    Answers,
    Columns,
    Document,
    Figures,
    Head,
    Headline,
    Later,
    Note,
    Section,
    Table,
    TableCell,
    Tile,
    Tiles,
)
from mismatchctl.render.pages import run_tables as tables
from mismatchctl.render.pages.correction_tables import (
    corrections_table,
    effects_table,
    gates_table,
    loss_table,
    selection_table,
)
from mismatchctl.render.pages.findings import card, sides_section
from mismatchctl.render.pages.provenance import provenance
from mismatchctl.render.tables import Registry, measured, words
from mismatchctl.render.text import clean
from mismatchctl.result import NOT_RECORDED, Finding, Result, RunResult, Value, story_of
from mismatchctl.result.growth import Z_LIMIT
from mismatchctl.result.notes import notes

if TYPE_CHECKING:
    from mismatchctl.render.figures.of_run import RunFigures

BRIEF_FROM = 9
"""With so many runs, each shows its main figures only."""
DETAILED = 3
"""Up to so many runs are unfolded when the page opens, and told one by one elsewhere."""
TILES = (
    "abs_diff_mean", "abs_diff_max", "ratio_mean", "ess_token", "ess_sequence", "drift_k3",
    "total_k3", "rollout_reference_k3", "train_reference_k3", "ref_k3", "routing_differs", "ratio_mean_z",
    "khat_token", "khat_sequence", "chi2_token", "chi2_sequence", "prob_corr", "k3_worst_share", "bitwise_share",
)  # fmt: skip
FIRST_TILES = frozenset(TILES[:11])
SIDE_BY_SIDE = {
    "tokens": 7, "sequences": None, "abs_diff_mean": 8, "abs_diff_max": 9, "ess_token": None, "ess_sequence": 1,
    "ratio_mean_z": 2, "khat_sequence": None, "bitwise_share": None,
}  # fmt: skip
"""Metrics of the overview, and how early each goes in a terminal."""


def document(result: Result, objectives: tuple[Sequence[str], Sequence[str]] = ((), ())) -> Document:
    """The page of a Result; `objectives` are estimators of the KL, and aggregations of losses, that are shown."""
    registry, runs, origin = Registry(result.corrections), result.runs, result.provenance
    several = len(runs) != 1
    title = f"{len(runs)} runs" if several else clean(next(iter(runs)))
    made = Document(Headline(title, _facts(result), what="analyze"), version=clean(origin.version))
    if not several:
        made.add(Section("", "answer").add(_answers(runs[next(iter(runs))])))
    called = [Note(clean(note), "alarm") for note in notes(result)]
    made.add(Section("Look at this first", "notes", reach=WHOLE).add(*called))
    sections = (_sections(result, index, registry) for index in range(len(runs)))
    if several:
        made.add(overview(result, registry), *map(partial(_run, result), range(len(runs)), sections))
        made.add(_many(result) if len(runs) > DETAILED else None)
    else:
        made.add(*next(sections))
    for index, (name, run) in enumerate(runs.items()):
        shown, id = clean(name) if several else "it", f"run-{index}"
        made.add(tables.objectives(run, shown, id, *objectives) if any(objectives) else None)
        made.add(tables.against(run, clean(name), id, origin))
    made.add(Section("", "notes", terminal=True).add(*called))
    made.add(provenance(origin.version, origin.inputs, origin.left_out, result.corrections))
    made.glossary = lambda: [
        ("The mismatch, and other pairs of policies", registry.entries("m")),
        ("Corrections", registry.entries("c")),
    ]
    return made


def _facts(result: Result) -> list[str]:
    """The size of what was read, in a few phrases."""
    runs, provenance = result.runs.values(), result.provenance
    counts = [
        (sum(int(run.overall.metrics.get(f"{key}s", NOT_RECORDED).value or 0) for run in runs), key)
        for key in ("token", "sequence")
    ]
    counts += [(sum(len(run.groups.labels) for run in runs), "step"), (len(provenance.inputs), "file")]
    counts += [(len(result.corrections), "correction")]
    facts = [counted(*each) for each in counts]
    left_out = sum(row.count for row in provenance.left_out)
    return [*facts, f"{left_out:,} left out"] if left_out else facts


def _answers(run: RunResult) -> Answers:
    over = run.groups.series("k3").value
    return Answers(story_of(run).answers, run.overall.metrics.get("k3", NOT_RECORDED).value, over)


def _run(result: Result, index: int, sections: Iterable[Section | Later]) -> Section:
    """One of several runs, folded where there are many; these are of the page alone."""
    name, run = list(result.runs.items())[index]
    k3, few = run.overall.metrics.get("k3", NOT_RECORDED), len(result.runs) <= DETAILED
    section = Section(
        clean(name), f"run-{index}", note=f"K3 {estimate(k3.value, k3.se, 'nats/token')}", folded=True, opened=few,
        reach=BRIEF if few else WHOLE,
    )  # fmt: skip
    judged = [Note(clean(found.sentence), "alarm", reach=WHOLE) for found in story_of(run).judgements]
    return section.add(_answers(run), *judged, *sections)


def _many(result: Result) -> Section:
    """What is told of many runs in a terminal, where there is no room for each."""
    first = {name: run.findings[0] if run.findings else None for name, run in result.runs.items()}
    columns: Columns[tuple[str, Finding | None]] = (
        ("Strongest finding of", lambda item: words(item[0], "name")),
        (Head("how sure", numeric=False, drop=1), lambda item: item[1].confidence if item[1] else DASH),
        (Head("what", numeric=False, drop=0), lambda item: item[1].title if item[1] else "none"),
    )
    table = Table.of("Strongest finding of each run", first.items() if any(first.values()) else (), columns)
    table.reach = USUAL
    return Section("", "each", terminal=True).add(table, effects_table(result) if result.corrections else None)


def _sections(result: Result, index: int, registry: Registry) -> Iterator[Section | Later]:
    """What is shown of one run, in the order of a reader's questions."""
    run, id, brief = list(result.runs.values())[index], f"run-{index}", len(result.runs) >= BRIEF_FROM
    name = f" on {clean(list(result.runs)[index])}" if len(result.runs) > 1 else ""

    @cache
    def figures() -> RunFigures:
        from mismatchctl.render.figures.of_run import run_figures  # draws: what prints to a terminal need not wait

        return run_figures(run, f"f{index}", brief=brief)

    told = Section(f"Findings{name}", f"{id}-findings", terminal=True)
    yield told.add(*(card(finding, told=False) for finding in run.findings))
    lead = "What causes the mismatch, as far as the dump shows it; strongest first."
    yield Section("Findings", f"{id}-findings", lead=lead, reach=WHOLE).add(*map(card, run.findings))
    yield Section("Main figures", f"{id}-tiles").add(Tiles(tiles(run, registry)))
    if run.sides is not None:
        yield sides_section("Whose error", f"{id}-sides", run.sides)
    yield Later(lambda: (
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
            Later(lambda: (
                Figures(figures().corrections), loss_table(run, registry),
                gates_table(result.corrections, run, registry),
            )),
        )  # fmt: skip
        lead = "A rejection that prefers some sequences changes what is learned. Compare within a row; ± is one "
        yield Section("Rejected against kept", f"{id}-selection", lead=f"{lead}standard error.", reach=WHOLE).add(
            Later(lambda: (selection_table(result, run, registry), Figures(figures().selection)))
        )
    yield Section("Broken down", f"{id}-by").add(*tables.by_tables(result.corrections, run, registry, name))
    yield Later(lambda: (
        Section("The worst", f"{id}-worst").add(
            tables.worst_sequences(run.worst_sequences), tables.worst_tokens(run.worst_tokens)
        ),
        Section("All numbers", f"{id}-numbers").add(*_numbers(result, run, registry, brief)),
    ))  # fmt: skip


def _numbers(result: Result, run: RunResult, registry: Registry, brief: bool) -> list[Table]:
    """Every number there is, each table folded."""
    found = tables.metric_tables(run, registry)
    if result.corrections:
        found.append(tables.correction_metric_table(run, registry))
    if run.logged:
        found.append(tables.logged_table(run, result.provenance.framework or "the framework"))
    if not brief:
        found += tables.breakdown_tables(run, registry)
    if len(run.groups.labels) > 1:
        found += tables.step_tables(run, registry)
    for table in found:
        table.folded, table.title = True, table.title or table.caption.split(":")[0]
    return found


def tiles(run: RunResult, registry: Registry) -> list[Tile]:
    """The numbers that are read first, with a judgement where there is a limit."""
    found = []
    for key in (key for key in TILES if key in run.overall.metrics):
        value, metric = run.overall.metrics[key], registry.metric(key)
        verdict, beyond = (value.status, False) if value.value is None else judgement(key, value, run)
        level = "quiet" if value.value is None else "alarm" if beyond else "fair" if value.tail else "good"
        if value.tail:
            verdict = "; ".join(filter(None, (verdict, heavy_tail(value.covers))))
        shown, first = estimate(value.value, value.se, metric.unit), key in FIRST_TILES
        found.append(Tile(metric.title, f"m-{key}", shown, metric.meaning, verdict, level, first))
    return found


def judgement(key: str, value: Value, run: RunResult) -> tuple[str, bool]:
    """A few words on a number that has a limit, and whether it is beyond it."""
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
            return f"{'above' if beyond else 'below'} its limit of {number(limit.value)}", beyond
    return "", False


def overview(result: Result, registry: Registry) -> Section:
    """Runs side by side: K3 and its trend first, then what is read next."""
    runs = list(result.runs.values())
    chosen = [key for key in SIDE_BY_SIDE if any(key in run.overall.metrics for run in runs)]
    steps = any(len(run.groups.labels) > 1 for run in runs)
    k3 = {name: run.overall.metrics.get("k3", NOT_RECORDED) for name, run in result.runs.items()}
    place = {name: f"run-{index}" for index, name in enumerate(result.runs)}

    def cell(key: str) -> Callable[[tuple[str, RunResult]], TableCell]:
        def made(item: tuple[str, RunResult]) -> TableCell:
            value = item[1].overall.metrics.get(key, NOT_RECORDED)
            kind = "alarm" if judgement(key, value, item[1])[1] else "number"
            return replace(measured(value, registry.metric(key).unit, errors=False), kind=kind)

        return made

    columns: Columns[tuple[str, RunResult]] = (
        ("run", lambda item: TableCell(clean(item[0]), kind="name", anchor=place[item[0]])),
        *registry.columns({"k3": 0}, lambda item: item[1].overall.metrics),
        (Head("K3 from 1e-8 to 1", numeric=False, drop=6, short="K3\nusual for"), lambda item: replace(
            measured(k3[item[0]], ""), text=_range(k3[item[0]].value), kind="scale", place=k3[item[0]].value, brief="",
            reason="")),
        (Head("K3 over the steps", numeric=False, drop=4 if steps else None, short="K3 over\nsteps"),
         lambda item: TableCell("", kind="line", line=tuple(item[1].groups.series("k3").value))),
        (Head("trend of K3", numeric=False, drop=5 if steps else None, short="change"),
         lambda item: words(story_of(item[1]).growth.brief)),
        *((registry.head(key, drop=SIDE_BY_SIDE[key]), cell(key)) for key in chosen),
    )  # fmt: skip
    table = Table.of("", result.runs.items(), columns, sortable=True, title=f"{len(runs)} runs", reach=BRIEF)
    section = Section(
        "Side by side", "overview",
        lead="Each run on its own; nothing is blended. The scale marks K3 between 1e-8 and 1: the first band is what "
        "dense models usually show (1e-5 to 1e-3), the second what mixtures of experts do (1e-3 to 0.1). Marked "
        "numbers are beyond their limit.",
    )  # fmt: skip
    return section.add(table, Later(lambda: [_overlaid(result)]))


def _overlaid(result: Result) -> Figures:
    from mismatchctl.render.figures.of_run import overview_figure  # draws: what prints to a terminal need not wait

    return Figures([overview_figure(result.runs)])


def _range(k3: float | None) -> str:
    """The usual range that a K3 lies in, in a word."""
    if k3 is None:
        return DASH
    if k3 == 0:
        return "identical"
    if k3 < DENSE_RANGE[0]:
        return "< dense"
    return "dense" if k3 < DENSE_RANGE[1] else "MoE" if k3 < MOE_RANGE[1] else "> MoE"
