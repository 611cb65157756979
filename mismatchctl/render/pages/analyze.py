"""The page of a Result: the answer first, then its evidence in the order of a reader's questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from mismatchctl.measure.metrics.ranges import DENSE_RANGE, MOE_RANGE
from mismatchctl.numbers import DASH, estimate, heavy_tail, number
from mismatchctl.render.document import (
    BRIEF,
    USUAL,
    WHOLE,
    Answers,
    Card,
    Cell,
    Document,
    Figures,
    Head,
    Headline,
    Note,
    Section,
    Table,
    Tile,
    Tiles,
)
from mismatchctl.render.figures import overview_figure, run_figures
from mismatchctl.render.pages import run_log
from mismatchctl.render.pages import run_tables as tables
from mismatchctl.render.pages.correction_tables import (
    corrections_table,
    effects_table,
    gates_table,
    loss_table,
    selection_table,
)
from mismatchctl.render.pages.diagnose import sides_section
from mismatchctl.render.pages.findings import card
from mismatchctl.render.pages.provenance import provenance
from mismatchctl.render.tables import Registry, known_keys, words
from mismatchctl.render.text import clean
from mismatchctl.result import NOT_RECORDED, Result, RunResult, Value, story_of
from mismatchctl.result.growth import Z_LIMIT
from mismatchctl.result.notes import notes

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


def document(
    result: Result, *, whole: bool = True, objectives: tuple[Sequence[str], Sequence[str]] = ((), ())
) -> Document:
    """The page of a Result; without `whole` what stands on a page alone is not even prepared.

    `objectives` are estimators of the KL, and aggregations of losses, that are shown.
    """
    registry, runs = Registry(result.corrections), result.runs
    several = len(runs) != 1
    title = f"{len(runs)} runs" if several else clean(next(iter(runs)))
    made = Document(Headline(title, _facts(result), what="analyze"), version=clean(result.provenance.version))
    if not several:
        made.add(Section("", "answer").add(_answers(runs[next(iter(runs))])))
    called = [Note(clean(note), "alarm") for note in notes(result)]
    made.add(Section("Look at this first", "notes", heading=several or whole).add(*called) if whole else None)
    made.add(overview(result, registry) if several else None)
    prepared = partial(_sections, result, registry=registry, whole=whole, brief=len(runs) >= BRIEF_FROM)
    if several:
        made.add(*(_run(result, index, prepared(index)) for index in range(len(runs))))
        made.add(_many(result) if len(runs) > DETAILED else None)
    else:
        made.add(*prepared(0))
    for index, (name, run) in enumerate(runs.items()):
        shown, id = clean(name) if several else "it", f"run-{index}"
        made.add(run_log.objectives(run, shown, id, *objectives) if any(objectives) else None)
        made.add(run_log.against(run, clean(name), id, result.provenance))
    if not whole:
        made.add(Section("", "notes").add(*called))
        return made
    origin = result.provenance
    made.add(provenance(origin.version, origin.inputs, origin.left_out, result.corrections))
    made.glossary = [
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
    facts = [f"{count:,} {name}{'s' * (count != 1)}" for count, name in counts]
    left_out = sum(row.count for row in provenance.left_out)
    return [*facts, f"{left_out:,} left out"] if left_out else facts


def _answers(run: RunResult) -> Answers:
    over = run.groups.series("k3").value
    return Answers(story_of(run).answers, run.overall.metrics.get("k3", NOT_RECORDED).value, over)


def _run(result: Result, index: int, sections: Sequence[Section]) -> Section:
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
    heads = [
        Head("Strongest finding of", numeric=False), Head("how sure", numeric=False, drop=1),
        Head("what", numeric=False, drop=0),
    ]  # fmt: skip
    table = Table("Strongest finding of each run", heads, reach=USUAL)
    for name, run in result.runs.items():
        first = run.findings[0] if run.findings else None
        texts = (first.confidence, first.title) if first else (DASH, "none")
        table.rows.append([words(name, "name"), *map(Cell, texts)])
    found = any(run.findings for run in result.runs.values())
    section = Section("", "each", terminal=True)
    return section.add(table if found else None, effects_table(result) if result.corrections else None)


def _sections(result: Result, index: int, *, registry: Registry, whole: bool, brief: bool) -> list[Section]:
    """What is shown of one run, in the order of a reader's questions."""
    run, id = list(result.runs.values())[index], f"run-{index}"
    several = len(result.runs) > 1
    name = f" on {clean(list(result.runs)[index])}" if several else ""
    found: list[Section] = [
        Section(
            f"Findings{name}" if not whole else "Findings", f"{id}-findings",
            lead="What causes the mismatch, as far as the dump shows it; strongest first.",
        ).add(*map(_card, run.findings) if whole else (card(each, told=False) for each in run.findings)),
    ]  # fmt: skip
    found.insert(int(whole), Section("Main figures", f"{id}-tiles", heading=whole).add(Tiles(tiles(run, registry))))
    if run.sides is not None:
        found.append(sides_section("Whose error", f"{id}-sides", run.sides))
    figures = run_figures(run, f"f{index}", brief=brief) if whole else None
    if figures is not None:
        found += [
            Section("Over the steps", f"{id}-steps").add(Figures(figures.trends)),
            Section(
                "Where the mismatch sits", f"{id}-where",
                lead="Nowhere: every log ratio is 0." if run.overall.metrics["k3"].value == 0 else "",
            ).add(Figures(figures.distributions + figures.breakdowns)),
            Section(
                "The second drift", f"{id}-drift",
                lead="From the trainer's recomputation to the policy that is being updated: what PPO's ratio sees, "
                "apart from the mismatch.",
            ).add(Figures(figures.drift)),
        ]  # fmt: skip
    if run.overall.corrections:
        corrections = Section("Corrections", f"{id}-corrections").add(corrections_table(run, registry))
        if several:
            corrections.parts[0].title += name
        if figures is not None:
            corrections.add(Figures(figures.corrections), loss_table(run, registry))
            corrections.add(gates_table(result.corrections, run, registry))
        found.append(corrections)
        if figures is not None:
            lead = "A rejection that prefers some sequences changes what is learned. Compare within a row; ± is one "
            section = Section("Rejected against kept", f"{id}-selection", lead=f"{lead}standard error.")
            found.append(section.add(selection_table(result, run, registry), Figures(figures.selection)))
    by = tables.by_tables(result.corrections, run, registry)
    for table in by:
        table.title += name
    found.append(Section("Broken down", f"{id}-by").add(*by))
    if whole:
        found.append(Section("The worst", f"{id}-worst").add(
            tables.worst_sequences(run.worst_sequences), tables.worst_tokens(run.worst_tokens)
        ))  # fmt: skip
        found.append(Section("All numbers", f"{id}-numbers").add(*_numbers(result, run, registry, brief)))
    return [section for section in found if section.parts]


