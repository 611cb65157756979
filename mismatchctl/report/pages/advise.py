"""First screen and page of `advise`: what to fix first, the configuration to paste, and the ranking."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mismatchctl.api.advise.advice import (
    RankedCorrection,
    RunAdvice,
    advice_headline,
    advice_status,
    candidate_label,
    compare_with_yours,
    describe_gain,
)
from mismatchctl.core.formatting import escape_terminal, format_command
from mismatchctl.io.yaml import dump_yaml
from mismatchctl.report.document import (
    EVERYWHERE,
    TERMINAL_AND_PAGE,
    Code,
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
    TableColumns,
)
from mismatchctl.report.tables import MAX_RUNS, text_cell
from mismatchctl.results.summary import STATUSES, first_sentence, percent

MAX_CONFIG_LINES = 12
"""Maximum lines of a configuration on the first screen."""


def advise_screen(found: Mapping[str, RunAdvice], paths: Sequence[str], *, full: bool = False) -> Document:
    """Build the first screen: the advice, the configuration to paste, and the runner-up. `full` adds the reasons."""
    order = sorted(found, key=lambda run: STATUSES.index(advice_status(found[run])))
    advice = found[order[0]]
    if len(found) == 1:
        title, parts = f"{order[0]}: {advice_headline(advice)}", _screen_parts(advice)
    else:
        changes = sum(advice_status(own) != "OK" for own in found.values())
        title, parts = f"{changes} of {len(found)} runs need a fix or a correction", _runs_parts(found, order)
    screen = Document(Headline(title, status=advice_status(advice)))
    screen.add(Section("", "advice").add(*parts))
    if full:
        screen.sections += document(found).sections
    screen.commands = [*([] if full else [("Reasons", "-v")]), ("Next", _next_command(advice, paths))]
    return screen


def _screen_parts(advice: RunAdvice) -> Iterator[DocumentPart]:
    """Yield the configuration, the runner-up and your correction."""
    if advice.fix_first is not None:
        rows = [("do", first_sentence(advice.fix_first.advice))]
        failed = advice_status(advice) == "FAIL"
        yield Facts(rows + [("else", f"if that is ruled out, use {own.title}") for own in advice.advice[:failed]])
        if failed:
            return
    if not advice.advice:
        yield Facts([("yours", note) for note in advice.notes[1:]])
        return
    best, second = advice.advice[0], advice.runner_up
    if best.name != "none":
        yield _config_part(advice)
    rows = [("known", best.outcome)] if best.outcome else []
    if best.name == "none" and advice.default is not None:
        price = f"{percent(1 - advice.default.ess)} of the ESS"
        rows.append(("by default", f"documents recommend {advice.default.title} anyway; its price here: {price}"))
    if second is not None:
        text = candidate_label("none") if second.name == "none" else f"{second.title}: {describe_gain(second)}"
        text += ", not significantly worse" if second.ties else ""
        rows.append(("runner-up", f"{text}{f'; {second.outcome}' if second.outcome else ''}"))
    for own in advice.yours:
        text = compare_with_yours(own, best).removeprefix("yours: ")
        rows.append(("yours", f"{text}{f'; {own.outcome}' if own.outcome else ''}"))
    size = f"{advice.sequences:,} sequences of {advice.prompts:,} prompts, {advice.batch:,} per update"
    yield Facts([*rows, ("data", f"{advice.severity} mismatch; {size}")])


def _config_part(advice: RunAdvice) -> Code:
    best = advice.advice[0]
    title = "As YAML (for a framework's keys: --for NAME):"
    lines = dump_yaml(best.config if advice.framework else best.correction).splitlines()
    if advice.framework:
        title = f"Paste into {advice.framework}:"
        lines = lines if best.config else [f"{advice.framework} has no keys for it"]
    more = [f"({len(lines) - MAX_CONFIG_LINES} more lines: -v)"] if len(lines) > MAX_CONFIG_LINES else []
    return Code(title, "\n".join([*lines[:MAX_CONFIG_LINES], *more]), reach=TERMINAL_AND_PAGE)


def _runs_parts(found: Mapping[str, RunAdvice], order: Sequence[str]) -> Iterator[DocumentPart]:
    """Yield the table of runs, most severe first."""
    columns: TableColumns[str] = (
        ("run", lambda run: TableCell(escape_terminal(run), kind="name")),
        (ColumnHeader("status", numeric=False, drop=0), lambda run: advice_status(found[run])),
        (ColumnHeader("advice", numeric=False, drop=1, flexible=True), lambda run: advice_headline(found[run])),
    )
    yield Table.of("", order[:MAX_RUNS], columns, reach=EVERYWHERE)
    if len(order) > MAX_RUNS:
        yield Note(f"{len(order) - MAX_RUNS} more runs: -v")


def _next_command(advice: RunAdvice, paths: Sequence[str]) -> str:
    if advice.fix_first is not None:
        return format_command("diagnose", paths)
    if not advice.advice:
        return format_command("sweep", paths)
    if advice.advice[0].name == "none":
        return format_command("gate", paths, "--save-baseline ok.json --accept")
    return format_command("analyze", paths, f"-c {advice.advice[0].name}")


def document(found: Mapping[str, RunAdvice]) -> Document:
    """Build the page of the advice for each run."""
    doc = Document(Headline("", subtitle="advise"))
    for index, (run, advice) in enumerate(found.items()):
        title = ": ".join(filter(None, (run, advice_headline(advice))))
        doc.add(_advice_section(Section(escape_terminal(title), f"advice-{index}"), advice))
    return doc


def _advice_section(section: Section, advice: RunAdvice) -> Section:
    """Add the ranking of one run, its reasons and the configurations."""
    notes = [Note(f"{note}.", "quiet") for note in advice.notes]
    if advice.fix_first is not None:
        section.add(Note(advice.fix_first.summary), Note(advice.fix_first.advice))
    if not advice.advice:
        return section.add(*notes)

    def figure() -> Iterator[Figures]:
        from mismatchctl.report.figures.bars import advice_figure  # slow import, only needed for HTML

        yield Figures([advice_figure(advice, f"{section.anchor}-front")])

    yours = (escape_terminal(compare_with_yours(own, advice.advice[0])) for own in advice.yours)
    reasons = (*yours, *_describe_others(advice), *_describe_confidence(advice))
    section.add(_ranking_table(advice), *(Note(f"{text}.") for text in reasons), DeferredSection(figure), *notes)
    for own in filter(None, (advice.advice[0], advice.runner_up)):
        config = own.config if advice.framework else own.correction
        if config and own.name != "none":
            name = f"{own.name}{f' for {advice.framework}' if advice.framework else ''}:"
            section.add(Code(name, dump_yaml(config), reach=TERMINAL_AND_PAGE))
    return section


def _describe_others(advice: RunAdvice) -> Iterator[str]:
    """Describe ties with the first correction, and why the next one is worse."""

    def name(own: RankedCorrection) -> str:
        return escape_terminal(candidate_label(own.name))

    first, *others = advice.advice
    ties = [name(own) for own in others if own.ties]
    if ties:
        names = " and ".join(filter(None, (", ".join(ties[:-1]), ties[-1])))
        yield f"Not significantly worse than {name(first)}: {names}"
    behind = next((own for own in others if not own.ties), None)
    if behind is not None and first.mse:
        yield f"{name(behind)} has {behind.mse / first.mse:.3g} times the error of {name(first)}: {behind.why}"


def _describe_confidence(advice: RunAdvice) -> Iterator[str]:
    if advice.stable is not None:
        yield f"Same advice, or a tie, in {percent(advice.stable)} of random halves of the prompts"
    for own in (*advice.advice, *advice.yours):
        if own.outcome:
            yield f"{escape_terminal(own.name)}: {own.outcome}"


def _ranking_table(advice: RunAdvice) -> Table:
    scale = advice.uncorrected
    columns: TableColumns[RankedCorrection] = (
        ("correction", lambda own: text_cell(own.name, "name")),
        (ColumnHeader("error", description="gradient error of an update after the best scalar", drop=0),
         lambda own: f"{own.mse / scale:.3f}"),
        (ColumnHeader("bias²", description="its part that more data does not remove", drop=4),
         lambda own: f"{max(own.bias2, 0.0) / scale:.3f}"),
        (ColumnHeader("variance", description="its part that more data removes", drop=5),
         lambda own: f"{own.variance / scale:.3f}"),
        (ColumnHeader("rejected", description="share of the tokens", drop=0),
         lambda own: f"{own.rejected_tokens:.1%}" if own.rejected_tokens else "0"),
        (ColumnHeader("loss scale", description="factor on the loss", drop=1), lambda own: f"{own.loss_scale:.3g}"),
        (ColumnHeader("ESS", description="effective sample size of the tokens", drop=1), lambda own: f"{own.ess:.2f}"),
        (ColumnHeader("why", numeric=False, drop=6), lambda own: text_cell(own.why, "prose")),
    )  # fmt: skip
    every = [*advice.advice, *advice.yours]
    return Table.of("Corrections, best first", every, columns, reach=EVERYWHERE)