def _card(finding: object) -> Card:
    return card(finding)  # type: ignore[arg-type]


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
    for key in known_keys(TILES, run.overall.metrics):
        value, metric = run.overall.metrics[key], registry.metric(key)
        shown, undefined = estimate(value.value, value.se, metric.unit), value.value is None
        verdict, alarm = (value.status, False) if undefined else judgement(key, value, run)
        if value.tail:
            verdict = "; ".join(filter(None, (verdict, heavy_tail(value.covers))))
        meaning = metric.meaning
        first = key in FIRST_TILES
        found.append(Tile(metric.title, f"m-{key}", shown, meaning, verdict, alarm, undefined, first))
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
    heads = [
        Head("run", numeric=False), registry.head("k3", drop=0),
        Head("K3 from 1e-8 to 1", numeric=False, drop=6, short="K3\nusual for"),
        Head("K3 over the steps", numeric=False, drop=4 if steps else None, short="K3 over\nsteps"),
        Head("trend of K3", numeric=False, drop=5 if steps else None, short="change"),
    ]  # fmt: skip
    heads += [registry.head(key, drop=SIDE_BY_SIDE[key]) for key in chosen]
    table = Table("", heads, sortable=True, title=f"{len(runs)} runs", reach=BRIEF)
    for index, (name, run) in enumerate(result.runs.items()):
        k3, growth = run.overall.metrics.get("k3", NOT_RECORDED), story_of(run).growth
        cell = table.value(k3, "nats/token")
        row = [
            Cell(clean(name), kind="name", anchor=f"run-{index}"), cell,
            Cell(_range(k3.value), kind="scale", order=cell.order, place=k3.value),
            Cell("", kind="line", line=tuple(run.groups.series("k3").value)), words(growth.brief),
        ]  # fmt: skip
        for key in chosen:
            value = run.overall.metrics.get(key, NOT_RECORDED)
            alarm = "alarm" if judgement(key, value, run)[1] else "number"
            row.append(replace(table.value(value, registry.metric(key).unit, errors=False), kind=alarm))
        table.rows.append(row)
    section = Section(
        "Side by side", "overview",
        lead="Each run on its own; nothing is blended. The scale marks K3 between 1e-8 and 1: the first band is what "
        "dense models usually show (1e-5 to 1e-3), the second what mixtures of experts do (1e-3 to 0.1). Marked "
        "numbers are beyond their limit.",
    )  # fmt: skip
    figure = overview_figure(result.runs)
    return section.add(table, Figures([] if figure is None else [figure]))


def _range(k3: float | None) -> str:
    """The usual range that a K3 lies in, in a word."""
    if k3 is None:
        return DASH
    if k3 == 0:
        return "identical"
    if k3 < DENSE_RANGE[0]:
        return "< dense"
    return "dense" if k3 < DENSE_RANGE[1] else "MoE" if k3 < MOE_RANGE[1] else "> MoE"
